"""Operations that a CUDA graph can record: the same for every batch of a shape, whatever is in it.

Inside `recording` nothing waits for the GPU to decide what comes next. Samples without a finite gradient
cannot be left out there, nor groups be counted: who records has to deal with that.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_groups: ContextVar[int | None] = ContextVar("recording", default=None)


def is_recording() -> bool:
    """Return whether operations are being recorded."""
    return _groups.get() is not None


def most_groups() -> int:
    """Return how many groups of a batch there is room for."""
    return _groups.get() or 0


@contextmanager
def recording(groups: int) -> Iterator[None]:
    """Take only steps that can be recorded, with room for so many groups of a batch."""
    before = _groups.set(groups)
    try:
        yield
    finally:
        _groups.reset(before)
