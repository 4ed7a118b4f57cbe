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
from likewise.wording import agreeing, counted

if TYPE_CHECKING:
    from likewise.index import Index
    from likewise.index.page import Answer
    from likewise.loading import Read
    from likewise.marked_text import MarkedText

PASSAGES = 3  # neighbors whose passages are shown
SHOWN = ("show", "show_columns", "excerpt_length", "classes")


@takes_settings((*INPUTS, *SHOWN))
def index(
    request: Request,
    out: Annotated[Path, typer.Option(help="The folder; a build that is there goes on.")] = Path("index"),
    width: Annotated[
        int, typer.Option(min=16, help="Numbers a sample: the standard error is about 1/√width.")
    ] = 1024,
    dtype: Annotated[
        Literal["float16", "int8", "float32"], typer.Option(help="How they are stored.")
    ] = "float16",
    no_pictures: Annotated[
        bool, typer.Option("--no-pictures", help="Keep no thumbnails or excerpts of the samples.")
    ] = False,
    projection: Annotated[
        Literal["signs", "two-sided"],
        typer.Option(help="two-sided: no gradient is formed; faster for large models, with a larger error."),
    ] = "signs",
    unit: Annotated[
        Literal["sample", "layer", "matrix"],
        typer.Option(
            help="What is scaled to length 1: the gradient, that of each layer, or of each hidden matrix, by which "
            "likewise select chooses texts best."
        ),
    ] = "sample",
    optimizer_state: Annotated[
        str | None,
        typer.Option(
            help="State of Adam: a Trainer's checkpoint folder or its optimizer.pt. Rows as in LESS."
        ),
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(min=0, help="The weight of this checkpoint in likewise select.")
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(help="i/n: only this part of the samples; likewise merge joins the n folders."),
    ] = None,
    form: Form = Format.text,
    quiet: Quiet = False,
) -> None:
    """Build an index of a data set by a model, to ask about new inputs later.

    Example: `likewise index net.py:model images/ --weights net.safetensors --out index`

    A build that was stopped goes on when the same command is given again. Under torchrun the processes share the work:
    `torchrun --nproc-per-node 4 -m likewise index ...`
    """
    be_quiet(quiet or own_rank() > 0)
    from likewise import loading
    from likewise.index import build_index

    settings = request.settings
    parts = None if part is None else read_part(part)
    own = on_own_device(settings)
    net, read = open_inputs(own)
    show = read.show if settings.show is None else loading.import_object(settings.show)
    print_message(f"indexing {settings.data} by {settings.model} into {out}/ ...")
    with joined_processes(own.device):
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
        _tell_index(form, found, width)


def ask(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="INDEX", help="The folder of an index, or of a run that keeps one.", show_default=False
        ),
    ],
    new: Annotated[
        list[str],
        typer.Argument(
            help="New inputs: images, or a table, archive or folder, or texts; - for standard input.",
            show_default=False,
        ),
    ],
    k: Annotated[int, typer.Option("-k", min=1, help="How many neighbors.")] = 6,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Compare the best candidates by exact gradients; reads the data set."),
    ] = False,
    approximate: Annotated[
        bool,
        typer.Option(
            "--approximate", help="Search neighbors by faiss, for very many rows; tells its recall."
        ),
    ] = False,
    passages: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Of a causal language model: of how many neighbors to show the passage that the similarity rests on. "
            "Reads the data set, and takes about eight training steps a neighbor. [default: 3, where the data are]",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model, if it is not where it was.")] = None,
    weights: Annotated[str | None, typer.Option(help="Its weights, if they are not where they were.")] = None,
    data: Annotated[str | None, typer.Option(help="The data set, if it is not where it was.")] = None,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, mps.")] = "cpu",
    page: Annotated[Path, typer.Option(help="Where --open writes the page.")] = Path("answers.html"),
    opened: Annotated[
        bool, typer.Option("--open", help="Write an HTML page, and open it in the browser.")
    ] = False,
    form: Form = Format.text,
    quiet: Quiet = False,
) -> None:
    """Ask an index about new inputs: prediction, nearest samples, novelty, whether to trust it.

    Example: `likewise ask index new.png more/*.png --open`
    """
    be_quiet(quiet)
    found, settings = open_index(folder, model, weights, data, device, exact)
    read = _read_new(found, settings, new)
    answers = _answer(found, read, new, k, exact, approximate)
    answers = _add_passages(found, folder, settings, read, answers, passages)
    if opened:
        from likewise.index.page import write_page

        write_page(page, str(folder), answers)
        webbrowser.open(page.resolve().as_uri())
        print_message(f"page: {page}")
    facts = [{"name": answer.name, **answer.explanation.as_dict()} for answer in answers]
    lines = [line for answer in answers for line in _tell_answer(answer)]
    print_result(form, {"index": str(folder), "answers": facts}, *lines)


