"""docs/uses.md holds the tables that its results give."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_tables_are_made_of_the_results(tmp_path):
    page = ROOT / "docs" / "uses.md"
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import uses, pathlib\n"
        "uses.PAGE = pathlib.Path(sys.argv[2]); uses.main()"
    )
    copy = tmp_path / "uses.md"
    copy.write_text(page.read_text(encoding="utf-8").replace("| **all** |", "| none |"), encoding="utf-8")
    subprocess.run([sys.executable, "-c", code, ROOT / "benchmarks", copy], check=True)
    assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")
