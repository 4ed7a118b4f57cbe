"""The network and the data that settings name."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from likewise.runs.config import Settings


def open_inputs(settings: "Settings") -> tuple[Any, Any]:
    """Return the network and the data that settings name."""
    from likewise import loading
    from likewise.model import Network

    model = loading.model(settings.model, settings.weights).to(settings.device).eval()
    read = loading.data(
        settings.data,
        label=settings.label,
        text_column=settings.text_column,
        columns=settings.columns,
        image_size=settings.image_size,
        gray=settings.gray,
        prepare=settings.prepare,
        limit=settings.limit,
        show_columns=settings.show_columns,
        follow_links=settings.follow_links,
        max_memory=settings.max_memory,
    )
    readout = _load_readout(settings.readout)
    if settings.classes is not None:
        read = _renumbered(read, settings.classes)
    parameters = None if settings.parameters is None else list(settings.parameters)
    net = Network(model, readout, parameters=parameters)
    _refuse_misfit(net, read, settings)
    return net, read


def _load_readout(text: str) -> Any:
    """Return the readout of a name or an import string; a model, a class or a number is none."""
    from torch import nn

    from likewise import loading, readouts
    from likewise.checks import describe

    if ":" not in text:
        if text not in readouts.NAMED:
            raise ValueError(
                f"There is no readout {text!r}: use {', '.join(readouts.NAMED)}, or an import string such as "
                "mine.py:readout."
            )
        return readouts.NAMED[text]
    found = loading.import_object(text)
    if not callable(found) or isinstance(found, type | nn.Module):
        raise ValueError(
            f"--readout {text} is {describe(found)}: a function (outputs, labels) -> (n, d) is needed, or one of "
            f"{', '.join(readouts.NAMED)}."
        )
    readouts.check_readout(found)
    return found


def _refuse_misfit(net: Any, read: Any, settings: "Settings") -> None:
    """Call the model with one sample, and say what was tried if it fails."""
    from torch.utils._pytree import tree_leaves

    from likewise.data import batches
    from likewise.engines.memory import is_out_of_memory

    first = batches(read.dataset, labels=read.labels).samples(range(1))
    try:
        with net.evaluation_mode():
            net.function({}, first.inputs, first.labels, first.ids)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        shapes = ", ".join(
            str(tuple(part.shape)) for part in tree_leaves(first.inputs) if hasattr(part, "shape")
        )
        hints = "--gray for one channel, --image-size, --columns, --label (it is no input then), --prepare"
        raise ValueError(
            f"{settings.model} cannot be called with a sample of {settings.data}, a batch of shape "
            f"{shapes}: {error}. What may help: {hints}."
        ) from error


def _renumbered(read: Any, classes: tuple[str, ...]) -> Any:
    """Return the data with its classes in the order given, where they have names."""
    if read.classes is None or read.labels is None:
        return read._replace(classes=classes)
    missing = [name for name in read.classes if name not in classes]
    if missing:
        raise ValueError(f"--classes must name all classes of the data; missing: {', '.join(missing)}.")
    import torch

    order = torch.tensor([classes.index(name) for name in read.classes])
    return read._replace(classes=classes, labels=order[read.labels])
