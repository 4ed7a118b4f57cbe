"""One prediction with what it rests on: neighbors, their agreement, novelty, and whether to trust it.

`write_page` writes the answers of an index as one HTML file that opens from disk.
"""

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from likewise import files
from likewise.index.counterfactual import Counterfactual
from likewise.marked_text import MarkedText
from likewise.thumbnails import Picture, media_type
from likewise.wording import counted

SHOWN = 5  # neighbors that are printed
NOVEL = 99.0  # percentile of the index's own rows
AGREEMENT = 0.5  # share of neighbors' votes, or exp(−gap) of values
SHIFT = 0.5  # of probability that neighbors put on other classes; of values, in units of the labels' spread
CONFIDENCE = 0.5
# Between the limits above and these a prediction is not certain: 5 to 26 % of these were wrong, and 0 to 9 % of those
# without any sign (digits with wrong labels, two and four overlapping classes; 800 test samples each, 2026-11-16).
UNUSUAL = 95.0
CLEAR = 0.8  # of agreement and confidence, for classes


class Sample(NamedTuple):
    """A row of the index as a person sees it."""

    row: int
    name: str
    label: Any  # a class number, a value or values; None without labels
    label_name: str
    picture: Picture | None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, pictures as text (images as data URLs)."""
        return {
            "row": self.row,
            "name": self.name,
            "label": self.label,
            "label_name": self.label_name,
            "picture": picture_text(self.picture),
        }


class Neighbor(NamedTuple):
    """A row that the network treats like an input."""

    sample: Sample
    similarity: float
    error: float  # standard error of the similarity, 0 where it is exact
    passage: MarkedText | None = (
        None  # of a language model: what its tokens contribute to the plain similarity
    )

    def as_dict(self) -> dict[str, Any]:
        """Return plain values; `passage` only if it is known."""
        known = {} if self.passage is None else {"passage": self.passage.as_dict()}
        return {**self.sample.as_dict(), "similarity": self.similarity, "error": self.error, **known}


@dataclass(frozen=True, repr=False)
class Explanation:
    """What a prediction rests on; fields that need labels are None if the index has none.

    `print` shows it in a few lines.
    """

    prediction: Any  # class number, or values
    prediction_name: str
    confidence: float | None  # the network's own
    neighbors: tuple[Neighbor, ...]
    agreement: float | None  # of the neighbors' labels with the prediction, 0 to 1
    shift: float | None  # how far the prediction is from the neighbors' predictions
    novelty: (
        float  # share of the index's rows, each left out in turn, that are less novel: see `likewise.novelty`
    )
    novelty_percentile: float  # the same as counted, 0 to 100
    novelty_error: float
    counterfactual: Counterfactual | None = None  # what would change the neighbors' vote
    exact: bool = False  # whether the similarities of `neighbors` are exact
    label: int | None = None  # the class that the input came with, where it did
    label_name: str = ""

    @classmethod
    def without_labels(
        cls, neighbors: tuple[Neighbor, ...], novelty: float, percentile: float, error: float, exact: bool
    ) -> "Explanation":
        """Return that of an index that has no labels: neighbors and novelty."""
        return cls(None, "", None, neighbors, None, None, novelty, percentile, error, exact=exact)

    def with_passages(self, passages: Sequence[MarkedText | None]) -> "Explanation":
        """Return the same with the marked texts of the first neighbors."""
        marked = [near._replace(passage=one) for near, one in zip(self.neighbors, passages, strict=False)]
        return replace(self, neighbors=(*marked, *self.neighbors[len(marked) :]))

    @property
    def sketched(self) -> tuple[str, ...]:
        """Which numbers come from sketches; those that use all rows do so even with exact=True."""
        known = {"similarity": not self.exact, "agreement": self.agreement is not None}
        known |= {"shift": self.shift is not None and not math.isnan(self.shift), "novelty": True}
        known["counterfactual"] = self.counterfactual is not None
        return tuple(name for name, is_sketched in known.items() if is_sketched)

    @property
    def novelty_comparison(self) -> str:
        """The share of samples that are less novel, in words; rounded down."""
        if math.isnan(self.novelty_percentile):
            return "with too few indexed samples to compare it with"
        if self.novelty_percentile == 100:
            return "more than that of any indexed sample"
        tenths = math.floor(10 * self.novelty_percentile + 1e-3)  # 90.6 in float32 is a little less
        return f"more than that of {tenths / 10:g} % of the indexed samples"

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons to doubt the prediction."""
        found = []
        if self.label is not None and self.label != self.prediction:
            found.append(f"its own label is {self.label_name}")
        if self.novelty_percentile >= NOVEL:
            found.append(f"its novelty is {self.novelty_comparison}")
        if self.agreement is not None and self.agreement < AGREEMENT:
            found.append(f"the labels of its neighbors agree with it by {self.agreement:.0%} only")
        if self.shift is not None and self.shift > SHIFT:
            found.append(f"its neighbors are predicted otherwise (shift {self.shift:.2f})")
        if self.confidence is not None and self.confidence < CONFIDENCE:
            found.append(f"the network itself is unsure ({self.confidence:.0%})")
        return tuple(found)

    @property
    def caveats(self) -> tuple[str, ...]:
        """What leaves the prediction uncertain without contradicting it; for classes, also weak agreement."""
        found = []
        if UNUSUAL <= self.novelty_percentile < NOVEL:
            found.append(f"its novelty is {self.novelty_comparison}")
        if self.confidence is not None:
            if self.agreement is not None and AGREEMENT <= self.agreement < CLEAR:
                found.append(f"the labels of its neighbors agree with it by {self.agreement:.0%}")
            if CONFIDENCE <= self.confidence < CLEAR:
                found.append(f"the network is {self.confidence:.0%} sure")
        return tuple(found)

    @property
    def trusted(self) -> bool:
        """Whether there is no reason to doubt the prediction; `caveats` may still leave it uncertain."""
        return not self.reasons

    @property
    def verdict(self) -> str:
        """The reasons or caveats, in words."""
        if self.reasons:
            return "; ".join(self.reasons)
        if self.prediction is None:
            return "; ".join(self.caveats) or "nothing unusual about it"
        return f"not certain: {'; '.join(self.caveats)}" if self.caveats else "no sign against it"

    @property
    def headline(self) -> str:
        """The prediction and the verdict on one line."""
        if self.prediction is None:
            return self.verdict
        sure = "" if self.confidence is None else f" ({self.confidence:.0%})"
        doubt = "" if self.trusted else ", not trusted"
        return f"{self.prediction_name or _format_prediction(self.prediction)}{sure}{doubt}: {self.verdict}"

    @property
    def evidence(self) -> str:
        """How far neighbors agree, and how novel the input is, on one line."""
        agreement = [] if self.agreement is None else [f"neighbors agree by {self.agreement:.0%}"]
        novelty = f"novelty {self.novelty:.3f} ± {self.novelty_error:.3f}, {self.novelty_comparison}"
        if self.exact:
            novelty += f"; similarities are exact, {', '.join(self.sketched)} from sketches"
        return "; ".join([*agreement, novelty])

    def __repr__(self) -> str:
        return f"Explanation({self.headline}, {counted(len(self.neighbors), 'neighbor')})"

    def __str__(self) -> str:
        near = ", ".join(
            f"{n.sample.name or f'row {n.sample.row}'} ({n.sample.label_name + ', ' if n.sample.label_name else ''}"
            f"{n.similarity:.2f})"
            for n in self.neighbors[:SHOWN]
        )
        more = f" and {len(self.neighbors) - SHOWN} more" if len(self.neighbors) > SHOWN else ""
        lines = [self.headline, self.evidence, f"nearest: {near}{more}"]
        return "\n".join(lines if self.counterfactual is None else [*lines, self.counterfactual.text])

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "prediction": self.prediction,
            "prediction_name": self.prediction_name,
            "confidence": self.confidence,
            "label": self.label,
            "label_name": self.label_name,
            "trusted": self.trusted,
            "reasons": list(self.reasons),
            "caveats": list(self.caveats),
            "verdict": self.verdict,
            "agreement": self.agreement,
            "shift": None if self.shift is None or math.isnan(self.shift) else self.shift,
            "novelty": None if math.isnan(self.novelty) else self.novelty,
            "novelty_percentile": None if math.isnan(self.novelty_percentile) else self.novelty_percentile,
            "novelty_error": None if math.isnan(self.novelty_error) else self.novelty_error,
            "counterfactual": None if self.counterfactual is None else self.counterfactual.as_dict(),
            "sketched": list(self.sketched),
            "neighbors": [neighbor.as_dict() for neighbor in self.neighbors],
        }


