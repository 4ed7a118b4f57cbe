"""Numbers of tokens as marks on a text: where each token lies in it, and an excerpt with the marks in its own places.

Places count characters (code points) from 0, ends excluded. A token that stands for no character of the text, such as
one that begins every text, has an empty span.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from likewise.thumbnails import EXCERPT, escape_controls

Span = tuple[int, int]
CUT = "…"
AGAINST = 0.02  # of the largest contribution: less is nothing to look at; dom.js of the report has it too
WORD = 16  # characters that an excerpt may begin later, to begin with a word


class TokenText(NamedTuple):
    """A text and where its tokens lie."""

    text: str
    spans: Sequence[Span] | None  # of each token that the model reads, in order; None where that is not known


class Segment(NamedTuple):
    """A piece of an excerpt."""

    text: str
    contribution: float  # 0 between marks
    strength: float  # of the largest contribution in the excerpt, 0 to 1
    against: bool  # whether it speaks against the sum, by more than a fiftieth of the largest contribution
    strongest: bool  # whether it is in the strongest passage


class MarkedText(NamedTuple):
    """An excerpt of a text whose tokens contribute to a number.

    Contributions of marks and `unshown` together are the sum over all tokens.
    """

    text: str  # control characters written out, … where the text goes on
    starts: tuple[int, ...]  # of the marks in the excerpt, in order; no two overlap
    ends: tuple[int, ...]
    contributions: tuple[float, ...]
    passage: Span  # the strongest passage, in the excerpt
    unshown: float  # of tokens outside of the excerpt, or that stand for no character

    @property
    def total(self) -> float:
        """The sum over all tokens."""
        return sum(self.contributions) + self.unshown

    @property
    def share(self) -> float:
        """How much of the sum the marks in the strongest passage contribute; NaN of a sum that is not positive."""
        first, end = self.passage
        inside = sum(c for s, c in zip(self.starts, self.contributions, strict=True) if first <= s < end)
        return inside / self.total if self.total > 0 else float("nan")

    @property
    def segments(self) -> list[Segment]:
        """The excerpt piece by piece, marked and not; pieces begin and end with the strongest passage too."""
        first, end = self.passage
        marks = list(zip(self.starts, self.ends, self.contributions, strict=True))
        places = sorted({0, len(self.text), first, end, *self.starts, *self.ends})
        most = max([c for _, _, c in marks if c > 0], default=1.0)
        found = []
        for start, stop in pairwise(places):
            value = next((c for s, e, c in marks if s <= start < e), 0.0)
            inside = first <= start < end
            against = value < -AGAINST * most
            found.append(Segment(self.text[start:stop], value, max(0.0, value / most), against, inside))
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        first, end = self.passage
        marks = zip(self.starts, self.ends, self.contributions, strict=True)
        return {
            "text": self.text,
            "passage": self.text[first:end],
            "start": first,
            "end": end,
            "share": self.share if self.total > 0 else None,
            "similarity": self.total,
            "unshown": self.unshown,
            "marks": [{"start": s, "end": e, "contribution": c} for s, e, c in marks],
        }


def token_spans(tokenizer: Any, text: str, **encoding: Any) -> tuple[list[int], list[Span] | None]:
    """Return the tokens of a text and where they lie in it, None where the tokenizer does not tell.

    A fast tokenizer knows the places. Of another one, tokens are decoded, one more at a time: where that gives the
    text back, or its beginning, each token has the characters that it adds, and tokens that share the bytes of one
    character share its place. Where it does not, as with a tokenizer that changes case, places are not known.

    Args:
        tokenizer: Of transformers.
        text: The text.
        **encoding: What the tokenizer is called with, such as truncation and max_length.

    """
    if getattr(tokenizer, "is_fast", False):
        found = tokenizer(text, return_offsets_mapping=True, **encoding)
        return list(found["input_ids"]), [(int(a), int(b)) for a, b in found["offset_mapping"]]
    ids = list(tokenizer(text, **encoding)["input_ids"])
    return ids, _decoded_spans(tokenizer, text, ids)


def mark_text(
    text: str,
    spans: Sequence[Span],
    contributions: Sequence[float],
    strongest: Span,
    length: int = EXCERPT,
) -> MarkedText:
    """Return an excerpt of at most `length` characters that holds the strongest passage, with the marks of tokens.

    The excerpt is the beginning of the text where the passage lies in it. Tokens that share characters, as those of the
    bytes of one, become one mark. Tokens that contribute nothing are not marked.

    Args:
        text: The whole text.
        spans: Of its tokens.
        contributions: Of its tokens; more of them are padding, and 0.
        strongest: The first token of the strongest passage, and the one after the last.
        length: Characters of the excerpt.

    Raises:
        ValueError: There are fewer contributions than tokens, or a token beyond the last contributes.

    """
    if len(contributions) < len(spans) or any(contributions[len(spans) :]):
        raise ValueError(
            f"{len(spans)} tokens have a place in the text, and there are contributions of {len(contributions)}: "
            "both must be of the tokens that the model reads."
        )
    marks, placeless = _join_overlapping(spans, contributions)
    inside = [span for span in spans[strongest[0] : strongest[1]] if span[0] < span[1]]
    low, high = (min(a for a, _ in inside), max(b for _, b in inside)) if inside else (0, 0)
    window = _Window(text, low, high, length)
    shown = [(window.place(s), window.place(e), c) for s, e, c in marks]
    kept = [(s, e, c) for s, e, c in shown if s < e]
    return MarkedText(
        text=window.written,
        starts=tuple(s for s, _, _ in kept),
        ends=tuple(e for _, e, _ in kept),
        contributions=tuple(c for _, _, c in kept),
        passage=(window.place(low), window.place(high)),
        unshown=placeless + sum(c for s, e, c in shown if s >= e),
    )


def _join_overlapping(
    spans: Sequence[Span], contributions: Sequence[float]
) -> tuple[list[tuple[int, int, float]], float]:
    """Return marks that do not overlap, in order, and what tokens without a character contribute."""
    marks, placeless = list[tuple[int, int, float]](), 0.0
    for (start, end), value in sorted(zip(spans, contributions, strict=False), key=lambda pair: pair[0]):
        if start >= end:
            placeless += value
        elif marks and start < marks[-1][1]:
            first, last, before = marks[-1]
            marks[-1] = (first, max(last, end), before + value)
        else:
            marks.append((start, end, value))
    return [mark for mark in marks if mark[2] != 0], placeless


class _Window:
    """A part of a text as it is written out, and where the characters of the text lie in that."""

    def __init__(self, text: str, low: int, high: int, length: int) -> None:
        self._widths = _written_widths(text)
        fits = sum(self._widths) <= length or sum(self._widths[:high]) < length or length <= 2 * len(CUT)
        start = 0 if fits else _begin(text, self._widths, low, high, length)
        lead = CUT if start else ""
        room, stop = length - len(lead), start
        while stop < len(text) and self._widths[stop] <= room:
            room -= self._widths[stop]
            stop += 1
        while stop < len(text) and stop > start and room < len(CUT):
            stop -= 1
            room += self._widths[stop]
        if stop > start and text[stop - 1 : stop + 1] == "\r\n":  # one character, as it is written
            stop -= 1
        self._start, self._stop, self._lead = start, stop, len(lead)
        self.written = lead + escape_controls(text[start:stop]) + (CUT if stop < len(text) else "")
        places = [self._lead]
        for width in self._widths[start:stop]:
            places.append(places[-1] + width)
        self._places = places

    def place(self, character: int) -> int:
        """Return where a character of the text lies in what is written; its nearest end for one outside."""
        return self._places[min(max(character, self._start), self._stop) - self._start]


def _written_widths(text: str) -> list[int]:
    """Return how many characters each one is written as; the first of a line end of Windows as none."""
    following = [*text[1:], ""]
    pairs = zip(text, following, strict=False)  # of an empty text there are none
    return [0 if a == "\r" and b == "\n" else len(escape_controls(a)) for a, b in pairs]


def _begin(text: str, widths: Sequence[int], low: int, high: int, length: int) -> int:
    """Return where an excerpt begins that has a passage in its middle: at a word, where one begins nearby."""
    passage, after = sum(widths[low:high]), sum(widths[high:])
    middle = min((length - passage) // 2, length - 2 * len(CUT) - passage)
    room, start = (
        max(0, middle, length - len(CUT) - passage - after),
        low,
    )  # all of the room where the text ends soon
    while start > 0 and widths[start - 1] <= room:
        start -= 1
        room -= widths[start]
    if text[start - 1 : start] == "\r" and text[start : start + 1] == "\n":
        start += 1
    blank = next((i for i in range(start, min(start + WORD, low)) if text[i].isspace()), None)
    return start if blank is None else blank + 1


def _decoded_spans(tokenizer: Any, text: str, ids: Sequence[int]) -> list[Span] | None:
    special = set(tokenizer.all_special_ids)
    spans, known, before = list[Span](), list[int](), 0
    for token in ids:
        if token in special:
            spans.append((before, before))
            continue
        known.append(token)
        decoded = tokenizer.decode(known, clean_up_tokenization_spaces=False)
        end = max(before, _common_length(decoded, text))
        spans.append((before, end))
        before = end
    if tokenizer.decode(known, clean_up_tokenization_spaces=False).rstrip("\ufffd") != text[:before]:
        return None
    following: Span | None = None
    for i in reversed(range(len(ids))):  # bytes of a character that a later token completes
        if ids[i] in special:
            spans[i] = (0, 0)
        elif spans[i][0] == spans[i][1] and following is not None:
            spans[i] = following
        else:
            following = spans[i]
    return spans


def _common_length(one: str, other: str) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
