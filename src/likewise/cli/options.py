"""From the words of a command to settings, and from settings to the network and the data that they name.

The options of a run come from `likewise.runs.settings.Settings`, with names, defaults and help.
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
    from likewise.loading.pretrained import PretrainedFolder
    from likewise.loading.texts import Tokenization

FLAGS = {"text_column": "--text"}  # where the flag is not the name of the setting
Form = Annotated[
    Format,
    typer.Option("--format", help="How results are written to stdout; --json is short for --format json."),
]
NEW_INPUTS = (*READING, "show_columns", "follow_links")
"""The settings of an index or a run by which new inputs are read."""
Force = Annotated[bool, typer.Option("--force", help="Replace a file that is there.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only results.")]


class Request(NamedTuple):
    """What a command was asked for."""

    settings: Settings
    folder: Path  # of results, unless another is named


def takes_settings(
    names: Sequence[str], *, optional: bool = False, help_texts: Mapping[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator: the command takes these settings as options, and gets them as a Request.

    Args:
        names: Fields of Settings.
        optional: The command also works without model and data, and then gets None.
        help_texts: What settings mean to this command, where it is not what they usually do.

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
        meanings = help_texts or {}
        options = [_option(name, Settings.model_fields[name], optional, meanings.get(name)) for name in names]
        parameters = [context, *(p.replace(kind=p.KEYWORD_ONLY) for p in (*options, *own))]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def read_part(text: str) -> tuple[int, int]:
    """Return (i, n) of a part, written i/n."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None:
        raise ValueError(f"--part is i/n, such as 2/8, found {text!r}.")
    return int(found[1]), int(found[2])


def load_network(settings: Settings) -> Any:
    """Return the network that settings name."""
    return _read_by(_load_model(settings), settings)


def open_inputs(settings: Settings) -> tuple[Any, Any]:
    """Return the network and the data that settings name."""
    from likewise.progress import announce

    _refuse_unnamed_text(settings)
    announce(f"loading {settings.model}")
    model = _load_model(settings)
    read = open_data(settings)
    net = _read_by(model, settings)
    _refuse_misfit(net, read, settings)
    _note_other_classes(net, read, settings)
    return net, read


def open_data(settings: Settings, on_demand: bool = False) -> Any:
    """Return the data that settings name.

    Args:
        settings: Of a command.
        on_demand: Tokenize texts as they are asked for: for a few of many.

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
    """Return the folder that the model comes from, None of an import string."""
    from likewise import loading

    if not loading.is_pretrained(settings.model):
        return None
    return loading.PretrainedFolder(settings.model, task=settings.task, base_model=settings.base_model)


def tokenization(settings: Settings, on_demand: bool = False) -> "Tokenization | None":
    """Return how texts become inputs, by the tokenizer in the model's folder; None where there are none."""
    if settings.text_column is None or settings.prepare is not None:
        return None
    folder = pretrained_folder(settings)
    found = None if folder is None else folder.tokenization(settings.max_length)
    return replace(found, on_demand=True) if found is not None and on_demand else found


def _classes_of_model(named: tuple[str, ...] | None, read: Any) -> tuple[str, ...] | None:
    """Return the classes in the order of the model, where it names them and the data do."""
    if named is None and read.classes is not None:
        order = ", ".join(f"{i} {name}" for i, name in enumerate(read.classes[:10]))
        print_message(
            f"note: the model names no classes: labels are its outputs in alphabetical order, {order}."
        )
    if named is None or read.classes is None:
        return named
    missing = [name for name in read.classes if name not in named]
    if missing:
        raise ValueError(
            f"The labels {', '.join(missing[:5])} are no classes of the model, which has {', '.join(named[:10])}: "
            "--classes gives the data's names in the order of the model's outputs."
        )
    return named


def _read_by(model: Any, settings: Settings) -> Any:
    """Return a model with the readout and parameters of settings."""
    from likewise.model import Network

    parameters = None if settings.parameters is None else list(settings.parameters)
    return Network(model, _load_readout(settings.readout), parameters=parameters)


def read_batches(read: "Read") -> "Batches":
    """Return data that were read as batches; those of a table know the names of its columns."""
    from likewise.data import batches

    return batches(read.dataset, labels=read.labels, columns=read.columns)


def renumber_classes(read: Any, classes: tuple[str, ...]) -> Any:
    """Return the data with its classes in the order given, where they have names."""
    if read.classes is None or read.labels is None:
        return read._replace(classes=classes)
    missing = [name for name in read.classes if name not in classes]
    if missing:
        raise ValueError(f"--classes must name all classes of the data; missing: {', '.join(missing)}.")
    import torch

    order = torch.tensor([classes.index(name) for name in read.classes])
    return read._replace(classes=classes, labels=order[read.labels])


