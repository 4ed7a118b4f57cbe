"""Every public function on every hostile input: the right number, a named exclusion, or a named error.

A cell is one function with one input. In each, the state of the process and of the model is compared before
and after, bit for bit. What is expected of each input stands in hostile.py.
"""

import re
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import hostile
import likewise as lw
from hostile import (
    DATA,
    LABELS,
    MODELS,
    VALUES,
    Case,
    Expected,
    N,
    Outcome,
    Refused,
    Right,
    Same,
    Without,
    ZeroGradient,
    difference,
    observe,
    refusal_problem,
    short,
)

Use = Literal["classes", "numbers", "unused"]


class Function(NamedTuple):
    """One public function as it is called on a model and a data set."""

    call: Callable[[Case], Any]
    labels: Use = "unused"
    oracle: Callable[[torch.Tensor], Any] | None = None  # from similarities of the naive reference
    term: bool = False  # a training term: takes tensors, leaves samples out
    warns: bool = False  # names samples without a gradient in a warning
    nan: bool = False  # whether a NaN can be the right answer
    overrides: dict[str, Expected] = {}  # what is expected of this function only  # noqa: RUF012
    kinds: tuple[str, ...] = ("data", "labels", "model")
    successes: frozenset[str] | None = None  # of the cells that succeed, these only: it takes long


# The functions

UNIT = torch.ones(2).double()


def flipped(x: Any) -> Any:
    """The same samples in the opposite order, where there is one."""

    def flip(t: Any) -> Any:
        usable = isinstance(t, torch.Tensor) and t.layout is torch.strided and not t.is_nested
        return t.flip(0) if usable and t.dim() and not (t.is_meta or t.is_quantized) else t

    return tree_map(flip, x)


def drawn(model: Any, readout: Any = None) -> dict[str, Any]:
    """The option by which a term draws its combination of outputs, the same at each call."""
    own = readout is not None or isinstance(model, lw.Network)
    return {} if own else {"generator": torch.Generator().manual_seed(0)}


def every_output(model: Any) -> dict[str, Any]:
    """The option by which a term reads what a Network reads by itself."""
    return {} if isinstance(model, lw.Network) else {"readout": lw.all_outputs}


def density_term(case: Case) -> torch.Tensor:
    p = 26
    if isinstance(case.module, nn.Module) and not hostile.is_lazy(case.module):
        p = sum(v.numel() for v in case.module.parameters() if v.requires_grad) or 26
    total = torch.linspace(-1, 1, 2 * p).double().reshape(2, p)
    return lw.losses.density(case.model, case.data, total, labels=case.given, q=0.5, samples=N)


