"""Every public name has an entry in the reference and a docstring whose example runs; `make docs` checks the pages."""

import ast
import doctest
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import likewise
from likewise import figures, losses
from likewise.integrations import samplers
from likewise.integrations import sklearn as likewise_sklearn
from likewise.losses import directions

ROOT = Path(__file__).parent.parent
MODULES = (likewise, losses, figures, directions, likewise_sklearn, samplers)


def public_names():
    for module in MODULES:
        functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        own = [n for n in functions if n[0] != "_" and getattr(module, n).__module__ == module.__name__]
        for name in getattr(module, "__all__", own):
            if not isinstance(getattr(module, name), ModuleType):
                yield module, name


def entries():
    pages = (page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    return {entry for page in pages for entry in re.findall(r"^::: (\S+)$", page, re.MULTILINE)}


def test_public_names_have_an_entry_in_the_reference():
    found, missing = entries(), []
    for module, name in public_names():
        defined = getattr(getattr(module, name), "__module__", module.__name__)
        if not {f"{module.__name__}.{name}", f"{defined}.{name}"} & found:
            missing.append(f"::: {module.__name__}.{name}")
    assert not missing, f"add to a page of docs/reference/: {missing}"


def documented(module, name):
    """Where a public name is defined, and its docstring there, also of a constant."""
    value = getattr(module, name)
    home = importlib.import_module(getattr(value, "__module__", module.__name__))
    body = ast.parse(inspect.getsource(home)).body
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.ClassDef | ast.FunctionDef) and statement.name == name:
            return home, ast.get_docstring(statement) or "", statement
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
            text = (
                following.value.value if isinstance(getattr(following, "value", None), ast.Constant) else ""
            )
            return home, inspect.cleandoc(text), None
    raise LookupError(f"{name} is not defined in {home.__name__}")


NAMES = [(module, name) for module, name in public_names()]


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[f"{m.__name__}.{name}" for m, name in NAMES])
def test_docstring_has_sections_and_its_example_runs(module, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    home, text, definition = documented(module, name)
    if isinstance(definition, ast.FunctionDef):
        given = definition.args
        arguments = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        missing = [a for a in arguments if not re.search(rf"^    {a}(?: \(.*?\))?: ", text, re.MULTILINE)]
        assert not missing, "not in `Args:`"
        assert "Returns:" in text
    assert ">>>" in text, "a docstring of a public name has an `Example:`"
    example = doctest.DocTestParser().get_doctest(text, {}, name, home.__file__, 0)
    report = []
    doctest.DocTestRunner().run(example, out=report.append)
    assert not report, "".join(report)
