"""One writer per folder: who waits is told for whom, and a dead process holds nothing."""

import errno
import os
import subprocess
import sys
import threading
import time

import pytest

from likewise import locks
from likewise.locks import FolderLockedError, Holder, lock_folder

HOLD = """
import importlib.util, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("locks", sys.argv[3])  # without torch, which takes seconds
locks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(locks)
if sys.argv[2] == "created":
    locks._try_lock = locks._try_create
with locks.lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(params=["flock", "created"])
def kind(request, monkeypatch):
    """The lock of the system, and what is used where there is none."""
    if request.param == "created":
        import fcntl

        def refuse(*_):
            raise OSError(errno.ENOTSUP, "not supported")

        monkeypatch.setattr(fcntl, "flock", refuse)
    return request.param


def test_a_second_writer_waits_and_is_told_for_whom(tmp_path, kind):
    entered, leave, order = threading.Event(), threading.Event(), []

    def first():
        with lock_folder(tmp_path):
            entered.set()
            leave.wait()
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait()
    told = rf"process {os.getpid()} on .*, since 20"
    with pytest.raises(FolderLockedError, match=told) as caught, lock_folder(tmp_path, wait=0):
        pass
    assert caught.value.holder.pid == os.getpid()
    threading.Timer(0.3, leave.set).start()
    with pytest.warns(UserWarning, match=f"process {os.getpid()} on"), lock_folder(tmp_path):
        order.append("second")
    thread.join()
    assert order == ["first", "second"]
    assert list(tmp_path.iterdir()) == []


def test_a_lock_left_by_a_killed_process_is_taken_over(tmp_path, kind):
    words = [sys.executable, "-c", HOLD, str(tmp_path), kind, locks.__file__]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    with pytest.raises(FolderLockedError, match=f"process {process.pid}"), lock_folder(tmp_path, wait=0):
        pass
    process.kill()
    process.wait()
    process.stdout.close()
    assert list(tmp_path.iterdir())  # it had no time to tidy up
    start = time.perf_counter()
    with lock_folder(tmp_path, wait=10):
        assert time.perf_counter() - start < 5
    assert list(tmp_path.iterdir()) == []


def test_a_process_on_another_machine_is_not_thought_dead(tmp_path, monkeypatch):
    here = Holder.current()
    assert not here.is_dead
    assert here._replace(started="1").is_dead  # its number is used by another process now
    assert not here._replace(host="elsewhere", pid=2**22 + 1).is_dead
    monkeypatch.setattr(locks, "_try_lock", locks._try_create)
    (tmp_path / locks.CREATED_NAME).write_bytes(here._replace(host="elsewhere").content())
    told = r"on elsewhere.*delete"
    with pytest.raises(FolderLockedError, match=told), lock_folder(tmp_path, wait=0):
        pass


def test_many_threads_never_write_at_once(tmp_path, kind):
    inside, most = [], []

    def write():
        with lock_folder(tmp_path):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.01)
            inside.pop()

    threads = [threading.Thread(target=write) for _ in range(12)]
    with pytest.warns(UserWarning, match="waiting"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == [1] * 12
