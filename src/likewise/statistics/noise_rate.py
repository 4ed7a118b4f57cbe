"""Estimate how many labels are wrong, and how likely each one is, from the votes of similar samples.

No true label is known. Three estimates that err in different directions are combined.

Counted: an isotonic regression turns votes into probabilities q(c) that class c is the given label. A matrix T(c, y),
how often class c is labeled y, is estimated from the votes: from samples whose votes reach the usual share of some
class; and for the two ends of the interval, from the quarter of each class's samples with the clearest votes and from
all samples. T decomposes q into probabilities of the true class, and Bayes' rule gives the probability that the label
is wrong. If the network has memorized wrong labels, some of them win the vote, and this finds too few.

Grouped: the logarithm of the best other class's share over the label's own is modeled as a mixture of two normal
distributions, for right and for wrong labels. This finds too many. No group of labels stands out if two distributions
explain the data hardly better than one, if the labels of one group do not lose their votes, if most samples lose
theirs, if many more labels lose their votes than the group has, or if the groups are not well separated (classes
overlap). Then the smaller of both probabilities is used, and the lower ends are 0.

Mirrored: if classes overlap, right labels lose their votes too, but narrowly; the number of narrow wins shows how many.
A label that wins by r, the logarithm of its share over the best other's, could just as well have lost by r, less likely
for larger r; close votes show how much less. Labels that lose beyond that are wrong. This finds too few. If overlap
explains most of the group, no group stands out; otherwise the probability is the mean of grouped and mirrored. Nor does
a group stand out in a network's votes if the number of errors may be 0.

Neighbors cannot judge if no group stands out and the network either has memorized its labels (wrong ones then win the
vote) or supports few of them (right ones then lose it). One network then cannot tell, and `reason` says why.
"""

import math
import warnings
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from likewise.torch_state import preserve_generators

BINS = 401  # of vote shares, so that many classes cost little
STEPS = 10  # iterations to decompose q
FEWEST = 100  # samples needed to look for groups
DISTINCT = 0.1  # gain of the Bayesian information criterion per sample from which there are two groups
OVERLAP = 0.12  # share of labels that may lose the vote beyond those in the group of wrong ones
EXPLAINED = 0.5  # share of a group that may lose narrowly, as right labels of overlapping classes do
CLEAR = 1.5  # a label that loses by more is not pooled with those that lose narrowly, however few lose
CLOSE = 1.0  # votes within a factor of e: how often these are lost shows how often right labels lose
USUAL, USUAL_DEVIATION = 1.0, 0.2  # prior of k if close votes are few: 0.6 to 1.7 on networks with many
SEPARATION = 2.2  # of the groups' means, in standard deviations: below, hard samples are in both
MEMORIZED = 0.9  # share of reproduced labels from which wrong ones may be among them
WEAK = 0.6  # share of labels supported by neighbors below which neighbors cannot judge
MOST_CLASSES = 2000  # with more, only the order of suspicion is given
MOST_TAKEN_APART = 200  # with more classes, labels are assumed to be nearly right


class Interval(NamedTuple):
    """An estimate and the two ends it should lie between."""

    low: float
    likely: float
    high: float


class NoiseEstimate(NamedTuple):
    """Estimates of wrong labels from votes."""

    chance: Tensor  # (n,) probability that the label is wrong
    errors: Interval  # how many labels are wrong
    separated: bool  # whether labels form two groups
    distinct: bool  # whether wrong labels stand out as a group, which cannot be empty
    both: tuple[Tensor, Tensor]  # probabilities mirrored and grouped; if not separated, counted and grouped
    reason: str  # why one network cannot tell; empty if it can


