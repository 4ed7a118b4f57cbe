"""A model and a data set in, a folder of results out: `likewise.analyze`."""

import copy
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from likewise import identity
from likewise.checks import (
    check_choice,
    check_flag,
    check_function,
    check_integer,
    check_number,
    check_type,
    describe,
    refuse_unreadable,
)
from likewise.data import Batches, batches
from likewise.distributed import alone, on_first_rank, world_size
from likewise.engines.memory import MemoryLimitError, default_max_memory, freeze_objects
from likewise.gram import GramMatrix, has_passages
from likewise.gram.last_layer import Features
from likewise.gram.matrix import dataset_outputs
from likewise.index.build import check_part
from likewise.index.shards import describe_data
from likewise.manifest import NAME as MANIFEST
from likewise.model import Network, to_network
from likewise.progress import announce
from likewise.readouts import Readout, readout_name, reads_text
from likewise.report.pages import write_report
from likewise.runs.neighbors import TokenTexts, passage_count
from likewise.runs.parts import Adopted, Part, adopt_parts, read_parts, refuse_other_parts
from likewise.runs.plan import Method, choose_method
from likewise.runs.result import Analysis
from likewise.runs.stages import find_last_layer, reads_on_the_way, run_part, run_stages
from likewise.runs.store import open_folder
from likewise.runs.tables import Shown
from likewise.statistics.crossval import CrossValidated
from likewise.statistics.targets import finite_labels, model_outputs, outputs_network
from likewise.thumbnails import EXCERPT
from likewise.watch import Watch

if TYPE_CHECKING:
    from likewise.runs.settings import Settings

Show = Callable[[int], Any] | Sequence[Any]
FEW_SHOWN = 16  # entries that are compared of a sequence that may read files


def analyze(
    model: nn.Module | Network,
    dataset: Any,
    labels: Any = None,
    *,
    out: str | Path = "run",
    readout: Readout | None = None,
    parameters: Any = None,
    neighbors: int = 10,
    threshold: float = 0.5,
    sketch: int | Literal["auto", "never"] = "auto",
    exact: bool = False,
    layout: Literal["neighbors", "pca", "umap"] = "neighbors",
    classes: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    show: Show | None = None,
    extra: Mapping[str, Any] | None = None,
    excerpt_length: int = EXCERPT,
    token_text: TokenTexts | None = None,
    passages: int | None = None,
    watch: Watch | str | Path | None = None,
    index: bool = True,
    reheat: bool = False,
    crossval: CrossValidated | str | Path | None = None,
    words: bool = True,
    settings: "Settings | None" = None,
    max_memory: int | None = None,
    wait: float = math.inf,
    parts: Sequence[str | Path] | None = None,
) -> Analysis:
    """Return an Analysis of a data set by a model, kept in the folder `out`; one that is there goes on.

    Density of each sample, how freely its prediction moves, its most similar samples, a map, and, where
    labels are classes, which of them look wrong; report.html shows all of it.

    Few samples are compared exactly, in seconds. Where all pairs of gradients would take longer, a run costs a handful
    of plain training epochs: they are compared by sketches of four random combinations of the outputs, contrasts of the
    classes of a classifier, with the error measured on a few samples. The manifest and the report say what was chosen
    and what exact would cost; `exact=True` asks for it.

    The folder is returned as it is only if model (code, state, outputs and gradients on a few samples), data,
    readout, precision and options are those of the run in it; another run is refused.

    Args:
        model: A model, or a Network, whose readout and parameters are kept.
        dataset: Anything that `likewise.batches` accepts.
        labels: Of the samples, where they do not travel with the data.
        out: The folder for results.
        readout: Whose gradients are compared; chosen by cost if None.
        parameters: Names or patterns; all that require grad if None.
        neighbors: How many are kept of each sample.
        threshold: Samples at least so similar count as near.
        sketch: Numbers per sample; "auto" decides by the number of pairs, "never" compares gradients as they are.
        exact: All outputs, all pairs, whatever it costs.
        layout: How the map is drawn: "neighbors" (near samples together, others apart), "pca" (the two leading
            directions of the kernel), or "umap" (an extra).
        classes: Their names.
        names: Of the samples.
        show: What a person should see of sample i (image, text, dict, array), a function or a sequence.
        extra: Columns of your own for the table.
        excerpt_length: The characters that the report shows of a text.
        token_text: Of a language model: a function of i that returns text i and the (start, end) of each of its tokens
            in it, as the offset_mapping of a fast tokenizer. The report then marks on which passages of its neighbors
            the similarity of a text rests.
        passages: For how many texts, the most novel, and three neighbors each; a pair takes about eight training
            steps. None: one in 200, 8 to 32.
        watch: The record of the training run, or its file, with which `label_suspicion` becomes a mean of ranks.
        index: Where gradients are compared by sketches, keep these as an index in the folder `index`, for
            `likewise ask` and `likewise.Index`: about 2.3 KB a sample and a thumbnail.
        reheat: Judge labels also by reheated copies, if the network has memorized them (`likewise.reheat`).
        crossval: What `likewise.crossval` returned for these samples, or its folder: judges labels too.
        words: Rank labels of texts also by the words that texts share (`likewise.label_suspicion`).
        settings: What a command was given.
        max_memory: Bytes for gradients and pairs, beside the model; None: half of what the device has free.
        wait: For how many seconds, if another process is writing into the folder.
        parts: Folders of all parts of this run, in any order, that `analyze_part` computed: nothing of them is
            computed again. Those of another model, data set, option or version are refused by name.

    Returns:
        The results, read from the folder.

    Example:
        >>> import tempfile, torch, likewise as lw
        >>> x, y = torch.randn(60, 8), torch.arange(60) % 3
        >>> run = lw.analyze(torch.nn.Linear(8, 3), (x, y), out=tempfile.mkdtemp())
        >>> run.summary.samples, (run.folder / "report.html").exists()
        (60, True)

    """
    job = _begin(
        model,
        dataset,
        labels,
        out=out,
        readout=readout,
        parameters=parameters,
        neighbors=neighbors,
        threshold=threshold,
        sketch=sketch,
        exact=exact,
        layout=layout,
        classes=classes,
        names=names,
        show=show,
        extra=extra,
        excerpt_length=excerpt_length,
        token_text=token_text,
        passages=passages,
        watch=watch,
        reheat=reheat,
        crossval=crossval,
        words=words,
        max_memory=max_memory,
        wait=wait,
    )
    known = None if parts is None else read_parts(parts)
    with freeze_objects():
        return _run(job, index, settings, known)


