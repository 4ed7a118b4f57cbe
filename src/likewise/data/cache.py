"""Cache for items of a data set that are costly to read."""

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

LEAF_BYTES = 256  # of a tensor or number beside its values: about what the objects of Python take


class ItemCache:
    """A cache of data set items, up to a number of bytes; it keeps the first items.

    Passes read from first to last, so a cache that drops the oldest item would never hold the next one.
    """

    def __init__(self, max_bytes: int) -> None:
        self._free, self._items = max_bytes, dict[int, Any]()

    def __contains__(self, position: int) -> bool:
        return position in self._items

    def get(self, position: int) -> Any:
        """Return a copy of an item: a collate function may modify it."""
        return tree_map(_copy_leaf, self._items[position])

    def put(self, position: int, item: Any) -> None:
        """Store a copy of an item, if its bytes can be counted and fit."""
        size = item_bytes(item)
        if position not in self._items and size is not None and size <= self._free:
            self._items[position] = tree_map(_copy_leaf, item)
            self._free -= size


def item_bytes(item: Any) -> int | None:
    """Return the bytes of an item; None if it holds something that cannot be counted or copied."""
    total = LEAF_BYTES
    for leaf in tree_leaves(item):
        if isinstance(leaf, Tensor):
            if leaf.layout != torch.strided or leaf.requires_grad:
                return None
            total += leaf.numel() * leaf.element_size() + LEAF_BYTES
        elif isinstance(leaf, np.ndarray):
            if leaf.dtype.hasobject:
                return None
            total += leaf.nbytes + LEAF_BYTES
        elif leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes | np.generic):
            total += sys.getsizeof(leaf) + LEAF_BYTES
        else:
            return None
    return total


def _copy_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
