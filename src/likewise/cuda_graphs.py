"""Whether operations are being recorded into a CUDA graph, and must not depend on the values in a batch.

Inside `recording` no code synchronizes with the GPU to decide what comes next. Samples without a finite gradient
cannot be left out there, nor groups be counted: the caller has to handle both.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_groups: ContextVar[int | None] = ContextVar("recording", default=None)


def is_recording() -> bool:
    """Return whether operations are being recorded."""
    return _groups.get() is not None


def most_groups() -> int:
    """Return the maximal number of groups of a recorded batch."""
    return _groups.get() or 0


@contextmanager
def recording(groups: int) -> Iterator[None]:
    """Use only operations that can be recorded, for batches of at most `groups` groups."""
    before = _groups.set(groups)
    try:
        yield
    finally:
        _groups.reset(before)