def select(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="INDEX...",
            help="The folder of an index; several, of one data set by checkpoints, count by their learning rates.",
            show_default=False,
        ),
    ],
    target: Annotated[
        list[str],
        typer.Option(
            help="What to be good at: images, a table, archive or folder, or texts; - for standard input."
        ),
    ],
    share: Annotated[float, typer.Option(min=0, max=1, help="Which part of the rows to choose.")] = 0.05,
    count: Annotated[int | None, typer.Option(min=1, help="How many to choose, in place of --share.")] = None,
    by: Annotated[
        Literal["max", "mean", "each"],
        typer.Option(
            help="Rank by the best target, by the mean over targets, or let targets choose in turn."
        ),
    ] = "max",
    centered: Annotated[
        bool, typer.Option("--centered/--plain", help="Less what all rows share, or plain similarity.")
    ] = True,
    diverse: Annotated[bool, typer.Option("--diverse", help="Rows that are unlike each other.")] = False,
    exclude_duplicates: Annotated[
        float | None, typer.Option(min=-1, max=1, help="Leave out rows so similar to one chosen before: .99.")
    ] = None,
    baseline: Annotated[
        Literal["none", "rds"],
        typer.Option(help="rds: also choose by hidden states (RDS+), into OUT with .rds before its suffix."),
    ] = "none",
    model: Annotated[str | None, typer.Option(help="The model, if it is not where it was.")] = None,
    weights: Annotated[str | None, typer.Option(help="Its weights, if they are not where they were.")] = None,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, mps.")] = "cpu",
    data: Annotated[
        str | None, typer.Option(help="The data set, if it is not where it was: for --texts and --baseline.")
    ] = None,
    texts: Annotated[
        bool, typer.Option("--texts", help="Write the texts of chosen rows too, read from the data set.")
    ] = False,
    out: Annotated[Path, typer.Option(help="A file of JSON lines, one for each chosen row.")] = Path(
        "selected.jsonl"
    ),
    force: Force = False,
    form: Form = Format.text,
    quiet: Quiet = False,
) -> None:
    """Choose the rows of an index that the network treats most like targets, best first.

    Example: `likewise select index --target targets.jsonl --share 0.05 --out chosen.jsonl`
    """
    be_quiet(quiet)
    from likewise.files import refuse_existing
    from likewise.index import score_targets
    from likewise.index import select as select_rows
    from likewise.index.selection import write_rows, write_selection

    refuse_existing(out, force, *target, *folders, *([] if data is None else [data]))
    if len(folders) > 1 and (model is not None or weights is not None):
        raise ValueError("--model and --weights are of one index: of several, each knows its own.")
    several = [open_index(folder, model, weights, data, device, False) for folder in folders]
    found, settings = several[0]
    text_of = _read_texts(found, folders[0], settings, data is None) if texts else None
    indexes = [index for index, _ in several]
    read = _read_new(found, settings, target)
    targets = read_batches(read)
    if any(_is_plain_of_texts(index) for index in indexes):
        print_message(
            "note: this index has plain gradients of a language model, by which fewer texts of the targets' kind are "
            "chosen: likewise index ... --unit matrix."
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
    told = [
        f"{len(chosen):,} of {len(found):,} rows, the most similar to the targets ({targets.n:,}) first: {out}"
    ]
    if baseline == "rds":
        rows = _select_by_states(found, settings, targets, len(chosen), by)
        beside = out.with_suffix(f".rds{out.suffix}")
        write_rows(beside, found, rows, text_of)
        shared = len(set(rows.tolist()) & set(chosen.tolist()))
        facts |= {"baseline": rows.tolist(), "baseline_out": str(beside), "shared": shared}
        told.append(
            f"by hidden states (RDS+): {beside}; {counted(shared, 'row')} {agreeing(shared, 'is', 'are')} chosen by "
            "both"
        )
    print_result(form, facts, *told)


def _is_plain_of_texts(index: "Index") -> bool:
    """Whether an index has gradients of a text's log-likelihood as a whole, none of them scaled by layers or Adam."""
    from likewise.index.layers import are_plain
    from likewise.readouts import is_log_likelihood

    return are_plain(index.manifest["projection"]) and is_log_likelihood(index.network.readout)


def _read_texts(
    index: "Index", folder: Path, settings: Settings, moved: bool
) -> Callable[[int], dict[str, Any]]:
    """Return what reads the text of a row, or its two, from the data set that the index was built from.

    `moved`: whether the data set is looked for where the index lies now, since nobody said where it is.
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
            raise ValueError(f"--texts writes texts, and the data set of {folder} has none: join by row.")
        return (
            {"text": shown[names[0]]} if len(names) == 1 else {"texts": {name: shown[name] for name in names}}
        )

    text_of(0)
    return text_of


def _select_by_states(index: "Index", settings: Settings, targets: Any, count: int, by: Any) -> Any:
    """Return the rows that hidden states choose, from the data set that the index was built from."""
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
        typer.Argument(help="Parts of one run or of one index, or indexes.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="The new folder.", show_default=False)],
    model: Annotated[str | None, typer.Option(help="Of a run: the model, if it is not where it was.")] = None,
    weights: Annotated[
        str | None, typer.Option(help="Of a run: its weights, if they are not where they were.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Of a run: the data set, if it is not where it was.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Of a run: where pairs are compared, cpu or cuda; as the parts if not given."),
    ] = None,
    form: Form = Format.text,
    quiet: Quiet = False,
) -> None:
    """Put the parts of a run or of an index together, or indexes of several data sets by one model.

    Example: `likewise merge parts/1 parts/2 parts/3 --out index`

    Parts of a run have the gradients; pairs are compared here, so that model and data are opened again.
    """
    be_quiet(quiet or own_rank() > 0)
    from likewise.manifest import kind_of

    if any(kind_of(folder) == "index" for folder in folders):
        from likewise.index import merge_indexes

        _tell_index(form, merge_indexes([str(folder) for folder in folders], out))
        return
    merge_run(folders, out, {"model": model, "weights": weights, "data": data, "device": device}, form)


def open_index(
    folder: Path, model: str | None, weights: str | None, data: str | None, device: str, exact: bool
) -> "tuple[Index, Settings]":
    """Return an index with its model, and the settings that it was built with; what is not None replaces these."""
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
            f"The index in {folder} was built from Python: say which model, --model net.py:model --weights "
            "net.safetensors."
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
    """Return the folder of an index, that in a run where the folder is that of a run."""
    from likewise.manifest import kind_of

    if not (folder / "manifest.json").exists():
        raise FileNotFoundError(
            f"{folder} holds no index: likewise index MODEL DATA --out {folder} builds one."
        )
    if kind_of(folder) == "index":
        return folder
    if (folder / "index" / "manifest.json").exists():
        return folder / "index"
    settings = folder / "settings.toml"
    asked = settings if settings.exists() else "MODEL DATA"
    raise FileNotFoundError(
        f"{folder} is a run that keeps no index: likewise index {asked} --out index builds one, then ask index."
    )


def _answer(
    index: "Index", read: "Read", words: list[str], k: int, exact: bool, approximate: bool
) -> "list[Answer]":
    from likewise.index.page import Answer
    from likewise.thumbnails import picture

    asked = True if approximate else None
    told = index.explain(read_batches(read), k, exact, approximate=asked)
    called = read.names or tuple(f"{words[0]} {i}" if len(told) > 1 else words[0] for i in range(len(told)))
    seen = [None if read.show is None else picture(read.show(i)) for i in range(len(told))]
    return [Answer(*parts) for parts in zip(called, seen, told, strict=True)]


def _add_passages(
    index: "Index", folder: Path, settings: Settings, read: "Read", answers: "list[Answer]", count: int | None
) -> "list[Answer]":
    """Return answers with the passages that similarities to the first neighbors rest on.

    Where no number was asked for, and passages cannot be had, a note says why; nothing is said where similarities are
    no sums over tokens.
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
        advice = f"{error} --data names the texts; --passages 0 asks for none."
    except GradientMismatchError as error:
        if count is not None:
            raise
        advice = f"{error} --passages 0 does not try."
    print_message(f"note: passages are not shown: {advice}")
    return answers


def _open_texts(index: "Index", folder: Path, settings: Settings) -> "Read":
    """Return the texts of an index, tokenized as they are asked for, and attach them."""
    settings = locate_paths(settings, _folder_of_index(folder), ["data"])
    read = open_data(settings, on_demand=True)
    if read.token_text is None:
        raise ValueError(
            "Passages are shown in texts that the tokenizer of the model's folder reads (likewise index --text): this "
            "index is of something else."
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
            f"note: of {counted(unplaced, 'neighbor')} no passage is shown: the tokenizer does not tell where "
            "tokens lie in a "
            "text, and decoding them does not give it back."
        )
    return marked


def _read_new(index: "Index", settings: Settings, words: list[str]) -> "Read":
    """Return the new inputs that words name, prepared as the index was."""
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
    """Return new inputs with their labels, if they have any, numbered as the classes of the index are.

    `are_given`: whether names of classes were given to the index, and not found in its data.
    """
    if read.labels is None or classes is None:
        return read
    if (
        read.classes is None
        and not are_given
        and _are_integers(classes)
        and not read.labels.is_floating_point()
    ):
        # integers that were no class numbers there, -1, 0 and 1 say, and some of which could be here
        found, numbers = read.labels.unique(return_inverse=True)
        read = read._replace(labels=numbers, classes=tuple(str(label) for label in found.tolist()))
    if read.classes is None:
        return read
    unknown = [name for name in read.classes if name not in classes]
    if unknown:
        print_message(f"note: {unknown[0]} is no class of the index: labels of the new inputs are left out.")
        return read._replace(labels=None, classes=None)
    return renumber_classes(read, tuple(classes))


def _are_integers(names: list[str]) -> bool:
    return all(name.removeprefix("-").isdecimal() for name in names)


def _size_of_images(index: "Index") -> tuple[int, int] | None:
    """Return width and height of the inputs of an index, None if they are no images."""
    inputs = index.manifest["inputs"]
    shape: list[int] = inputs[0][2] if len(inputs) == 1 else []
    return (shape[2], shape[1]) if len(shape) == 3 else None


def _tell_answer(answer: "Answer") -> list[str]:
    told = answer.explanation
    rows = [
        {
            "row": near.sample.row,
            "name": near.sample.name,
            "label": near.sample.label_name,
            "similarity": near.similarity,
            "±": near.error,
            "rests on": _tell_passage(near.passage),
            "shown": excerpt(near.sample.picture),
        }
        for near in told.neighbors
    ]
    change = [] if told.counterfactual is None else [told.counterfactual.text, ""]
    return [
        f"{answer.name}: {told.headline}",
        told.evidence,
        table(rows, optional=("name", "label", "rests on", "shown")),
        *change,
    ]


def _tell_passage(marked: "MarkedText | None") -> str:
    """Return the strongest passage, and how much of the similarity is its own."""
    if marked is None:
        return ""
    first, end = marked.passage
    if first == end or not marked.total > 0:
        return "no token speaks for it"
    text = " ".join(marked.text[first:end].split())
    return f"{marked.share:.0%} “{text if len(text) <= EXCERPT else text[: EXCERPT - 1] + '…'}”"


def _tell_index(form: Format, found: "Index", asked: int | None = None) -> None:
    size = found.bytes
    rows = sum(shard["stop"] - shard["start"] for shard in found.manifest["shards"])
    each = (size["all"] - size["pictures"]) / rows
    facts = {"index": str(found.path), "rows": rows, "part": found.manifest["part"], "bytes": size}
    if asked not in (None, found.width):
        d = found.manifest["projection"]["outputs"]
        print_message(
            f"note: {found.width} numbers a sample in place of {asked}: the nearest width of a sketch of "
            f"{counted(d, 'output')}."
        )
    print_result(
        form,
        facts,
        repr(found),
        f"{counted(rows, 'row')}, {each:,.0f} bytes a sample and {size['pictures'] / rows:,.0f} of pictures",
    )
