"""How many labels are wrong, and how likely is each? From votes of the similar, with no true label at hand.

Votes are turned into chances q(c) that class c is the label at hand, by how often it is where c gets such a
share of the votes (isotonic). A matrix T(c, y), how often class c is labeled y, is read off the votes as
well, in three ways: from samples whose votes reach the usual share of some class (confident counting), and as
two ends, from the half of each class's samples with the clearest votes and from all of them. With T, q is
taken apart into chances of the true class, and Bayes' rule says how likely the label at hand is wrong.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

BINS = 401  # of vote shares, so that many classes cost little
STEPS = 10  # of taking q apart
MOST_TAKEN_APART = 200  # classes: beyond, labels are taken to be nearly right


class Between(NamedTuple):
    """An estimate and the two ends it should lie between."""

    low: float
    likely: float
    high: float


class Mislabeled(NamedTuple):
    """What votes say of wrong labels."""

    chance: Tensor  # (n,) that the label is wrong
    errors: Between  # how many labels are wrong
    ends: tuple[Tensor, Tensor]  # the chances with the fewest and the most errors


def mislabeled(shares: Tensor, given: Tensor) -> Mislabeled:
    """Return chances and number of wrong labels, from each class's share of the votes, (n, c) in float64."""
    q = calibrated(shares, given)
    counted = _confident(shares, given)
    fewest, most = (_by_winner(shares, given, share) for share in (0.5, 0.0))
    winners = torch.bincount(shares.argmax(1), minlength=shares.shape[1]).double()
    low, high = (float((winners * (1 - _rates(joint).diagonal())).sum()) for joint in (fewest, most))
    low, high = min(low, high), max(low, high)
    low, high = (
        max(0.0, low - 1.96 * (2 * low) ** 0.5),
        high + 1.96 * high**0.5,
    )  # from half, from all of them
    likely = float(counted.sum() - counted.diagonal().sum())
    chance, *ends = (wrong_chance(q, _smoothed(joint), given) for joint in (counted, fewest, most))
    return Mislabeled(chance, Between(low, min(max(likely, low), high), high), (ends[0], ends[1]))


def calibrated(shares: Tensor, given: Tensor) -> Tensor:
    """Return the chance of each class to be the label at hand, (n, c), as it grows with its share of votes."""
    from sklearn.isotonic import IsotonicRegression

    at, labels = shares.double().cpu().numpy(), given.cpu().numpy()
    edges = np.unique(np.quantile(at, np.linspace(0, 1, BINS)))
    of = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, len(edges) - 1)
    total = np.bincount(of.ravel(), minlength=len(edges)).astype(float)
    hits = np.bincount(of[np.arange(len(labels)), labels], minlength=len(edges))
    seen = total > 0
    rate = (hits[seen] + 0.5 / len(edges)) / (total[seen] + 1)
    grown = IsotonicRegression(out_of_bounds="clip").fit(edges[seen], rate, sample_weight=total[seen])
    found = torch.tensor(grown.predict(edges)[of]).clamp(min=1e-6)
    return found / found.sum(1, keepdim=True)


def wrong_chance(q: Tensor, transition: Tensor, given: Tensor) -> Tensor:
    """Return the chance that each label is wrong, (n,), where class c is labeled y at rate T(c, y)."""
    true = q
    if q.shape[1] <= MOST_TAKEN_APART:
        for _ in range(STEPS):  # Richardson-Lucy: q = true @ T with all chances positive
            true = true * ((q / (true @ transition).clamp(min=1e-12)) @ transition.T)
            true = true / true.sum(1, keepdim=True)
    joint = true * transition[:, given].T
    right = joint.gather(1, given[:, None])[:, 0]
    return (1 - right / joint.sum(1).clamp(min=1e-300)).clamp(0, 1)


def _confident(shares: Tensor, given: Tensor) -> Tensor:
    """Return how many samples of class c are labeled y, (c, c): those that reach c's usual share count."""
    classes = shares.shape[1]
    members = torch.nn.functional.one_hot(given, classes).double()
    sizes = members.sum(0)
    usual = (shares * members).sum(0) / sizes.clamp(min=1)
    reached = (shares >= usual) & (sizes > 0)
    sure = reached.any(1)
    likely = torch.where(reached, shares, -1).argmax(1)
    joint = _counts(likely[sure], given[sure], classes)
    return joint / joint.sum(0).clamp(min=1) * sizes  # each label as often as it is given


def _by_winner(shares: Tensor, given: Tensor, least: float) -> Tensor:
    """Return how the winners of votes are labeled, (c, c): of each class, those above this quantile."""
    winner, largest = shares.argmax(1), shares.max(1).values
    order = torch.argsort(largest).argsort() + len(largest) * winner  # places within each winner, by votes
    rank = torch.argsort(order).argsort()
    sizes = torch.bincount(winner, minlength=shares.shape[1])
    place = (rank - (sizes.cumsum(0) - sizes)[winner]) / sizes[winner]
    sure = place >= least
    return _counts(winner[sure], given[sure], shares.shape[1])


def _counts(true: Tensor, given: Tensor, classes: int) -> Tensor:
    return torch.bincount(true * classes + given, minlength=classes**2).reshape(classes, classes).double()


def _rates(joint: Tensor) -> Tensor:
    """Return each row as shares; a class that no sample seems to be of is always labeled right."""
    sizes = joint.sum(1, keepdim=True)
    return torch.where(sizes > 0, joint / sizes.clamp(min=1), torch.eye(len(joint)).to(joint))


def _smoothed(joint: Tensor) -> Tensor:
    """Return rates of labels, drawn towards errors that are equally likely for all classes."""
    classes = len(joint)
    wrong = 1 - float(joint.diagonal().sum() / joint.sum().clamp(min=1))
    other = wrong / max(1, classes - 1)
    prior = torch.full_like(joint, other).fill_diagonal_(1 - wrong)
    return (joint + classes * prior) / (joint.sum(1, keepdim=True) + classes)
