"""Imports go down only, and each kind of effect has one place."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "likewise"
LEVELS = {
    "checks": -1,  # of arguments: knows nothing of the package
    "module_attributes": -1,
    "padding": -1,  # of texts
    "torch_state": -1,
    "wording": -1,
    "linalg": 0,
    "kernels": 0,
    "fingerprint": 0,
    "liveness": 0,
    "readouts": 0,
    "sharding": 0,
    "progress": 0,
    "version": 0,
    "figures": 0,
    "thumbnails": -1,
    "marked_text": -0.5,  # knows how a text is written out
    "loading": 0,
    "files": 0,
    "locks": 0,
    "distributed": 1,
    "manifest": 1,
    "watch": 1,  # knows only how files are written
    "data": 2,  # batches over sources of samples
    "model": 2,  # knows the readouts
    "report": 2,  # knows only its folder
    "components": 2,  # scripts and styles that the live page and notebooks share
    "identity": 3,  # of models, data and readouts
    "engines": 3,
    "losses": 4,
    "gram": 5,
    "statistics": 8,
    "index": 8.5,
    "runs": 9,
    "integrations": 9,
    "serve": 10,
    "cli": 11,
    "__main__": 12,
}
WRITERS = {"files", "manifest", "index", "runs", "report", "watch"}
FILES = sorted(SOURCE.rglob("*.py"))


def part(path):
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported(path, nodes=ast.walk):
    for node in nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "likewise":
            yield from (f"likewise.{name.name}" for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_down(path):
    if part(path) == "__init__":
        return
    for module in imported(path):
        if module.split(".")[0] == "likewise":
            other = module.split(".")[1]
            assert other == part(path) or LEVELS[other] < LEVELS[part(path)], module


@pytest.mark.parametrize("folder", sorted({p.parent for p in FILES} - {SOURCE}), ids=lambda p: p.name)
def test_modules_of_a_folder_import_each_other_without_a_cycle(folder):
    modules = {
        ".".join(p.relative_to(SOURCE.parent).with_suffix("").parts): p for p in folder.glob("[!_]*.py")
    }
    graph = {
        name: [
            other for other in imported(path, ast.iter_child_nodes) if other in modules
        ]  # when it is loaded
        for name, path in modules.items()
    }
    assert len(list(TopologicalSorter(graph).static_order())) == len(modules)  # raises a CycleError by name


def test_each_effect_has_its_place():
    for path in FILES:
        text = path.read_text()
        where = part(path)
        assert "torch.distributed" not in text or where == "distributed", path
        assert not re.search(r"\bprint\(|os\.environ", text) or where == "cli", path
        assert "typer" not in text or where == "cli", path
        assert not re.search(r"pickle\.|torch\.save\(", text) or where == "loading", path
        assert "torch.load(" not in text or (where == "loading" and "weights_only=True" in text), path
        assert not re.search(r"\.write_(text|bytes)|to_csv|write_table\(", text) or where in WRITERS, path
        assert not re.search(r"(?<![\w.])open\(", text) or where in WRITERS, path


def test_no_drawer_for_odds_and_ends():
    assert not {p.stem for p in FILES} & {"utils", "common", "helpers", "misc", "core"}


# What the report, the command, files, figures or single statistics need: imported inside the functions that use it.
REPORT = [
    "PIL",
    "jinja2",
    "matplotlib",
    "pandas",
    "pyarrow",
    "pydantic",
    "rich",
    "safetensors",
    "tomlkit",
    "typer",
]
HEAVY = [*REPORT, "datasets", "scipy", "sklearn", "tensorboard", "transformers"]


def in_new_process(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_nothing_heavy():
    code = f"import sys, torch, numpy, likewise; print(sorted(set({HEAVY}) & set(sys.modules)))"
    assert in_new_process(code) == "[]"


def test_statistics_need_torch_and_numpy_alone():
    code = f"""
import sys
import torch
sys.modules.update(dict.fromkeys({HEAVY}))  # importing any of them raises
import likewise as lw
net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
x, y = torch.randn(30, 4), torch.arange(30) % 3
gram = lw.GramMatrix(net, (x, y))
for statistic in (lw.soft_neighbors, lw.nearest, lw.novelty, lw.reliability, lw.uncertainty, lw.class_similarity):
    statistic(gram)
lw.losses.pair(net, x[:2], x[2:4]).backward()
try:
    import pandas
except ImportError:
    print("absent")
"""
    assert in_new_process(code) == "absent"


def test_public_names_are_sorted_and_there():
    import likewise

    assert likewise.__all__ == sorted(likewise.__all__, key=lambda n: (not n.isupper(), n[0].islower(), n))
    assert all(hasattr(likewise, name) for name in likewise.__all__)


def test_no_two_test_modules_have_one_name():
    """pytest imports them by name alone: of two that are equal it collects neither, nor anything else."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
