import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from hypothesis import settings

EXAMPLES = Path(__file__).parents[1] / "examples" / "analyze"

settings.register_profile("likewise", deadline=None, max_examples=20, derandomize=True)
settings.load_profile("likewise")


@pytest.fixture(autouse=True)
def one_thread_and_a_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """What the examples write, images by class, tables and weights: once for all workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "made"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            begun = folder.with_name("made-begun")
            for kind in ("images", "table", "text"):
                subprocess.run([sys.executable, EXAMPLES / f"{kind}.py", begun / kind], check=True)
            begun.rename(folder)
    return folder
