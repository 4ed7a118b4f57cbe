"""Gradient engines: per-sample Jacobians J(x), self kernels K(x, x) = J Jᵀ, vjp and jvp of whitened Jacobians.

base             the Engine interface, its results, checks of finite numbers
dense            DenseEngine: everything from explicit rows, Jacobians or activations; the reference
traced           TracedEngine: from inputs and output gradients of operations on parameters
selection        chooses the engine, and its batch size
memory           memory of tensors, measured, and what fits into a limit
comparison       compares gradients with those of autograd, parameter by parameter
validation       before the first number: samples are independent, gradients are those of autograd
pass_check       compares gradients for some samples of every pass
tracer           records operations on parameters, and which dimension is the batch
gradient_batch   the gradients of a batch by parameter
retained         gradients of one pass that the next reads, on a GPU
rules            parameter gradients of one operation, a rule for each function
convolution      the same for convolutions
factors          parameter gradients: dense, factored, embedding, sliced
membership       which sample each row of an output belongs to
ragged           gradients of batches whose samples are regrouped: experts, packed sequences
differentiable   gradients that can be differentiated, for training terms; their sums and tangents
double_backward  functions with correct higher derivatives
"""

from likewise.engines.base import (
    DependentSampleError,
    Engine,
    Features,
    GradientMismatchError,
    GradientParts,
    JvpResult,
    PartsChangedError,
    RowBlock,
    Rows,
    SelfKernelCache,
    VjpResult,
    ZeroGradientLog,
    ZeroGradientWarning,
    whiten_rows,
)
from likewise.engines.comparison import network_outputs
from likewise.engines.dense import Activations, DenseEngine, Jacobians, jacobians_one_by_one, record_calls
from likewise.engines.differentiable import (
    DifferentiableGradients,
    differentiable_gradients,
    gradient_tangents,
    live_parameters,
    refuse_dependent_samples_once,
)
from likewise.engines.double_backward import SECOND_ORDER, FunctionSubstitution
from likewise.engines.memory import MemoryLimitError, MemoryMeter, default_max_memory
from likewise.engines.selection import EngineName, select_engine, with_combined_outputs
from likewise.engines.traced import TracedEngine
from likewise.engines.validation import OperationCounter, call_on_pair, check_independent_samples, first_call

__all__ = [
    "SECOND_ORDER",
    "Activations",
    "DenseEngine",
    "DependentSampleError",
    "DifferentiableGradients",
    "Engine",
    "EngineName",
    "Features",
    "FunctionSubstitution",
    "GradientMismatchError",
    "GradientParts",
    "Jacobians",
    "JvpResult",
    "MemoryLimitError",
    "MemoryMeter",
    "OperationCounter",
    "PartsChangedError",
    "RowBlock",
    "Rows",
    "SelfKernelCache",
    "TracedEngine",
    "VjpResult",
    "ZeroGradientLog",
    "ZeroGradientWarning",
    "call_on_pair",
    "check_independent_samples",
    "default_max_memory",
    "differentiable_gradients",
    "first_call",
    "gradient_tangents",
    "jacobians_one_by_one",
    "live_parameters",
    "network_outputs",
    "record_calls",
    "refuse_dependent_samples_once",
    "select_engine",
    "whiten_rows",
    "with_combined_outputs",
]