def analyze_part(
    model: nn.Module | Network,
    dataset: Any,
    labels: Any = None,
    *,
    part: tuple[int, int],
    out: str | Path = "part",
    settings: "Settings | None" = None,
    index: bool = True,
    **options: Any,
) -> Path:
    """Compute part i of n of a run into a folder, and return it; one that was stopped goes on.

    Parts are computed apart, on any machines, with the same model, data and options. `analyze(..., parts=[...])`, or
    `likewise merge`, makes the run of them: its tables are those of one process. A part has the gradients of its
    samples; of an exact run, its strips of the pairs, so that it reads all samples.

    Args:
        model: As of `analyze`.
        dataset: The whole data set.
        labels: As of `analyze`.
        part: (i, n), i from 1.
        out: The folder of the part.
        settings: What a command was given.
        index: Whether the run is to keep an index; nothing to a part.
        **options: As of `analyze`.

    Returns:
        The folder.

    Raises:
        ValueError: The folder holds another run or part, or something else.

    Example:
        >>> import tempfile, torch, likewise as lw
        >>> net, data = torch.nn.Linear(8, 3), (torch.randn(60, 8), torch.arange(60) % 3)
        >>> parts = [lw.analyze_part(net, data, part=(i, 2), out=tempfile.mkdtemp(), sketch=64) for i in (1, 2)]
        >>> lw.analyze(net, data, out=tempfile.mkdtemp(), sketch=64, parts=parts).summary.samples
        60

    """
    del index
    chosen = check_part(part)
    job = _begin(model, dataset, labels, out=out, **options)
    work, outputs, given = job.work, None, None
    features: Features | None = None
    with alone():
        data_print: Any = describe_data(work.gram.data)
        if not work.method.sketch:  # exact pairs need the labels and outputs of all samples
            announce("reading the data")
            data_print, given, outputs, features = _read(work, job.out, with_outputs=True)
        found = {"part": list(chosen), **_describe_inputs(job, data_print)}
    with open_folder(job.out, found, job.wait) as folder:
        if folder.needs("settings.toml"):
            folder.write_text("settings.toml", (settings or _given_in_python(job.options)).text())
        if not folder.state.get("part_done") or folder.has_damaged_stage():
            targets = None if given is None or reads_text(work.net.readout) else finite_labels(given)
            run_part(folder, work.gram, targets, chosen, outputs, features, work.is_classifier)
            folder.finish_part()
        on_first_rank(folder.save, "the part")
    return folder.path


