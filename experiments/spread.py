"""How sure a mean over repeats is."""

import math
from collections.abc import Sequence

from scipy import stats


def interval(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of the mean, by Student's t; not a number for less than two values."""
    if len(values) < 2:
        return math.nan
    return float(stats.sem(values) * stats.t.ppf(0.975, len(values) - 1))
