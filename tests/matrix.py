"""The fast tests on each Python and torch: `make matrix`, or `python tests/matrix.py --only 3.12:2.13.0`.

Each combination gets an environment of its own in out/matrix, with the package installed as a user would, and the
results are kept in benchmarks/results/versions.json, from which docs/versions.md is written. A combination that is not
installable here, or was not run, is listed as such.
"""

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TORCHES = (
    "2.6.0",
    "2.13.0",
    "2.14.1",
    "2.15.0",
)  # the oldest supported, the one of constraints.txt, the latest two
TESTS = (
    "tests/gram/test_matrix.py",
    "tests/statistics/test_denoising.py",
    "tests/statistics/test_label_issues.py",
    "tests/losses/test_degenerate_terms.py",
    "tests/test_data.py",
    "tests/test_docs.py",
    "tests/test_files.py",
    "tests/test_linalg.py",
)
EXTRAS = ("pytest", "hypothesis")
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "versions.json", ROOT / "docs" / "versions.md"


def interpreter(version: str) -> str | None:
    """The Python of a version on this machine, None if there is none that starts."""
    found = (
        sys.executable
        if platform.python_version().startswith(version + ".")
        else shutil.which(f"python{version}")
    )
    works = found and subprocess.run([found, "--version"], capture_output=True).returncode == 0
    return found if works else None


def run(python: str, version: str, torch: str) -> dict[str, object]:
    """Install and test one combination; what came out of it."""
    folder = ROOT / "out" / "matrix" / f"{version}-{torch}"
    subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
    own = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    command = [own, "-m", "pip", "install", "--quiet", f"torch=={torch}", f"{ROOT}[figures]", *EXTRAS]
    installed = subprocess.run(command, capture_output=True, text=True)
    if installed.returncode:
        lines = [line for line in installed.stderr.splitlines() if line.startswith("ERROR")]
        return {"result": "not installable here", "detail": lines[-1][:200] if lines else ""}
    start = time.perf_counter()
    found = subprocess.run([own, "-m", "pytest", "-q", *TESTS], cwd=ROOT, capture_output=True, text=True)
    (folder / "pytest.txt").write_text(found.stdout + found.stderr)
    last = next((line for line in reversed(found.stdout.splitlines()) if " in " in line), "no result")
    counts = re.sub(r" in .*$", "", last.strip("= "))
    code = "import platform, numpy, torch; print(platform.python_version(), torch.__version__, numpy.__version__)"
    exact = subprocess.run([own, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    seconds = round(time.perf_counter() - start)
    return {"result": counts, "passed": found.returncode == 0, "exact": exact, "seconds": seconds}


def write_page(results: dict[str, dict[str, object]]) -> None:
    """Write docs/versions.md from the results."""
    lines = [
        "# Versions tested\n",
        "`make matrix` runs the fast tests (`TESTS` in `tests/matrix.py`) on each combination that installs where it",
        "is started, and writes this table. The whole suite, `make test`, runs on the version in `constraints.txt`.\n",
        "| Python | torch | numpy | fast tests |",
        "|---|---|---|---|",
    ]
    for python in PYTHONS:
        for torch in TORCHES:
            found = results.get(f"{python}:{torch}", {"result": "not run"})
            versions = found.get("exact") or [python, torch, ""]
            lines.append(f"| {versions[0]} | {versions[1]} | {versions[2]} | {found['result']} |")
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """Run what was asked for, write the page; 1 if tests failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="combinations such as 3.12:2.13.0")
    parser.add_argument("--here", action="store_true", help="this Python only, with --torch; nothing is kept")
    parser.add_argument("--torch", default=TORCHES[-1])
    options = parser.parse_args()
    if options.here:
        found = run(sys.executable, ".".join(platform.python_version_tuple()[:2]), options.torch)
        print(found)
        return 0 if found.get("passed") else 1
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in options.only or [f"{python}:{torch}" for python in PYTHONS for torch in TORCHES]:
        python, torch = name.split(":")
        where = interpreter(python)
        results[name] = {"result": f"no Python {python} here"} if where is None else run(where, python, torch)
        print(name, results[name], flush=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        write_page(results)
    return 0 if all(found.get("passed", True) for found in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
