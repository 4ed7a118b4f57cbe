"""Checks on files before they are read: that they exist, and that their content fits into memory.

A few kilobytes can declare, or expand to, more than a machine has. Sizes are taken from headers and compared
with a limit before anything is decompressed or allocated.
"""

import os
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Protocol


def existing(text: str) -> Path:
    """Return the path of a file or folder; raise naming what exists instead.

    Pipes, devices and sockets are refused: reading one may wait or go on for ever.
    """
    path = Path(text).expanduser()
    if path.is_file() or path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"{text} is a pipe, device or socket, expected a file: write its content to one.")
    if path.is_symlink():
        raise FileNotFoundError(f"{text} is a link that leads nowhere: repair it, or name the file itself.")
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    if folder != path.absolute().parent:
        raise FileNotFoundError(f"There is no {text}, and no such folder: the path exists up to {folder}.")
    others = [entry.name for entry in folder.iterdir() if not entry.name.startswith(".")]
    raise FileNotFoundError(f"There is no {text}: {alternatives(path.name, others)}")


def alternatives(name: str, others: Iterable[str]) -> str:
    """Return a sentence that suggests the closest names, or lists some that exist."""
    there = sorted(others)
    close = get_close_matches(name, there, n=3)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"there {'are' if len(there) > 1 else 'is'} {listed(there)}."


def listed(names: Iterable[str], most: int = 12) -> str:
    """List names, with the number of those left out."""
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return (", ".join(every[:most]) or "nothing") + more


class ExpansionError(MemoryError):
    """A file expands to more memory than allowed.

    Attributes:
        path: The file.
        enough: A max_memory, in bytes, that would do: what its content takes.
        allowed: The bytes that it may take.
    """

    def __init__(self, path: object, what: str, needed: int, allowed: int) -> None:
        super().__init__(
            f"{what} in {path} takes {_megabytes(needed)} MB once decompressed, but only {_megabytes(allowed)} MB are "
            f"allowed: if you trust the file, allow max_memory={needed:_}."
        )
        self.path, self.enough, self.allowed = path, needed, allowed


class Sized(Protocol):
    """A file, or an object with the size of one."""

    def stat(self) -> os.stat_result:
        """Return the file's status, with its size."""


def refuse_expansion(path: Sized, what: str, needed: int, max_memory: int) -> None:
    """Raise an error if content takes more than `max_memory` bytes and more than the file it is in."""
    if needed > max(max_memory, path.stat().st_size):
        raise ExpansionError(path, what, needed, max_memory)


def _megabytes(count: int) -> str:
    return f"{count / 2**20:,.1f}"