def memory_limit(settings: Settings) -> int:
    """Return the bytes for gradients and pairs: those that were given, else half of what the device has free."""
    if settings.max_memory is not None:
        return settings.max_memory
    import torch

    from likewise.engines import default_max_memory

    return default_max_memory(torch.device(settings.device))


def _option(name: str, field: FieldInfo, optional: bool, help_text: str | None = None) -> inspect.Parameter:
    """Return a field as the parameter of a command; values are validated by Settings itself."""
    default, meaning = field.default, help_text or field.description
    kind: Any = type(default) if type(default) in (bool, int, float) else str
    if name in ("model", "data"):
        default = inspect.Parameter.empty if name == "model" and not optional else None
        information = typer.Argument(help=meaning, show_default=False)
        kind = str if default is inspect.Parameter.empty else str | None
    elif kind is bool:
        information = typer.Option("--" + name.replace("_", "-"), help=meaning)
    else:
        information = typer.Option(FLAGS.get(name, "--" + name.replace("_", "-")), help=meaning)
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


def _load_readout(text: str) -> Any:
    """Return the readout of a name or an import string, None for auto; a model, a class or a number is none."""
    from torch import nn

    from likewise import loading, readouts
    from likewise.checks import describe

    if text == "auto":
        return None
    if ":" not in text:
        named = readouts.named_readout(text)
        if named is None:
            raise ValueError(
                f"There is no readout {text!r}: use auto, projected_outputs(8), {', '.join(readouts.NAMED)}, or an "
                "import string such as mine.py:readout."
            )
        return named
    found = loading.import_object(text)
    if not callable(found) or isinstance(found, type | nn.Module):
        raise ValueError(
            f"--readout {text} is {describe(found)}: a function (outputs, labels) -> (n, d) is needed, or one of "
            f"{', '.join(readouts.NAMED)}."
        )
    readouts.check_readout(found)
    return found


def _refuse_unnamed_text(settings: Settings) -> None:
    """Raise if a model with a tokenizer is to read a table, and no column of text is named."""
    from likewise.loading.load import TABLES
    from likewise.loading.paths import existing, listed
    from likewise.loading.tables import table_columns

    named = settings.text_column or settings.columns or settings.prepare
    is_table = Path(settings.data).suffix.lower() in TABLES and ":" not in settings.data
    if named or not is_table or pretrained_folder(settings) is None:
        return
    there = [name for name in table_columns(existing(settings.data)) if name != settings.label]
    raise ValueError(
        f"Which column of {settings.data} holds the texts that {settings.model} reads? Name it by --text COLUMN, one "
        f"of {listed(there, 50)}."
    )


def _refuse_misfit(net: Any, read: Any, settings: Settings) -> None:
    """Call the model with one sample, and say what was tried if it fails."""
    from torch.utils._pytree import tree_leaves

    from likewise.engines.memory import is_out_of_memory
    from likewise.loading.paths import listed

    first = read_batches(read).samples(range(1))
    try:
        with net.evaluation_mode():
            if net.automatic is None:
                net.function({}, first.inputs, first.labels, first.ids)
            else:  # which readout it gets is not decided here
                net.call_model({}, first.inputs)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        shapes = ", ".join(
            str(tuple(part.shape)) for part in tree_leaves(first.inputs) if hasattr(part, "shape")
        )
        hints = "--gray for one channel, --image-size, --columns, --label (it is no input then), --prepare"
        columns = _columns_read(read, settings)
        if columns:
            hints = (
                f"its inputs are the columns {listed(columns, 50)}, choose by --columns; --label; --prepare"
            )
        raise ValueError(
            f"{settings.model} cannot be called with a sample of {settings.data}, a batch of shape "
            f"{shapes}: {error}. What may help: {hints}."
        ) from error


def _note_other_classes(net: Any, read: Any, settings: Settings) -> None:
    """Say it where labels are not numbered as the outputs are, or may not be: nothing else would show it."""
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
            f"note: labels go from {least:,} to {most:,}, and the network has {d:,} outputs, for classes 0 to "
            f"{d - 1:,}: its predictions are not compared with the labels. If outputs are classes, {advice}"
        )
    elif read.classes is not None and settings.classes is None and len(read.classes) < d:
        print_message(
            f"note: the data name {len(read.classes):,} classes ({listed(read.classes, 4)}), and the network has {d:,} "
            "outputs: labels are numbered from 0 in the order of their names. If the network knows other classes too, "
            "name all by --classes, in the order of its outputs."
        )


def _columns_read(read: Any, settings: Settings) -> list[str]:
    """Return the columns of numbers that are the inputs, none where no table of numbers was read."""
    from torch import Tensor

    shown = None if read.show is None else read.show(0)
    if not isinstance(shown, dict) or not isinstance(read.dataset, Tensor):
        return []
    return [name for name in shown if name not in (settings.label, *(settings.show_columns or ()))]
