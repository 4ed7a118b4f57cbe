"""`likewise index`, `likewise ask`, `likewise select` and `likewise merge`."""

import sys
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from likewise.cli.analyze import merge_run
from likewise.cli.options import (
    NEW_INPUTS,
    Force,
    Form,
    Quiet,
    Request,
    load_network,
    open_data,
    open_inputs,
    read_batches,
    read_part,
    renumber_classes,
    takes_settings,
    tokenization,
)
from likewise.cli.output import (
    EXCERPT,
    Format,
    be_quiet,
    excerpt,
    print_message,
    print_result,
    table,
)
from likewise.cli.processes import joined_processes, on_own_device, own_rank
from likewise.runs.settings import INPUTS, Settings, locate_paths, read_settings
from likewise.wording import counted

if TYPE_CHECKING:
    from likewise.index import Index
    from likewise.index.explanation import Answer
    from likewise.loading import Read
    from likewise.marked_text import MarkedText

PASSAGES = 3  # neighbors whose passages are shown
SHOWN = ("show", "show_columns", "excerpt_length", "classes")


@takes_settings((*INPUTS, *SHOWN))
def index(
    request: Request,
    out: Annotated[
        Path, typer.Option(help="The folder of the index; an unfinished build there is resumed.")
    ] = Path("index"),
    width: Annotated[
        int,
        typer.Option(
            min=16, help="Numbers per sample; the standard error of a similarity is about 1/√width."
        ),
    ] = 1024,
    dtype: Annotated[
        Literal["float16", "int8", "float32"], typer.Option(help="The dtype in which rows are stored.")
    ] = "float16",
    no_pictures: Annotated[
        bool, typer.Option("--no-pictures", help="Store no thumbnails or excerpts of the samples.")
    ] = False,
    projection: Annotated[
        Literal["signs", "two-sided"],
        typer.Option(help="two-sided forms no gradients: faster for large models, but with a larger error."),
    ] = "signs",
    unit: Annotated[
        Literal["sample", "layer", "matrix"],
        typer.Option(
            help="What is scaled to length 1: the whole gradient, the gradient of each layer, or that of each hidden "
            "matrix, which suits likewise select on texts best."
        ),
    ] = "sample",
    optimizer_state: Annotated[
        str | None,
        typer.Option(
            help="The state of Adam: a Trainer's checkpoint folder or its optimizer.pt. Rows become Adam steps, as in "
            "LESS."
        ),
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(min=0, help="The weight of this checkpoint in likewise select.")
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(help="i/n: index only part i of n; likewise merge combines the n folders."),
    ] = None,
    form: Form = Format.text,
    quiet: Quiet = False,
) -> None:
    """Build an index of a data set and a model, to ask about new inputs later.

    Example: `likewise index net.py:model images/ --weights net.safetensors --out index`

    To resume a build that was stopped, repeat the command. Under torchrun, the processes share the work:
    `torchrun --nproc-per-node 4 -m likewise index ...`
    """
    be_quiet(quiet or own_rank() > 0)
    from likewise import loading
    from likewise.index import build_index

    settings = request.settings
    parts = None if part is None else read_part(part)
    local = on_own_device(settings)
    net, read = open_inputs(local)
    show = read.show if settings.show is None else loading.import_object(settings.show)
    print_message(f"indexing {settings.data} with {settings.model} into {out}/ ...")
    with joined_processes(local.device):
        found = build_index(
            net,
            read_batches(read),
            out,
            width=width,
            dtype=dtype,
            classes=settings.classes or read.classes,
            names=read.names,
            show=show,  # type: ignore[arg-type]
            pictures=not no_pictures,
            excerpt_length=settings.excerpt_length,
            projection=projection,
            unit=unit,
            optimizer_state=optimizer_state,
            learning_rate=learning_rate,
            part=parts,
            max_memory=settings.max_memory or 2**31,
            settings=settings.naming_columns(read.columns).text("index"),
        )
    if own_rank() == 0:
        _print_index(form, found, width)


