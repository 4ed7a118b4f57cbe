"""The tutorials run, print what is stored in them, and hold small pictures.

Cells run in this process, without a Jupyter kernel; `pytest -m slow` runs them in one.
"""

import ast
import base64
import contextlib
import io
import json
import platform
import re
import warnings
from itertools import starmap
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?")
MOST_BYTES = 60_000  # of a picture
by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
    return json.loads(path.read_text())


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(cell):
    return "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")


def is_same_result(found, stored):
    """Whether two texts are the same but for numbers, which may differ as much as other rounding makes them."""
    pairs = zip(NUMBER.findall(found), NUMBER.findall(stored), strict=False)
    return NUMBER.sub("#", found) == NUMBER.sub("#", stored) and all(starmap(is_close, pairs))


def is_close(found, stored):
    """By a seventh; counts also by two or three, other numbers by a twentieth."""
    a, b = (float(text.replace(",", "")) for text in (found, stored))
    return abs(a - b) <= 0.15 * max(abs(a), abs(b)) + (0.05 if "." in found + stored else 2.5)


def has_stored_versions(notebook):
    """Whether this Python and PyTorch are those of the stored results: others round, draw and document otherwise."""
    stored, here = notebook["metadata"]["versions"], platform.python_version_tuple()
    return stored == {"python": f"{here[0]}.{here[1]}", "torch": torch.__version__.split("+")[0]}


def check(found, notebook):
    """Compare what cells printed with what is stored, unless they print examples, which are tagged "varies"."""
    pairs = list(zip(found, code_cells(notebook), strict=True))
    assert all(bool(text) == bool(printed(cell)) for text, cell in pairs)
    if has_stored_versions(notebook):
        fixed = [pair for pair in pairs if "varies" not in pair[1]["metadata"].get("tags", [])]
        different = [(text, printed(cell)) for text, cell in fixed if not is_same_result(text, printed(cell))]
        assert not different, "the results have changed: look at them, then `make notebooks`"


@by_name
def test_cells_print_what_is_stored(path, tmp_path, monkeypatch):
    from matplotlib import pyplot

    notebook, names, found = read(path), {"__name__": "__main__"}, []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pyplot, "show", lambda: pyplot.close("all"))
    pyplot.switch_backend("Agg")
    with warnings.catch_warnings():
        for cell in code_cells(notebook):
            with contextlib.redirect_stdout(io.StringIO()) as text:
                exec(compile("".join(cell["source"]), path.name, "exec"), names)
            found.append(text.getvalue())
    check(found, notebook)


@pytest.mark.slow
@by_name
def test_cells_print_what_is_stored_in_a_jupyter_kernel(path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute(cwd=str(FOLDER))
    found = [
        "".join(o.text for o in cell.outputs if o.get("name") == "stdout")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    check(found, read(path))


@by_name
def test_notebook_says_first_what_to_do_and_ends_with_a_small_picture(path):
    notebook = read(path)
    first = "".join(notebook["cells"][0]["source"])
    assert first.startswith("# ") and "**What to do:**" in first
    pictures = [
        base64.b64decode("".join(output["data"]["image/png"]))
        for cell in code_cells(notebook)[-1:]
        for output in cell["outputs"]
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 1 and pictures[0][:4] == b"\x89PNG" and len(pictures[0]) <= MOST_BYTES
    assert not any(o.get("name") == "stderr" for cell in code_cells(notebook) for o in cell["outputs"])
    assert [cell["execution_count"] for cell in code_cells(notebook)] == list(
        range(1, len(code_cells(notebook)) + 1)
    )


@by_name
def test_cells_are_plain_python_without_paths_of_a_machine(path):
    for cell in code_cells(read(path)):
        ast.parse("".join(cell["source"]))
        assert "/work/" not in "".join(cell["source"]) + printed(cell)


def test_a_stale_result_is_noticed():
    stored = "flagged labels: 96, 88 of 90 wrong"
    assert is_same_result("flagged labels: 94, 85 of 90 wrong", stored)
    assert not is_same_result("flagged labels: 60, 55 of 90 wrong", stored)
    assert not is_same_result("flagged: 96, 88 of 90 wrong", stored)
    assert is_same_result("loss 2.04, 1,203 texts", "loss 2.07, 1,213 texts")


def test_there_are_tutorials():
    assert {path.stem for path in NOTEBOOKS} >= {
        "wrong-labels",
        "text",
        "lora",
        "novelty",
        "training-terms",
        "scikit-learn",
    }
