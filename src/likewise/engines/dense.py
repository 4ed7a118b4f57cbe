"""The dense engine: everything from explicit rows. Slow, simple, the reference for the traced engine.

Rows are Jacobians, or activations of layers, which perceptual similarity compares. They are computed a few samples at
a time within max_memory, and dropped again. Jacobians come from torch.func; where vmap fails, from one sample at a
time, as a batch of two copies. vmap is validated first: its Jacobian of the first sample must agree with autograd's.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.utils._pytree import tree_map

from likewise.data import Samples
from likewise.engines.base import (
    Engine,
    Features,
    GradientParts,
    JvpResult,
    RowBlock,
    Rows,
    VjpResult,
    check_finite,
    concatenate_powers,
    join_tensors,
    whiten_outputs,
    whiten_rows,
)
from likewise.engines.comparison import (
    Parts,
    find_mismatch,
    flatten_gradients,
    gradient_parts,
    network_outputs,
)
from likewise.engines.factors import gram_from_rows
from likewise.engines.memory import fit_batch_size, is_out_of_memory
from likewise.engines.pass_check import PassCheck
from likewise.engines.tracer import repeat_samples
from likewise.linalg import Power, accumulation_dtype, matrix_power, rank_floor
from likewise.model import Network, Parameters, annotate_errors
from likewise.readouts import main_tensor


class Source(Protocol):
    """Computes the rows that a DenseEngine works on."""

    def __call__(self, samples: Samples) -> Tensor:
        """Return the rows of samples, (n, d, p)."""

    def shape(self, samples: Samples) -> tuple[int, int, int]:
        """Return d, p and the bytes of a number, before any row is computed."""


# A chunk of rows takes about seven times its size: by parameter, concatenated, whitened, twice in float64.
COPIES = 7


@final
class DenseEngine(Engine):
    """Gradients from dense rows, in at most about `max_memory` bytes.

    Args:
        source: Computes the rows: Jacobians, or activations.
        max_memory: Bytes for the rows of one chunk and what is made of them.
        check: Compares some samples of every pass with autograd, where rows are a network's gradients.

    """

    name = "dense"

    def __init__(
        self,
        source: Source,
        max_memory: int,
        check: PassCheck | None = None,
    ) -> None:
        self._source, self._max_memory = source, max_memory
        self._check = check
        self._size: int | None = None  # samples of a chunk; known after the first call

    def self_kernel(self, samples: Samples, exponent: float = 1) -> Power:
        """Return K(x, x)ᵉ and its ranks."""
        powers = concatenate_powers([self._self_kernel(*raw, exponent) for raw in self._chunks(samples)])
        assert powers is not None
        return powers

    def rows(self, samples: Samples, exponent: float) -> Rows:
        """Return S(x); the caller makes sure that they fit into memory."""
        parts, self_kernels = [], list[Power]()
        for raw in self._chunks(samples):
            rows = raw[0]
            if exponent:
                self_kernels.append(self._self_kernel(*raw, exponent))
                rows = whiten_rows(rows, self_kernels[-1], overwrite=True)
            parts.append(rows)
        self_kernel = concatenate_powers(self_kernels)
        (joined,) = join_tensors([(part,) for part in parts])
        return Rows(joined, None if self_kernel is None else self_kernel.rank)

    def features(self, samples: Samples, exponent: float) -> Features:
        """Return S(x), all of it dense."""
        explicit = self.rows(samples, exponent)
        return Features(explicit.rows, (), explicit.ranks)

    def largest_part(self, samples: Samples, d: int) -> int:
        """Return the number of entries of the rows of one sample."""
        return d * self._source.shape(samples[:1])[1]

    def feature_bytes(self, samples: Samples, d: int) -> int:
        """Return the bytes of the rows of one sample."""
        return max(4, self._source.shape(samples[:1])[2]) * self.largest_part(samples, d)

    def parts(self, samples: Samples) -> Iterator[GradientParts]:
        """Yield J(x) as one dense part, and K(x, x) of the same rows."""
        for raw in self._chunks(samples):
            rows, self_kernel = raw[0], self._self_kernel(*raw, 1).matrix
            blocks = [(0, [RowBlock(rows, self_kernel)])]
            yield GradientParts(torch.zeros_like(self_kernel), rows.shape[2], blocks, ())

    def vjp(self, samples: Samples, weights: Tensor, exponent: float) -> VjpResult:
        """Return Σₓ S(x)ᵀ w(x)."""
        total, self_kernels, start = None, list[Power](), 0
        for raw in self._chunks(samples):
            rows = raw[0]
            part = weights[start : start + len(rows)].to(rows.device, accumulation_dtype(rows))
            start += len(rows)
            if exponent:
                self_kernels.append(self._self_kernel(*raw, exponent))
                part = self_kernels[-1].matrix @ part
            term = part.flatten(0, 1).T @ rows.flatten(0, 1).to(part.dtype)
            total = term if total is None else total.add_(term)
        assert total is not None and start == len(weights)
        return VjpResult(total, concatenate_powers(self_kernels))

    def jvp(
        self, samples: Samples, directions: Tensor, exponent: float, self_kernel: Power | None = None
    ) -> JvpResult:
        """Return S(x) u for each direction u."""
        outputs, self_kernels = [], list[Power]()
        for raw in self._chunks(samples):
            rows = raw[0]
            outputs.append(rows.to(directions.dtype) @ directions.T)
            if exponent and self_kernel is None:
                self_kernels.append(self._self_kernel(*raw, exponent))
        return whiten_outputs(torch.cat(outputs), self_kernel or concatenate_powers(self_kernels))

    def begin_pass(self, n: int) -> None:
        """Announce a pass over n samples."""
        if self._check is not None:
            self._check.begin_pass(n)

    def finish_checks(self) -> None:
        """Check a sample of the pass."""
        if self._check is not None:
            self._check.finish_checks()

    def _chunks(self, samples: Samples) -> Iterator[tuple[Tensor, float]]:
        """Yield rows, finite and at least float32, and the floor of their ranks."""
        if self._size is None:
            d, p, number = self._source.shape(samples[:1])
            self._size = fit_batch_size(d * p * max(number, 4) * COPIES, d, p, self._max_memory)
        for part in samples.split(self._size):
            computed = self._source(part)
            check_finite(computed, part)
            if self._check is not None:
                combine = partial(_combine_rows, computed, self._check.sizes)
                self._check.offer(part, None, combine, computed.shape[1])
            rows = computed.to(torch.promote_types(computed.dtype, torch.float32))
            yield rows, rank_floor(computed.dtype)

    def _self_kernel(self, rows: Tensor, floor: float, exponent: float) -> Power:
        return matrix_power(gram_from_rows(rows), exponent, floor)


def _combine_rows(rows: Tensor, sizes: list[int], places: Tensor, weights: Tensor) -> Parts:
    """Return Σₓ J(x)ᵀ w(x) of samples at some places, by parameter, for weights of these, (k, d)."""
    return list(torch.einsum("kd,kdp->p", weights.to(rows), rows[places.to(rows.device)]).split(sizes))


@final
class Jacobians:
    """J(x), (n, d, p), of samples; parameters are concatenated in the order of `net.names`."""

    def __init__(self, net: Network) -> None:
        self._net = net
        self._vmap: bool | None = None  # whether vmap is correct for this model; tested on first use

    def __call__(self, samples: Samples) -> Tensor:
        """Return J(x); call it inside `net.evaluation_mode`."""
        with torch.enable_grad():
            if self._vmap is None:
                self._vmap = _vmap_is_correct(self._net, samples[:1])
            return (jacobians_by_vmap if self._vmap else jacobians_one_by_one)(self._net, samples)

    def shape(self, samples: Samples, d: int | None = None) -> tuple[int, int, int]:
        """Return d, p and the bytes of a number; the network is called where d is not given."""
        if d is None:
            d = self._net.function({}, samples.inputs, samples.labels, samples.ids).shape[1]
        return d, sum(self._net.numels.values()), self._net.dtype.itemsize


def jacobians_by_vmap(net: Network, samples: Samples) -> Tensor:
    """Return J(x) of all samples by vmap: one forward, and a backward for each output."""
    parameters = net.parameters

    def outputs(theta: Parameters, inputs: Any, labels: Tensor | None, ids: Tensor) -> Tensor:
        return net.select_outputs(net.call_model(theta, inputs), inputs, labels, ids)

    def one(inputs: Any, labels: Tensor | None, number: Tensor) -> list[Parts]:
        inputs, number = tree_map(lambda t: t.unsqueeze(0), (inputs, number))
        label = None if labels is None else labels.unsqueeze(0)
        y, pullback, *_ = vjp(lambda theta: outputs(theta, inputs, label, number)[0], parameters)
        # One vjp per output rather than a nested vmap, which breaks on PReLU.
        return [flatten_gradients(pullback(e)[0], parameters) for e in torch.eye(len(y)).to(y)]

    dims = (0, None if samples.labels is None else 0, 0)
    with annotate_errors(net, samples.inputs, samples.labels, samples.ids):  # inside, ids have no values
        by_output = vmap(one, in_dims=dims)(samples.inputs, samples.labels, samples.ids)
    sizes = [part.shape[1] for part in by_output[0]]
    rows = by_output[0][0].new_empty(len(samples), len(by_output), sum(sizes))
    for number, parts in enumerate(by_output):
        for target, part in zip(rows[:, number].split(sizes, 1), parts, strict=True):
            target.copy_(part)
    return rows


def jacobians_one_by_one(net: Network, samples: Samples) -> Tensor:
    """Return J(x) by one backward for each sample and output, of a batch that is the sample twice.

    Twice, since PyTorch differentiates some operations wrongly in a batch of one.
    """
    parameters = {name: value.requires_grad_() for name, value in net.parameters.items()}
    jacobians = []
    for x in samples.split(1):
        y = network_outputs(net, repeat_samples(x, 2), parameters)[0]
        jacobians.append(torch.stack([torch.cat(gradient_parts(output, parameters)) for output in y]))
    return torch.stack(jacobians)


def _vmap_is_correct(net: Network, samples: Samples) -> bool:
    try:
        wrong = _find_vmap_mismatch(net, samples)
        if wrong is None:
            return True
        reason = f"the gradient in {wrong} comes out wrong"
    except Exception as error:  # whatever vmap cannot do, plain autograd just did
        if is_out_of_memory(error):
            raise
        reason = str(error).strip().splitlines()[0][:80]
    warnings.warn(
        f"torch.func.vmap cannot differentiate {type(net.model).__name__} ({reason}): gradients "
        "are taken one sample at a time, which is exact but slow.",
        stacklevel=2,
    )
    return False


def _find_vmap_mismatch(net: Network, samples: Samples) -> str | None:
    """Return the first parameter for which vmap's Jacobian of a sample is wrong, if any."""
    d = network_outputs(net, samples).shape[1]
    u = torch.randn(d, generator=torch.Generator().manual_seed(0))

    def compute(other: Network) -> Parts:
        rows = jacobians_by_vmap(other, samples)[0]
        return list((u.to(rows) @ rows).split(list(other.numels.values())))

    return find_mismatch(net, compute, repeat_samples(samples, 2), torch.stack([u, torch.zeros_like(u)]))