def ask(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="INDEX", help="The folder of an index, or of a run that has one.", show_default=False
        ),
    ],
    new: Annotated[
        list[str],
        typer.Argument(
            help="New inputs: image files, texts, or a table, array file or folder; - reads standard input.",
            show_default=False,
        ),
    ],
    k: Annotated[int, typer.Option("-k", min=1, help="Number of neighbors.")] = 6,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Compare the best candidates by exact gradients; needs the data set."),
    ] = False,
    approximate: Annotated[
        bool,
        typer.Option(
            "--approximate", help="Search neighbors with faiss and report its recall; for very many rows."
        ),
    ] = False,
    passages: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Causal language models only: for this many neighbors, show the passage that the similarity rests on. "
            "Needs the data set; costs about eight training steps per neighbor. [default: 3 if the data set is found]",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model, if it has moved.")] = None,
    weights: Annotated[str | None, typer.Option(help="Its weights, if they have moved.")] = None,
    data: Annotated[str | None, typer.Option(help="The data set, if it has moved.")] = None,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, mps.")] = "cpu",
    page: Annotated[Path, typer.Option(help="The file that --open writes.")] = Path("answers.html"),
    opened: Annotated[
        bool, typer.Option("--open", help="Write an HTML page and open it in the browser.")
    ] = False,
    form: Form = Format.text,
    quiet: Quiet = False,
) -> None:
    """Ask an index about new inputs: prediction, nearest samples, novelty, and whether to trust the prediction.

    Example: `likewise ask index new.png more/*.png --open`
    """
    be_quiet(quiet)
    found, settings = open_index(folder, model, weights, data, device, exact)
    read = _read_new(found, settings, new)
    answers = _answer(found, read, new, k, exact, approximate)
    answers = _add_passages(found, folder, settings, read, answers, passages)
    if opened:
        from likewise.index.explanation import write_page

        write_page(page, str(folder), answers)
        webbrowser.open(page.resolve().as_uri())
        print_message(f"page: {page}")
    facts = [{"name": answer.name, **answer.explanation.as_dict()} for answer in answers]
    lines = [line for answer in answers for line in _describe_answer(answer)]
    print_result(form, {"index": str(folder), "answers": facts}, *lines)


def select(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="INDEX...",
            help="The folder of an index. Indexes of several checkpoints on one data set are weighted by their "
            "learning rates.",
            show_default=False,
        ),
    ],
    target: Annotated[
        list[str],
        typer.Option(
            help="Examples of what the model should be good at: image files, texts, or a table, array file or folder; "
            "- reads standard input."
        ),
    ],
    share: Annotated[float, typer.Option(min=0, max=1, help="The share of rows to select.")] = 0.05,
    count: Annotated[
        int | None, typer.Option(min=1, help="The number of rows to select, instead of --share.")
    ] = None,
    by: Annotated[
        Literal["max", "mean", "each"],
        typer.Option(
            help="Rank by the most similar target, by the mean over targets, or let each target choose in turn."
        ),
    ] = "max",
    centered: Annotated[
        bool, typer.Option("--centered/--plain", help="Compare by centered or by plain similarity.")
    ] = True,
    diverse: Annotated[
        bool, typer.Option("--diverse", help="Select rows that differ from each other.")
    ] = False,
    exclude_duplicates: Annotated[
        float | None,
        typer.Option(
            min=-1, max=1, help="Skip rows at least this similar to one already selected, such as .99."
        ),
    ] = None,
    baseline: Annotated[
        Literal["none", "rds"],
        typer.Option(
            help="rds: also select by hidden states (RDS+), into a second file with .rds before the suffix."
        ),
    ] = "none",
    model: Annotated[str | None, typer.Option(help="The model, if it has moved.")] = None,
    weights: Annotated[str | None, typer.Option(help="Its weights, if they have moved.")] = None,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, mps.")] = "cpu",
    data: Annotated[
        str | None,
        typer.Option(help="The data set, if it has moved; read for --texts and --baseline."),
    ] = None,
    texts: Annotated[
        bool, typer.Option("--texts", help="Also write the texts of the selected rows, from the data set.")
    ] = False,
    out: Annotated[Path, typer.Option(help="The output file: JSON lines, one for each selected row.")] = Path(
        "selected.jsonl"
    ),
    force: Force = False,
    form: Form = Format.text,
    quiet: Quiet = False,
) -> None:
    """Select the rows of an index that the network treats most like the targets, best first.

    Example: `likewise select index --target targets.jsonl --share 0.05 --out chosen.jsonl`
    """
    be_quiet(quiet)
    from likewise.files import refuse_existing
    from likewise.index import score_targets
    from likewise.index import select as select_rows
    from likewise.index.selection import write_rows, write_selection

    refuse_existing(out, force, *target, *folders, *([] if data is None else [data]))
    if len(folders) > 1 and (model is not None or weights is not None):
        raise ValueError(
            "--model and --weights apply to a single index; with several, each index uses its own model."
        )
    several = [open_index(folder, model, weights, data, device, False) for folder in folders]
    found, settings = several[0]
    text_of = _read_texts(found, folders[0], settings, data is None) if texts else None
    indexes = [index for index, _ in several]
    read = _read_new(found, settings, target)
    targets = read_batches(read)
    if any(_is_plain_of_texts(index) for index in indexes):
        print_message(
            "note: this index holds plain gradients of a language model, which select fewer texts of the targets' "
            "kind. Better: likewise index ... --unit matrix."
        )
    chosen = select_rows(
        indexes,
        targets,
        share=share,
        count=count,
        by=by,
        centered=centered,
        diverse=diverse,
        exclude_duplicates=exclude_duplicates,
    )
    scores = score_targets(indexes, targets, by="mean" if by == "mean" else "max", centered=centered)
    write_selection(out, found, chosen, scores, read.names, text_of)
    facts: dict[str, Any] = {
        "index": [str(folder) for folder in folders],
        "out": str(out),
        "rows": chosen.tolist(),
    }
    lines = [
        f"{len(chosen):,} of {len(found):,} rows, the most similar to the {counted(targets.n, 'target')} first: {out}"
    ]
    if baseline == "rds":
        rows = _select_by_states(found, settings, targets, len(chosen), by)
        baseline_out = out.with_suffix(f".rds{out.suffix}")
        write_rows(baseline_out, found, rows, text_of)
        shared = len(set(rows.tolist()) & set(chosen.tolist()))
        facts |= {"baseline": rows.tolist(), "baseline_out": str(baseline_out), "shared": shared}
        lines.append(f"by hidden states (RDS+): {baseline_out}; both selected {counted(shared, 'row')}")
    print_result(form, facts, *lines)


