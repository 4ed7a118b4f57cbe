"""Command-line options, and the network and data that they name.

The names, defaults and help texts of a run's options come from `likewise.runs.settings.Settings`.
"""

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Union, get_args, get_origin

import typer
from pydantic import ByteSize, ValidationError
from pydantic.fields import FieldInfo

from likewise.cli.output import Format, print_message
from likewise.runs.settings import READING, Settings, describe_errors, read_settings

if TYPE_CHECKING:
    from likewise.data import Batches
    from likewise.loading import Read
    from likewise.loading.models import PretrainedFolder
    from likewise.loading.texts import Tokenization

FLAGS = {"text_column": "--text"}  # flags that differ from the name of the setting
Form = Annotated[
    Format,
    typer.Option("--format", help="Format of the results on stdout; --json is short for --format json."),
]
NEW_INPUTS = (*READING, "show_columns", "follow_links")
"""The settings of an index or a run that say how to read new inputs."""
Force = Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print results only, no progress or notes.")]


class Request(NamedTuple):
    """The settings given to a command, and its default output folder."""

    settings: Settings
    folder: Path  # for results, unless --out names another


def takes_settings(
    names: Sequence[str], *, optional: bool = False, help_texts: Mapping[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds these settings to a command as options and passes them to it as a Request.

    Args:
        names: Fields of Settings.
        optional: The command also works without model and data; it then gets None.
        help_texts: Help for settings that mean something else to this command.

    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(context: typer.Context, **given: Any) -> None:
            values = {name: given.pop(name) for name in names}
            is_empty = optional and values["model"] is None
            command(None if is_empty else _read_request(context, values), **given)

        command_parameters = list(inspect.signature(command).parameters.values())[1:]
        context = inspect.Parameter(
            "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
        )
        texts = help_texts or {}
        options = [_option(name, Settings.model_fields[name], optional, texts.get(name)) for name in names]
        parameters = [context, *(p.replace(kind=p.KEYWORD_ONLY) for p in (*options, *command_parameters))]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def read_part(text: str) -> tuple[int, int]:
    """Parse a part written as i/n; return (i, n)."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None:
        raise ValueError(f"--part must be i/n, such as 2/8, found {text!r}.")
    return int(match[1]), int(match[2])


def load_network(settings: Settings) -> Any:
    """Return the network named by the settings."""
    return _build_network(_load_model(settings), settings)


def open_inputs(settings: Settings) -> tuple[Any, Any]:
    """Return the network and the data named by the settings."""
    from likewise.progress import announce

    _refuse_unnamed_text(settings)
    announce(f"loading {settings.model}")
    model = _load_model(settings)
    read = open_data(settings)
    net = _build_network(model, settings)
    _refuse_misfit(net, read, settings)
    _note_other_classes(net, read, settings)
    return net, read


def open_data(settings: Settings, on_demand: bool = False) -> Any:
    """Return the data named by the settings.

    Args:
        settings: The settings of a command.
        on_demand: Tokenize each text only when it is used; for commands that need a few of many.

    """
    from likewise import loading
    from likewise.progress import announce

    announce(f"loading {settings.data}")
    folder = pretrained_folder(settings)
    read = loading.data(
        settings.data,
        label=settings.label,
        text_column=settings.text_column,
        columns=settings.columns,
        image_size=settings.image_size,
        gray=settings.gray,
        prepare=settings.prepare,
        tokenization=tokenization(settings, on_demand),
        limit=settings.limit,
        show_columns=settings.show_columns,
        follow_links=settings.follow_links,
        max_memory=memory_limit(settings),
    )
    print_message(*(f"note: {note}" for note in read.notes))
    classes = settings.classes
    if classes is None and folder is not None and read.labels is not None:
        classes = _classes_of_model(folder.classes, read)
    return read if classes is None else renumber_classes(read, classes)


def _load_model(settings: Settings) -> Any:
    from likewise import loading

    model = loading.model(
        settings.model,
        settings.weights,
        task=settings.task,
        base_model=settings.base_model,
        allow_pickle=settings.allow_pickle,
    )
    return model.to(settings.device).eval()


def pretrained_folder(settings: Settings) -> "PretrainedFolder | None":
    """Return the model's folder; None if the model is an import string."""
    from likewise import loading

    if not loading.is_pretrained(settings.model):
        return None
    return loading.PretrainedFolder(settings.model, task=settings.task, base_model=settings.base_model)


def tokenization(settings: Settings, on_demand: bool = False) -> "Tokenization | None":
    """Return how the tokenizer in the model's folder turns texts into inputs; None if it is not used."""
    if settings.text_column is None or settings.prepare is not None:
        return None
    folder = pretrained_folder(settings)
    found = None if folder is None else folder.tokenization(settings.max_length)
    return replace(found, on_demand=True) if found is not None and on_demand else found


def _classes_of_model(named: tuple[str, ...] | None, read: Any) -> tuple[str, ...] | None:
    """Return the class names in the order of the model's outputs, if the model and the data name classes."""
    if named is None and read.classes is not None:
        order = ", ".join(f"{i} {name}" for i, name in enumerate(read.classes[:10]))
        print_message(
            "note: the model does not name its classes, so labels are matched to outputs in alphabetical order: "
            f"{order}."
        )
    if named is None or read.classes is None:
        return named
    missing = [name for name in read.classes if name not in named]
    if missing:
        raise ValueError(
            f"The labels {', '.join(missing[:5])} are not among the model's classes ({', '.join(named[:10])}). "
            "Pass --classes with the data's class names in the order of the model's outputs."
        )
    return named


def _build_network(model: Any, settings: Settings) -> Any:
    """Return a Network of the model with the readout and parameters of the settings."""
    from likewise.model import Network

    parameters = None if settings.parameters is None else list(settings.parameters)
    return Network(model, _load_readout(settings.readout), parameters=parameters)


def read_batches(read: "Read") -> "Batches":
    """Return loaded data as batches; those of a table know their column names."""
    from likewise.data import batches

    return batches(read.dataset, labels=read.labels, columns=read.columns)


def renumber_classes(read: Any, classes: tuple[str, ...]) -> Any:
    """Return the data with its classes in the given order, if they have names."""
    if read.classes is None or read.labels is None:
        return read._replace(classes=classes)
    missing = [name for name in read.classes if name not in classes]
    if missing:
        raise ValueError(f"--classes must name all classes of the data; it lacks {', '.join(missing)}.")
    import torch

    order = torch.tensor([classes.index(name) for name in read.classes])
    return read._replace(classes=classes, labels=order[read.labels])


def memory_limit(settings: Settings) -> int:
    """Return the bytes for gradients and pairs: --max-memory, or half of the free memory of the device."""
    if settings.max_memory is not None:
        return settings.max_memory
    import torch

    from likewise.engines import default_max_memory

    return default_max_memory(torch.device(settings.device))


def _option(name: str, field: FieldInfo, optional: bool, help_text: str | None = None) -> inspect.Parameter:
    """Return a field as the parameter of a command; Settings itself validates the values."""
    default, description = field.default, help_text or field.description
    kind: Any = type(default) if type(default) in (bool, int, float) else str
    if name in ("model", "data"):
        default = inspect.Parameter.empty if name == "model" and not optional else None
        information = typer.Argument(help=description, show_default=False)
        kind = str if default is inspect.Parameter.empty else str | None
    elif kind is bool:
        information = typer.Option("--" + name.replace("_", "-"), help=description)
    else:
        information = typer.Option(FLAGS.get(name, "--" + name.replace("_", "-")), help=description)
        if default is None:
            kind = (int if _holds(field.annotation, int) else str) | None
        elif isinstance(default, ByteSize):
            kind, default = str, default.human_readable(separator="")
    annotation = Annotated[kind, information]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _holds(annotation: Any, kind: type) -> bool:
    """Whether an annotation is `kind`, or a union that contains it."""
    if get_origin(annotation) in (Union, UnionType):
        return any(_holds(part, kind) for part in get_args(annotation))
    return annotation is kind


def _read_request(context: typer.Context, values: dict[str, Any]) -> Request:
    """Return the settings given as options, or those of a TOML file updated by options, with the default folder."""
    model, folder = values["model"], Path("run")
    if values["data"] is None:
        if not model.endswith(".toml"):
            raise ValueError(
                f"Name the data after the model: likewise {context.info_name} net.py:model images/ (see "
                f"likewise {context.info_name} --help)."
            )
        stored = read_settings(model).model_dump()
        given = {name: value for name, value in values.items() if _is_given(context, name)}
        values = {**stored, **given, "model": stored["model"], "data": stored["data"]}
        folder = _run_folder(Path(model))
    try:
        return Request(Settings(**values), folder)
    except ValidationError as error:
        raise ValueError(describe_errors(error)) from error


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _run_folder(settings: Path) -> Path:
    """Return the run folder that contains the settings file, or the default folder."""
    return settings.parent if (settings.parent / "manifest.json").exists() else Path("run")


def _load_readout(text: str) -> Any:
    """Return the readout with this name or import string; None for auto.

    Raises:
        ValueError: There is no such readout, or the import string names something else, such as a model.

    """
    from torch import nn

    from likewise import loading, readouts
    from likewise.checks import describe

    if text == "auto":
        return None
    if ":" not in text:
        named = readouts.named_readout(text)
        if named is None:
            raise ValueError(
                f"There is no readout {text!r}: use auto, projected_outputs(8), class_contrasts(8), "
                f"{', '.join(readouts.NAMED)}, or an import string such as mine.py:readout."
            )
        return named
    found = loading.import_object(text)
    if not callable(found) or isinstance(found, type | nn.Module):
        raise ValueError(
            f"--readout {text} is {describe(found)}; expected a function (outputs, labels) -> (n, d), or one of "
            f"{', '.join(readouts.NAMED)}."
        )
    readouts.check_readout(found)
    return found


def _refuse_unnamed_text(settings: Settings) -> None:
    """Raise if a model with a tokenizer should read a table and no text column is named."""
    from likewise.loading.load import TABLES
    from likewise.loading.paths import existing, listed
    from likewise.loading.tables import table_columns

    named = settings.text_column or settings.columns or settings.prepare
    is_table = Path(settings.data).suffix.lower() in TABLES and ":" not in settings.data
    if named or not is_table or pretrained_folder(settings) is None:
        return
    available = [name for name in table_columns(existing(settings.data)) if name != settings.label]
    raise ValueError(
        f"Which column of {settings.data} holds the texts for {settings.model}? Pass --text COLUMN, one of "
        f"{listed(available, 50)}."
    )


def _refuse_misfit(net: Any, read: Any, settings: Settings) -> None:
    """Call the model with one sample; if that fails, raise an error that names the shapes and the options to try."""
    from torch.utils._pytree import tree_leaves

    from likewise.engines.memory import is_out_of_memory
    from likewise.loading.paths import listed

    first = read_batches(read).samples(range(1))
    try:
        with net.evaluation_mode():
            if net.automatic is None:
                net.function({}, first.inputs, first.labels, first.ids)
            else:  # the readout is chosen later
                net.call_model({}, first.inputs)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        shapes = ", ".join(
            str(tuple(part.shape)) for part in tree_leaves(first.inputs) if hasattr(part, "shape")
        )
        hints = (
            "--gray for one channel, --image-size, --columns, --label (which is then not an input), --prepare"
        )
        columns = _columns_read(read, settings)
        if columns:
            hints = (
                f"--columns (the inputs are now {listed(columns, 50)}), --label (which is then not an input), "
                "--prepare"
            )
        raise ValueError(
            f"{settings.model} fails on a sample of {settings.data}, a batch of shape {shapes}: {error}. "
            f"Options that may help: {hints}."
        ) from error


def _note_other_classes(net: Any, read: Any, settings: Settings) -> None:
    """Print a note if labels may not be numbered like the outputs; nothing else would show it."""
    from torch import Tensor

    from likewise.loading.paths import listed

    if read.labels is None or read.labels.is_floating_point() or read.labels.dim() != 1:
        return
    with net.evaluation_mode():
        found = net.call_model({}, read_batches(read).samples(range(1)).inputs)
    outputs = getattr(found, "logits", found)
    d = outputs.shape[1] if isinstance(outputs, Tensor) and outputs.dim() == 2 else 0
    least, most = int(read.labels.min()), int(read.labels.max())
    if d < 2 or least < 0:
        return
    if most >= d:
        advice = "number labels from 0." if least == 1 and most == d else "is this the model of these data?"
        print_message(
            f"note: labels range from {least:,} to {most:,}, but the network has {d:,} outputs (classes 0 to "
            f"{d - 1:,}), so its predictions are not compared with the labels. If outputs are classes, {advice}"
        )
    elif read.classes is not None and settings.classes is None and len(read.classes) < d:
        print_message(
            f"note: the data name {len(read.classes):,} classes ({listed(read.classes, 4)}), but the network has {d:,} "
            "outputs. Labels are numbered from 0, sorted by name. If the network knows other classes too, pass "
            "all of them with --classes, in the order of its outputs."
        )


def _columns_read(read: Any, settings: Settings) -> list[str]:
    """Return the numeric input columns; none if the data are not a table of numbers."""
    from torch import Tensor

    shown = None if read.show is None else read.show(0)
    if not isinstance(shown, dict) or not isinstance(read.dataset, Tensor):
        return []
    return [name for name in shown if name not in (settings.label, *(settings.show_columns or ()))]