@final
class Activations:
    """√λ_l a_l(x) of named layers, concatenated, (n, 1, q): rows like the gradients of one output."""

    def __init__(self, net: Network, layers: Sequence[str], weights: Sequence[float]) -> None:
        names = [name for name, _ in net.model.named_modules() if name]
        for pattern in layers:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"No layer matches {pattern!r}. The model has: {', '.join(names)}.")
        if len(weights) != len(layers) or min(weights) < 0:
            raise ValueError(
                f"weights must be {len(layers)} numbers of at least 0, one for each of the layers, found "
                f"{list(weights)}."
            )
        self._net, self._patterns = net, tuple(layers)
        self._weight = {
            name: weight
            for pattern, weight in zip(layers, weights, strict=True)
            for name in names
            if fnmatchcase(name, pattern)
        }

    def __call__(self, samples: Samples) -> Tensor:
        """Return the activations; call it inside `net.evaluation_mode`."""
        seen: dict[str, list[Tensor]] = {name: [] for name in self._weight}

        def record(name: str, inputs: tuple[Any, ...], outputs: Any) -> None:
            seen[name].append(main_tensor(outputs).clone())  # the next layer may work in place

        with record_calls(self._net.model, seen, record):
            self._net.function({}, samples.inputs, samples.labels, samples.ids)
        for pattern in self._patterns:  # a container may be silent, but not all that match
            if not any(seen[name] for name in seen if fnmatchcase(name, pattern)):
                raise ValueError(f"No layer that matches {pattern!r} was called in the forward pass.")
        return torch.cat(
            [
                output.reshape(len(samples), 1, -1) * self._weight[name] ** 0.5
                for name, outputs in seen.items()
                for output in outputs
            ],
            dim=2,
        )

    def shape(self, samples: Samples) -> tuple[int, int, int]:
        """Return d = 1, the number of activations and the bytes of a number."""
        rows = self(samples)
        return rows.shape[1], rows.shape[2], rows.element_size()


@contextmanager
def record_calls(
    model: nn.Module, names: Iterable[str], record: Callable[[str, tuple[Any, ...], Any], None]
) -> Iterator[None]:
    """Call `record` with the name, inputs and outputs of each call of the named modules."""
    modules = dict(model.named_modules())
    hooks = [
        modules[name].register_forward_hook(
            lambda _, inputs, outputs, name=name: record(name, inputs, outputs)
        )
        for name in names
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
