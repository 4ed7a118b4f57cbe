"""`likewise serve` as a process of its own, and what a folder holds."""

import os
import signal
import subprocess
import sys
from pathlib import Path

CLASSES = ("ant", "bee", "cow")


class Server:
    """`likewise serve` as a process of its own."""

    def __init__(self, folder, *words):
        command = [sys.executable, "-m", "likewise", "serve", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.address = self.process.stdout.readline().strip()
        assert self.address.startswith("http://127.0.0.1:"), self.process.stderr.read()

    @property
    def alive(self):
        return self.process.poll() is None

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
        return self.process.stderr.read()


def content_of(folder):
    """The bytes of every file of a folder, but for locks."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and not path.name.startswith(".lock") and "__pycache__" not in path.parts
    }