def _is_plain_of_texts(index: "Index") -> bool:
    """Whether an index holds plain gradients of log-likelihoods, not scaled by layer, matrix or Adam."""
    from likewise.index.layers import are_plain
    from likewise.readouts import is_log_likelihood

    return are_plain(index.manifest["projection"]) and is_log_likelihood(index.network.readout)


def _read_texts(
    index: "Index", folder: Path, settings: Settings, moved: bool
) -> Callable[[int], dict[str, Any]]:
    """Return a function that reads the text (or two texts) of a row from the indexed data set.

    `moved`: search the data set near the index, because no --data says where it is.
    """
    if moved:
        settings = locate_paths(settings, _folder_of_index(folder), ["data"])
    read = open_data(settings, on_demand=True)
    index.attach(read_batches(read))
    show = read.show
    names = [] if settings.text_column is None else [name.strip() for name in settings.text_column.split(",")]

    def text_of(row: int) -> dict[str, Any]:
        shown = None if show is None else show(row)
        if isinstance(shown, str):
            return {"text": shown}
        if not isinstance(shown, dict) or not names or not shown.keys() >= set(names):
            raise ValueError(
                f"--texts needs texts, and the data set of {folder} has none. Leave --texts out, and join the output "
                "with the data by row."
            )
        return (
            {"text": shown[names[0]]} if len(names) == 1 else {"texts": {name: shown[name] for name in names}}
        )

    text_of(0)
    return text_of


def _select_by_states(index: "Index", settings: Settings, targets: Any, count: int, by: Any) -> Any:
    """Return the rows selected by hidden states, computed from the indexed data set."""
    from likewise.index import select_by_states

    net, read = open_inputs(settings)
    pool = read_batches(read)
    index.attach(pool)
    places = index.rows.tolist()
    chosen = select_by_states(net, pool.take(places), targets, count=count, by=by)
    return index.rows[chosen]


def merge(
    folders: Annotated[
        list[Path],
        typer.Argument(help="The parts of one run or of one index, or several indexes.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="The new folder.", show_default=False)],
    model: Annotated[str | None, typer.Option(help="Runs only: the model, if it has moved.")] = None,
    weights: Annotated[str | None, typer.Option(help="Runs only: its weights, if they have moved.")] = None,
    data: Annotated[str | None, typer.Option(help="Runs only: the data set, if it has moved.")] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Runs only: where to compare pairs, cpu or cuda; by default, the device of the parts."
        ),
    ] = None,
    form: Form = Format.text,
    quiet: Quiet = False,
) -> None:
    """Merge the parts of a run or of an index, or indexes of several data sets with one model.

    Example: `likewise merge parts/1 parts/2 parts/3 --out index`

    The parts of a run hold gradients. The merge compares the pairs, so it opens model and data again.
    """
    be_quiet(quiet or own_rank() > 0)
    from likewise.manifest import kind_of

    if any(kind_of(folder) == "index" for folder in folders):
        from likewise.index import merge_indexes

        _print_index(form, merge_indexes([str(folder) for folder in folders], out))
        return
    merge_run(folders, out, {"model": model, "weights": weights, "data": data, "device": device}, form)


