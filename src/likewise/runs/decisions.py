"""What a person decided about samples of a run: the file that the report's review downloads.

    {"run": "<fingerprint of the data>", "decisions": [{"sample": 17, "verdict": "relabel", "label": 3}, ...]}

`label` is the number of a class, or its name, and belongs to "relabel" only. Other keys are left alone.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from likewise import files
from likewise.wording import counted

VERDICTS = ("wrong", "right", "unsure", "relabel", "drop")
MOST_LISTED = 5


class Decision(NamedTuple):
    """What a person decided about one sample."""

    sample: int
    verdict: str  # one of VERDICTS
    label: int | None = None  # the class that it should have, where the verdict is "relabel"


class OtherRunError(ValueError):
    """Decisions are about another data set than that of the run.

    Attributes:
        found: The fingerprint that the decisions name.
        expected: That of the run.
    """

    def __init__(self, source: str, found: object, expected: str) -> None:
        self.found, self.expected = found, expected
        super().__init__(
            f"{source} holds decisions about another data set: its fingerprint is {str(found)[:12]!r}, that of this "
            f"run {expected[:12]!r}. Give the decisions of this run, or the run that they were made on."
        )


class DecisionReader:
    """Reads decisions about the samples of one run, and refuses those that cannot be about it.

    Args:
        manifest: Of the run.
        n: How many samples the run has.

    """

    def __init__(self, manifest: Mapping[str, Any], n: int) -> None:
        self.fingerprint: str = manifest["data"]
        self.classes: list[str] | None = manifest.get("classes")
        self.n = n

    def read(self, path: Path) -> list[Decision]:
        """Return the decisions in a file of the report's review.

        Raises:
            OtherRunError: They are about another data set.
            ValueError: It is no such file, or names samples, verdicts or classes that the run does not have.
        """
        return self.parse(read_json(path), str(path))

    def parse(self, found: Any, source: str) -> list[Decision]:
        """Return the decisions in a parsed file; `source` names it in errors."""
        if (
            not isinstance(found, Mapping)
            or "run" not in found
            or not isinstance(found.get("decisions"), list)
        ):
            raise ValueError(
                f"{source} is not a file of decisions, as the report's review downloads it: expected "
                '{"run": ..., "decisions": [...]}.'
            )
        if found["run"] != self.fingerprint:
            raise OtherRunError(source, found["run"], self.fingerprint)
        return self.check((self._decision(entry, source) for entry in found["decisions"]), source)

    def check(self, decisions: Iterable[Decision], source: str) -> list[Decision]:
        """Return decisions in the order of samples, if they are about samples of the run, one for each."""
        known: dict[int, Decision] = {}
        unknown = []
        for decision in decisions:
            if not 0 <= decision.sample < self.n:
                unknown.append(decision.sample)
            elif known.setdefault(decision.sample, decision) != decision:
                raise ValueError(
                    f"{source} decides on sample {decision.sample} twice, as {known[decision.sample].verdict!r} and "
                    f"{decision.verdict!r}: keep one."
                )
        if unknown:
            listed = ", ".join(map(str, unknown[:MOST_LISTED])) + (
                ", …" if len(unknown) > MOST_LISTED else ""
            )
            raise ValueError(
                f"{source} decides on {counted(len(unknown), 'sample')} that the run does not have ({listed}): its "
                "samples are "
                f"0 to {self.n - 1}."
            )
        return [known[sample] for sample in sorted(known)]

    def class_number(self, label: Any, source: str) -> int:
        """Return the number of a class, given by number or by name."""
        classes = self.classes or []
        if isinstance(label, str) and label in classes:
            return classes.index(label)
        if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(classes):
            return label
        some = ", ".join(classes[:MOST_LISTED]) + (", …" if len(classes) > MOST_LISTED else "")
        raise ValueError(
            f"{source} gives a sample the label {label!r}, which is no class of the run: it has {len(classes)} "
            f"({some})."
        )

    def _decision(self, entry: Any, source: str) -> Decision:
        if not isinstance(entry, Mapping) or "sample" not in entry or "verdict" not in entry:
            raise ValueError(
                f"{source} is not a file of decisions: {str(entry)[:60]!r} has no sample and verdict."
            )
        sample, verdict = entry["sample"], entry["verdict"]
        if not isinstance(sample, int) or isinstance(sample, bool):
            raise ValueError(
                f"{source} is not a file of decisions: the sample {sample!r} is no number of a sample."
            )
        if verdict not in VERDICTS:
            raise ValueError(
                f"{source} holds a verdict that is not known: {verdict!r}. Expected {', '.join(VERDICTS)}."
            )
        if verdict != "relabel" or entry.get("label") is None:
            return Decision(sample, verdict)
        return Decision(sample, verdict, self.class_number(entry["label"], source))


class VerdictCounts(NamedTuple):
    """How many labels were decided, by verdict."""

    wrong: int  # relabeled ones among them
    right: int
    unsure: int
    dropped: int  # samples to drop, whether their label is wrong or not


def count_verdicts(verdicts: Iterable[str]) -> VerdictCounts:
    """Return how many labels are wrong, right and unsure, and how many samples are dropped."""
    counts = Counter("wrong" if verdict == "relabel" else verdict for verdict in verdicts)
    wrong, right, dropped = (counts[verdict] for verdict in ("wrong", "right", "drop"))
    return VerdictCounts(wrong, right, counts.total() - wrong - right - dropped, dropped)


def decisions_as_dict(
    decisions: Iterable[Decision], manifest: Mapping[str, Any], names: Mapping[int, str] | None = None
) -> dict[str, Any]:
    """Return decisions as the file of the report's review holds them, with names of classes beside their numbers.

    Args:
        decisions: Of one run.
        manifest: Of that run.
        names: Of samples, to be written beside their numbers.

    """
    classes = manifest.get("classes") or []
    entries = []
    for decision in decisions:
        entry: dict[str, Any] = {"sample": decision.sample, "verdict": decision.verdict}
        if decision.label is not None:
            entry |= {"label": decision.label, "label_name": classes[decision.label]}
        if names is not None and decision.sample in names:
            entry["name"] = names[decision.sample]
        entries.append(entry)
    return {"run": manifest["data"], "decisions": entries}


def write_decisions(
    path: Path,
    decisions: Iterable[Decision],
    manifest: Mapping[str, Any],
    names: Mapping[int, str] | None = None,
) -> None:
    """Write decisions as the report's review downloads them, complete or not at all."""
    files.write_text(
        path, json.dumps(decisions_as_dict(decisions, manifest, names), indent=1, ensure_ascii=False)
    )


def read_json(path: Path) -> Any:
    """Return what a JSON file holds, or say what is wrong with it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a file of decisions: it is no JSON ({error}).") from error
