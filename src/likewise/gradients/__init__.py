"""The four questions that every statistic asks of a network's gradients, and who answers them."""

from likewise.gradients.activations import Activations
from likewise.gradients.autograd import Jacobians
from likewise.gradients.base import (
    DependentSampleError,
    Features,
    GradientMismatchError,
    Gradients,
    Kept,
    Parts,
    PartsChanged,
    Pulled,
    Pushed,
    Rows,
    Vanished,
    VanishingGradientWarning,
)
from likewise.gradients.choice import Engine, chosen
from likewise.gradients.explicit import Explicit
from likewise.gradients.instead import TWICE, Substituting
from likewise.gradients.layers import Layers
from likewise.gradients.live import Live, live, refuse_dependent_samples_once
from likewise.gradients.meter import Meter
from likewise.gradients.probe import refuse_dependent_samples
from likewise.gradients.turning import turning

__all__ = [
    "TWICE",
    "Activations",
    "DependentSampleError",
    "Engine",
    "Explicit",
    "Features",
    "GradientMismatchError",
    "Gradients",
    "Jacobians",
    "Kept",
    "Layers",
    "Live",
    "Meter",
    "Parts",
    "PartsChanged",
    "Pulled",
    "Pushed",
    "Rows",
    "Substituting",
    "Vanished",
    "VanishingGradientWarning",
    "chosen",
    "live",
    "refuse_dependent_samples",
    "refuse_dependent_samples_once",
    "turning",
]