def open_index(
    folder: Path, model: str | None, weights: str | None, data: str | None, device: str, exact: bool
) -> "tuple[Index, Settings]":
    """Open an index with its model; return it with its settings, in which arguments other than None replace values."""
    from likewise.index import Index
    from likewise.index.store import SETTINGS

    folder = _folder_of_index(folder)
    changes: dict[str, Any] = {"model": model, "weights": weights, "data": data, "device": device}
    changes = {name: value for name, value in changes.items() if value is not None}
    if (folder / SETTINGS).exists():
        needed = [name for name in ("model", "weights", "data")[: 3 if exact else 2] if name not in changes]
        settings = locate_paths(read_settings(folder / SETTINGS), folder, needed).model_copy(update=changes)
    elif model is None:
        raise ValueError(
            f"The index in {folder} was built from Python, so it does not name its model. Pass --model net.py:model "
            "--weights net.safetensors."
        )
    else:
        settings = Settings(**{"data": "", **changes})
    if exact:
        net, read = open_inputs(settings)
        from likewise.index.store import refuse_other_classes

        found = Index(folder, model=net)
        classes = settings.classes or read.classes or ()
        if sorted(classes) == sorted(found.classes or ()):  # else the data differ in more than their order
            refuse_other_classes(f"The index in {folder}", found.classes, classes)
        found.attach(read_batches(read))
        return found, settings
    return Index(folder, model=load_network(settings)), settings


def _folder_of_index(folder: Path) -> Path:
    """Return the folder of an index; given a run, the folder of its index."""
    from likewise.manifest import kind_of

    if not (folder / "manifest.json").exists():
        raise FileNotFoundError(
            f"There is no index in {folder}. Build one with likewise index MODEL DATA --out {folder}."
        )
    if kind_of(folder) == "index":
        return folder
    if (folder / "index" / "manifest.json").exists():
        return folder / "index"
    settings = folder / "settings.toml"
    asked = settings if settings.exists() else "MODEL DATA"
    raise FileNotFoundError(
        f"The run in {folder} has no index. Build one with likewise index {asked} --out index, then ask that."
    )


def _answer(
    index: "Index", read: "Read", words: list[str], k: int, exact: bool, approximate: bool
) -> "list[Answer]":
    from likewise.index.explanation import Answer
    from likewise.thumbnails import picture

    asked = True if approximate else None
    explanations = index.explain(read_batches(read), k, exact, approximate=asked)
    count = len(explanations)
    names = read.names or tuple(f"{words[0]} {i}" if count > 1 else words[0] for i in range(count))
    pictures = [None if read.show is None else picture(read.show(i)) for i in range(count)]
    return [Answer(*parts) for parts in zip(names, pictures, explanations, strict=True)]


def _add_passages(
    index: "Index", folder: Path, settings: Settings, read: "Read", answers: "list[Answer]", count: int | None
) -> "list[Answer]":
    """Return answers with the passages that the similarities to the first neighbors rest on.

    If no number was asked for and passages cannot be computed, a note says why, unless similarities are not sums over
    tokens.
    """
    from likewise.engines import GradientMismatchError
    from likewise.gram import has_passages

    new = read_batches(read)
    if count == 0 or (count is None and (read.token_text is None or not has_passages(index.network, new))):
        return answers
    try:
        texts = _open_texts(index, folder, settings)
        return _mark_answers(index, new, answers, PASSAGES if count is None else count, texts, settings)
    except (FileNotFoundError, ValueError) as error:
        if count is not None:
            raise
        advice = f"{error} Pass the texts with --data, or --passages 0 for no passages."
    except GradientMismatchError as error:
        if count is not None:
            raise
        advice = f"{error} Pass --passages 0 to skip them."
    print_message(f"note: passages are not shown: {advice}")
    return answers


def _open_texts(index: "Index", folder: Path, settings: Settings) -> "Read":
    """Open the texts of an index, tokenized on demand, and attach them to it."""
    settings = locate_paths(settings, _folder_of_index(folder), ["data"])
    read = open_data(settings, on_demand=True)
    if read.token_text is None:
        raise ValueError(
            "Passages need texts that the tokenizer in the model's folder reads (likewise index --text); this index "
            "holds something else."
        )
    index.attach(read_batches(read))
    return read


