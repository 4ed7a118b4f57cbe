"""Which passages of its neighbors a text's similarity rests on: computed for a few texts of a run, kept as a table.

Only for language models that are compared by the log-likelihood of a text, whose similarities are sums over tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from likewise.engines import GradientMismatchError
from likewise.engines.memory import is_out_of_memory
from likewise.gram import GramMatrix, join_passages, passages_by
from likewise.marked_text import mark_text
from likewise.progress import announce
from likewise.runs.store import Arrays
from likewise.wording import counted

NEIGHBORS = 3  # of each text
# A pair takes about eight training steps (benchmarks/passages.py, 2026-11-18), and a run about five of each text: one
# text in 200 with three neighbors is a fortieth of its cost, more for tiny models, whose calls take longer than sums.
LEAST, MOST, ONE_IN = 8, 32, 200
TokenTexts = Callable[[int], tuple[str, Sequence[tuple[int, int]] | None]]


def passage_count(n: int) -> int:
    """Return for how many texts of n passages are computed, where no number is given."""
    return min(n, MOST, max(LEAST, n // ONE_IN))


def compute_passages(gram: GramMatrix, samples: np.ndarray, indices: np.ndarray) -> dict[str, Tensor]:
    """Return what tokens of neighbors contribute to the plain similarities of some texts with them.

    Args:
        gram: Of the run.
        samples: The texts, (s,).
        indices: (n, k) the neighbors of every text, nearest first.

    Returns:
        pairs (p, 2), similarities (p,), contributions (p, T), strongest (p, 2); or `problem`, the bytes of a sentence,
        where the model cannot be differentiated twice, or not in the memory that there is.

    """
    announce(f"finding the passages that similarities of {counted(len(samples), 'text')} rest on")
    near = indices[:, :NEIGHBORS]
    try:
        found = [passages_by(gram, gram.data.take([i]), gram.data.take(near[i].tolist())) for i in samples]
    except (GradientMismatchError, MemoryError, RuntimeError) as error:  # all else of the run is there
        if not isinstance(error, GradientMismatchError) and not is_out_of_memory(error):
            raise
        reason = str(error).strip().rstrip(".")
        problem = f"memory ran out ({reason})" if is_out_of_memory(error) else reason
        announce(f"passages are not marked: {problem}")
        return {"problem": torch.tensor(list(problem.encode("utf-8", "replace")), dtype=torch.uint8)}
    whole = join_passages(found, 0)
    pairs = np.stack([np.repeat(samples, near.shape[1]), near[samples].ravel()], 1)
    return {
        "pairs": torch.tensor(pairs),
        "similarities": whole.similarities.flatten(),
        "contributions": whole.contributions.flatten(0, 1),
        "strongest": whole.strongest().flatten(0, 1),
    }


def passage_table(found: Arrays, token_text: TokenTexts, excerpt_length: int) -> tuple[dict[str, Any], int]:
    """Return the table of marked excerpts, a row for each pair, and of how many neighbors tokens have no known place.

    Args:
        found: What `compute_passages` returned.
        token_text: Text i, and where its tokens lie in it.
        excerpt_length: Characters of an excerpt.

    """
    import pyarrow

    rows, unplaced = list[dict[str, Any]](), 0
    pairs = found.get("pairs", np.zeros((0, 2), np.int64)).tolist()
    for at, (sample, neighbor) in enumerate(pairs):
        text, spans = token_text(neighbor)
        if spans is None:
            unplaced += 1
            continue
        first, end = found["strongest"][at].tolist()
        try:
            marked = mark_text(text, spans, found["contributions"][at].tolist(), (first, end), excerpt_length)
        except ValueError as error:
            raise ValueError(f"token_text({neighbor}) does not fit: {error}") from error
        rows.append(
            {
                "sample": sample,
                "neighbor": neighbor,
                "similarity": float(found["similarities"][at]),
                "text": marked.text.encode("utf-8", "replace").decode(),
                "passage_start": marked.passage[0],
                "passage_end": marked.passage[1],
                "starts": marked.starts,
                "ends": marked.ends,
                "contributions": marked.contributions,
                "unshown": marked.unshown,
            }
        )
    whole, places = pyarrow.int64(), pyarrow.list_(pyarrow.int32())
    types = {
        "sample": whole,
        "neighbor": whole,
        "similarity": pyarrow.float64(),
        "text": pyarrow.string(),
        "passage_start": pyarrow.int32(),
        "passage_end": pyarrow.int32(),
        "starts": places,
        "ends": places,
        "contributions": pyarrow.list_(pyarrow.float64()),
        "unshown": pyarrow.float64(),
    }
    columns = {name: pyarrow.array([row[name] for row in rows], kind) for name, kind in types.items()}
    return columns, unplaced


def describe_passages(found: Arrays, table: dict[str, Any], unplaced: int) -> dict[str, Any]:
    """Return what the manifest says of the table: how many texts and pairs, and why there are not more."""
    problem = bytes(found["problem"].tolist()).decode("utf-8", "replace") if "problem" in found else ""
    if unplaced:
        problem = (
            f"of {counted(unplaced, 'neighbor')} it is not known where tokens lie in the text: the tokenizer tells "
            "no places, "
            "and decoding its tokens does not give the text back"
        )
    pairs = len(table["sample"])
    samples = len(set(table["sample"].to_pylist()))
    asked = found["pairs"][:, 0] if "pairs" in found else np.zeros(0)
    neighbors = len(asked) // max(1, len(np.unique(asked)))
    return {"samples": samples, "neighbors": neighbors, "pairs": pairs, "problem": problem}
