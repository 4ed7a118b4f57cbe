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
from torch.utils._pytree import tree_map

import likewise as lw
from zoo.cases import SAMPLES, Case, Problem, build_case, call, random_combination

WRONG = 1e-8  # a float64 error beyond rounding


def measure(case: Case) -> dict[str, Any]:
    """Return engine, reason, errors and seconds of one case, as a record for JSON.

    `float64` and `float32` are the largest errors of similarities and of soft neighbors (per sample)
    against a loop in float64 with the same weights; `loop32` is the error of that loop in float32.
    A `spread` of similarities near 0 would mean that they tell nothing.
    """
    began = time.perf_counter()
    problem = build_case(case)
    exact = _in_float64(problem)
    with _default_dtype(torch.float64):
        expected = loop_similarities(exact)
    record: dict[str, Any] = {
        "key": case.key,
        "parameters": sum(p.numel() for p in problem.model.parameters()),
        "spread": float(expected.max() - expected.min()),
        "loop32": _difference(loop_similarities(problem), expected),
    }
    for name, given in (("float64", exact), ("float32", problem)):
        start = time.perf_counter()
        with _default_dtype(getattr(torch, name)):
            record[name] = _measured(given, expected)
        record[name]["seconds"] = round(time.perf_counter() - start, 2)
    record["seconds"] = round(time.perf_counter() - began, 2)
    return record


def loop_similarities(problem: Problem) -> Tensor:
    """Return the (n, n) cosines of gradients taken one sample at a time by plain autograd.

    Each sample is given twice: PyTorch's BatchNorm2d is wrong for a batch of one in evaluation mode where
    the incoming gradient has transposed strides.
    """
    wanted = [p for p in problem.model.parameters() if p.requires_grad]
    rows = []
    for i in range(SAMPLES):
        pair = tree_map(lambda t, i=i: t[[i, i]], problem.inputs)
        output = random_combination(call(problem, pair))[0, 0]
        found = torch.autograd.grad(output, wanted, allow_unused=True)
        rows.append(torch.cat([g.flatten() for g in found if g is not None]))
    directions = F.normalize(torch.stack(rows), dim=1)
    return directions @ directions.T


def _in_float64(problem: Problem) -> Problem:
    """Return the same model in float64. Mixtures of experts then avoid grouped products, which it has none of."""
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
            net = lw.Network(problem.model, random_combination)
            gram = lw.GramMatrix(net, lw.batches(problem.inputs, labels=False))
            similarities, neighbors = gram.dense(), lw.soft_neighbors(gram)
        except Exception as error:  # whatever it is, it is what the table tells
            return {"engine": "refused", "reason": _first_line(error)}
    messages = [str(w.message) for w in caught]
    slow = [message for message in messages if "reference engine" in message]
    found = {"engine": "autograd", "reason": slow[0]} if slow else {"engine": "layers"}
    errors = _difference(similarities, expected), _difference(neighbors, expected.sum(1)) / SAMPLES
    return {**found, "error": max(errors)}


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference; NaN where either is."""
    return float((found.double() - expected).abs().max())


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
