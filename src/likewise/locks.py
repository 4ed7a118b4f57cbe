"""One writer per folder.

What is promised:

- On a folder of this machine, and on a network folder whose server handles `flock` (NFS 3 with its lock
  service, NFS 4, SMB, Lustre mounted with `flock`), at most one process at a time holds the lock. The system
  releases it when its holder ends, however it ends.
- Where `flock` is not to be had, a file that only one can create stands for the lock. If its holder died on
  this machine, the lock is taken over. If it was held from another machine, nobody here can tell whether that
  process is alive: the lock stays, and the message says who holds it and which file to delete.

Readers need no lock: files appear complete, and the manifest appears after the files that it names.
"""

import errno
import json
import os
import secrets
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

LOCK_NAME = ".lock"  # locked by flock
CREATED_NAME = ".lock-created"  # where there is no flock: who creates it has the lock
NO_FLOCK = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
SECONDS_BETWEEN_TRIES = 0.1


class FolderLockedError(OSError):
    """Another process writes into the folder.

    Attributes:
        folder: The folder.
        holder: Who holds the lock, None where that is not known.
    """

    def __init__(self, folder: Path, holder: "Holder | None", seconds: float) -> None:
        self.folder, self.holder = folder, holder
        super().__init__(
            f"{folder} is being written by {holder or 'another process'}; it did not end in {seconds:g} s. "
            f"Give the same command again later. If that process is gone for sure, delete {folder}/.lock*."
        )


class Holder(NamedTuple):
    """Who holds a lock."""

    pid: int
    host: str
    since: str
    started: str  # when the process began, as the system counts: a number may be used again
    token: str  # of this one lock

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    @classmethod
    def current(cls) -> "Holder":
        """Return this process."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        return cls(os.getpid(), socket.gethostname(), now, _start_of(os.getpid()), secrets.token_hex(8))

    @classmethod
    def read(cls, path: Path) -> "Holder | None":
        """Return who wrote a lock file, None where that is not written yet or the file is gone."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def content(self) -> bytes:
        """Return what is written into a lock file."""
        return json.dumps(self._asdict()).encode()

    @property
    def is_dead(self) -> bool:
        """Whether it is known that the process has ended."""
        if self.host != socket.gethostname() or os.name != "posix":
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # it is somebody else's, and alive
            return False
        return bool(self.started) and self.started != _start_of(self.pid)


@contextmanager
def lock_folder(folder: Path, wait: float = float("inf")) -> Iterator[None]:
    """Hold the folder's lock inside; wait for another writer to end, with a warning that names it.

    Args:
        folder: An existing folder.
        wait: How many seconds to wait at most.

    Raises:
        FolderLockedError: Another process held the lock all that time.
    """
    start, warned = time.monotonic(), False
    while (release := _try_lock(folder)) is None:
        holder, waited = _read_holder(folder), time.monotonic() - start
        if waited >= wait:
            raise FolderLockedError(folder, holder, wait)
        if not warned and (holder is not None or waited > 2):
            who = holder or f"another process ({folder / LOCK_NAME} does not say which)"
            warnings.warn(f"{folder} is being written by {who}: waiting for it to end.", stacklevel=3)
            warned = True
        time.sleep(SECONDS_BETWEEN_TRIES)
    try:
        yield
    finally:
        release()


def _try_lock(folder: Path) -> Callable[[], None] | None:
    """Return what releases the lock, None where another process holds it."""
    try:
        import fcntl
    except ImportError:  # Windows
        return _try_create(folder)
    path = folder / LOCK_NAME
    number = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(number)
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return None
        if error.errno in NO_FLOCK:
            path.unlink(missing_ok=True)
            return _try_create(folder)
        raise
    if not _is_open_at(number, path):  # deleted by its last holder, after it was opened here
        os.close(number)
        return None
    os.ftruncate(number, 0)  # what a holder that was killed wrote
    os.write(number, Holder.current().content())

    def release() -> None:
        path.unlink(missing_ok=True)  # before it is released, so that who waits for this file looks again
        os.close(number)

    return release


def _is_open_at(number: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(number), path.stat())
    except FileNotFoundError:
        return False


def _try_create(folder: Path) -> Callable[[], None] | None:
    """Return what removes a file that this process created, None where another process has one."""
    path = folder / CREATED_NAME
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        holder = _read_holder(folder)
        if holder is not None and holder.is_dead:
            _remove_dead(path, holder)
        return None
    os.write(number, Holder.current().content())
    os.close(number)
    return path.unlink


def _remove_dead(path: Path, dead: Holder) -> None:
    """Remove the lock of a process that has ended, and no other that came in between."""
    aside = path.with_name(f"{CREATED_NAME}-{secrets.token_hex(4)}")
    try:
        path.rename(aside)  # of those who try, one succeeds
    except FileNotFoundError:
        return
    if Holder.read(aside) != dead:
        aside.rename(path)
        return
    aside.unlink()


def _read_holder(folder: Path) -> Holder | None:
    return Holder.read(folder / CREATED_NAME) or Holder.read(folder / LOCK_NAME)


def _start_of(pid: int) -> str:
    """Return when a process began, in the system's ticks; empty where the system does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""