def _mark_answers(
    index: "Index", new: Any, answers: "list[Answer]", count: int, read: "Read", settings: Settings
) -> "list[Answer]":
    from likewise.marked_text import mark_text

    rows = [[near.sample.row for near in one.explanation.neighbors[:count]] for one in answers]
    found = index.passages(new, rows)
    strongest = found.strongest()
    marked, unplaced = [], 0
    for i, answer in enumerate(answers):
        texts = []
        for j, row in enumerate(rows[i]):
            text, spans = read.token_text(row)  # type: ignore[misc]
            unplaced += spans is None
            values, (first, end) = found.contributions[i, j].tolist(), strongest[i, j].tolist()
            length = settings.excerpt_length
            texts.append(None if spans is None else mark_text(text, spans, values, (first, end), length))
        marked.append(answer._replace(explanation=answer.explanation.with_passages(texts)))
    if unplaced:
        print_message(
            f"note: no passage is shown for {counted(unplaced, 'neighbor')}: the tokenizer returns no token offsets, "
            "and decoding the tokens does not reproduce the text."
        )
    return marked


def _read_new(index: "Index", settings: Settings, words: list[str]) -> "Read":
    """Return the new inputs named by words, prepared like the indexed samples."""
    from likewise import loading

    known = {name: getattr(settings, name) for name in NEW_INPUTS}
    read = loading.new_inputs(
        words,
        sys.stdin.read,
        indexed=_size_of_images(index),
        **known,
        tokenization=tokenization(settings),
        limit=None,
        max_memory=settings.max_memory or 2**31,
    )
    print_message(*(f"note: {note}" for note in read.notes))
    return _number_labels(read, index.classes, settings.classes is not None)


def _number_labels(read: "Read", classes: list[str] | None, are_given: bool) -> "Read":
    """Return new inputs with their labels, if any, numbered like the classes of the index.

    `are_given`: whether the index got its class names as an option rather than from its data.
    """
    if read.labels is None or classes is None:
        return read
    if (
        read.classes is None
        and not are_given
        and _are_integers(classes)
        and not read.labels.is_floating_point()
    ):
        # the index had integers that are not class numbers, such as -1, 0 and 1, of which the new inputs may have some
        found, numbers = read.labels.unique(return_inverse=True)
        read = read._replace(labels=numbers, classes=tuple(str(label) for label in found.tolist()))
    if read.classes is None:
        return read
    unknown = [name for name in read.classes if name not in classes]
    if unknown:
        print_message(
            f"note: {unknown[0]} is not a class of the index, so the labels of the new inputs are ignored."
        )
        return read._replace(labels=None, classes=None)
    return renumber_classes(read, tuple(classes))


def _are_integers(names: list[str]) -> bool:
    return all(name.removeprefix("-").isdecimal() for name in names)


def _size_of_images(index: "Index") -> tuple[int, int] | None:
    """Return width and height of the indexed inputs; None if they are not images."""
    inputs = index.manifest["inputs"]
    shape: list[int] = inputs[0][2] if len(inputs) == 1 else []
    return (shape[2], shape[1]) if len(shape) == 3 else None


def _describe_answer(answer: "Answer") -> list[str]:
    explanation = answer.explanation
    rows = [
        {
            "row": near.sample.row,
            "name": near.sample.name,
            "label": near.sample.label_name,
            "similarity": near.similarity,
            "±": near.error,
            "rests on": _describe_passage(near.passage),
            "shown": excerpt(near.sample.picture),
        }
        for near in explanation.neighbors
    ]
    change = [] if explanation.counterfactual is None else [explanation.counterfactual.text, ""]
    return [
        f"{answer.name}: {explanation.headline}",
        explanation.evidence,
        table(rows, optional=("name", "label", "rests on", "shown")),
        *change,
    ]


def _describe_passage(marked: "MarkedText | None") -> str:
    """Return the strongest passage and its share of the similarity."""
    if marked is None:
        return ""
    first, end = marked.passage
    if first == end or not marked.total > 0:
        return "no token supports it"
    text = " ".join(marked.text[first:end].split())
    return f"{marked.share:.0%} “{text if len(text) <= EXCERPT else text[: EXCERPT - 1] + '…'}”"


def _print_index(form: Format, found: "Index", asked: int | None = None) -> None:
    size = found.bytes
    rows = sum(shard["stop"] - shard["start"] for shard in found.manifest["shards"])
    each = (size["all"] - size["pictures"]) / rows
    facts = {"index": str(found.path), "rows": rows, "part": found.manifest["part"], "bytes": size}
    if asked not in (None, found.width):
        d = found.manifest["projection"]["outputs"]
        print_message(
            f"note: rows have {found.width} numbers instead of {asked}, the nearest width for a sketch of "
            f"{counted(d, 'output')}."
        )
    print_result(
        form,
        facts,
        repr(found),
        f"{counted(rows, 'row')}, {each:,.0f} bytes each, and {size['pictures'] / rows:,.0f} bytes each for pictures",
    )