def _run(job: "_Job", index: bool, settings: "Settings | None", parts: "list[Part] | None") -> Analysis:
    """Return the results of a run, computed as far as they are not there."""
    work, shared = job.work, world_size() > 1
    with alone():
        announce("reading the data")
        with_outputs = (
            not shared and not parts and not reads_on_the_way(work.method.sketch, work.is_classifier)
        )
        data_print, given, outputs, features = _read(work, job.out, with_outputs)
        if parts is not None:
            whole = data_print if not work.method.sketch else describe_data(work.gram.data)
            refuse_other_parts(parts, _describe_inputs(job, whole))
        identity_of_run = {"part": None, **_describe_inputs(job, data_print)}
    with open_folder(job.out, identity_of_run, job.wait) as folder:
        if folder.needs("settings.toml"):
            folder.write_text("settings.toml", (settings or _given_in_python(job.options)).text())
        if not folder.finished:
            folder.state |= {
                "about": _about(work.net, work.gram.data),
                "method": work.method.describe(),
            }
            told = None if settings is None else settings.text("index")
            targets = None if given is None or reads_text(work.net.readout) else finite_labels(given)
            adopted = Adopted(outputs, 0, features)
            if parts is not None:
                adopted = adopt_parts(folder, parts, work.gram, work.method.sketch)
            run_stages(
                folder,
                work.gram,
                targets,
                job.shown,
                job.watch,
                adopted.outputs,
                work.is_classifier,
                index,
                told,
                job.reheat,
                job.crossval,
                adopted.pairs,
                adopted.features,
                job.words,
            )
            folder.finish()

        def report() -> None:
            if folder.needs("report.html"):
                announce("writing the report")
                write_report(folder.path)

        on_first_rank(report, "the report")
    return Analysis(folder.path)


class _Work(NamedTuple):
    """What a run compares, and how."""

    method: Method
    gram: GramMatrix
    is_classifier: bool  # whether the model's outputs may be those of classes

    @property
    def net(self) -> Network:
        """The network with the readout that was chosen."""
        return self.method.net


class _Job(NamedTuple):
    """What a run or a part is asked for, checked."""

    work: _Work
    options: dict[str, Any]
    shown: Shown
    watch: Watch | None
    reheat: bool
    crossval: CrossValidated | None
    words: bool
    out: Path
    wait: float


def _begin(
    model: nn.Module | Network,
    dataset: Any,
    labels: Any = None,
    *,
    out: Any,
    readout: Readout | None = None,
    parameters: Any = None,
    neighbors: int = 10,
    threshold: float = 0.5,
    sketch: int | Literal["auto", "never"] = "auto",
    exact: bool = False,
    layout: str = "neighbors",
    classes: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    show: Show | None = None,
    extra: Mapping[str, Any] | None = None,
    excerpt_length: int = EXCERPT,
    token_text: TokenTexts | None = None,
    passages: int | None = None,
    watch: Watch | str | Path | None = None,
    reheat: bool = False,
    crossval: CrossValidated | str | Path | None = None,
    words: bool = True,
    max_memory: int | None = None,
    wait: float = math.inf,
) -> _Job:
    """Check what `analyze` was given, and prepare the network."""
    given_net = to_network(model, readout, parameters)
    if max_memory is None:  # of several processes each takes the same
        max_memory = default_max_memory(next(given_net.model.parameters()).device)
    with alone():  # what is chosen does not depend on how many processes share the work
        work = _prepare(given_net, batches(dataset, labels=labels), max_memory, exact=exact, sketch=sketch)
        options = _check_options(work, neighbors, threshold, layout, excerpt_length)
        options |= _check_passages(work, token_text, passages)
        shown = _check_shown(classes, names, show, extra, options["excerpt_length"])
        shown = shown._replace(token_text=token_text)
        record = _check_watch(watch, work.gram.data.n)
        return _Job(
            work,
            options,
            shown,
            record,
            check_flag("reheat", reheat),
            _check_crossval(crossval),
            check_flag("words", words),
            _check_out(out),
            _check_wait(wait),
        )


