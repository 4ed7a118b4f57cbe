"""The options of commands: those of a run come from `likewise.runs.config.Settings`, with names, defaults and help."""

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

import typer
from pydantic import ByteSize, ValidationError
from pydantic.fields import FieldInfo

from likewise.cli.output import Format
from likewise.runs.config import Settings, describe_errors, read_settings

Form = Annotated[Format, typer.Option("--format", help="How results are written to stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only results.")]


class Request(NamedTuple):
    """What a command was asked for."""

    settings: Settings
    folder: Path  # of results, unless another is named


def takes_settings(
    names: Sequence[str], *, optional: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator: the command takes these settings as options, and gets them as a Request.

    Args:
        names: Fields of Settings.
        optional: The command also works without model and data, and then gets None.

    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(context: typer.Context, **given: Any) -> None:
            words = {name: given.pop(name) for name in names}
            is_empty = optional and words["model"] is None
            command(None if is_empty else _read_request(context, words), **given)

        own = list(inspect.signature(command).parameters.values())[1:]
        context = inspect.Parameter(
            "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
        )
        options = [_option(name, Settings.model_fields[name], optional) for name in names]
        parameters = [context, *(p.replace(kind=p.KEYWORD_ONLY) for p in (*options, *own))]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _option(name: str, field: FieldInfo, optional: bool) -> inspect.Parameter:
    """Return a field as the parameter of a command; values are validated by Settings itself."""
    default = field.default
    kind: Any = type(default) if type(default) in (bool, int, float) else str
    if name in ("model", "data"):
        default = inspect.Parameter.empty if name == "model" and not optional else None
        information = typer.Argument(help=field.description, show_default=False)
        kind = str if default is inspect.Parameter.empty else str | None
    elif kind is bool:
        information = typer.Option("--" + name.replace("_", "-"), help=field.description)
    else:
        information = typer.Option(help=field.description)
        if default is None:
            kind = (int if _holds(field.annotation, int) else str) | None
        elif isinstance(default, ByteSize):
            kind, default = str, default.human_readable(separator="")
    annotation = Annotated[kind, information]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _holds(annotation: Any, kind: type) -> bool:
    """Whether a type, or one of a union, is this one."""
    if get_origin(annotation) in (Union, UnionType):
        return any(_holds(part, kind) for part in get_args(annotation))
    return annotation is kind


def _read_request(context: typer.Context, words: dict[str, Any]) -> Request:
    """Return the settings that were given, or those of a file with what was given beside it, and where to."""
    model, folder = words["model"], Path("run")
    if words["data"] is None:
        if not model.endswith(".toml"):
            raise ValueError(
                f"Data are needed beside the model: likewise {context.info_name} net.py:model images/ (--help tells "
                "more)."
            )
        before = read_settings(model).model_dump()
        beside = {name: value for name, value in words.items() if _is_given(context, name)}
        words = {**before, **beside, "model": before["model"], "data": before["data"]}
        folder = _folder_of(Path(model))
    try:
        return Request(Settings(**words), folder)
    except ValidationError as error:
        raise ValueError(describe_errors(error)) from error


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _folder_of(settings: Path) -> Path:
    """Return the run folder that a settings file lies in, else the usual one."""
    return settings.parent if (settings.parent / "manifest.json").exists() else Path("run")
