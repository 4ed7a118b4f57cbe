"""How much memory a file may take once it is decompressed.

A few kilobytes can declare, or expand to, more than a machine has. Sizes are taken from headers and compared
with a limit before anything is decompressed or allocated.
"""

from pathlib import Path


class ExpansionError(MemoryError):
    """A file expands to more than may be used.

    Attributes:
        path: The file.
        enough: A max_memory, in bytes, that would do: what its content takes.
        allowed: The bytes that it may take.
    """

    def __init__(self, path: Path, what: str, needed: int, allowed: int) -> None:
        super().__init__(
            f"{what} in {path} takes {_megabytes(needed)} MB once it is decompressed, and "
            f"{_megabytes(allowed)} MB are allowed: if you trust the file, allow max_memory={needed:_}."
        )
        self.path, self.enough, self.allowed = path, needed, allowed


def refuse_expansion(path: Path, what: str, needed: int, max_memory: int) -> None:
    """Raise an error if content takes more than `max_memory` bytes and more than the file it is in."""
    if needed > max(max_memory, path.stat().st_size):
        raise ExpansionError(path, what, needed, max_memory)


def _megabytes(count: int) -> str:
    return f"{count / 2**20:,.1f}"
