"""The fast tests on each Python and torch: `make matrix`, or `python tests/matrix.py --only 3.12:2.13.0`.

Each combination gets an environment of its own in out/matrix, with the package installed as a user would (by uv where
it is installed, else by pip). Results are kept in benchmarks/results/versions.json, from which docs/versions.md is
written.
A combination that is not installable here, or was not run, is listed as such.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
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
    "tests/losses/test_degenerate_terms.py",
    "tests/test_compatibility.py",
    "tests/test_data.py",
    "tests/test_files.py",
    "tests/test_linalg.py",
)  # gradients, products, terms, a whole run and an index by the command, files and paths
EXTRAS = ("pytest", "hypothesis")
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "versions.json", ROOT / "docs" / "versions.md"
Result = dict[str, object]


def interpreter(version: str) -> str | None:
    """The Python of a version on this machine, None if there is none that starts."""
    for found in _candidates(version):
        if subprocess.run([found, "--version"], capture_output=True).returncode == 0:
            return found
    return None


def run(python: str, version: str, torch: str) -> Result:
    """Install and test one combination; what came out of it."""
    folder = ROOT / "out" / "matrix" / f"{version}-{torch}"
    shutil.rmtree(folder, ignore_errors=True)
    own, refusal = _install(python, folder, [f"torch=={torch}", f"{ROOT}[figures]", *EXTRAS])
    today = datetime.date.today().isoformat()
    if refusal is not None:
        return {"result": "not installable here", "detail": refusal, "date": today}
    start = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [own, "-m", "pytest", "-q", *TESTS], cwd=ROOT, capture_output=True, text=True, env=environment
    )
    (folder / "pytest.txt").write_text(found.stdout + found.stderr, encoding="utf-8")
    last = next((line for line in reversed(found.stdout.splitlines()) if " in " in line), "no result")
    counts = re.sub(r" in .*$", "", last.strip("= "))
    code = "import platform, numpy, torch; print(platform.python_version(), torch.__version__, numpy.__version__)"
    exact = subprocess.run([own, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    seconds = round(time.perf_counter() - start)
    return {
        "result": counts,
        "passed": found.returncode == 0,
        "exact": exact,
        "system": f"{platform.system()} {platform.machine()}",
        "seconds": seconds,
        "date": today,
    }


def write_page(results: dict[str, Result]) -> None:
    """Write docs/versions.md from the results."""
    lines = [
        "# Versions tested\n",
        "`make matrix` runs the fast tests (`TESTS` in `tests/matrix.py`) on each combination that installs where it",
        "is started, and writes this table. The whole suite, `make test`, runs on the version in `constraints.txt`.",
        "GitHub's workflow runs the same combinations, and one each on macOS and Windows.\n",
        "| Python | torch | numpy | fast tests | date |",
        "|---|---|---|---|---|",
    ]
    for python in PYTHONS:
        for torch in TORCHES:
            found = results.get(f"{python}:{torch}", {"result": "not run"})
            exact = found.get("exact")
            versions = exact if isinstance(exact, list) else [python, torch, ""]
            said = found["result"] if not found.get("detail") else f"{found['result']}: {found['detail']}"
            lines.append(f"| {' | '.join(versions)} | {said} | {found.get('date', '')} |")
    lines += [
        "",
        "Python 3.10 has had no fixes since October 2026, and today's NumPy, pandas and SciPy need 3.11: `pip`",
        "refuses it by `requires-python`.",
    ]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """Run what was asked for, write the page; 1 if tests failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="combinations such as 3.12:2.13.0")
    parser.add_argument("--here", action="store_true", help="this Python only, with --torch")
    parser.add_argument("--keep", action="store_true", help="with --here: keep the result")
    parser.add_argument("--torch", default=TORCHES[-1])
    options = parser.parse_args()
    if options.here:
        version = ".".join(platform.python_version_tuple()[:2])
        found = run(sys.executable, version, options.torch)
        print(found)
        if options.keep:
            _keep(f"{version}:{options.torch}", found)
        return 0 if found.get("passed") else 1
    failed = False
    for name in options.only or [f"{python}:{torch}" for python in PYTHONS for torch in TORCHES]:
        python, torch = name.split(":")
        where = interpreter(python)
        if where is None:
            print(f"{name}: no Python {python} here", flush=True)
            continue
        found = run(where, python, torch)
        failed |= not found.get("passed", True)
        _keep(name, found)
        print(name, found, flush=True)
    return 1 if failed else 0


def _candidates(version: str) -> Iterator[str]:
    """Yield where a Python of a version may be: this one, those on the path, pyenv's."""
    if platform.python_version().startswith(version + "."):
        yield sys.executable
    if (found := shutil.which(f"python{version}")) is not None:
        yield found
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(root.glob(f"versions/{version}.*/bin/python")))


def _install(python: str, folder: Path, packages: list[str]) -> tuple[Path, str | None]:
    """Make an environment with these packages; its Python, and why they cannot be installed, None if they were."""
    own = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    if uv := shutil.which("uv"):
        subprocess.run([uv, "venv", "--quiet", "--python", python, folder], check=True)
        command = [uv, "pip", "install", "--quiet", "--python", own, *packages]
    else:
        subprocess.run([python, "-m", "venv", folder], check=True)
        command = [own, "-m", "pip", "install", "--quiet", *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.returncode:
        return own, None
    said = " ".join(done.stderr.split())
    reason = re.search(r"(ERROR: No matching.*|Because .*|ERROR: .*)", said)
    return own, (reason[1] if reason else said).replace("|", "/")[:160]


def _keep(name: str, found: Result) -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    results[name] = found
    RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n", encoding="utf-8")
    write_page(results)


if __name__ == "__main__":
    sys.exit(main())