def _format_prediction(prediction: Any) -> str:
    values = prediction if isinstance(prediction, list) else [prediction]
    return ", ".join(f"{value:.4g}" for value in values)


def picture_text(picture: Picture | None) -> str | None:
    """Return a picture as text: an image as a data URL, anything else as its content."""
    if picture is None:
        return None
    if picture.kind == "image":
        encoded = base64.b64encode(picture.content).decode()
        return f"data:{media_type(picture.content)};base64,{encoded}"
    return picture.content.decode("utf-8", "replace")


class Answer(NamedTuple):
    """A new input and what the index says of it."""

    name: str
    picture: Picture | None
    explanation: Explanation


def write_page(path: Path, index: str, answers: Sequence[Answer]) -> None:
    """Write the answers, with the pictures inside; everything of the user's is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["counted"] = counted
    template = environment.get_template("page.html")
    marked = any(near.passage is not None for one in answers for near in one.explanation.neighbors)
    text = template.render(
        index=index, answers=answers, picture=picture_text, row=_row, marks_passages=marked
    )
    files.write_text(path, text)


def _row(picture: Picture) -> dict[str, Any]:
    """Return the columns of a row, or the numbers of a signal by place."""
    found = json.loads(picture.content)
    return found if isinstance(found, dict) else {"signal": ", ".join(str(v) for v in found[:12])}
