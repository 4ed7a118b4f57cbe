"""Resolve import strings: `package.module:object.attr` or `path/to/file.py:object`."""

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from likewise.loading.paths import alternatives, existing


def import_object(text: str) -> object:
    """Return the object that an import string names; its module is imported if necessary.

    The folder of a file, or the current folder for a module, is added to sys.path and stays there. A file runs once,
    however many of its objects are used.
    """
    place, _, name = text.rpartition(":")
    if not place or not name:
        example = f"{text.strip(':')}:object" if text.strip(":") else "package.module:object"
        raise ValueError(
            f"{text!r} is no import string: expected package.module:object or path/to/file.py:object, "
            f"for example {example}."
        )
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(
            f"{name!r} in {text!r} is not the name of an object: write it without brackets or arguments."
        )
    in_file = place.endswith(".py") or "/" in place or "\\" in place
    found: object = _file(place) if in_file else _module(place)
    for part in name.split("."):
        found = _attribute(found, part, text)
    return found


def is_import(text: str) -> bool:
    """Return whether a word is an import string and not a path."""
    drive = text[1:3] in (":\\", ":/") and text.count(":") == 1  # C:\data.csv
    return ":" in text and not drive and not Path(text).exists()


def build_object(found: Any, text: str, expected: str) -> object:
    """Call a class or function without arguments, and return the result."""
    try:
        return found()
    except (Exception, SystemExit) as error:
        raise TypeError(
            f"{text}{_signature(found)}, called without arguments, raised {_describe_error(error)}. Write a small "
            f"function that needs none and returns {expected}, and name that instead."
        ) from error


def library(module: str, package: str) -> Any:
    """Import an optional library."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"This needs {package}, which is not installed: pip install {package}.") from error


def _file(place: str) -> ModuleType:
    path = existing(place).resolve()
    name = f"{path.stem}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path) if path.suffix == ".py" else None
    if spec is None or spec.loader is None:
        raise ValueError(f"{place} is not a Python file: expected path/to/file.py:object.")
    _make_importable(path.parent)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failure(place, error) from error
    return module


def _module(place: str) -> ModuleType:
    parts = place.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ValueError(f"{place!r} is not the name of a module, such as package.module.")
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        above = [".".join(parts[: i + 1]) for i in range(len(parts))]
        if error.name not in above:
            raise _failure(place, error) from error
        here = [path.stem for path in Path.cwd().glob("*.py")]
        raise ValueError(
            f"There is no module {error.name} ({alternatives(parts[0], here)[:-1]} in {Path.cwd()}): install "
            "it, start in its folder, or name the file, path/to/file.py:object."
        ) from error
    except (Exception, SystemExit) as error:
        raise _failure(place, error) from error


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


def _attribute(found: object, name: str, text: str) -> object:
    try:
        return getattr(found, name)
    except AttributeError as error:
        owner = getattr(found, "__file__", None) or getattr(found, "__name__", type(found).__name__)
        public = [other for other in dir(found) if not other.startswith("_")]
        raise ValueError(f"{owner} has no {name!r}, as in {text}: {alternatives(name, public)}") from error


def _failure(place: str, error: BaseException) -> ValueError:
    """Return an error that names the line of the user's file that raised the original one."""
    own = {__file__, importlib.__file__}
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<")]
    where = [f"{f.filename}, line {f.lineno}" for f in frames if f.filename not in own]
    if isinstance(error, SyntaxError):
        where = [f"{error.filename}, line {error.lineno}"]
    advice = ""
    if isinstance(error, SystemExit):
        advice = ' Put what runs a program under if __name__ == "__main__".'
    elif "relative import" in str(error):
        advice = " A file of a package is imported by package.module:object."
    found = f" ({where[0]})" if where else ""
    return ValueError(f"Importing {place} raised {_describe_error(error)}{found}.{advice}")


def _signature(found: Any) -> str:
    try:
        return str(inspect.signature(found))
    except (TypeError, ValueError):
        return "(...)"


def _describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).rstrip('.')}"
