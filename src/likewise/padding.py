"""Texts of several lengths as one tensor: tokens, masks and labels filled up on the right."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

MASKS = ("attention_mask", "token_type_ids", "special_tokens_mask")
PADDED = ("input_ids", "labels", *MASKS)  # columns of which one knows how they are filled up
IGNORED = -100  # the label of a token that does not count


class RaggedError(TypeError):
    """Rows have several lengths, and it is not known how to fill them up."""


def pad_columns(columns: Mapping[str, Any], pad_id: int | None) -> dict[str, Any]:
    """Return columns of tokens filled up to the longest text on the right, the attention mask and labels with them.

    Args:
        columns: A sequence, array or tensor a column; those whose rows are all of one length are returned as they are.
        pad_id: The token that input_ids are filled up with; None: several lengths are refused.

    Raises:
        RaggedError: Rows have several lengths, and there is no pad_id, or the column is none of tokens.

    """
    found = dict(columns)
    ragged = [name for name, values in found.items() if _is_ragged(values)]
    if pad_id is None or "input_ids" not in found:
        if ragged:
            raise _ragged_error(found, ragged)
        return found
    unknown = [name for name in ragged if name not in PADDED]
    if unknown:
        raise _ragged_error(found, unknown)
    lengths = [len(row) for row in found["input_ids"]]
    if "attention_mask" not in found:  # also where all have one length, so that batches are alike
        found["attention_mask"] = [[1] * length for length in lengths]
    for name in {*ragged, "input_ids", "attention_mask"}:
        fill = {"input_ids": pad_id, "labels": IGNORED}.get(name, 0)
        rows = [torch.as_tensor(row) for row in found[name]]
        if [len(row) for row in rows] != lengths:
            raise ValueError(
                f"Column {name!r} has other lengths than input_ids in some rows: one entry a token."
            )
        found[name] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)
    return found


def _is_ragged(values: Any) -> bool:
    """Whether rows are sequences of several lengths."""
    if not isinstance(values, list | tuple) or not values:
        return False
    rows = [
        isinstance(row, list | tuple) or (isinstance(row, Tensor | np.ndarray) and row.ndim == 1)
        for row in values
    ]
    return all(rows) and len({len(row) for row in values}) > 1


def _ragged_error(columns: Mapping[str, Any], names: list[str]) -> RaggedError:
    lengths = [len(row) for row in columns[names[0]]]
    found = f"Column {names[0]!r} has rows of {min(lengths)} to {max(lengths)} entries"
    if "input_ids" in columns:
        return RaggedError(
            f"{found}, and nothing says how to pad them to one shape. Give "
            "likewise.batches(dataset, pad_id=tokenizer.pad_token_id), or torch.utils.data.DataLoader(dataset, "
            "batch_size=32, collate_fn=transformers.DataCollatorWithPadding(tokenizer))."
        )
    return RaggedError(
        f"{found}: numbers of one shape for every sample are needed; pad or cut them, or give a DataLoader with a "
        "collate_fn that does."
    )


@dataclass(frozen=True)
class PaddingCollate:
    """default_collate, which fills up texts of several lengths if it knows how.

    Attributes:
        pad_id: The token that input_ids are filled up with; None: several lengths are refused.

    """

    pad_id: int | None

    def __call__(self, items: list[Any]) -> Any:
        """Return a batch of items."""
        if not all(isinstance(item, Mapping) for item in items):
            return default_collate(items)
        columns = {name: [item[name] for item in items] for name in items[0]}
        if self.pad_id is None and not any(_is_ragged(values) for values in columns.values()):
            return default_collate(_with_tensors(items))
        padded = pad_columns(columns, self.pad_id)
        return {
            name: values if isinstance(values, Tensor) else default_collate(_as_tensors(name, values))
            for name, values in padded.items()
        }


def _with_tensors(items: list[Any]) -> list[Any]:
    """Return items whose lists of tokens are tensors: default_collate would transpose them."""
    names = list(items[0])
    columns = {name: _as_tensors(name, [item[name] for item in items]) for name in names}
    return [{name: columns[name][i] for name in names} for i in range(len(items))]


def _as_tensors(name: str, values: list[Any]) -> list[Any]:
    if name not in PADDED:
        return values
    return [torch.tensor(value) if isinstance(value, list) else value for value in values]