@preserve_generators()  # importing scikit-learn and fitting draw from Python's and NumPy's
def estimate_noise(
    shares: Tensor, given: Tensor, learned: float | None = None, judge: str = "The network"
) -> NoiseEstimate:
    """Estimate the number of wrong labels, and the probability of each to be wrong.

    Args:
        shares: (n, c) each class's share of the votes, in float64.
        given: (n,) the labels.
        learned: Share of the labels that the network reproduces; None if its outputs are not classes.
        judge: What `reason` calls the network.

    """
    won = float((shares.argmax(1) == given).double().mean())
    if shares.shape[1] > MOST_CLASSES:  # tables of classes × classes would not fit
        none = torch.zeros(len(given), dtype=torch.float64)
        errors = Interval(0.0, 0.0, float((shares.argmax(1) != given).sum()))
        return NoiseEstimate(none, errors, False, False, (none, none), _why_unknown(won, learned, judge))
    joint = _count_confident(shares, given)
    counted = wrong_chance(calibrate_shares(shares, given), _smooth_rates(joint), given)
    against = _votes_against(shares, given)
    narrow = narrow_loss_chance(against)
    mirrored = torch.where(against > 0, 1 - narrow, 0)
    grouped, apart = _fit_two_groups(against)
    group = (grouped >= 0.5) & (against > 0)
    low, high = _count_ends(shares, given)
    beyond, lost = float(mirrored.sum()), float((against > 0).sum())
    spread = 1.96 * (2 * lost - beyond) ** 0.5  # of all that lose, less those that do so narrowly
    low = min(low, max(0.0, beyond - spread))
    is_overlap = bool(group.any()) and float(narrow[group].mean()) > EXPLAINED
    is_none_possible = low == 0 and learned is not None  # for votes alone, the group is all there is
    separated = apart and not is_overlap
    distinct = separated and not is_none_possible
    chances = (mirrored, grouped) if separated else (counted, grouped)
    high = max(high, float(grouped.sum())) if apart else high
    if separated:
        likely, chance = (beyond + float(grouped.sum())) / 2, (mirrored + grouped) / 2
    else:
        low, likely = 0.0, float(joint.sum() - joint.diagonal().sum())
        chance = torch.minimum(counted, grouped)
    high = min(high, float(len(given)))
    errors = Interval(low, min(max(likely, low), high), high)
    return NoiseEstimate(
        chance, errors, separated, distinct, chances, "" if distinct else _why_unknown(won, learned, judge)
    )


def _count_ends(shares: Tensor, given: Tensor) -> tuple[float, float]:
    """Return the ends of the number of wrong labels, by the clearest quarter of the votes and by all of them."""
    winners = torch.bincount(shares.argmax(1), minlength=shares.shape[1]).double()
    rates = (_rates(_count_winners(shares, given, share)) for share in (0.75, 0.0))
    low, high = sorted(float((winners * (1 - rate.diagonal())).sum()) for rate in rates)
    return max(0.0, low - 1.96 * (4 * low) ** 0.5), high + 1.96 * high**0.5  # the former is seen in a quarter


def _why_unknown(won: float, learned: float | None, judge: str) -> str:
    """Return why neighbors cannot judge labels if no group stands out; empty if they may."""
    if learned is None:
        return ""
    if learned >= MEMORIZED:
        return (
            f"{judge} reproduces {learned:.0%} of the labels, the votes of similar samples {won:.0%}, and no group "
            "of labels stands out: wrong labels may be memorized, and then look right."
        )
    if won < WEAK:
        return (
            f"The votes of similar samples support only {won:.0%} of the labels: {judge[0].lower()}{judge[1:]} does "
            "not separate the classes well enough to tell wrong labels from hard samples."
        )
    return ""


