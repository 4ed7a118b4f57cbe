"""Review decisions about samples of a run, and the file that the report's review downloads.

    {"run": "<fingerprint of the data>", "decisions": [{"sample": 17, "verdict": "relabel", "label": 3}, ...]}

`label` is the number or name of a class, and only goes with "relabel". Other keys are ignored.
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
    """A reviewer's decision about one sample."""

    sample: int
    verdict: str  # one of VERDICTS
    label: int | None = None  # the right class, if the verdict is "relabel"


class OtherRunError(ValueError):
    """The decisions are about another data set than the run.

    Attributes:
        found: The fingerprint in the decisions.
        expected: The fingerprint of the run.
    """

    def __init__(self, source: str, found: object, expected: str) -> None:
        self.found, self.expected = found, expected
        super().__init__(
            f"{source} holds decisions about another data set: its fingerprint is {str(found)[:12]!r}, this run has "
            f"{expected[:12]!r}. Pass decisions about this run, or the run that these were made for."
        )


class DecisionReader:
    """Reads decisions about the samples of one run, and rejects those that do not fit it.

    Args:
        manifest: The manifest of the run.
        n: The number of samples in the run.

    """

    def __init__(self, manifest: Mapping[str, Any], n: int) -> None:
        self.fingerprint: str = manifest["data"]
        self.classes: list[str] | None = manifest.get("classes")
        self.n = n

    def read(self, path: Path) -> list[Decision]:
        """Read the decisions in a file of the report's review.

        Raises:
            OtherRunError: They are about another data set.
            ValueError: It is not such a file, or it names samples, verdicts or classes that the run does not have.
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
                f"{source} is not a decisions file of the report's review: expected "
                '{"run": ..., "decisions": [...]}.'
            )
        if found["run"] != self.fingerprint:
            raise OtherRunError(source, found["run"], self.fingerprint)
        return self.check((self._decision(entry, source) for entry in found["decisions"]), source)

    def check(self, decisions: Iterable[Decision], source: str) -> list[Decision]:
        """Return the decisions sorted by sample; raise unless each is about one sample of the run, once."""
        known: dict[int, Decision] = {}
        unknown = []
        for decision in decisions:
            if not 0 <= decision.sample < self.n:
                unknown.append(decision.sample)
            elif known.setdefault(decision.sample, decision) != decision:
                raise ValueError(
                    f"{source} has two decisions on sample {decision.sample}, {known[decision.sample].verdict!r} and "
                    f"{decision.verdict!r}: keep one."
                )
        if unknown:
            listed = ", ".join(map(str, unknown[:MOST_LISTED])) + (
                ", …" if len(unknown) > MOST_LISTED else ""
            )
            raise ValueError(
                f"{source} has decisions on {counted(len(unknown), 'sample')} that the run does not have ({listed}); "
                f"the run's samples are 0 to {self.n - 1}."
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
            f"{source} gives a sample the label {label!r}, which is not a class of the run: it has {len(classes)} "
            f"({some})."
        )

    def _decision(self, entry: Any, source: str) -> Decision:
        if not isinstance(entry, Mapping) or "sample" not in entry or "verdict" not in entry:
            raise ValueError(
                f"{source} is not a decisions file: the entry {str(entry)[:60]!r} has no sample and verdict."
            )
        sample, verdict = entry["sample"], entry["verdict"]
        if not isinstance(sample, int) or isinstance(sample, bool):
            raise ValueError(
                f"{source} is not a decisions file: expected the number of a sample, found {sample!r}."
            )
        if verdict not in VERDICTS:
            raise ValueError(
                f"{source} has an unknown verdict: expected one of {', '.join(VERDICTS)}, found {verdict!r}."
            )
        if verdict != "relabel" or entry.get("label") is None:
            return Decision(sample, verdict)
        return Decision(sample, verdict, self.class_number(entry["label"], source))


class VerdictCounts(NamedTuple):
    """How many labels were decided, by verdict."""

    wrong: int  # including relabeled ones
    right: int
    unsure: int
    dropped: int  # samples to drop, whether or not their label is wrong


def count_verdicts(verdicts: Iterable[str]) -> VerdictCounts:
    """Count wrong, right and unsure labels, and dropped samples."""
    counts = Counter("wrong" if verdict == "relabel" else verdict for verdict in verdicts)
    wrong, right, dropped = (counts[verdict] for verdict in ("wrong", "right", "drop"))
    return VerdictCounts(wrong, right, counts.total() - wrong - right - dropped, dropped)


def decisions_as_dict(
    decisions: Iterable[Decision], manifest: Mapping[str, Any], names: Mapping[int, str] | None = None
) -> dict[str, Any]:
    """Return decisions in the format of the report's review, with class names besides their numbers.

    Args:
        decisions: Decisions about one run.
        manifest: The manifest of that run.
        names: Names of samples, written besides their numbers.

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
    """Write decisions atomically, in the format of the report's review."""
    files.write_text(
        path, json.dumps(decisions_as_dict(decisions, manifest, names), indent=1, ensure_ascii=False)
    )


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; raise ValueError if it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a decisions file: it is not JSON ({error}).") from error