def analyzed(case: Case, **options: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = options.pop("out", Path(folder) / "run")
        table = lw.analyze(case.model, case.batches, out=out, **{"neighbors": 3, **options}).table
        return {name: torch.tensor(table[name].to_numpy(float)) for name in ("density", "uncertainty")}


def moved(x: Any) -> Any:
    return tree_map(lambda t: t + 0.125 if t.is_floating_point() else t, x)


def read(case: Case, readout: Any) -> torch.Tensor:
    samples = case.samples
    return lw.Network(case.module, readout).outputs(samples.inputs, samples.labels, samples.ids)


def estimated(case: Case) -> tuple[Any, ...]:
    found = lw.denoising(case.gram, draws=4)  # the factor is drawn, by batches
    return found.shift, found.smoothed_label, found.factor.isfinite()


def calibrated(case: Case) -> list[Any]:
    found = lw.reliability(case.gram)
    wide = lw.Reliability(*(None if v is None else v.repeat_interleave(60 // len(v) + 1, 0) for v in found))
    truth = torch.arange(len(wide.closeness)) % 2 if found.confidence is not None else wide.prediction + 0.1
    return [tuple(level) for level in lw.calibrate(wide, truth).levels]


NOT_LOOKED_AT = {  # outputs are the model's, whatever they are
    **dict.fromkeys(("data: NaN in one", "data: infinity in two", "data: NaN in all"), Right()),
    **dict.fromkeys(("model: NaN in a weight", "model: infinity in a weight", "model: returns NaN"), Right()),
    **dict.fromkeys(("model: not one alone", "model: random", "model: batch statistics"), Right()),
}
OF_INPUTS = {  # whether a model takes them is not known yet
    **dict.fromkeys((f"data: {n}" for n, e in DATA.items() if e.expected == hostile.CALLED), Right()),
    **dict.fromkeys(("data: NaN in one", "data: infinity in two", "data: NaN in all"), Right()),
    "data: dict of the argument": Right(),
}
ONE_LAYER = Refused("No layer matches")
OF_ACTIVATIONS = {
    **dict.fromkeys(
        ("model: other inputs", "model: images", "model: words", "model: two arguments"), ONE_LAYER
    ),
    **dict.fromkeys(("model: all frozen", "model: returns NaN"), Right()),
    **dict.fromkeys(("model: NaN in a weight", "model: infinity in a weight"), Right()),
    "data: infinity in two": Right(),  # tanh makes it 1
}
GROUPS = {
    **{f"labels: {name}": Right() for name in ("values", "one class", "each its own")},
    **{
        f"labels: {name}": Refused("groups")
        for name, entry in LABELS.items()
        if isinstance(entry.unused, Refused)
        or name in ("column", "one-hot", "three dimensions", "NaN", "infinity", "complex")
    },
}
FLOATING = Refused("floating|happened when")
OF_MOVES = {
    **dict.fromkeys((f"data: {n}" for n in ("integers", "bytes", "booleans", "complex")), FLOATING),
    **dict.fromkeys(("data: dict of the argument", "data: tuple of one", "data: unequal lengths"), FLOATING),
    **dict.fromkeys((f"data: list of {n}" for n in ("samples", "pairs", "unequal samples")), FLOATING),
}
FEW = frozenset(
    [
        *(f"data: {n}" for n in ("clean", "float16", "requires grad", "Dataset", "one sample", "1e38")),
        *(f"labels: {n}" for n in ("booleans", "values", "one class", "negative")),
        *(f"model: {n}" for n in ("training mode", "hooks", "detached", "draws and seeds")),
    ]
)

FUNCTIONS: dict[str, Function] = {
    "similarity": Function(
        lambda c: lw.similarity(c.model, c.batches), oracle=lambda k: k, warns=True, successes=FEW
    ),
    "GramMatrix.dense": Function(lambda c: c.gram.dense(), oracle=lambda k: k, warns=True),
    "GramMatrix @": Function(
        lambda c: c.gram @ torch.ones(c.gram.shape[1], c.gram.d, 1).double(), warns=True
    ),
    "GramMatrix.row_sums": Function(lambda c: c.gram.row_sums(), oracle=lambda k: k.sum(1), warns=True),
    "GramMatrix.over_rows": Function(
        lambda c: c.gram.over_rows(lambda k: k.max(1).values), oracle=lambda k: k.max(1).values, warns=True
    ),
    "GramMatrix.diagonal": Function(lambda c: c.gram.diagonal(), oracle=lambda k: k.diagonal()),
    "GramMatrix.with_kernel": Function(lambda c: c.gram.with_kernel(lw.SUBSPACE_MATCH).diagonal()),
    "GramMatrix.plan": Function(lambda c: c.gram.plan().passes, successes=FEW),
    "soft_neighbors": Function(lambda c: lw.soft_neighbors(c.gram), oracle=lambda k: k.sum(1), warns=True),
    "hard_neighbors": Function(
        lambda c: lw.hard_neighbors(c.gram, 0.61803), oracle=lambda k: (k >= 0.61803).sum(1), warns=True
    ),
    "positive_neighbors": Function(
        lambda c: lw.positive_neighbors(c.gram, 3),
        oracle=lambda k: k.clamp(min=0).pow(3).sum(1),
        warns=True,
    ),
    "nearest": Function(
        lambda c: lw.nearest(c.gram, 3).similarities,
        oracle=lambda k: (k - 9 * torch.eye(len(k))).topk(min(3, len(k) - 1), 1).values,
        warns=True,
    ),
    "similarity_histogram": Function(
        lambda c: lw.similarity_histogram(c.gram, 7).counts.sum(1),
        oracle=lambda k: torch.full((len(k),), len(k)),
        warns=True,
    ),
    "class_similarity": Function(lambda c: lw.class_similarity(c.gram), "classes", warns=True, nan=True),
    "uncertainty": Function(lambda c: lw.uncertainty(c.gram)),
    "disturbance": Function(lambda c: lw.disturbance(c.gram)),
    "predicted_move": Function(
        lambda c: lw.predicted_move(
            c.model, c.batches.take(range(min(2, c.batches.n))), torch.ones(2).double(), c.batches
        )
    ),
    "denoising": Function(estimated, "numbers", successes=FEW),
    "denoising from pairs": Function(lambda c: lw.denoising(c.gram, exact=True), "numbers", successes=FEW),
    "fit_quality": Function(lambda c: lw.fit_quality(c.gram), "numbers", nan=True, successes=FEW),
    "lipschitz_bound": Function(lambda c: lw.lipschitz_bound(c.gram), successes=FEW),
    "perceptual": Function(
        lambda c: lw.perceptual(c.model, "*1", c.batches).dense(), overrides=OF_ACTIVATIONS
    ),
    "label_suspicion": Function(lambda c: lw.label_suspicion(c.gram), "classes", nan=True, successes=FEW),
    "label_evidence": Function(
        lambda c: lw.label_evidence(c.gram, lw.label_suspicion(c.gram), k=2),
        "classes",
        nan=True,
        successes=FEW,
    ),
    "novelty": Function(lambda c: lw.novelty(c.gram, 3), successes=FEW),
    "reliability": Function(lambda c: lw.reliability(c.gram), "numbers", successes=FEW),
    "calibrate": Function(calibrated, "numbers", successes=FEW),
    "analyze": Function(analyzed, "numbers", successes=FEW),
    "batches": Function(lambda c: c.samples.inputs, overrides=OF_INPUTS, nan=True, kinds=("data", "labels")),
    "Network": Function(lambda c: read(c, lw.all_outputs), overrides=NOT_LOOKED_AT, nan=True),
    "one_output": Function(lambda c: read(c, lw.one_output(1)), overrides=NOT_LOOKED_AT, nan=True),
    "log_probabilities": Function(lambda c: read(c, lw.log_probabilities), overrides=NOT_LOOKED_AT, nan=True),
    "label_against_rest": Function(
        lambda c: read(c, lw.label_against_rest), "classes", overrides=NOT_LOOKED_AT, nan=True
    ),
    "label_against_random": Function(
        lambda c: read(c, lw.label_against_random(3)), "classes", overrides=NOT_LOOKED_AT, nan=True
    ),
    "losses.pair": Function(
        lambda c: lw.losses.pair(c.model, c.data, flipped(c.data), labels=c.given, **every_output(c.model)),
        term=True,
    ),
    "losses.group": Function(
        lambda c: lw.losses.group(c.model, c.data, labels=c.given, **every_output(c.model)), term=True
    ),
    "losses.group by labels": Function(
        lambda c: lw.losses.group(c.model, c.data, c.given, **every_output(c.model)),
        term=True,
        overrides=GROUPS,
    ),
    "losses.two_batches": Function(
        lambda c: lw.losses.two_batches(c.model, c.data, c.data, c.given, c.given), term=True
    ),
    "losses.orbit": Function(
        lambda c: lw.losses.orbit(c.model, c.data, moved, labels=c.given, **every_output(c.model)), term=True
    ),
    "losses.along": Function(
        lambda c: lw.losses.along(c.model, c.data, torch.ones_like, labels=c.given),
        term=True,
        overrides=OF_MOVES,
    ),
    "losses.density": Function(density_term, term=True),
}


# The cells


class Cell(NamedTuple):
    name: str
    case: Case
    expected: Expected


@cache
def data_case(name: str) -> Case:
    entry = DATA[name]
    data = entry.make()
    known = isinstance(data, torch.Tensor | list) and not (isinstance(data, torch.Tensor) and data.dim() == 0)
    n = len(data) if known and not getattr(data, "is_nested", False) else N
    return Case(hostile.network(), data, None if entry.own_labels or n == 0 else hostile.labels(n))


@cache
def label_case(name: str) -> Case:
    return Case(hostile.network(), hostile.inputs(), LABELS[name].make())


@cache
def model_case(name: str) -> Case:
    return Case(MODELS[name].make(), hostile.inputs(), hostile.labels())


def cells_of(function: Function) -> Iterator[Cell]:
    """All cells of a function, with what is expected of each."""
    use = {"classes": "of_classes", "numbers": "of_numbers", "unused": "unused"}[function.labels]
    every = [
        *(("data", name, data_case, entry.expected, entry.of_terms) for name, entry in DATA.items()),
        *(("labels", name, label_case, getattr(entry, use), None) for name, entry in LABELS.items()),
        *(("model", name, model_case, entry.expected, entry.of_terms) for name, entry in MODELS.items()),
    ]
    for kind, name, case, expected, of_terms in every:
        full = f"{kind}: {name}"
        expected = function.overrides.get(full) or (of_terms if function.term else None) or expected
        skipped = function.successes is not None and full not in function.successes
        if kind in function.kinds and not (skipped and isinstance(expected, Same | Right | ZeroGradient)):
            yield Cell(full, case(name), expected)


@cache
def clean_outcome(name: str, clean: str) -> Outcome:
    case = data_case(clean)
    return observe(lambda: FUNCTIONS[name].call(case), *case.touched)


def problem_of(name: str, cell: Cell) -> str | None:
    """What is wrong with a cell, or None."""
    function, expected = FUNCTIONS[name], cell.expected
    outcome = observe(lambda: function.call(cell.case), *cell.case.touched)
    if outcome.changed:
        return f"changed {', '.join(outcome.changed)}"
    if isinstance(expected, Refused):
        return refusal_problem(outcome, expected.pattern)
    if isinstance(expected, Same):
        if outcome.error is not None:
            own = refusal_problem(outcome, "")
            return own or f"{type(outcome.error).__name__}: {hostile.text_of(outcome.error)[:200]}"
        return difference(outcome.value, clean_outcome(name, expected.clean).value, expected.tolerance)
    if outcome.error is not None:
        ids = rf"\[{', '.join(map(str, expected.ids))}\]" if isinstance(expected, Without) else ""
        return refusal_problem(outcome, ids)
    if isinstance(expected, Without):
        return without_problem(name, cell.case, outcome, expected.ids)
    if isinstance(expected, ZeroGradient) and function.warns:
        told = any("no gradient" in w and "ids 0, 1" in w for w in outcome.warnings)
        return None if told else f"{short(outcome.value)} without a word on zero gradients"
    if not function.nan and has_nan(outcome.value):
        return f"NaN in {short(outcome.value)}"
    if isinstance(expected, Right) and function.oracle is not None and cell.name.startswith("data"):
        return difference(outcome.value, function.oracle(cell.case.reference), 1e-6)
    return None


def without_problem(name: str, case: Case, outcome: Outcome, ids: tuple[int, ...]) -> str | None:
    """What is wrong with a term that left samples out."""
    if not any(re.search(rf"\b{', '.join(map(str, ids))}\b", w) for w in outcome.warnings):
        return f"{short(outcome.value)} without naming samples {ids}: {outcome.warnings}"
    out = {*ids, *(N - 1 - i for i in ids)} if name == "losses.pair" else set(ids)  # a pair goes together
    left = [i for i in range(N) if i not in out]
    return difference(
        outcome.value, FUNCTIONS[name].call(Case(case.model, case.data[left], case.given[left]))
    )


def has_nan(value: Any) -> bool:
    return any(bool(torch.as_tensor(v).isnan().any()) for v in tree_leaves(value) if is_number(v))


def is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, torch.Tensor) and value.is_floating_point())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_hostile_inputs_give_the_right_number_or_a_named_error(name):
    problems, count = [], 0
    for cell in cells_of(FUNCTIONS[name]):
        count += 1
        problem = problem_of(name, cell)
        if problem is not None:
            problems.append(f"{cell.name}: {problem}")
    assert count >= 100
    assert not problems, f"{len(problems)} of {count} cells:\n" + "\n".join(problems)


# Values of single arguments


class Argument(NamedTuple):
    """One argument of a function, called with everything else as it should be."""

    call: Callable[[Any], Any]
    accepted: dict[str, Any]  # by the name of a value: the plain value that it stands for
    pattern: str  # what a refusal names


@cache
def clean() -> Case:
    return data_case("clean")


def good(**checks: Any) -> dict[str, Any]:
    """Which of the hostile values are finite numbers within limits, and which plain numbers these are."""
    numbers = {
        **{"0": 0, "1": 1, "2": 2, "-1": -1, "2.5": 2.5, "0.5": 0.5, "-0.5": -0.5, "1e308": 1e308},
        **{"10**30": 1e30, "1e-320": 1e-320, "Fraction": 0.5, "numpy integer": 2, "numpy float": 0.5},
        **{"integer tensor": 2, "float tensor": 0.5},
    }
    low, high = checks.get("least", -torch.inf), checks.get("most", torch.inf)
    above, below = checks.get("above", -torch.inf), checks.get("below", torch.inf)
    return {name: v for name, v in numbers.items() if low <= v <= high and above < v < below}


def integers(least: int, most: float = torch.inf, huge: Any = None) -> dict[str, int]:
    """The same of integers; `huge` is what a very large one stands for, if it is accepted."""
    plain = {"0": 0, "1": 1, "2": 2, "-1": -1, "numpy integer": 2, "integer tensor": 2}
    found = {name: v for name, v in plain.items() if least <= v <= most}
    return found if huge is None else {**found, "10**30": huge, "10**400": huge}


def on_gram(function: Callable[..., Any], name: str, accepted: dict[str, Any], pattern: str = "") -> Argument:
    return Argument(lambda v: function(clean().gram, **{name: v}), accepted, pattern or name)


def on_term(function: Callable[..., Any], name: str, accepted: dict[str, Any], pattern: str = "") -> Argument:
    def call(value: Any) -> Any:
        given = {"x": clean().data, **drawn(clean().model), **{name: value}}
        return function(clean().model, **given)

    return Argument(call, accepted, pattern or name)


def similar(**options: Any) -> torch.Tensor:
    return lw.similarity(clean().model, clean().data, **options)


def with_gram(**options: Any) -> torch.Tensor:
    return lw.GramMatrix(clean().model, clean().data, **options).row_sums()


def network(**options: Any) -> torch.Tensor:
    return lw.Network(clean().model, **options).outputs(clean().data)


def reliable() -> lw.Reliability:
    found = lw.reliability(clean().gram)
    return lw.Reliability(*(v.repeat_interleave(7, 0) for v in found))


def pairs(**options: Any) -> torch.Tensor:
    x = clean().data
    draw = drawn(clean().model, options.get("readout"))
    return lw.losses.pair(clean().model, **{"x": x, "other": x.flip(0), **draw, **options})


def two(**options: Any) -> torch.Tensor:
    x = clean().data
    return lw.losses.two_batches(clean().model, **{"a": x, "b": x.flip(0), **options})


def orbits(**options: Any) -> torch.Tensor:
    return lw.losses.orbit(
        clean().model, clean().data, **{"transforms": moved, **drawn(clean().model), **options}
    )


def along(**options: Any) -> torch.Tensor:
    return lw.losses.along(clean().model, clean().data, **{"direction": torch.ones_like, **options})


def dense_term(**options: Any) -> torch.Tensor:
    total = torch.linspace(-1, 1, 52).double().reshape(2, 26)
    given = {"total": total, "q": 0.5, "samples": N, **options}
    return lw.losses.density(clean().model, clean().data, **given)


def keyword(function: Callable[..., Any], name: str, accepted: dict[str, Any], pattern: str = "") -> Argument:
    return Argument(lambda v: function(**{name: v}), accepted, pattern or name)


def label_of(outputs: Any) -> torch.Tensor:
    return lw.label_against_rest(outputs, torch.zeros(7).long())


FLAGS = {"True": True, "False": False, "numpy bool": True}
NOTHING: dict[str, Any] = {}
DEFAULT = {"None": None}
SEEDS = integers(0)
ANY = "."  # its own words suffice: whether the model takes such data is the model's matter

ARGUMENTS: dict[str, Argument] = {
    "similarity model": Argument(lambda v: lw.similarity(v, clean().data), NOTHING, "model|happened when"),
    "similarity a": Argument(lambda v: lw.similarity(clean().model, v), NOTHING, ANY),
    "similarity b": keyword(similar, "b", DEFAULT, ANY),
    "similarity readout": keyword(similar, "readout", DEFAULT),
    "similarity kernel": keyword(similar, "kernel", NOTHING),
    "similarity centered": keyword(similar, "centered", FLAGS),
    "similarity engine": keyword(similar, "engine", NOTHING),
    "GramMatrix columns": keyword(with_gram, "columns", DEFAULT, "columns|happened when"),
    "GramMatrix kernel": keyword(with_gram, "kernel", NOTHING),
    "GramMatrix engine": keyword(with_gram, "engine", NOTHING),
    "GramMatrix centered": keyword(with_gram, "centered", FLAGS),
    "GramMatrix max_memory": keyword(with_gram, "max_memory", {**DEFAULT, "10**30": 2**31, "10**400": 2**31}),
    "GramMatrix.with_kernel": Argument(lambda v: clean().gram.with_kernel(v), NOTHING, "kernel"),
    "GramMatrix.with_columns": Argument(
        lambda v: clean().gram.with_columns(v).row_sums(), NOTHING, "columns|happened when"
    ),
    "GramMatrix @ weights": Argument(lambda v: clean().gram @ v, NOTHING, "weights"),
    "GramMatrix.row_sums weights": Argument(lambda v: clean().gram.row_sums(v), DEFAULT, "weights"),
    "GramMatrix.over_rows reduce": Argument(lambda v: clean().gram.over_rows(v), NOTHING, "reduce|reduction"),
    "GramMatrix.plan statistic": Argument(
        lambda v: clean().gram.plan(v).passes, DEFAULT, "statistic|happened|found"
    ),
    **{
        f"{function.__name__} gram": Argument(lambda v, function=function: function(v), NOTHING, "GramMatrix")
        for function in (
            *(lw.soft_neighbors, lw.hard_neighbors, lw.positive_neighbors, lw.nearest, lw.novelty),
            *(lw.similarity_histogram, lw.class_similarity, lw.uncertainty, lw.disturbance, lw.denoising),
            *(lw.fit_quality, lw.lipschitz_bound, lw.label_suspicion, lw.reliability),
        )
    },
    **{
        f"{function.__name__} labels": on_gram(function, "labels", DEFAULT, "label")
        for function in (lw.class_similarity, lw.label_suspicion, lw.fit_quality, lw.reliability)
    },
    "denoising labels": Argument(
        lambda v: lw.denoising(clean().gram, labels=v, draws=4).smoothed_label, DEFAULT, "label"
    ),
    "hard_neighbors threshold": on_gram(lw.hard_neighbors, "threshold", good()),
    "positive_neighbors exponent": on_gram(lw.positive_neighbors, "exponent", good(above=0)),
    "nearest k": on_gram(lw.nearest, "k", integers(1, huge=N - 1)),
    "similarity_histogram bins": on_gram(lw.similarity_histogram, "bins", integers(1)),
    "similarity_histogram low": on_gram(lw.similarity_histogram, "low", good(below=1), "low|high"),
    "similarity_histogram high": on_gram(lw.similarity_histogram, "high", good(above=-1)),
    "novelty k": on_gram(lw.novelty, "k", integers(1, huge=N - 1)),
    "novelty sketch": on_gram(lw.novelty, "sketch", DEFAULT),
    "reliability sketch": on_gram(lw.reliability, "sketch", DEFAULT),
    "fit_quality alone": on_gram(lw.fit_quality, "alone", good()),
    "fit_quality underfit_below": on_gram(lw.fit_quality, "underfit_below", {**good(), **DEFAULT}),
    "fit_quality overfit_above": on_gram(lw.fit_quality, "overfit_above", good()),
    "fit_quality sketch": on_gram(lw.fit_quality, "sketch", DEFAULT),
    "label_suspicion exponent": on_gram(lw.label_suspicion, "exponent", good(above=0)),
    "label_suspicion isolated_below": on_gram(lw.label_suspicion, "isolated_below", good(least=0)),
    "label_suspicion sketch": on_gram(lw.label_suspicion, "sketch", DEFAULT),
    "label_evidence found": Argument(lambda v: lw.label_evidence(clean().gram, v), NOTHING, "found must be"),
    "label_evidence k": Argument(
        lambda v: lw.label_evidence(clean().gram, lw.label_suspicion(clean().gram), k=v),
        integers(1, huge=N - 1),
        "k must",
    ),
    "denoising draws": on_gram(lw.denoising, "draws", NOTHING),
    "denoising exact": Argument(lambda v: lw.denoising(clean().gram, draws=4, exact=v), FLAGS, "exact"),
    "denoising seed": Argument(lambda v: lw.denoising(clean().gram, draws=4, seed=v), SEEDS, "seed"),
    "predicted_move net": Argument(
        lambda v: lw.predicted_move(v, clean().data[:1], UNIT, clean().data), NOTHING, "model|happened when"
    ),
    "predicted_move move": Argument(
        lambda v: lw.predicted_move(clean().model, clean().data[:1], v, clean().data),
        {"tuple": UNIT * 0 + torch.tensor([1, 2])},
        "move",
    ),
    "predicted_move at": Argument(
        lambda v: lw.predicted_move(clean().model, v, UNIT, clean().data), NOTHING, ANY
    ),
    "perceptual layers": Argument(lambda v: lw.perceptual(clean().model, v, clean().data), NOTHING, "layer"),
    "perceptual weights": Argument(
        lambda v: lw.perceptual(clean().model, "1", clean().data, weights=v).dense(),
        {**DEFAULT, "list": [3.0], "numpy 0-d": [2.0], "integer tensor": [2.0], "float tensor": [0.5]}
        | {"bool tensor": [1.0]},
        "weights",
    ),
    "perceptual max_memory": Argument(
        lambda v: lw.perceptual(clean().model, "1", clean().data, max_memory=v).dense(),
        {**DEFAULT, "10**30": 2**31, "10**400": 2**31},
        "max_memory",
    ),
    "calibrate found": Argument(lambda v: lw.calibrate(v, torch.ones(63)), NOTHING, "found must be"),
    "calibrate truth": Argument(lambda v: lw.calibrate(reliable(), v), NOTHING, "truth"),
    "calibrate levels": Argument(
        lambda v: [tuple(w) for w in lw.calibrate(reliable(), torch.arange(63) % 2, v).levels],
        integers(1, huge=6),
        "levels",
    ),
    "Kernel left_power": keyword(
        lambda left_power: lw.Kernel(left_power, 0).left_power, "left_power", good()
    ),
    "Kernel right_power": keyword(
        lambda right_power: lw.Kernel(0, right_power).right_power, "right_power", good()
    ),
    "Kernel reduce": keyword(lambda reduce: lw.Kernel(0, 0, reduce), "reduce", NOTHING),
    "Network model": Argument(lambda v: lw.Network(v), NOTHING, "model"),
    "Network readout": keyword(network, "readout", DEFAULT),
    "Network parameters": keyword(network, "parameters", DEFAULT, "parameter"),
    "Network autocast": keyword(network, "autocast", DEFAULT),
    "batches dataset": Argument(lambda v: lw.batches(v, labels=[0] * 77), NOTHING, ANY),
    "batches size": Argument(
        lambda v: lw.batches(clean().data, size=v).samples(range(N)).inputs,
        {**DEFAULT, **integers(1, huge=N)},
        "size",
    ),
    "batches limit": Argument(
        lambda v: lw.batches(clean().data, limit=v).n, {**DEFAULT, **integers(1, huge=N)}, "limit"
    ),
    "batches labels": Argument(
        lambda v: lw.batches(clean().data, labels=v).n, {**DEFAULT, "False": False}, "label"
    ),
    "one_output index": Argument(
        lambda v: read(clean(), lw.one_output(v)), {**integers(-1, 1), "-1": -1}, "index|one_output"
    ),
    "label_against_random seed": Argument(lambda v: read(clean(), lw.label_against_random(v)), SEEDS, "seed"),
    **{
        f"{name} outputs": Argument(
            lambda v, function=function: function(v), NOTHING, "model|outputs|happened"
        )
        for name, function in (("one_output(9)", lw.one_output(9)), ("label_against_rest", label_of))
    },
    "label_against_rest labels": Argument(
        lambda v: lw.label_against_rest(torch.zeros(9, 2), v), NOTHING, "labels"
    ),
    "losses.pair x": keyword(pairs, "x", NOTHING, ANY),
    "losses.pair other": keyword(pairs, "other", NOTHING, "other|inputs"),
    "losses.pair labels": keyword(pairs, "labels", DEFAULT),
    "losses.pair weight": keyword(pairs, "weight", good()),
    "losses.pair readout": keyword(pairs, "readout", DEFAULT),
    "losses.pair parameters": keyword(pairs, "parameters", DEFAULT, "parameter"),
    "losses.group model": Argument(
        lambda v: lw.losses.group(v, clean().data, **drawn(v)), NOTHING, "model|happened when"
    ),
    "losses.group x": on_term(lw.losses.group, "x", NOTHING, ANY),
    "losses.group groups": on_term(lw.losses.group, "groups", DEFAULT),
    "losses.group labels": on_term(lw.losses.group, "labels", DEFAULT),
    "losses.group ids": on_term(lw.losses.group, "ids", DEFAULT),
    "losses.group weight": on_term(lw.losses.group, "weight", good()),
    "losses.two_batches a": keyword(two, "a", NOTHING, ANY),
    "losses.two_batches form": keyword(two, "form", NOTHING),
    "losses.two_batches weight": keyword(two, "weight", good()),
    "losses.two_batches labels_b": keyword(two, "labels_b", DEFAULT),
    "losses.orbit transforms": keyword(orbits, "transforms", NOTHING, "transform"),
    "losses.orbit weight": keyword(orbits, "weight", good()),
    "losses.along direction": keyword(along, "direction", NOTHING),
    "losses.along weight": keyword(along, "weight", good()),
    "losses.density total": keyword(dense_term, "total", NOTHING),
    "losses.density q": keyword(dense_term, "q", good()),
    "losses.density samples": keyword(dense_term, "samples", integers(1)),
    "losses.density weight": keyword(dense_term, "weight", good()),
    "RunningTotal decay": Argument(
        lambda v: lw.losses.RunningTotal(v).decay, good(least=0, below=1), "decay"
    ),
    "DensitySampler temperature": Argument(
        lambda v: list(lw.losses.DensitySampler(torch.arange(4), temperature=v)), good(least=0), "temperature"
    ),
    "DensitySampler seed": Argument(
        lambda v: list(lw.losses.DensitySampler(torch.arange(4), seed=v)), SEEDS, "seed"
    ),
    "analyze neighbors": Argument(lambda v: analyzed(clean(), neighbors=v), {"2": 2}, "neighbors"),
    "analyze threshold": Argument(
        lambda v: analyzed(clean(), threshold=v), {"0.5": 0.5, "0": 0, "float tensor": 0.5}, "threshold"
    ),
    "analyze sketch": Argument(lambda v: analyzed(clean(), sketch=v), NOTHING, "sketch"),
    "analyze layout": Argument(lambda v: analyzed(clean(), layout=v), NOTHING, "layout"),
    "analyze max_memory": Argument(lambda v: analyzed(clean(), max_memory=v), DEFAULT, "max_memory"),
    "analyze labels": Argument(
        lambda v: lw.analyze(clean().model, clean().data, v, neighbors=0), NOTHING, "label|neighbors"
    ),
    "analyze out": Argument(lambda v: analyzed(clean(), out=v, neighbors=0), NOTHING, "out|neighbors"),
    **{
        f"analyze {name}": Argument(lambda v, name=name: analyzed(clean(), **{name: v}), accepted, name)
        for name, accepted in (
            ("classes", dict.fromkeys(("None", "list of text", "range", "numpy array"))),
            *(("names", DEFAULT), ("show", DEFAULT), ("extra", DEFAULT)),
            ("excerpt_length", {"2": 2}),
            ("wait", {"infinity": torch.inf}),
        )
    },
}
FUNCTION = ("readout", "model", "net", "statistic", "transforms", "reduce", "direction", "show")
LONG = {  # values that are right there, and take long
    "analyze neighbors": ("1", "10**30", "10**400", "numpy integer", "integer tensor"),
    "analyze max_memory": ("10**30", "10**400"),
    "analyze threshold": ("1", "-1", "-0.5", "1e-320", "Fraction", "numpy float"),
    "analyze excerpt_length": ("1", "10**30", "10**400", "numpy integer", "integer tensor"),
    "analyze wait": tuple(good(least=0)),
    "analyze classes": ("tuple", "numpy objects", "masked array"),
    "analyze extra": ("empty dict",),
}


def argument_problem(argument: Argument, name: str) -> str | None:
    """What is wrong with one value of an argument, or None."""
    value = VALUES[name]()
    outcome = observe(lambda: argument.call(value), *clean().touched)
    if outcome.changed:
        return f"changed {', '.join(outcome.changed)}"
    if name not in argument.accepted:
        return refusal_problem(outcome, argument.pattern)
    if outcome.error is not None:
        return f"{type(outcome.error).__name__}: {hostile.text_of(outcome.error)[:200]}"
    return difference(outcome.value, argument.call(argument.accepted[name]), 1e-12)


def values_of(name: str) -> list[str]:
    """The values to try: a module is a function too, and may be a right one."""
    callable_one = name.endswith(FUNCTION)
    return [v for v in VALUES if v not in LONG.get(name, ()) and not (callable_one and v == "module")]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_hostile_values_of_an_argument_are_read_right_or_refused_by_name(name):
    found = {value: argument_problem(ARGUMENTS[name], value) for value in values_of(name)}
    problems = [f"{value}: {problem}" for value, problem in found.items() if problem is not None]
    assert len(found) >= 45
    assert not problems, f"{len(problems)} of {len(found)} cells:\n" + "\n".join(problems)