def calibrate_shares(shares: Tensor, given: Tensor) -> Tensor:
    """Return the probability of each class to be the given label, (n, c), increasing with its share of votes."""
    with warnings.catch_warnings():  # importing it changes their filters
        from sklearn.isotonic import IsotonicRegression

    values, labels = shares.double().cpu().numpy(), given.cpu().numpy()
    edges = np.unique(np.quantile(values, np.linspace(0, 1, BINS)))
    bins = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 1)
    total = np.bincount(bins.ravel(), minlength=len(edges)).astype(float)
    hits = np.bincount(bins[np.arange(len(labels)), labels], minlength=len(edges))
    seen = total > 0
    rate = (hits[seen] + 0.5 / len(edges)) / (total[seen] + 1)
    curve = IsotonicRegression(out_of_bounds="clip").fit(edges[seen], rate, sample_weight=total[seen])
    found = torch.tensor(curve.predict(edges)[bins]).clamp(min=1e-6)
    return found / found.sum(1, keepdim=True)


def wrong_chance(q: Tensor, transition: Tensor, given: Tensor) -> Tensor:
    """Return the probability that each label is wrong, (n,), if class c is labeled y at rate T(c, y)."""
    true = q
    if q.shape[1] <= MOST_TAKEN_APART:
        for _ in range(STEPS):  # Richardson-Lucy: q = true @ T with all chances positive
            true = true * ((q / (true @ transition).clamp(min=1e-12)) @ transition.T)
            true = true / true.sum(1, keepdim=True)
    joint = true * transition[:, given].T
    right = joint.gather(1, given[:, None])[:, 0]
    return (1 - right / joint.sum(1).clamp(min=1e-300)).clamp(0, 1)


