"""Gradient engines: per-sample Jacobians J(x), self kernels K(x, x) = J Jᵀ, vjp and jvp of whitened Jacobians.

base             the Engine interface, its results, checks of finite numbers, memory limits
dense            DenseEngine: everything from explicit rows; the reference
traced           TracedEngine: from inputs and output gradients of operations on parameters
selection        chooses the engine, and its batch size
validation       compares gradients with autograd, before the first number and in every pass
reference        plain autograd, float64 and finite differences, by which others are judged
jacobians        rows by torch.func.vmap, or one sample at a time
activations      activations of layers as rows, for perceptual similarity
tracer           records operations on parameters, and which dimension is the batch
membership       which sample each row of an output belongs to
partition        indices along a dimension, divided among samples
ragged           gradients of batches whose samples are regrouped: experts, packed sequences
rules            parameter gradients of one operation, a rule for each function
convolution      the same for convolutions
factors          parameter gradients: dense, factored, embedding, sliced
gradient_batch   the gradients of a batch by parameter
backward         backward passes to operations, and from derived tensors to parameters
differentiable   gradients that can be differentiated, for training terms
group_sums       norms of sums of gradients over groups of samples
tangents         derivatives of gradients along an input direction
double_backward  functions with correct higher derivatives
memory           peak memory of tensors, measured
"""

from likewise.engines.activations import Activations
from likewise.engines.base import (
    DependentSampleError,
    Engine,
    Features,
    GradientMismatchError,
    GradientParts,
    JvpResult,
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
from likewise.engines.double_backward import SECOND_ORDER, FunctionSubstitution
from likewise.engines.jacobians import Jacobians
from likewise.engines.memory import MemoryMeter
from likewise.engines.selection import EngineName, select_engine
from likewise.engines.tangents import gradient_tangents
from likewise.engines.traced import TracedEngine
from likewise.engines.validation import check_independent_samples

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
    "MemoryMeter",
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
