"""The service behind `likewise serve`, without HTTP: answers, review queue, decisions in the run folder.

New inputs are read from memory, in the same way as the indexed data. Waiting questions are answered in batches: one
pass over the index serves all of them.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from likewise import loading
from likewise.data import batches
from likewise.index import Index
from likewise.loading.load import TABLES
from likewise.loading.tables import table_columns
from likewise.locks import lock_folder
from likewise.report.pages import page
from likewise.report.payload import Run, apply_command, pack_payload, read_run
from likewise.runs.result import Analysis
from likewise.runs.review import Decision, ReviewQueue, decisions_as_dict, describe_picture, write_decisions
from likewise.thumbnails import Picture, picture

MOST_PIXELS = 50_000_000
BYTES_PER_PIXEL = 20  # decoded, converted and as a tensor
KINDS = ("image", "text", "row")
DECISIONS = "decisions.json"
REPORT_DATA = "report-data"  # URL of the report's data, relative to the report
PICTURES = "pictures/{sample}"
SECONDS_FOR_LOCK = 10
MOST_TOGETHER = 32
MOST_WAITING = 256


class NewInput(NamedTuple):
    """A new input: the model's input, and a picture of it."""

    value: Any
    picture: Picture | None


class InputReader:
    """Reads new inputs of one kind in the same way as the indexed data.

    Args:
        kind: "image", "text" or "row".
        read: Turns a raw value into a data set of one sample.
        columns: The columns that a row needs, in order; None if they are not known.

    """

    def __init__(
        self, kind: str, read: Callable[..., loading.Read], columns: list[str] | None = None
    ) -> None:
        self.kind, self.columns, self._read = kind, columns, read

    def read(self, raw: Any) -> NewInput:
        """Read a new input.

        Raises:
            ValueError: It cannot be read; the message says why.
            MemoryError: It is too large once decoded.

        """
        if self.kind == "row":
            raw = self._order_columns(raw)
        found = self._read(**{self.kind: raw})
        shown = None if found.show is None else picture(found.show(0))
        return NewInput(found.dataset[0], shown)

    def _order_columns(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row with its columns in the order of the data; raise if one is missing or unknown."""
        if self.columns is None:
            return dict(row)
        missing = [name for name in self.columns if name not in row]
        unknown = [name for name in row if name not in self.columns]
        if missing or unknown:
            parts = [f"missing: {', '.join(missing[:8])}"] if missing else []
            parts += [f"unknown: {', '.join(map(str, unknown[:8]))}"] if unknown else []
            raise ValueError(f"The row needs {len(self.columns)} columns ({'; '.join(parts)}).")
        return {name: row[name] for name in self.columns}


def reader_from_settings(index: Index, settings: Mapping[str, Any]) -> InputReader | None:
    """Return a reader of new inputs for an index built by a command; None if its settings do not say how.

    Args:
        index: The index.
        settings: The arguments of `loading.pasted_input`, and `data`, the name of the data set.

    """
    kind = _kind_of(index, settings)
    if kind is None:
        return None
    columns = _row_columns(index, settings) if kind == "row" else settings["columns"]
    known = {name: value for name, value in settings.items() if name != "data"}
    known |= {"columns": columns, "max_memory": MOST_PIXELS * BYTES_PER_PIXEL}

    def read(**raw: Any) -> loading.Read:
        return loading.pasted_input(**raw, **known)

    return InputReader(kind, read, columns)


class Question:
    """A new input, with the number of neighbors to return."""

    def __init__(self, new: NewInput, k: int) -> None:
        self.new, self.k = new, k


class Service:
    """Serves a run, an index, or both.

    Args:
        index: Answers questions about new inputs; opened with its model. None without an index.
        run: The run to review. None if only an index is served.
        reader: Reads new inputs; None if it is not known how.

    """

    def __init__(self, index: Index | None, run: Analysis | None, reader: InputReader | None) -> None:
        if index is None and run is None:
            raise ValueError("There is nothing to serve: pass a run or an index.")
        self.index, self.run, self.reader = index, run, reader
        self.queue = None if run is None else ReviewQueue(run, self._stored_picture)
        if run is not None:
            self.decisions()  # fail at the start if the file cannot be read

    def about(self) -> dict[str, Any]:
        """Return what is served, and which new inputs are accepted."""
        index, run, reader = self.index, self.run, self.reader
        name = "" if run is None else run.folder.resolve().name
        if run is not None:
            model, samples = run.manifest["about"]["model"], len(run.table)
        else:
            assert index is not None
            model, samples = index.manifest["model_name"], len(index)
        return {
            "model": model,
            "samples": samples,
            "classes": self.classes,
            "input": None if index is None or reader is None else reader.kind,
            "columns": None if index is None or reader is None else reader.columns,
            "run": None if run is None else run.manifest["data"],
            "flagged": None if self.queue is None else self.queue.flagged,
            "report": run is not None,
            "command": None if run is None else apply_command(name, f"{name}/{DECISIONS}"),
        }

    @property
    def classes(self) -> list[str] | None:
        """The names of the classes."""
        if self.run is not None:
            return self.run.manifest.get("classes")
        return None if self.index is None else self.index.classes

    def explain(self, questions: Sequence[Question]) -> list[dict[str, Any]]:
        """Return prediction, neighbors, novelty and reasons for doubt, for each new input."""
        assert self.index is not None
        most = max(question.k for question in questions)
        found = self.index.explain(batches([question.new.value for question in questions]), most)
        answers = []
        for question, explanation in zip(questions, found, strict=True):
            answer = explanation.as_dict()
            answer["novelty_comparison"] = explanation.novelty_comparison
            answer["picture"] = describe_picture(question.new.picture)
            pictures = [describe_picture(near.sample.picture) for near in explanation.neighbors]
            answer["neighbors"] = [
                {**near, "picture": shown} for near, shown in zip(answer["neighbors"], pictures, strict=True)
            ][: question.k]
            change = explanation.counterfactual
            if change is not None:
                answer["counterfactual"]["samples"] = [self._describe_row(row) for row in change.rows]
            answers.append(answer)
        return answers

    def decisions(self) -> dict[str, Any]:
        """Return the decisions in the run folder, in the format of the report's review."""
        return decisions_as_dict(self._read_decisions(), self._run.manifest)

    def decide(self, changes: Any) -> dict[str, Any]:
        """Change decisions in the run folder; return how many there are.

        Args:
            changes: In the format of a decisions file; a verdict of None withdraws a decision.

        Raises:
            ValueError: They are about another data set, or name samples or classes that the run does not have.

        """
        run = self._run
        entries = changes.get("decisions") if isinstance(changes, Mapping) else None
        if not isinstance(entries, list):
            raise ValueError('Expected {"run": ..., "decisions": [{"sample": ..., "verdict": ...}]}.')
        withdrawn = [e for e in entries if isinstance(e, Mapping) and "verdict" in e and e["verdict"] is None]
        remaining = {**changes, "decisions": [e for e in entries if e not in withdrawn]}
        reader = run.decision_reader
        new = {decision.sample: decision for decision in reader.parse(remaining, "The request")}
        checked = reader.parse({**remaining, "decisions": _as_unsure(withdrawn)}, "The request")
        gone = {decision.sample for decision in checked}
        with lock_folder(run.folder, SECONDS_FOR_LOCK):
            known = {d.sample: d for d in self._read_decisions() if d.sample not in gone} | new
            kept = [known[sample] for sample in sorted(known)]
            write_decisions(run.folder / DECISIONS, kept, run.manifest)
        return {"decisions": len(kept)}

    def warm_up(self) -> None:
        """Trace the model by asking about a stored sample, so that the first visitor does not have to wait."""
        if self.index is None or self.reader is None:
            return
        seen = self.index.sample(int(self.index.rows[0])).picture
        if seen is None or seen.kind != self.reader.kind:
            return
        raw: Any = seen.content
        if seen.kind == "text":
            raw = seen.content.decode("utf-8")
        elif seen.kind == "row":
            row = json.loads(seen.content)
            raw = {name: row[name] for name in self.reader.columns or row if name in row}
        self.explain([Question(self.reader.read(raw), 1)])

    def report_page(self) -> str:
        """Return the report of the run; it fetches its data from `REPORT_DATA`.

        Raises:
            LookupError: Only an index is served.

        """
        return page(self._report_run, source=REPORT_DATA)

    @cached_property
    def report_data(self) -> bytes:
        """The data of the report, packed once."""
        return pack_payload(self._report_run, picture_source=PICTURES)

    def picture(self, sample: int) -> dict[str, Any] | None:
        """Return the picture of a sample that the report does not hold.

        Raises:
            LookupError: There is no such sample, or only an index is served.

        """
        run = self._run
        if not 0 <= sample < len(run.table):
            raise LookupError(f"There is no sample {sample}.")
        return describe_picture(run.pictures.get(sample) or self._stored_picture(sample))

    @cached_property
    def _report_run(self) -> Run:
        return read_run(self._run.folder)

    def _describe_row(self, row: int) -> dict[str, Any]:
        assert self.index is not None
        sample = self.index.sample(row)
        return {**sample.as_dict(), "picture": describe_picture(sample.picture)}

    @property
    def _run(self) -> Analysis:
        if self.run is None:
            raise LookupError("Only an index is served, so there is no run to review.")
        return self.run

    def _read_decisions(self) -> list[Decision]:
        path = self._run.folder / DECISIONS
        return self._run.decision_reader.read(path) if path.exists() else []

    def _stored_picture(self, sample: int) -> Picture | None:
        """Return the picture that the run's index holds of a sample, if the run itself has none."""
        if self.index is None or self.run is None or len(self.index) != len(self.run.table):
            return None
        return self.index.sample(sample).picture


class BusyError(RuntimeError):
    """Too many questions are waiting."""


class _Waiting(NamedTuple):
    value: Any
    answer: "asyncio.Future[Any]"


class Batcher:
    """Answers questions in a separate thread, in batches of all that are waiting.

    Args:
        answer: Returns an answer for each question of a batch; called in one thread at a time.

    """

    def __init__(self, answer: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        self._answer = answer
        self._waiting: asyncio.Queue[_Waiting] = asyncio.Queue(MOST_WAITING)
        self._task: asyncio.Task[None] | None = None

    async def ask(self, value: Any) -> Any:
        """Return the answer to a question.

        Raises:
            BusyError: Too many questions are waiting.

        """
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        waiting = _Waiting(value, asyncio.get_running_loop().create_future())
        try:
            self._waiting.put_nowait(waiting)
        except asyncio.QueueFull:
            raise BusyError(f"{MOST_WAITING} questions are waiting: try again in a few seconds.") from None
        return await waiting.answer

    def stop(self) -> None:
        """Stop answering questions."""
        if self._task is not None:
            self._task.cancel()

    async def _work(self) -> None:
        while True:
            together = [await self._waiting.get()]
            while len(together) < MOST_TOGETHER and not self._waiting.empty():
                together.append(self._waiting.get_nowait())
            if not await self._settle(together) and len(together) > 1:
                for one in together:  # one faulty question must not fail the others
                    await self._settle([one])

    async def _settle(self, together: list[_Waiting]) -> bool:
        """Answer a batch; return False if a batch of several failed, without answering any."""
        alive = [one for one in together if not one.answer.done()]
        try:
            answers = await asyncio.to_thread(self._answer, [one.value for one in alive])
        except Exception as error:
            if len(together) > 1:
                return False
            for one in alive:
                one.answer.set_exception(error)
            return True
        for one, answer in zip(alive, answers, strict=True):
            if not one.answer.done():
                one.answer.set_result(answer)
        return True


def _kind_of(index: Index, settings: Mapping[str, Any]) -> str | None:
    """Return the kind of new inputs (image, text or row), by the settings or else by the stored pictures."""
    if settings["text_column"] is not None:
        return "text"
    path = Path(settings["data"]).expanduser()
    if path.suffix.lower() in TABLES:
        return "row"
    if settings["data"] and path.is_dir():
        return "image"
    seen = index.sample(int(index.rows[0])).picture
    is_raw = settings["prepare"] is not None or settings["image_size"] is not None
    return seen.kind if seen is not None and seen.kind in KINDS and is_raw else None


def _row_columns(index: Index, settings: Mapping[str, Any]) -> list[str] | None:
    """Return the columns of a row, in order, if they are certain: named, or as many as the index has inputs."""
    if settings["columns"] is not None:
        return list(settings["columns"])
    if settings["prepare"] is not None:
        return None
    path = Path(settings["data"]).expanduser()
    width = index.manifest["inputs"][0][2][-1]
    candidates = [table_columns(path)] if path.is_file() else []
    seen = index.sample(int(index.rows[0])).picture
    if seen is not None and seen.kind == "row":
        candidates.append(list(json.loads(seen.content)))
    for names in candidates:
        left = [name for name in names if name not in (settings["label"], *(settings["show_columns"] or ()))]
        if len(left) == width:
            return left
    raise ValueError(
        f"The index was built from {width} columns of {settings['data']}, but does not say which: rebuild it with "
        "--columns."
    )


def _as_unsure(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return withdrawn decisions with a verdict, so that they can be checked."""
    return [{**entry, "verdict": "unsure"} for entry in entries]
