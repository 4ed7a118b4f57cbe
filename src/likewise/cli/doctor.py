"""`likewise doctor`: installed packages, and whether a model and data work."""

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from likewise.cli.options import Form, Request, memory_limit, open_inputs, takes_settings
from likewise.cli.output import Format, gigabytes, print_result
from likewise.runs.settings import INPUTS

if TYPE_CHECKING:
    from likewise.model import Network


@takes_settings(INPUTS, optional=True)
def doctor(
    request: Request | None,
    form: Form = Format.text,
) -> None:
    """Show installed versions; with a model and data, also check that they work, with which engine and memory.

    Example: `likewise doctor net.py:model images/ --image-size 32`
    """
    import torch

    names = (
        "likewise",
        "torch",
        "numpy",
        "pandas",
        "pyarrow",
        "scikit-learn",
        "matplotlib",
        "scipy",
        "umap-learn",
    )
    facts: dict[str, Any] = {"python": sys.version.split()[0], **{name: _version(name) for name in names}}
    facts |= {"threads": torch.get_num_threads(), "cuda": torch.cuda.is_available()}
    if request is not None:
        net, read = open_inputs(request.settings)
        facts |= examine(net, read.dataset, read.labels, memory_limit(request.settings))
    print_result(
        form,
        facts,
        *(f"{name:<16} {'not installed' if value is None else value}" for name, value in facts.items()),
    )


def examine(net: "Network", dataset: Any, labels: Any, max_memory: int) -> dict[str, Any]:
    """Check a network and data on two samples: outputs, readout, engine, memory and similarities."""
    from likewise.data import batches
    from likewise.engines import TracedEngine
    from likewise.gram import GramMatrix
    from likewise.gram.cost import choose_outputs
    from likewise.readouts import readout_name

    data = batches(dataset, labels=labels)
    choice = choose_outputs(net, data)  # as `analyze` does
    gram = GramMatrix(choice.net, data.take(range(min(2, data.n))), max_memory=max_memory)
    similar = gram.dense()
    is_traced = isinstance(gram.engine, TracedEngine)
    return {
        "samples": data.n,
        "labels": "none" if data.take([0]).labels() is None else "yes",
        "readout": readout_name(choice.net.readout) + ("" if net.automatic is None else ", automatic"),
        "outputs": gram.d if net.automatic is None else choice.outputs,
        "outputs compared": gram.d,
        "parameters": sum(net.numels.values()),
        "engine": "traced (fast)" if is_traced else "dense (slow, by autograd)",
        "bytes per sample": gigabytes(max(gram.engine.memory.bytes_per_sample, 1)),
        "similarities": f"{similar.min():.2f} to {similar.max():.2f} among the first {len(similar)}: it works",
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
