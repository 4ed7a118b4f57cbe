"""One model measured: which engine served it, and how far its numbers are from a plain autograd loop's."""

import copy
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import likewise as lw
from zoo.cases import SAMPLES, Case, Problem, build_case, call, combined_outputs


def measure(case: Case) -> dict[str, Any]:
    """Return engine, reason, errors and seconds of one case, as a record for JSON.

    `float64` and `float32` are the largest errors of similarities and of soft neighbors (per sample)
    against a loop in float64 with the same weights; `loop32` is the larger error of two such
    loops in float32. A `spread` of similarities near 0 would mean that they tell nothing. Seconds are of
    CPU time.
    """
    began = time.process_time()
    problem = build_case(case)
    exact = _in_float64(problem)
    wide = torch.float64 if case.creates_float64 else torch.float32
    with _default_dtype(wide):
        expected = loop_similarities(exact)
        narrow = computes_in_float32(exact)
    loops = [loop_similarities(problem, together) for together in (False, True)]
    record: dict[str, Any] = {
        "key": case.key,
        "parameters": sum(p.numel() for p in problem.model.parameters()),
        "differentiated": sum(p.numel() for p in problem.model.parameters() if p.requires_grad),
        "spread": float(expected.max() - expected.min()),
        "float32_inside": narrow,
        "loop32": max(_difference(loop, expected) for loop in loops),
    }
    for name, given, default in (("float64", exact, wide), ("float32", problem, torch.float32)):
        start = time.process_time()
        with _default_dtype(default):
            record[name] = _measured(given, expected)
        record[name]["seconds"] = round(time.process_time() - start, 2)
    record["seconds"] = round(time.process_time() - began, 2)
    return record


def loop_similarities(problem: Problem, together: bool = False) -> Tensor:
    """Return the (n, n) cosines of gradients taken one sample at a time by plain autograd.

    `together`: of one batch, sample after sample; else each sample is given alone, and twice: PyTorch's
    BatchNorm2d is wrong for a batch of one in evaluation mode where the incoming gradient has transposed
    strides.
    """
    wanted = [p for p in problem.model.parameters() if p.requires_grad]
    batches = [list(range(SAMPLES))] if together else [[i, i] for i in range(SAMPLES)]
    rows = []
    for places in batches:
        outputs = combined_outputs(
            call(problem, tree_map(lambda t, places=places: t[places], problem.inputs))
        )
        for output in outputs[: len(set(places)), 0]:
            found = torch.autograd.grad(output, wanted, retain_graph=True, allow_unused=True)
            filled = [torch.zeros_like(p) if g is None else g for g, p in zip(found, wanted, strict=True)]
            rows.append(torch.cat([g.flatten() for g in filled]))
    directions = F.normalize(torch.stack(rows), dim=1)
    return directions @ directions.T


class _Narrowing(TorchFunctionMode):
    """Notices differentiable float32 values."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float32 and result.requires_grad:
            self.seen = True
        return result


def computes_in_float32(problem: Problem) -> bool:
    """Return whether a float64 model casts what it differentiates to float32 in its forward pass."""
    with _Narrowing() as mode:
        call(problem)
    return mode.seen


def _in_float64(problem: Problem) -> Problem:
    """Return the same model in float64, where mixtures of experts cannot use PyTorch's grouped products."""
    model = copy.deepcopy(problem.model).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return Problem(model, tree_map(lambda t: t.double() if t.is_floating_point() else t, problem.inputs))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What a model creates in its forward pass is in this precision too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _measured(problem: Problem, expected: Tensor) -> dict[str, Any]:
    """Return which engine was used and the largest error, or why the model was refused."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            net = lw.Network(problem.model, combined_outputs)
            gram = lw.GramMatrix(net, lw.batches(problem.inputs, labels=False))
            similarities, neighbors = gram.dense(), lw.soft_neighbors(gram)
        except Exception as error:  # whatever it is, it is what the table tells
            return {"engine": "refused", "reason": _first_line(error)}
    reasons = [str(w.message) for w in caught if "engine" in str(w.message)]
    found = {"engine": gram.engine.name, **({"reason": reasons[0]} if reasons else {})}
    errors = _difference(similarities, expected), _difference(neighbors, expected.sum(1)) / SAMPLES
    return {**found, "error": max(errors)}


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference; NaN where either is."""
    return float((found.double() - expected).abs().max())


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