def narrow_loss_chance(against: Tensor) -> Tensor:
    """Return the probability that a label is right but lost its vote narrowly, because classes overlap; (n,), 0 if won.

    Log-ratios of votes are assumed to have a normal error, so that right labels lose by r at Φ(-k r) / Φ(k r) times the
    rate at which they win by r. That gives the number of right labels among those that lose by about r.

    Args:
        against: (n,) logarithm of the best other class's share over the label's own; the vote is lost above 0.

    """
    with warnings.catch_warnings():
        from sklearn.isotonic import IsotonicRegression

    values = against.double().cpu()
    lost, right = values > 0, torch.zeros_like(values)
    if not lost.any():
        return right.to(against.device)
    lost_by, k = values[lost], _sharpness(values)
    won_by = -values[~lost & (-values <= lost_by.max())]
    quantiles = np.quantile(lost_by.numpy(), np.linspace(0, 1, max(1, min(20, len(lost_by) // 25)) + 1)[1:-1])
    edges = torch.tensor(np.unique(np.concatenate([quantiles, [CLEAR]])))
    bins = len(edges) + 1
    odds = torch.exp(torch.special.log_ndtr(-k * won_by) - torch.special.log_ndtr(k * won_by))
    expected = torch.bincount(torch.bucketize(won_by, edges), odds, minlength=bins)
    losers = torch.bincount(torch.bucketize(lost_by, edges), minlength=bins).clamp(min=1)
    falling = IsotonicRegression(increasing=False)
    chance = falling.fit_transform(np.arange(bins), expected / losers, sample_weight=losers)
    right[lost] = torch.tensor(chance).double().clamp(max=1)[torch.bucketize(lost_by, edges)]
    return right.to(against.device)


def _sharpness(against: Tensor) -> float:
    """Return the most likely k, if close votes are lost by r with probability Φ(-k r); near 1 if few are close."""
    close = against[against.abs() <= CLOSE]
    low, high = 0.0, 10.0
    for _ in range(40):
        k = (low + high) / 2
        density = torch.exp(-((k * close) ** 2) / 2 - torch.special.log_ndtr(-k * close))
        slope = (
            -float((close * density).sum()) / (2 * math.pi) ** 0.5 - (k - USUAL) / USUAL_DEVIATION**2
        )  # of the log-posterior
        low, high = (k, high) if slope > 0 else (low, k)
    return (low + high) / 2


def _votes_against(shares: Tensor, given: Tensor) -> Tensor:
    """Return the logarithm of the best other class's share over the label's own, (n,); 0 if there is one class."""
    logs = (shares + 1e-3).log()
    if shares.shape[1] < 2:
        return torch.zeros_like(logs[:, 0])
    others = logs.scatter(1, given[:, None], -torch.inf).max(1).values
    return others - logs.gather(1, given[:, None])[:, 0]


def _fit_two_groups(values: Tensor) -> tuple[Tensor, bool]:
    """Return each label's probability of being in the group with more votes against it, and whether there are two."""
    with warnings.catch_warnings():
        from sklearn.mixture import GaussianMixture

    against = values.cpu().numpy()[:, None]
    if len(against) < FEWEST or against.std() < 1e-9:
        return torch.zeros(len(against), dtype=torch.float64), False
    one = GaussianMixture(1).fit(against)
    two = GaussianMixture(2, random_state=0, n_init=3).fit(against)
    wrong = int(two.means_[:, 0].argmax())
    chance = two.predict_proba(against)[:, wrong]
    chance[against[:, 0] < two.means_[1 - wrong, 0]] = 0  # the wider of two is above on both sides
    gain = (one.bic(against) - two.bic(against)) / len(against)
    voted_down = (
        two.means_[wrong, 0] > 0 and two.weights_[wrong] < 0.5
    )  # else right labels fall in two groups
    lost = float((values > 0).double().mean())  # where neighbors are no judge, nothing is known
    apart = (two.means_[wrong, 0] - two.means_[1 - wrong, 0]) / two.covariances_.mean() ** 0.5
    few_hard = bool(lost < 0.5 and lost - two.weights_[wrong] <= OVERLAP and apart >= SEPARATION)
    return torch.tensor(chance), bool(gain > DISTINCT and voted_down) and few_hard


def _count_confident(shares: Tensor, given: Tensor) -> Tensor:
    """Return how many samples of class c are labeled y, (c, c), counting those that reach c's usual share."""
    classes = shares.shape[1]
    members = torch.nn.functional.one_hot(given, classes).double()
    sizes = members.sum(0)
    usual = (shares * members).sum(0) / sizes.clamp(min=1)
    reached = (shares >= usual.clamp(min=1 / classes)) & (sizes > 1)  # nobody votes for a class of one
    sure = reached.any(1)
    likely = torch.where(reached, shares, -1).argmax(1)
    joint = _count_pairs(likely[sure], given[sure], classes)
    return joint / joint.sum(0).clamp(min=1) * sizes  # each label as often as it is given


def _count_winners(shares: Tensor, given: Tensor, least: float) -> Tensor:
    """Return how the winners of votes are labeled, (c, c): of each class, those above this quantile."""
    winner, largest = shares.argmax(1), shares.max(1).values
    order = torch.argsort(largest).argsort() + len(largest) * winner  # places within each winner, by votes
    rank = torch.argsort(order).argsort()
    sizes = torch.bincount(winner, minlength=shares.shape[1])
    place = (rank - (sizes.cumsum(0) - sizes)[winner]) / sizes[winner]
    sure = place >= least
    return _count_pairs(winner[sure], given[sure], shares.shape[1])


def _count_pairs(true: Tensor, given: Tensor, classes: int) -> Tensor:
    return torch.bincount(true * classes + given, minlength=classes**2).reshape(classes, classes).double()


def _rates(joint: Tensor) -> Tensor:
    """Return each row as shares; a class that no sample seems to belong to is always labeled right."""
    sizes = joint.sum(1, keepdim=True)
    return torch.where(sizes > 0, joint / sizes.clamp(min=1), torch.eye(len(joint)).to(joint))


def _smooth_rates(joint: Tensor) -> Tensor:
    """Return label rates, shrunk towards errors that are equally likely for all classes."""
    classes = len(joint)
    total = float(joint.sum())
    wrong = 1 - float(joint.diagonal().sum()) / total if total else 0.0
    other = wrong / max(1, classes - 1)
    prior = torch.full_like(joint, other).fill_diagonal_(1 - wrong)
    return (joint + classes * prior) / (joint.sum(1, keepdim=True) + classes)
