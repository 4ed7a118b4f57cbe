"""What would change a prediction: the fewest training samples on which the vote of its neighbors rests.

Every row votes for its label with the weight max(centered similarity, 0)^8, as in `likewise.reliability`. Let a be the
class with the most votes and b the next one. Rows of a are left out, or relabeled as b, in the order of their weights
until b leads; taking the largest weights first makes the set as small as possible. If labels are values, it is the one
row without which their weighted mean moves most.

This is first order: the network stays the same. A network trained without these rows may have other similarities.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from likewise.gram import Reducer, Strip
from likewise.linalg import power_
from likewise.statistics.neighbors import merge_largest
from likewise.statistics.reliability import EXPONENT

MOST = 1024  # rows of the leading class that are tried
SHOWN = 12  # rows that are named
CAVEAT = "First order: votes are weighted by similarity, and the network was not trained again."


@dataclass(frozen=True)
class Counterfactual:
    """What would change the vote of an input's neighbors.

    Attributes:
        votes_for: The name of the class that leads, or the mean label.
        would_be: The name of the class that would lead, or the mean label without the row; empty if there is none.
        share: Share of the votes for the leading class, 0 to 1; None for values.
        leave_out: How many rows must be left out; None if no number suffices, or more than 1,024 are needed.
        relabel: How many of them must be relabeled instead; None in the same cases, and for values.
        rows: The first of these rows, at most 12.
        text: The same in one or two sentences, with its caveat.

    """

    votes_for: str
    would_be: str
    share: float | None
    leave_out: int | None
    relabel: int | None
    rows: tuple[int, ...]
    text: str

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "votes_for": self.votes_for,
            "would_be": self.would_be,
            "share": self.share,
            "leave_out": self.leave_out,
            "relabel": self.relabel,
            "rows": list(self.rows),
            "text": self.text,
        }


class Flip(NamedTuple):
    """The fewest rows that change a vote, for each input."""

    leader: Tensor  # (n,) class
    other: Tensor  # (n,) the class that comes next; −1 where no other class has a vote
    share: Tensor  # (n,) of the votes for the leader; 0 where there is no vote at all
    leave_out: Tensor  # (n,) rows to leave out; 0 where no number does it, −1 where more than MOST are needed
    relabel: Tensor  # (n,) rows to relabel, likewise
    places: Tensor  # (n, s) the first rows in the order of their weights, −1 where there are no more


@dataclass(frozen=True)
class FlipReducer(Reducer):
    """The fewest columns of the leading class without which another one leads, or relabeled as which."""

    classes: Tensor  # (m,) class numbers of the columns
    count: int  # of classes
    results: ClassVar[int] = len(Flip._fields)
    centered: ClassVar[bool] = True

    def __call__(self, strip: Strip) -> tuple[Tensor, ...]:
        """Return the fields of a `Flip`, each (b, ...)."""
        weights = power_(strip.centered.double().clamp(min=0), EXPONENT)
        classes = self.classes.to(weights.device)
        votes = weights.new_zeros(len(weights), max(2, self.count)).index_add_(1, classes, weights)
        (leader, other), (lead, next_best) = (part.unbind(1) for part in merge_largest(None, votes, 0, 2))
        share = lead / votes.sum(1).clamp(min=1e-300)
        mine = torch.where(classes == leader[:, None], weights, 0)
        places, heaviest = merge_largest(None, mine, 0, min(MOST, mine.shape[1]))
        taken, margin = heaviest.cumsum(1), (lead - next_best)[:, None]
        left_out = _first(taken > margin, next_best > 0, mine, MOST)
        relabeled = _first(2 * taken > margin, lead > 0, mine, MOST)
        shown = torch.where(heaviest > 0, places, -1)[:, :SHOWN]
        return leader, torch.where(next_best > 0, other, -1), share, left_out, relabeled, shown


@dataclass(frozen=True)
class MeanShiftReducer(Reducer):
    """The column without which the weighted mean of the columns' values moves most."""

    values: Tensor  # (m, q)
    results: ClassVar[int] = 3
    centered: ClassVar[bool] = True

    def __call__(self, strip: Strip) -> tuple[Tensor, ...]:
        """Return the means, (b, q), those without the column, (b, q), and its place, (b,); −1 where there is none."""
        weights = power_(strip.centered.double().clamp(min=0), EXPONENT)
        values = self.values.to(weights)
        total = weights.sum(1, keepdim=True)
        means = weights @ values / total.clamp(min=1e-300)
        rest = total - weights
        known = (weights > 0) & (rest > 1e-12 * total)  # without the only one there is no mean
        gaps = torch.cdist(means, values) * weights / rest.clamp(min=1e-300)
        place = torch.where(known, gaps, -1.0).argmax(1)
        own = weights.gather(1, place[:, None])
        without = (means * total - own * values[place]) / (total - own).clamp(min=1e-300)
        found = known.any(1)
        return means, torch.where(found[:, None], without, means), torch.where(found, place, -1)


def _first(reached: Tensor, possible: Tensor, mine: Tensor, most: int) -> Tensor:
    """Return the number of the first column that reaches it; 0 if none can, −1 if more are needed."""
    beyond = ((mine > 0).sum(1) > most) & possible
    count = torch.where(reached.any(1), reached.int().argmax(1) + 1, torch.where(beyond, -1, 0))
    return torch.where(possible, count, 0)


def describe_flip(
    prediction: str, votes_for: str, would_be: str, share: float, counts: tuple[int, int]
) -> str:
    """Describe what would change a vote.

    Args:
        prediction: The prediction of the network.
        votes_for: The class that leads.
        would_be: The class that comes next; empty if no other class has a vote.
        share: Share of the votes for the leader; 0 without any vote.
        counts: Rows to leave out and to relabel, as in a `Flip`.

    """
    leave_out, relabel = counts
    if not share:
        return "No training sample is similar to it: the prediction rests on none of them alone."
    if votes_for != prediction:
        without = f"; without {_samples(leave_out)} they would vote for {would_be}" if leave_out > 0 else ""
        return (
            f"Similar training samples already vote for {votes_for} ({share:.0%}), not for {prediction}: the "
            f"prediction does not rest on them{without}. {CAVEAT}"
        )
    if not would_be:
        return f"All training samples like it are labeled {votes_for}: leaving some out changes nothing. {CAVEAT}"
    if leave_out == 0:  # they would have to be all
        return f"Only without every similar sample labeled {votes_for} would {would_be} lead. {CAVEAT}"
    if leave_out < 0:
        return f"It rests on many: without {MOST:,} training samples the vote would still be {votes_for}. {CAVEAT}"
    most = "most similar of them were"
    them = "it were" if leave_out == 1 else f"the {most}" if relabel == 1 else f"the {relabel:,} {most}"
    return (
        f"Without {_samples(leave_out)} the similar ones would vote for {would_be} instead of {votes_for}; so they "
        f"would if {them} labeled {would_be}. {CAVEAT}"
    )


def _samples(count: int) -> str:
    return "one training sample" if count == 1 else f"{count:,} training samples"


def describe_mean_shift(before: str, after: str, sample: str) -> str:
    """Describe how the mean label of similar samples moves without the one that matters most, if there is one."""
    if not sample:
        return "No training sample is similar to it: the prediction rests on none of them alone."
    return (
        f"The labels of similar training samples have a mean of {before}, weighted by similarity; without the one that "
        f"matters most, {sample}, it would be {after}. {CAVEAT}"
    )
