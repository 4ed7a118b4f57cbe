"""Names of any script on a machine whose encoding is not UTF-8, as on Windows."""

import os
import subprocess
import sys

import pandas as pd

NETWORK = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(2, 2)
"""
ROWS = "länge,höhe,Vogel\n" + "".join(f"{i},{i % 3},{'чайка' if i % 2 else 'Möwe 🐦'}\n" for i in range(30))


def test_names_of_any_script_survive_where_the_encoding_is_ascii(tmp_path):
    folder = tmp_path / "my data"
    folder.mkdir()
    (folder / "net.py").write_text(NETWORK, encoding="utf-8")
    (folder / "birds.csv").write_text(ROWS, encoding="utf-8")
    words = ["analyze", "net.py:model", "birds.csv", "--label", "Vogel", "--out", "runs/1", "--quiet"]
    locale = {
        "LC_ALL": "C",
        "LANG": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "likewise", *words],
        cwd=folder,
        env={**os.environ, **locale},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode("utf-8", "replace")
    out = folder / "runs" / "1"
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "чайка" in page and "Möwe 🐦" in page
    assert 'data = "birds.csv"' in (out / "settings.toml").read_text(encoding="utf-8")
    assert len(pd.read_parquet(out / "samples.parquet")) == 30
