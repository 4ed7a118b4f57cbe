"""Spot check: estimate how many labels are wrong, in all and among the flagged, from a few human decisions.

The ranking is cut into three strata: the flagged labels, the next most suspicious, and the rest. Samples are drawn at
random from each. A person's decisions on them estimate how many of each stratum are wrong, independent of any network.

    strata      flagged: f samples; next: the min(n − f, max(f, ⌈n/20⌉)) most suspicious others; the rest
    order       the next sample is of the stratum that has samples left and the smallest (drawn + ½) / weight,
                weights .4, .2, .4; a tie goes to the first stratum
    a stratum   of N samples, with m decisions, x of them wrong: p = x/m, v = m (N − 1) / (N − m);
                the ends of its share are those of Wilson's interval with a correction for continuity,
                (q + z²/2v ± z √(q (1 − q)/v + z²/4v²)) / (1 + z²/v), with q = p ± 1/2m within [0, 1], z = 1.96,
                at least x/N and at most 1 − (m − x)/N, which is what has been seen
    a total     Σ N p − √Σ N² (p − low)²   to   Σ N p + √Σ N² (high − p)²

The last line combines intervals of independent shares (the method of variance estimates recovery). Coverage was
checked by simulation, tests/statistics/test_spot_check.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from likewise.checks import check_integer, check_seed, check_tensor, describe
from likewise.statistics.label_issues import LabelSuspicion
from likewise.statistics.noise_rate import Interval
from likewise.wording import agreeing, counted

STRATA = ("flagged", "next", "rest")
WEIGHTS = (0.4, 0.2, 0.4)  # of decisions, by stratum
NEXT = 20  # the second stratum is a twentieth of all samples, or as many as are flagged
Z = 1.959963984540054  # of a normal distribution, 95 % lie within ± Z
UNKNOWN = Interval(math.nan, math.nan, math.nan)


class SpotCheckEstimate(NamedTuple):
    """Estimates from decisions, with 95 % intervals.

    Attributes:
        precision: Share of the flagged labels that are wrong; NaN until one of them is decided.
        errors: How many labels are wrong; NaN until one of every stratum is decided.
        decided: How many decisions were used per stratum: flagged, next, rest.

    Example:
        >>> import torch, likewise as lw
        >>> check = lw.spot_check(torch.rand(1000), torch.arange(1000) < 50)
        >>> check.estimate([False] * 30).errors.likely
        0.0

    """

    precision: Interval
    errors: Interval
    decided: tuple[int, ...]

    def __repr__(self) -> str:
        if math.isnan(self.errors.likely):
            return f"SpotCheckEstimate({self.decided} decided: decide at least one of every stratum)"
        low, likely, high = (round(value) for value in self.errors)
        flagged = "" if math.isnan(self.precision.likely) else f", {_percent(self.precision)} of the flagged"
        return f"SpotCheckEstimate({sum(self.decided)} decided: {likely} wrong ({low} to {high}){flagged})"


@dataclass(frozen=True)
class SpotCheck:
    """The samples to check, in order, and the estimate from decisions on them.

    Attributes:
        samples: Their numbers, in the order in which to check them; you may stop anywhere.
        strata: (n,) the stratum of every sample: 0 flagged, 1 next, 2 rest.
        sizes: How many samples each stratum has.

    Example:
        >>> import torch, likewise as lw
        >>> check = lw.spot_check(torch.rand(1000), torch.arange(1000) < 50, count=20)
        >>> check.sizes, len(check.samples)
        ((50, 50, 900), 20)

    """

    samples: Tensor
    strata: Tensor
    sizes: tuple[int, ...]

    def estimate(
        self, wrong: Mapping[int, bool | None] | Sequence[bool | None] | Tensor
    ) -> SpotCheckEstimate:
        """Estimate how many labels are wrong, in all and among the flagged.

        None (no decision) is left out, as if the sample had not been drawn. If undecidable labels are wrong more often
        than others, the estimate is too low.

        Args:
            wrong: For each of `samples`, in their order, whether its label is wrong; a shorter list covers the first
                ones. Or a mapping from sample numbers; numbers that were not drawn are refused, because they were not
                chosen at random.

        """
        known = self._decisions(wrong)
        decided, found = [0] * len(STRATA), [0] * len(STRATA)
        for sample, is_wrong in known.items():
            decided[int(self.strata[sample])] += 1
            found[int(self.strata[sample])] += is_wrong
        return estimate_errors(self.sizes, decided, found)

    def _decisions(self, wrong: Any) -> dict[int, bool]:
        drawn = self.samples.tolist()
        if not isinstance(wrong, Mapping):
            given = wrong.tolist() if isinstance(wrong, Tensor) else list(wrong)
            if len(given) > len(drawn):
                raise ValueError(
                    f"{counted(len(given), 'decision')} for {counted(len(drawn), 'sample')} drawn: expected no more "
                    "than those."
                )
            wrong = dict(zip(drawn, given, strict=False))
        others = [sample for sample in wrong if sample not in set(drawn)]
        if others:
            raise ValueError(
                f"{counted(len(others), 'decision')} {agreeing(len(others), 'is', 'are')} about samples that were "
                f"not drawn ({others[:5]}): pass decisions about `samples` only."
            )
        odd = [value for value in wrong.values() if value is not None and value not in (0, 1)]
        if odd:
            raise TypeError(f"A decision is True (wrong), False (right) or None, found {describe(odd[0])}.")
        return {sample: bool(value) for sample, value in wrong.items() if value is not None}


def spot_check(
    suspicion: LabelSuspicion | Any, flagged: Any = None, *, count: int = 30, seed: int = 0
) -> SpotCheck:
    """Draw samples to check by eye, so that a few decisions estimate how many labels are wrong.

    Samples are drawn at random from the flagged labels, the next most suspicious ones and the rest; the top of a list
    says nothing about the labels below it. The interval for the number of errors is wide if the rest is large: 20 right
    labels out of 20 still allow for 14 % wrong ones. The module docstring has the formula.

    Args:
        suspicion: The result of `likewise.label_suspicion`, or any scores (n,), larger for more suspicious.
        flagged: (n,) bool, for your own scores; None for no flags.
        count: How many samples to check; 20 to 50 are usual.
        seed: Seed of the draw.

    Returns:
        SpotCheck; check `samples` in their order, then call `estimate`.

    Example:
        >>> import torch, likewise as lw
        >>> score = torch.arange(400.0)
        >>> wrong = score >= 360                                        # the 40 most suspicious
        >>> check = lw.spot_check(score, flagged=score >= 340, count=40)
        >>> found = check.estimate([bool(wrong[i]) for i in check.samples])   # what you see
        >>> found.errors.low <= 40 <= found.errors.high
        True

    """
    if isinstance(suspicion, LabelSuspicion) and flagged is not None:
        raise ValueError("A LabelSuspicion has its own flags: leave out `flagged`, or pass scores instead.")
    given, flagged = (
        (suspicion.suspicion, suspicion.flagged)
        if isinstance(suspicion, LabelSuspicion)
        else (suspicion, flagged)
    )
    scores = check_tensor("suspicion", _copy_column(given)).cpu().double()
    if scores.dim() != 1 or not len(scores):
        raise ValueError(f"suspicion must be one number per sample, found {describe(given)}.")
    flags = torch.zeros(len(scores), dtype=torch.bool)
    if flagged is not None:
        flags = check_tensor("flagged", _copy_column(flagged)).cpu()
        if flags.shape != scores.shape or not ((flags == 0) | (flags == 1)).all():
            raise ValueError(
                f"flagged must be true or false for each of {len(scores)} samples, found {describe(flagged)}."
            )
    count, generator = (
        check_integer("count", count, 1),
        torch.Generator().manual_seed(check_seed("seed", seed)),
    )
    strata = _strata(scores, flags.bool())
    members = [(strata == h).nonzero()[:, 0] for h in range(len(STRATA))]
    sizes = tuple(len(each) for each in members)
    shuffled = [each[torch.randperm(len(each), generator=generator)].tolist() for each in members]
    samples = [shuffled[h].pop() for h in strata_order(sizes, count)]
    return SpotCheck(torch.tensor(samples), strata, sizes)


def strata_order(sizes: Sequence[int], count: int) -> list[int]:
    """Return the stratum of each draw, so that every prefix is divided by the weights."""
    drawn, order = [0] * len(sizes), list[int]()
    for _ in range(min(count, sum(sizes))):
        left = [h for h, size in enumerate(sizes) if drawn[h] < size]
        chosen = min(left, key=lambda h: ((drawn[h] + 0.5) / WEIGHTS[h], h))
        drawn[chosen] += 1
        order.append(chosen)
    return order


def estimate_errors(sizes: Sequence[int], decided: Sequence[int], wrong: Sequence[int]) -> SpotCheckEstimate:
    """Estimate errors from the size of each stratum, the number decided, and the number of these that are wrong."""
    shares = [_share(*each) if each[1] else None for each in zip(sizes, decided, wrong, strict=True)]
    missing = any(size and share is None for size, share in zip(sizes, shares, strict=True))
    known = [(size, share) for size, share in zip(sizes, shares, strict=True) if share is not None]
    errors = UNKNOWN
    if known and not missing:
        likely = sum(size * share.likely for size, share in known)
        below = math.sqrt(sum((size * (share.likely - share.low)) ** 2 for size, share in known))
        above = math.sqrt(sum((size * (share.high - share.likely)) ** 2 for size, share in known))
        errors = Interval(max(likely - below, float(sum(wrong))), likely, likely + above)
        errors = errors._replace(high=min(errors.high, float(sum(sizes) - sum(decided) + sum(wrong))))
    return SpotCheckEstimate(shares[0] or UNKNOWN, errors, tuple(decided))


def _copy_column(values: Any) -> Any:
    """Copy a table column, which may be read-only: torch warns about those."""
    return np.array(values) if hasattr(values, "__array__") and not isinstance(values, Tensor) else values


def _strata(scores: Tensor, flags: Tensor) -> Tensor:
    n, f = len(scores), int(flags.sum())
    others = (~flags).nonzero()[:, 0]
    others = others[scores[others].argsort(descending=True, stable=True)]
    strata = torch.full((n,), 2)
    strata[flags] = 0
    strata[others[: max(f, -(-n // NEXT))]] = 1
    return strata


def _share(size: int, decided: int, wrong: int) -> Interval:
    """Return the share of a stratum that is wrong."""
    likely = wrong / decided
    if decided == size:
        return Interval(likely, likely, likely)
    independent = decided * (size - 1) / (size - decided)
    low, high = (
        _wilson_end(min(1.0, max(0.0, likely + side / (2 * decided))), independent, side) for side in (-1, 1)
    )
    low, high = max(low, wrong / size), min(high, 1 - (decided - wrong) / size)
    return Interval(min(low, likely), likely, max(high, likely))  # rounding


def _wilson_end(share: float, count: float, side: int) -> float:
    spread = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    return (share + Z**2 / (2 * count) + side * spread) / (1 + Z**2 / count)


def _percent(interval: Interval) -> str:
    low, likely, high = (f"{value:.0%}" for value in interval)
    return f"{likely} ({low} to {high})"
