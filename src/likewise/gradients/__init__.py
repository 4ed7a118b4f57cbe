"""The four questions that every statistic asks of a network's gradients, and who answers them."""

from likewise.gradients.activations import Activations
from likewise.gradients.autograd import Jacobians
from likewise.gradients.base import (
    Gradients,
    Pulled,
    Pushed,
    Rows,
    Vanished,
    VanishingGradientWarning,
)
from likewise.gradients.explicit import Explicit
from likewise.gradients.probe import refuse_dependent_samples

__all__ = [
    "Activations",
    "Explicit",
    "Gradients",
    "Jacobians",
    "Pulled",
    "Pushed",
    "Rows",
    "Vanished",
    "VanishingGradientWarning",
    "refuse_dependent_samples",
]
