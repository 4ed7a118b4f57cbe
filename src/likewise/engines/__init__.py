"""The four questions that every statistic asks of a network's gradients, and who answers them."""

from likewise.engines.activations import Activations
from likewise.engines.base import (
    DependentSampleError,
    Engine,
    Features,
    GradientMismatchError,
    JvpResult,
    Parts,
    PartsChangedError,
    Rows,
    SelfKernelCache,
    VjpResult,
    ZeroGradientLog,
    ZeroGradientWarning,
)
from likewise.engines.dense import DenseEngine
from likewise.engines.differentiable import (
    DifferentiableGradients,
    differentiable_gradients,
    live_parameters,
    refuse_dependent_samples_once,
)
from likewise.engines.double_backward import TWICE, FunctionSubstitution
from likewise.engines.jacobians import Jacobians
from likewise.engines.memory import MemoryMeter
from likewise.engines.selection import EngineName, select_engine
from likewise.engines.tangents import gradient_tangents
from likewise.engines.traced import TracedEngine
from likewise.engines.validation import check_independent_samples

__all__ = [
    "TWICE",
    "Activations",
    "DenseEngine",
    "DependentSampleError",
    "DifferentiableGradients",
    "Engine",
    "EngineName",
    "Features",
    "FunctionSubstitution",
    "GradientMismatchError",
    "Jacobians",
    "JvpResult",
    "MemoryMeter",
    "Parts",
    "PartsChangedError",
    "Rows",
    "SelfKernelCache",
    "TracedEngine",
    "VjpResult",
    "ZeroGradientLog",
    "ZeroGradientWarning",
    "check_independent_samples",
    "differentiable_gradients",
    "gradient_tangents",
    "live_parameters",
    "refuse_dependent_samples_once",
    "select_engine",
]
