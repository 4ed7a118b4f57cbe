"""Files are complete or absent, and say whether they are as they were written."""

import subprocess
import sys

import pytest

from likewise import files
from likewise.files import DiskFullError, is_sealed, seal, write_atomically, write_text


def test_a_file_is_complete_or_as_before(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "before")

    def broken(file):
        file.write(b"half")
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        write_atomically(path, broken, 4)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
    assert write_text(path, "after") == files.checksum(path)


def test_the_same_bytes_leave_a_file_untouched(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "same")
    before = path.stat().st_mtime_ns, path.stat().st_ino
    write_text(path, "same")
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before


def test_file_and_folder_are_flushed_before_the_write_returns(tmp_path, monkeypatch):
    import os

    done, sync, replace = [], os.fsync, type(tmp_path).replace
    monkeypatch.setattr(
        os, "fsync", lambda number: (done.append(os.readlink(f"/proc/self/fd/{number}")), sync(number))
    )
    monkeypatch.setattr(type(tmp_path), "replace", lambda a, b: (done.append("renamed"), replace(a, b))[1])
    write_text(tmp_path / "a.txt", "text")
    assert ".part" in done[0] and done[1:] == ["renamed", str(tmp_path)]
    done.clear()
    files.make_folder(tmp_path / "b" / "c")
    assert done == [str(tmp_path / "b"), str(tmp_path)]


def test_a_seal_breaks_with_every_bit():
    ending = "<!-- {} -->\n"
    whole = seal("a page\n", ending).encode()
    assert is_sealed(whole, ending) and not is_sealed(whole[:-1], ending) and not is_sealed(b"", ending)
    for place in range(len(whole)):
        for bit in range(8):
            broken = bytearray(whole)
            broken[place] ^= 1 << bit
            assert not is_sealed(bytes(broken), ending)


def test_a_full_disk_is_named_with_the_bytes_needed(tmp_path):
    code = (
        "import importlib.util, resource, sys; from pathlib import Path\n"
        "spec = importlib.util.spec_from_file_location('files', sys.argv[2])  # without torch\n"
        "files = importlib.util.module_from_spec(spec); spec.loader.exec_module(files)\n"
        "path = Path(sys.argv[1])\n"
        "files.write_text(path, 'before')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n    files.write_text(path, 'x' * 123_456)\n"
        "except files.DiskFullError as error:\n    print(error.needed, error.path == path, error)"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "a.txt"), files.__file__]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert printed.startswith("123456 True") and f"{tmp_path}/a.txt needs about 123,456 bytes" in printed
    assert (tmp_path / "a.txt").read_text() == "before" and len(list(tmp_path.iterdir())) == 1
    assert issubclass(DiskFullError, OSError)
