"""Files that are whole or absent: atomic writes, checksums, and texts that carry their own checksum.

A file is written under a temporary name in its folder, flushed to the disk and renamed; then the folder is
flushed, so that the new name survives a power failure before anything relies on it.
"""

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk, quota, largest file allowed
TEMPORARY = ".part"


class DiskFullError(OSError):
    """A file could not be written for lack of space.

    Attributes:
        path: The file.
        needed: About how many bytes it takes.
        free: How many bytes are free where it would be.
    """

    def __init__(self, error: OSError, path: Path, needed: int) -> None:
        self.path, self.needed, self.free = path, needed, shutil.disk_usage(path.parent).free
        reason = os.strerror(error.errno or errno.ENOSPC)
        message = f"{reason}: {path} needs about {needed:,} bytes, and {self.free:,} are free"
        super().__init__(error.errno, message)

    def __str__(self) -> str:
        return f"{self.strerror}. Make room, then give the same command again."


def write_atomically(path: Path, write: Callable[[BinaryIO], object], needed: int) -> str:
    """Write a file that is complete or not there, and return its SHA-256.

    Args:
        path: The file; one that is there is replaced, unless it has the same bytes.
        write: Writes the content to an open file.
        needed: About how many bytes that is, for the message if they do not fit.

    Raises:
        DiskFullError: The disk, a quota or the limit of a file's size leaves no room. Nothing is changed.
    """
    part = temporary_name(path)
    try:
        with part.open("wb+") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if not path.exists() or checksum(path) != digest:
            part.replace(path)
    except OSError as error:
        if error.errno in FULL:
            part.unlink(missing_ok=True)  # so that what it took counts as free
            raise DiskFullError(error, path, needed) from error
        raise
    finally:
        part.unlink(missing_ok=True)
    flush_folder(path.parent)
    return digest


def write_text(path: Path, text: str) -> str:
    """Write a text as UTF-8, complete or not at all, and return its SHA-256."""
    return write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> str:
    """Write bytes, complete or not at all, and return their SHA-256."""
    return write_atomically(path, lambda file: file.write(content), len(content))


def copy_atomically(source: Path, path: Path) -> str:
    """Copy a file, complete or not at all, and return the SHA-256 of the copy."""
    with source.open("rb") as file:
        return write_atomically(path, lambda copy: shutil.copyfileobj(file, copy), source.stat().st_size)


def refuse_existing(path: Path, force: bool, *inputs: str | Path) -> None:
    """Raise if something would be replaced: anything unless asked to, and what is read here never.

    Args:
        path: What is to be written, as it was given by name.
        force: Whether a file that is there may be replaced.
        inputs: Files and folders that are read.

    Raises:
        FileExistsError: It is there, and may not be replaced.

    """
    place = path.resolve()
    for given in inputs:
        source = Path(given).resolve()
        if source.exists() and (place == source or source in place.parents or place in source.parents):
            raise FileExistsError(f"{path} is, holds or is in {given}, which is read: choose another name.")
    if path.exists() and not force:
        raise FileExistsError(f"{path} is there already: choose another name, or --force to replace it.")


def write_folder(path: Path, fill: Callable[[Path], object], *, replace: bool = False) -> None:
    """Write a folder that is complete or not there.

    Args:
        path: The folder.
        fill: Writes the content into a folder of another name beside it.
        replace: Whether a folder that is there may be replaced.

    Raises:
        FileExistsError: There is something of that name, and it may not be replaced.
    """
    part, old = temporary_name(path), temporary_name(path)
    part.mkdir()
    try:
        fill(part)
        if os.name == "posix":
            os.sync()
        if path.exists():
            if not replace:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            path.rename(old)
        part.rename(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
        elif old.exists():
            old.rename(path)
    flush_folder(path.parent)


def temporary_name(path: Path) -> Path:
    """Return a name beside a file that no other writer uses."""
    return path.with_name(f"{path.stem}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY}{path.suffix}")


def is_temporary(path: Path) -> bool:
    """Whether this is the name of a file that a writer has not finished."""
    return path.stem.endswith(TEMPORARY)


def flush_folder(folder: Path) -> None:
    """Flush a folder's list of names to the disk, where the system has such a call."""
    if os.name != "posix":
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # what some network folders answer
            raise
    finally:
        os.close(number)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, each flushed to the disk."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in missing:
        flush_folder(place.parent)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(body: str, ending: str) -> str:
    """Return a text with an ending that holds its SHA-256 in place of `{}`."""
    before, after = ending.split("{}")
    return body + before + hashlib.sha256(body.encode("utf-8")).hexdigest() + after


def is_sealed(content: bytes, ending: str) -> bool:
    """Whether every byte of a sealed text is as it was written."""
    size = len(ending.encode("utf-8")) - len("{}") + hashlib.sha256().digest_size * 2
    body = content[: max(0, len(content) - size)]
    before, after = ending.split("{}")
    return content[len(body) :] == (before + hashlib.sha256(body).hexdigest() + after).encode("utf-8")
