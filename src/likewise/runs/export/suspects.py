"""Labels that look wrong, for tools of annotation: what is shown of each, what is suggested, how surely.

A reviewer chooses one of the classes, or one of three answers that are no class. Back from the tool, the class that
the sample has means "right", another one "relabel".
"""

import json
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from likewise.index.explanation import picture_text
from likewise.runs.result import Analysis
from likewise.runs.review import Decision, DecisionReader, OtherRunError
from likewise.thumbnails import Picture
from likewise.wording import agreeing, counted

OTHER_ANSWERS = {"[wrong, no class fits]": "wrong", "[unsure]": "unsure", "[drop]": "drop"}


class Suspect(NamedTuple):
    """A sample whose label looks wrong."""

    sample: int
    name: str  # its number where it has no name
    label: str
    suggested: str
    confidence: float  # in the suggestion, 0 to 1
    suspicion: float
    picture: Picture | None

    @property
    def text(self) -> str:
        """What is to be read of it: its text, its row, or its name."""
        if self.picture is None or self.picture.kind == "image":
            return self.name
        content = self.picture.content.decode("utf-8", "replace")
        if self.picture.kind == "text":
            return content
        values = json.loads(content)
        rows = values.items() if isinstance(values, dict) else [("values", ", ".join(map(str, values)))]
        return "\n".join(f"{name}: {value}" for name, value in rows)

    @property
    def image(self) -> str | None:
        """Its thumbnail as a data address, None where it is no image."""
        is_image = self.picture is not None and self.picture.kind == "image"
        return picture_text(self.picture) if is_image else None


class Suspects(NamedTuple):
    """Samples whose labels look wrong, the worst first."""

    run: Analysis
    samples: list[Suspect]
    shows_images: bool

    @property
    def answers(self) -> list[str]:
        """What a reviewer chooses from: the classes, and answers that are none."""
        return [*self.run.manifest["classes"], *OTHER_ANSWERS]


def select_suspects(run: Analysis, count: int | None = None) -> Suspects:
    """Return the samples that are flagged, or so many of the most suspicious, the worst first.

    Where samples are images, those without a stored thumbnail are left out, with a warning.
    """
    table, classes = run.table, run.manifest.get("classes")
    if "label_issue" not in table or classes is None:
        raise ValueError(f"The run in {run.folder} has no labels that are classes: there are no suspects.")
    _refuse_names(classes)
    order = np.argsort(-table["label_suspicion"].to_numpy(), kind="stable")
    flagged = table["label_issue"].to_numpy()
    chosen = [int(i) for i in order if flagged[i]] if count is None else [int(i) for i in order[:count]]
    pictures = run.pictures
    shows_images = any(picture.kind == "image" for picture in pictures.values())
    samples = [_suspect(run, i, pictures.get(i)) for i in chosen]
    shown = [s for s in samples if s.image is not None] if shows_images else samples
    left = len(samples) - len(shown)
    if left:
        warnings.warn(
            f"{left} of {counted(len(samples), 'suspect')} "
            f"{agreeing(left, 'has no picture in the run and is', 'have no picture in the run and are')} "
            "left out.",
            stacklevel=3,
        )
    return Suspects(run, shown, shows_images)


def decide_answers(
    reader: DecisionReader, run: Analysis, answers: Iterable[tuple[Any, Any, Sequence[str]]], source: str
) -> list[Decision]:
    """Return decisions from answers of reviewers.

    Args:
        reader: Of the run.
        run: The run.
        answers: For each sample: the fingerprint of the data that it is of, its number, and what reviewers chose.
        source: The file, for errors.

    Raises:
        OtherRunError: A sample is of other data.
        ValueError: A sample or class is not of the run, or reviewers disagree.

    """
    labels = run.table["label"].to_numpy()
    decisions = []
    for fingerprint, sample, given in answers:
        if fingerprint != reader.fingerprint:
            raise OtherRunError(source, fingerprint, reader.fingerprint)
        if not isinstance(sample, int) or isinstance(sample, bool) or not 0 <= sample < reader.n:
            raise ValueError(
                f"{source} has an answer about the sample {sample!r}: samples are 0 to {reader.n - 1}."
            )
        if len(set(given)) > 1:
            raise ValueError(
                f"{source}: reviewers disagree on sample {sample} ({', '.join(sorted(set(given)))}): settle it there."
            )
        if not given:
            continue
        if given[0] in OTHER_ANSWERS:
            decisions.append(Decision(sample, OTHER_ANSWERS[given[0]]))
            continue
        number = reader.class_number(str(given[0]), source)
        is_same = number == int(labels[sample])
        decisions.append(Decision(sample, "right") if is_same else Decision(sample, "relabel", number))
    return reader.check(decisions, source)


def _suspect(run: Analysis, sample: int, picture: Picture | None) -> Suspect:
    row, classes = run.table.iloc[sample], run.manifest["classes"]
    suspicion, chance = float(row["label_suspicion"]), float(row["chance_wrong"])
    confidence = suspicion if np.isnan(chance) else chance
    return Suspect(
        sample,
        str(row["name"]) if "name" in run.table else str(sample),
        classes[int(row["label"])],
        classes[int(row["suggested_label"])],
        min(1.0, max(0.0, confidence)),
        suspicion,
        picture,
    )


def _refuse_names(classes: Sequence[str]) -> None:
    """Raise if answers could not be told apart, or not be written into a file of another tool."""
    doubled = sorted({name for name in classes if list(classes).count(name) > 1})
    if doubled:
        raise ValueError(f"Several classes are called {doubled[0]!r}: answers could not be told apart.")
    for name in classes:
        if name in OTHER_ANSWERS or name != name.strip() or not name.isprintable() or not name:
            raise ValueError(
                f"The class name {name!r} cannot be an answer in another tool: rename it (--classes)."
            )
