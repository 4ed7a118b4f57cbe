"""The Gram matrix of a kernel between two data sets: lazy, exact or from random projections.

matrix      GramMatrix: rows, columns, kernel, plain or centered; what every statistic works on
products    G @ w in two passes over the data, linear in N
features    per-sample gradients that are kept, where they fit: products and strips from one pass
strips      all pairs, one strip of whole rows at a time; many reducers in one visit
blocks      all pairs, block by block: of a data set with itself each pair of blocks once
centering   double centering of a kernel, then normalization
sketches    random projections of gradients, and the same strips from them
last_layer  what the last layer sees: features of samples, from a forward pass
similarity  similarity in one call, of gradients or of activations
passages    the tokens of a text that make it similar to another
cost        what a statistic will take, from a dry run
"""

from likewise.gram.cost import Plan
from likewise.gram.matrix import GramMatrix
from likewise.gram.passages import (
    MatchedPassages,
    has_passages,
    join_passages,
    matched_passages,
    passages_by,
)
from likewise.gram.products import RowSums
from likewise.gram.similarity import perceptual, similarity
from likewise.gram.sketches import (
    Sketch,
    Sketched,
    SketchedMatrix,
    Sketches,
    SketchNotice,
    SketchOption,
    bucket_count,
    choose_width,
    error_factors,
    inner_product_sums,
    measure_error,
    pair_source,
    similarity_errors,
    sketch_rows,
    whiten_sketches,
)
from likewise.gram.strips import BlockReducer, PairSource, ProductReducer, Reducer, Strip, SumReducer

__all__ = [
    "BlockReducer",
    "GramMatrix",
    "MatchedPassages",
    "PairSource",
    "Plan",
    "ProductReducer",
    "Reducer",
    "RowSums",
    "Sketch",
    "SketchNotice",
    "SketchOption",
    "Sketched",
    "SketchedMatrix",
    "Sketches",
    "Strip",
    "SumReducer",
    "bucket_count",
    "choose_width",
    "error_factors",
    "has_passages",
    "inner_product_sums",
    "join_passages",
    "matched_passages",
    "measure_error",
    "pair_source",
    "passages_by",
    "perceptual",
    "similarity",
    "similarity_errors",
    "sketch_rows",
    "whiten_sketches",
]
