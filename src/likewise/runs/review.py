"""Review of a run: the samples in review order, and the decisions about them.

The queue has the most suspicious samples first, as plain values for a page. The report's review downloads a file of
decisions:

    {"run": "<fingerprint of the data>", "decisions": [{"sample": 17, "verdict": "relabel", "label": 3}, ...]}

`label` is the number or name of a class, and only goes with "relabel". Other keys are ignored.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from likewise import files
from likewise.index.explanation import picture_text
from likewise.report.suggestions import JUDGES, doubtful_suggestions, suggestion_judge
from likewise.thumbnails import Picture, escape_controls
from likewise.wording import counted

if TYPE_CHECKING:
    from likewise.runs.result import Analysis

NEIGHBORS = 8
SHOWN = 12
MOST_POINTS = 3000
# Okabe and Ito's colors, which color-blind readers can tell apart.
COLORS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#56b4e9",
    "#8c6d1f",
    "#7f7f7f",
    "#b8a800",
    "#6a3d9a",
)


class ReviewQueue:
    """Samples in review order: flagged ones by suspicion, then all others.

    Args:
        run: The run to review.
        find_picture: Returns the picture of a sample for which the run holds none.

    """

    def __init__(self, run: "Analysis", find_picture: Callable[[int], Picture | None] | None = None) -> None:
        self.run, self._find_picture = run, find_picture
        table = run.table
        score = table.get("label_suspicion", table["novelty"]).to_numpy()
        flagged = (
            table["label_issue"].to_numpy() if "label_issue" in table else np.zeros(len(table), dtype=bool)
        )
        self.order = np.lexsort((-score, ~flagged))
        self._doubtful = doubtful_suggestions(table, run.neighbor_matrix)
        self._judge = JUDGES[suggestion_judge(run.manifest, table)]
        self.flagged = int(flagged.sum())

    def __len__(self) -> int:
        return len(self.order)

    def entries(self, start: int, count: int) -> list[dict[str, Any]]:
        """Return `count` samples of the queue from position `start`, with their neighbors."""
        return [self.entry(int(i)) for i in self.order[start : start + count]]

    def entry(self, sample: int) -> dict[str, Any]:
        """Return a sample with its neighbors."""
        near = zip(
            self.run.neighbor_matrix[sample, :NEIGHBORS],
            self.run.similarity_matrix[sample, :NEIGHBORS],
            strict=True,
        )
        neighbors = [{**self.describe(int(i)), "similarity": float(similarity)} for i, similarity in near]
        found = {**self.describe(sample), "neighbors": neighbors}
        if "suggested_label" in found and found["suggested_label"] != found.get("label"):
            found["judge"] = f"{self._judge} {found['suggested_label_name']}"
        return found

    def describe(self, sample: int) -> dict[str, Any]:
        """Return a sample without its neighbors."""
        row, table = self.run.table.iloc[sample], self.run.table
        found: dict[str, Any] = {
            "sample": sample,
            "name": escape_controls(str(row["name"])) if "name" in table else f"sample {sample}",
            "picture": describe_picture(self._picture(sample)),
        }
        for column in ("label", "prediction", "suggested_label"):
            if column in table and table[column].dtype.kind in "iu":
                found |= {column: int(row[column]), f"{column}_name": self.class_name(int(row[column]))}
        for column in ("label_suspicion", "chance_wrong", "novelty"):
            if column in table:
                value = float(row[column])
                found[column] = None if np.isnan(value) else value
        found["flagged"] = bool(row.get("label_issue", False))
        found["doubtful"] = bool(self._doubtful[sample])
        return found

    def class_name(self, number: int) -> str:
        """Return the name of a class, with control characters escaped."""
        classes = self.run.manifest.get("classes") or []
        return escape_controls(classes[number]) if number < len(classes) else str(number)

    def _picture(self, sample: int) -> Picture | None:
        found = self.run.pictures.get(sample)
        return self._find_picture(sample) if found is None and self._find_picture is not None else found


def describe_picture(picture: Picture | None) -> dict[str, Any] | None:
    """Return a picture as plain values for a page: images as data URLs, rows and signals as values."""
    if picture is None:
        return None
    if picture.kind in ("image", "text"):
        return {"kind": picture.kind, "content": picture_text(picture)}
    return {"kind": picture.kind, "content": json.loads(picture.content)}


class StaticReview:
    """The map and the most suspicious samples of a run as plain HTML, for places where widgets cannot run."""

    def __init__(self, run: "Analysis") -> None:
        self.run = run

    def _repr_html_(self) -> str:
        return static_html(self.run)


def static_html(run: "Analysis") -> str:
    """Return the map and the most suspicious samples as HTML without scripts; user data are escaped."""
    tiles = "".join(_tile(entry) for entry in ReviewQueue(run).entries(0, min(SHOWN, len(run.table))))
    return (
        '<div style="font:14px/1.4 system-ui,sans-serif">'
        f'{_static_map(run)}<div style="display:flex;flex-wrap:wrap;gap:10px;margin-top:10px">{tiles}</div></div>'
    )


def _tile(entry: dict[str, Any]) -> str:
    import html

    picture, name = entry["picture"], html.escape(entry["name"])
    if picture is None:
        shown = name
    elif picture["kind"] == "image":
        source = html.escape(picture["content"], quote=True)
        shown = f'<img src="{source}" alt="{name}" width="84" height="84" style="image-rendering:pixelated">'
    else:
        shown = html.escape(str(picture["content"])[:200])
    caption = html.escape(entry.get("label_name", ""))
    if entry["flagged"]:
        looks = "perhaps" if entry["doubtful"] else "looks like"
        caption += f", {looks} <b>{html.escape(entry['suggested_label_name'])}</b>"
    return f'<figure style="margin:0;width:110px;overflow:hidden">{shown}<figcaption>{caption}</figcaption></figure>'


def _static_map(run: "Analysis") -> str:
    table = run.table
    step = -(-len(table) // MOST_POINTS)
    some = table.iloc[::step]
    x, y = (_scale_to_percent(some[name].to_numpy()) for name in ("map_x", "map_y"))
    group = next((name for name in ("label", "prediction") if name in some), None)
    numbers = np.zeros(len(some), dtype=int)
    if group is not None and some[group].dtype.kind in "iu":
        numbers = some[group].to_numpy()
    points = "".join(
        f'<circle cx="{a:.1f}" cy="{100 - b:.1f}" r=".6" fill="{COLORS[int(i) % len(COLORS)]}"/>'
        for a, b, i in zip(x, y, numbers, strict=True)
    )
    return (
        f'<svg viewBox="-2 -2 104 104" width="360" role="img" aria-label="Map of the samples">{points}</svg>'
    )


def _scale_to_percent(values: np.ndarray) -> np.ndarray:
    low, high = values.min(), values.max()
    return 100 * (values - low) / (high - low if high > low else 1)


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
