"""Samples from tensors that hold all of them."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten

from likewise.checks import describe
from likewise.data.source import Source, checksum_of_positions, refuse_empty
from likewise.data.tables import ColumnNames
from likewise.fingerprint import ChecksumCache, tensor_states


class TensorSource:
    """Samples from tensors that hold all of them."""

    def __init__(self, inputs: Any, labels: Tensor | None, names: Any = None) -> None:
        """Check the tensors; `names`: a tree like that of the inputs, with ColumnNames or None."""
        leaves = tree_leaves(inputs)
        if not leaves:
            raise ValueError(f"The data are empty, found {describe(inputs)}: pass at least one tensor.")
        named = [("data", leaf) for leaf in leaves] + ([] if labels is None else [("labels", labels)])
        for name, leaf in named:
            if not isinstance(leaf, Tensor) or leaf.dim() == 0:
                raise ValueError(
                    f"{name} must have samples along the first dimension, found {describe(leaf)}: pass a single "
                    "sample as x[None]."
                )
        lengths = sorted({len(leaf) for leaf in leaves})
        refuse_empty(lengths[0])
        if len(lengths) != 1:
            raise ValueError(f"Inputs differ in length, {lengths}: each needs an entry for every sample.")
        if labels is not None and len(labels) != lengths[0]:
            raise ValueError(f"{len(labels)} labels for {lengths[0]} samples: expected one for each.")
        self._tables = _named_tables(inputs, names)
        self._inputs, self._labels, self._n = inputs, labels, lengths[0]
        self._checksums = ChecksumCache()

    def __len__(self) -> int:
        return self._n

    def __call__(self, positions: list[int]) -> tuple[Any, Tensor | None]:
        """Return the inputs and labels of the samples at these positions."""
        where: slice | list[int] = positions
        if positions == list(range(positions[0], positions[0] + len(positions))):
            where = slice(positions[0], positions[0] + len(positions))  # a view, not a copy
        labels = None if self._labels is None else self._labels[where]
        return tree_map(lambda t: t[where], self._inputs), labels

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The column names, prefixed by the path of the table if there are several; None if there are none."""
        names = [_qualify(place, name) for place, table in self._tables.items() for name in table.names]
        return tuple(names) or None

    def match_columns(self, names: Sequence[str]) -> Source:
        """Return the samples with these columns, table by table; raise naming one that is missing."""
        if not self._tables or self.columns == tuple(names):
            return self
        leaves, tree = tree_flatten_with_path(self._inputs)
        found = {keystr(path): leaf for path, leaf in leaves}
        tables = dict.fromkeys(found)
        for place, table in self._tables.items():
            wanted = [name.removeprefix(_qualify(place, "")) for name in names if _belongs(name, place)]
            if wanted:
                shown = "this table" if not place else f"the table of input {place}"
                found[place] = found[place][:, table.match(wanted, shown)]
            tables[place] = ColumnNames(tuple(wanted)) if wanted else table
        return TensorSource(
            tree_unflatten(found.values(), tree), self._labels, tree_unflatten(tables.values(), tree)
        )

    def checksum(self, positions: Sequence[int]) -> str:
        """Return a checksum of every number, and of the positions."""
        leaves = tree_leaves((self._inputs, self._labels))
        tensors = {str(i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        return " ".join([*self._checksums.get(tensors).values(), checksum_of_positions(positions)])

    def state(self) -> tuple[Any, ...]:
        """Return what changes when one of the tensors is modified."""
        return tensor_states(
            leaf for leaf in tree_leaves((self._inputs, self._labels)) if isinstance(leaf, Tensor)
        )

    def memory_checksum(self, positions: Sequence[int]) -> str | None:
        """Return the checksum of every number."""
        return f"tensors: {self.checksum(positions)}"

    def with_cache(self, max_bytes: int) -> tuple[Source, int]:
        """Return itself: all samples are in memory."""
        return self, 0


def _named_tables(inputs: Any, names: Any) -> dict[str, ColumnNames]:
    """Return the column names of tables among the inputs, by their path in the tree: "" for a single one."""
    leaves = {keystr(path): leaf for path, leaf in tree_flatten_with_path(inputs)[0]}
    known = {keystr(path): leaf for path, leaf in tree_flatten_with_path(names)[0]}
    found = {
        place: known[place]
        for place, leaf in leaves.items()
        if known.get(place) is not None and leaf.dim() == 2
    }
    for place, table in found.items():
        if len(table.names) != leaves[place].shape[1]:
            width = leaves[place].shape[1]
            raise ValueError(f"{len(table.names)} names for {width} columns: expected one for each.")
    return found


def _qualify(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _belongs(name: str, place: str) -> bool:
    """Whether a name from `columns` belongs to the table at this path."""
    return name.startswith(_qualify(place, ""))
