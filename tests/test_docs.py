"""The reference has every public name; `make docs` checks the rendered pages and all links."""

import inspect
import re
from pathlib import Path
from types import ModuleType

import likewise
from likewise import figures, losses
from likewise.losses import directions

ROOT = Path(__file__).parent.parent
MODULES = (likewise, losses, figures, directions)


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
