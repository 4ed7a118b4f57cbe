"""The service behind `likewise serve`, without HTTP: answers, review queue, decisions in the run folder.

Waiting questions are answered in batches: one pass over the index serves all of them.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from likewise.data import batches
from likewise.index import Index
from likewise.locks import lock_folder
from likewise.report.pages import page
from likewise.report.payload import Run, apply_command, pack_payload, read_run
from likewise.runs.result import Analysis
from likewise.runs.review import Decision, ReviewQueue, decisions_as_dict, describe_picture, write_decisions
from likewise.serve.inputs import InputReader, NewInput
from likewise.thumbnails import Picture

DECISIONS = "decisions.json"
REPORT_DATA = "report-data"  # URL of the report's data, relative to the report
PICTURES = "pictures/{sample}"
SECONDS_FOR_LOCK = 10


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


def _as_unsure(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return withdrawn decisions with a verdict, so that they can be checked."""
    return [{**entry, "verdict": "unsure"} for entry in entries]


MOST_TOGETHER = 32
MOST_WAITING = 256


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