def _prepare(
    net: Network, source: Batches, max_memory: Any, *, exact: bool, sketch: int | Literal["auto", "never"]
) -> _Work:
    """Choose how gradients are compared, trace the network and check its gradients."""
    max_memory = check_integer("max_memory", max_memory, 1, advice="bytes, such as 2**30")
    decoded, decoded_bytes = source.with_cache(max_memory // 4)
    method = choose_method(net, decoded, exact=exact, sketch=sketch)
    announce(f"comparing {method.describe(method.estimate_cost())}")
    announce("tracing the network and checking its gradients")
    gram = _gram_of_decoded(method.net, source, decoded, decoded_bytes, max_memory)
    fits = 4 * gram.data.n * method.outputs <= max_memory
    return _Work(method, gram, fits and not reads_text(method.net.readout))


def _check_options(
    work: _Work, neighbors: Any, threshold: Any, layout: Any, excerpt_length: Any
) -> dict[str, Any]:
    """Return what the run is asked for, as its manifest says it."""
    return {
        "readout": readout_name(work.net.readout),
        "parameters": list(work.net.names),
        "neighbors": check_integer("neighbors", neighbors, 1),
        "threshold": check_number("threshold", threshold, -1, 1),
        "sketch": work.method.sketch,
        "layout": check_choice("layout", layout, ("neighbors", "pca", "umap")),
        "excerpt_length": check_integer("excerpt_length", excerpt_length, 1, advice="characters"),
    }


def _check_passages(work: _Work, token_text: Any, passages: Any) -> dict[str, Any]:
    """Return for how many texts passages are computed; nothing where similarities are no sums over tokens."""
    if passages is not None:
        check_integer("passages", passages, 0, advice="texts")
    if token_text is None:
        if passages:
            raise ValueError(
                "Passages are shown in texts: token_text must say where tokens lie in them (likewise analyze: --text, "
                "with a model of a folder)."
            )
        return {}
    check_function("token_text", token_text, "of a sample's number")
    data = work.gram.data
    if passages == 0 or data.n < 2 or not has_passages(work.net, data):
        return {}
    return {"passages": passage_count(data.n) if passages is None else min(passages, data.n)}


def _check_wait(wait: Any) -> float:
    if isinstance(wait, float) and wait == math.inf:
        return wait
    return check_number("wait", wait, least=0, advice="seconds, or math.inf")


def _check_watch(watch: Any, n: int) -> Watch | None:
    record = Watch.load(watch) if isinstance(watch, str | Path) else watch
    if record is not None and check_type("watch", record, Watch, "a likewise.Watch or its file").n != n:
        raise ValueError(
            f"The record of training is of {record.n:,} samples, and the data set has {n:,}: they must be of the "
            "same samples, in the same order."
        )
    return record


def _check_crossval(crossval: Any) -> CrossValidated | None:
    found = CrossValidated.load(crossval) if isinstance(crossval, str | Path) else crossval
    if found is not None:
        check_type("crossval", found, CrossValidated, "what likewise.crossval returned, or its folder")
    return found


def _describe_inputs(job: _Job, data_print: Any) -> dict[str, Any]:
    """Return what makes a run another one."""
    net, data, record = job.work.net, job.work.gram.data, job.watch
    return {
        "model": identity.fingerprint_model(net),
        "data": data_print,
        "readout": identity.fingerprint_readout(net, data),
        "precision": identity.precision_settings(net),
        "options": job.options,
        "naming": _naming(job.shown),
        "behavior": identity.measure_behavior(net, data),
        "reheat": job.reheat,
        "words": None if job.words else False,  # None: as in folders that know nothing of words
        "crossval": None
        if job.crossval is None
        else hashlib.sha256(job.crossval.probabilities.numpy().tobytes()).hexdigest(),
        "watch": None
        if record is None
        else hashlib.sha256(record.early_margins.numpy().tobytes()).hexdigest(),
    }


def _gram_of_decoded(net: Network, data: Batches, decoded: Batches, size: int, max_memory: int) -> GramMatrix:
    """Return the matrix of samples that are decoded once, of which `size` bytes are kept.

    A model that takes more than the rest of the memory gets all of it, and samples are read again by each pass.
    """
    if size:
        gram = GramMatrix(net, decoded, centered=True, max_memory=max_memory - size)
        try:
            _ = gram.engine
            return gram
        except MemoryLimitError:
            pass
    return GramMatrix(net, data, centered=True, max_memory=max_memory)


def _read(
    work: _Work, out: Path, with_outputs: bool
) -> tuple[str, Tensor | None, Tensor | None, Features | None]:
    """Return fingerprint and labels of the data, and the model's outputs if so wished and no run has noted them.

    And what its last layer sees on the way, if it has one.
    """
    record, gram = identity.DataRecord(), work.gram
    if not with_outputs or (out / MANIFEST).exists():
        return (*record.complete(gram.data), None, None)
    observed = copy.copy(gram)
    observed.data = record.observe(gram.data)
    layer = find_last_layer(gram)
    # Tried before calls of the model are recorded.
    whole = outputs_network(gram) if work.is_classifier else gram.net
    nothing: AbstractContextManager[list[Features]] = nullcontext([])
    with nothing if layer is None else layer.recording() as seen:
        outputs = (
            model_outputs(observed, whole)
            if work.is_classifier
            else dataset_outputs(gram.net, observed.data).cpu()
        )
    features = None
    if (
        sum(len(part.lengths) for part in seen) == gram.data.n
    ):  # else the model was called more than once a sample
        features = Features(*map(torch.cat, zip(*seen, strict=True)))
    return (*record.complete(gram.data), outputs, features)


def _check_out(out: Any) -> Path:
    check_type("out", out, (str, PathLike), "the path of a folder")
    if not str(out):
        raise ValueError("out must be the path of a folder, found an empty one.")
    return Path(out)


def _check_shown(classes: Any, names: Any, show: Any, extra: Any, excerpt_length: int) -> Shown:
    """Return what a person is told of the samples; lengths are compared where they are known."""
    for name, given in (("classes", classes), ("names", names)):
        if given is not None and (isinstance(given, Tensor) or not _is_listed(given)):
            raise TypeError(f"{name} must be a list of text, found {describe(given)}.")
    if show is not None and not _is_listed(show):
        check_function("show", show, "of a sample's number, or a list")
    check_type("extra", {} if extra is None else extra, Mapping, "a dict of columns")
    for name, values in (extra or {}).items():
        if not _is_listed(values):
            raise TypeError(f"extra[{name!r}] must hold one value a sample, found {describe(values)}.")
    return Shown(classes, names, show, extra or {}, excerpt_length)


def _is_listed(given: Any) -> bool:
    """Whether there is an entry for each place: a list, an array, a column of a table."""
    if isinstance(given, str | bytes):
        return False
    return isinstance(given, Sequence) or getattr(given, "ndim", 0) > 0


def _given_in_python(options: Mapping[str, Any]) -> "Settings":
    from likewise.runs.settings import GIVEN_IN_PYTHON, Settings

    same = ("neighbors", "threshold", "layout", "readout", "parameters", "excerpt_length")
    known = {name: options[name] for name in same}
    known["sketch"] = options["sketch"] or "never"
    return Settings(model=GIVEN_IN_PYTHON, data=GIVEN_IN_PYTHON, **known)


def _about(net: Network, data: Batches) -> Mapping[str, Any]:
    return {
        "model": type(net.model).__name__,
        "parameters": sum(net.numels.values()),
        "samples": data.n,
        "device": str(next(net.model.parameters()).device),
        "threads": torch.get_num_threads(),
    }


def _naming(shown: Shown) -> str:
    """Return the fingerprint of what samples, classes and columns are called, and which of them are shown."""
    own = {
        name: [str(v) for v in torch.as_tensor(v).tolist()] if isinstance(v, Tensor) else [str(x) for x in v]
        for name, v in shown.extra.items()
    }
    parts = [
        None if given is None else [str(name) for name in given] for given in (shown.classes, shown.names)
    ]
    show: Any = []  # as in folders of earlier versions
    if shown.show is not None:
        show = identity.fingerprint_code(shown.show if callable(shown.show) else _contents(shown.show))
    return hashlib.sha256(repr((parts, own, show)).encode("utf-8", "replace")).hexdigest()


def _contents(show: Any) -> Any:
    """Return what is to be seen of samples, images by their pixels; of a sequence that may read files, a few."""
    if isinstance(show, Tensor):
        refuse_unreadable("show", show)
        return show
    if getattr(show, "ndim", 0) > 0:  # an array, or a column of a table
        show = np.asarray(show)
        if not show.dtype.hasobject:
            return show
    places: Sequence[int] = range(len(show))
    if not isinstance(show, list | tuple | np.ndarray):
        places = np.linspace(0, len(show) - 1, min(len(show), FEW_SHOWN)).astype(int).tolist()
    return [_content(show[place]) for place in places]


def _content(value: Any) -> Any:
    """Return an image of PIL as its size and pixels, anything else unchanged."""
    is_image = hasattr(value, "tobytes") and hasattr(value, "mode")
    return (value.mode, value.size, value.tobytes()) if is_image else value
