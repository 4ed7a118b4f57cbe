"""An index of a data set and a model, to ask about new inputs later.

store           the files: shards of sketches, pictures, manifest
projection      from inputs to sketches, and whether a model projects as the index did
pictures        thumbnails, excerpts and names of samples
pairs           strips of similarities from mapped shards; the summary of an index
shards          builds shards: alone, in parts, or shared by ranks
parts           merges parts and indexes
search          approximate search with faiss, for very many rows; exact similarities of candidates
counterfactual  the fewest rows that change the vote of an input's neighbors
explanation     a prediction with what it rests on, as text and as a page
query           Index: nearest, novelty, reliability, explain, add, remove, merge
selection       selects rows for targets; diversity
states          selects rows by hidden states of texts: the baseline
layers          gradients layer by layer: two-sided projections, unit layers
optimizer       the moments of Adam, and the steps that it makes
build           build_index and merge_indexes
"""

from likewise.index.build import build_index, merge_indexes
from likewise.index.query import Index, IndexNeighbors, Novelty
from likewise.index.selection import TargetScores, diversity, score_targets, select
from likewise.index.states import pooled_states, select_by_states

__all__ = [
    "Index",
    "IndexNeighbors",
    "Novelty",
    "TargetScores",
    "build_index",
    "diversity",
    "merge_indexes",
    "pooled_states",
    "score_targets",
    "select",
    "select_by_states",
]
