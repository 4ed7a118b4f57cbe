"""Inputs that go wrong in every way we could think of, and what is to come of each.

Four lists: data sets, labels, models and values of single arguments. Each entry says what is expected: the
same numbers as of a clean input, no gradient (with a warning that names the samples), or an error of the
package's own making whose text matches a pattern.
"""

import copy
import random
import re
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import likewise as lw
import oracle

PACKAGE = str(Path(lw.__file__).parent)
N, FEATURES, CLASSES = 9, 3, 2


# What is expected


@dataclass(frozen=True)
class Same:
    """The same numbers as of another, clean input."""

    clean: str = "clean"
    tolerance: float = 1e-9


@dataclass(frozen=True)
class Refused:
    """An error made here whose text, notes included, matches."""

    pattern: str


@dataclass(frozen=True)
class ZeroGradient:
    """No parameter moves any output: zeros and a warning that names the samples, or a named error."""


@dataclass(frozen=True)
class Without:
    """The numbers of the other samples and a warning that names these, or an error that names them."""

    ids: tuple[int, ...]


@dataclass(frozen=True)
class Right:
    """The numbers of the naive oracle where there is one, else a result without NaN, or a named error."""


Expected = Same | Refused | ZeroGradient | Without | Right


# Observing a call


class Outcome(NamedTuple):
    """What came of a call."""

    value: Any
    error: BaseException | None
    warnings: list[str]
    changed: list[str]  # what the call left different


def observe(call: Callable[[], Any], *touched: Any) -> Outcome:
    """Call it and compare the state before and after, of models and tensors among `touched` too."""
    value, error = None, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = state_of(*touched)
        try:
            value = call()
        except Exception as problem:
            error = problem
        after = state_of(*touched)
    changed = [name for name in before if not is_same(before[name], after[name])]
    return Outcome(value, error, [str(w.message) for w in caught], changed)


def state_of(*touched: Any) -> dict[str, Any]:
    """Everything that a call could leave different, copied."""
    state: dict[str, Any] = {
        "torch's generator": torch.get_rng_state(),
        "numpy's generator": np.random.get_state()[1].tolist(),
        "Python's generator": random.getstate(),
        "warning filters": list(warnings.filters),
        "flags": (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.backends.mha.get_fastpath_enabled(),
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.allow_tf32,
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.mkldnn.enabled,
            torch.are_deterministic_algorithms_enabled(),
        ),
    }
    for which, value in enumerate(touched):
        if isinstance(value, nn.Module):
            state |= {f"{name} of model {which}": part for name, part in _model_state(value).items()}
        elif isinstance(value, torch.Tensor):
            state[f"tensor {which}"] = _tensor_state(value)
    return state


def _model_state(model: nn.Module) -> dict[str, Any]:
    modules = list(model.modules())
    script = isinstance(model, torch.jit.ScriptModule)
    held = [] if script else [sorted(k for k in vars(m) if k != "_forward_hooks_id") for m in modules]
    hooks = [] if script else [_hooks(m) for m in modules]
    every = [] if is_lazy(model) else [*model.parameters(), *model.buffers()]
    return {
        "values": [_tensor_state(v) for v in every],
        "identities": [id(v) for v in every],
        "modes": [m.training for m in modules],
        "attributes": held,
        "hooks": hooks,
    }


def _hooks(module: nn.Module) -> list[int]:
    return [len(v) for k, v in sorted(vars(module).items()) if k.endswith("_hooks")]


def is_lazy(model: nn.Module) -> bool:
    """Whether some parameter has no shape yet."""
    return any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters())


def _tensor_state(value: torch.Tensor) -> Any:
    plain = value.layout is torch.strided and not (value.is_meta or value.is_quantized or value.is_nested)
    kept = value.detach().clone() if plain else None
    grad = value.grad.clone() if value.is_leaf and value.grad is not None else None
    version = None if value.is_inference() else value._version
    return [kept, grad, value.requires_grad, value.dtype, str(value.device), version]


def is_same(a: Any, b: Any) -> bool:
    """Whether two states are equal, bit for bit; NaN is equal to itself."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(is_same, a, b))
    return type(a) is type(b) and bool(a == b)


# Judging an outcome


def text_of(error: BaseException) -> str:
    """An error with its notes, as a user reads it."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def is_own(error: BaseException) -> bool:
    """Whether the package raised it itself, or said in a note what was being done."""
    if getattr(error, "__notes__", None):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    raised = (last.line or "").lstrip().startswith("raise")
    return (
        isinstance(error, ValueError | TypeError | MemoryError)
        and last.filename.startswith(PACKAGE)
        and raised
    )


def refusal_problem(outcome: Outcome, pattern: str) -> str | None:
    """Why an outcome is no refusal that names what is wrong, or None if it is."""

    if outcome.error is None:
        return f"returned {short(outcome.value)} where an error matching {pattern!r} was expected"
    text = text_of(outcome.error)
    kind = type(outcome.error).__name__
    if not is_own(outcome.error):
        where = traceback.extract_tb(outcome.error.__traceback__)[-1]
        return f"raw {kind} at {Path(where.filename).name}:{where.lineno}: {short(text)}"
    if not re.search(pattern, text, re.IGNORECASE):
        return f"{kind} does not match {pattern!r}: {text[:250]}"
    return None


def difference(found: Any, expected: Any, tolerance: float = 1e-9) -> str | None:
    """Where two results differ, or None if they do not."""
    (left, left_spec), (right, right_spec) = tree_flatten(found), tree_flatten(expected)
    if left_spec != right_spec:
        return f"a result of another form: {short(found)} instead of {short(expected)}"
    for a, b in zip(left, right, strict=True):
        if isinstance(a, torch.Tensor | float | int) and isinstance(b, torch.Tensor | float | int):
            a, b = (torch.as_tensor(v).detach().double() for v in (a, b))
            if a.shape != b.shape:
                return f"shape {tuple(a.shape)} instead of {tuple(b.shape)}"
            if not torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
                return f"off by {float((a - b).abs().max()):.2g}: {short(a)} instead of {short(b)}"
        elif a != b and isinstance(a, str | type(None)) is not False:
            return f"{short(a)} instead of {short(b)}"
    return None


def short(value: Any) -> str:
    """A result in one line."""
    text = " ".join(repr(value).split())
    return text if len(text) < 120 else f"{text[:117]}..."


# Data sets


def inputs(n: int = N, features: int = FEATURES) -> torch.Tensor:
    """Numbers that every floating type holds exactly."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(-12, 13, (n, features), generator=generator).double() / 8


def labels(n: int = N) -> torch.Tensor:
    return torch.arange(n) % CLASSES


class Input(NamedTuple):
    """A data set, with labels where they are given apart."""

    make: Callable[[], Any]
    expected: Expected
    of_terms: Expected | None = None  # of training terms, if they differ: they take tensors only
    own_labels: bool = False  # whether the data set holds its labels


class Rows(Dataset):
    """Samples by position, with something odd about them."""

    def __init__(self, item: Callable[[int], Any] | None = None, n: int = N) -> None:
        self._item, self._n = item or (lambda i: (inputs()[i], int(labels()[i]))), n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: int) -> Any:
        return self._item(i)


class Unsized:
    def __getitem__(self, i: int) -> Any:
        return inputs()[i]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(inputs())


class OddLength(Rows):
    def __len__(self) -> int:
        raise OSError("the file is gone")


def _raises(at: int, error: Exception) -> Callable[[int], Any]:
    def item(i: int) -> Any:
        if i == at:
            raise error
        return inputs()[i], int(labels()[i])

    return item


def _with(value: float, *places: int) -> torch.Tensor:
    x = inputs()
    for place in places:
        x[place, 1] = value
    return x


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return inputs() * 1


def _quiet(make: Callable[[], Any]) -> Callable[[], Any]:
    """Without the warnings of making something that PyTorch has half abandoned."""

    def made() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make()

    return made


def _strided() -> torch.Tensor:
    return inputs().repeat_interleave(2, 0)[::2]


def _frame() -> Any:
    import pandas

    return pandas.DataFrame(inputs().numpy(), columns=list("abc"))


def _generator() -> Any:
    return (x for x in inputs())


TENSORS = Refused("tensor")  # what training terms say of other containers
CALLED = Refused(r"happened when .*samples")  # the model's own error, with how it was called

DATA: dict[str, Input] = {
    "clean": Input(inputs, Right()),
    "float32": Input(lambda: inputs().float(), Same()),
    "float16": Input(lambda: inputs().half(), Same()),
    "bfloat16": Input(lambda: inputs().bfloat16(), Same()),
    "transposed memory": Input(lambda: inputs().T.contiguous().T, Same()),
    "every second row of a larger one": Input(_strided, Same()),
    "requires grad": Input(lambda: inputs().requires_grad_(), Same()),
    "a parameter": Input(lambda: nn.Parameter(inputs()), Same()),
    "inference tensor": Input(_inference, Same()),
    "numpy": Input(lambda: inputs().numpy(), Same(), TENSORS),
    "numpy float32": Input(lambda: inputs().float().numpy(), Same(), TENSORS),
    "numpy backwards": Input(lambda: inputs().flip(0).numpy()[::-1], Same(), TENSORS),
    "numpy columns first": Input(lambda: np.asfortranarray(inputs().numpy()), Same(), TENSORS),
    "pandas": Input(_frame, Same(), TENSORS),
    "list of samples": Input(lambda: list(inputs()), Same(), Refused("entry for each of 3")),
    "list of arrays": Input(lambda: list(inputs().numpy()), Same(), TENSORS),
    "list of pairs": Input(
        lambda: list(zip(inputs(), labels(), strict=True)), Same(), Refused("first dimension"), True
    ),
    "Dataset": Input(Rows, Same(), TENSORS, True),
    "TensorDataset": Input(lambda: TensorDataset(inputs(), labels()), Same(), TENSORS, True),
    "Subset": Input(lambda: Subset(TensorDataset(inputs(), labels()), range(N)), Same(), TENSORS, True),
    "DataLoader": Input(lambda: DataLoader(Rows(), 4), Same(), TENSORS, True),
    "dict of the argument": Input(lambda: {"input": inputs()}, Same()),
    "tuple of one": Input(lambda: (inputs(),), Same()),
    "batches": Input(lambda: lw.batches((inputs(), labels()), 4), Same(), TENSORS, True),
    "one sample": Input(lambda: inputs(1), Right()),
    "two samples": Input(lambda: inputs(2), Right()),
    "duplicates": Input(lambda: inputs(2)[[0, 1] * 4 + [0]], Right()),
    "expanded": Input(lambda: inputs(1).expand(N, -1), Right()),
    "zeros": Input(lambda: torch.zeros(N, FEATURES).double(), Right()),
    "1e19": Input(lambda: inputs() * 1e19, Right()),
    "1e38": Input(lambda: inputs() * 1e38, Right()),
    "1e-38": Input(lambda: inputs() * 1e-38, Right()),
    "one huge sample": Input(lambda: _with(1e30, 3), Right()),
    "NaN in one": Input(lambda: _with(torch.nan, 3), Without((3,))),
    "infinity in two": Input(lambda: _with(torch.inf, 3, 6), Without((3, 6))),
    "NaN in all": Input(lambda: inputs() * torch.nan, Refused("not finite|finite gradient")),
    "empty": Input(lambda: inputs()[:0], Refused("empty")),
    "empty list": Input(list, Refused("empty|nothing"), Refused("nothing|tensor")),
    "empty tuple": Input(tuple, Refused("empty|nothing"), Refused("nothing|tensor")),
    "empty dict": Input(dict, Refused("empty|nothing|no "), Refused("nothing|tensor")),
    "empty Dataset": Input(lambda: Rows(n=0), Refused("empty"), TENSORS, True),
    "no dimension": Input(lambda: torch.tensor(3.0), Refused(r"dimension|\(\)")),
    "numpy without a dimension": Input(lambda: np.array(3.0), Refused(r"dimension|\(\)"), TENSORS),
    "one dimension": Input(lambda: torch.ones(N).double(), CALLED),
    "no features": Input(lambda: inputs()[:, :0], CALLED),
    "other features": Input(lambda: inputs(features=4), CALLED),
    "integers": Input(lambda: inputs().long(), CALLED),
    "bytes": Input(lambda: inputs().abs().to(torch.uint8), CALLED),
    "booleans": Input(lambda: inputs() > 0, CALLED),
    "complex": Input(lambda: inputs().to(torch.complex64), CALLED),
    "sparse": Input(lambda: inputs().to_sparse(), Refused("sparse.*to_dense")),
    "sparse rows": Input(_quiet(lambda: inputs().to_sparse_csr()), Refused("sparse.*to_dense")),
    "meta": Input(lambda: inputs().to("meta"), Refused("meta device")),
    "quantized": Input(
        _quiet(lambda: torch.quantize_per_tensor(inputs().float(), 0.1, 0, torch.qint8)),
        Refused("quantized.*dequantize"),
    ),
    "nested": Input(
        _quiet(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])), Refused("nested.*pad")
    ),
    "objects": Input(lambda: np.array([None, 1, "a"] * 3, dtype=object), Refused("tensor"), TENSORS),
    "dates": Input(lambda: np.zeros((N, 3), "M8[s]"), Refused("tensor"), TENSORS),
    "records": Input(lambda: np.zeros(N, "f8,i4"), Refused("tensor"), TENSORS),
    "text in an array": Input(lambda: np.array(["a"] * N), Refused("text|tensor"), TENSORS),
    "masked": Input(lambda: np.ma.masked_less(inputs().numpy(), 0), Refused("mask"), TENSORS),
    "list of text": Input(lambda: ["a"] * N, Refused("text"), TENSORS),
    "list of None": Input(lambda: [None] * N, Refused("sample|batch"), TENSORS),
    "list of unequal samples": Input(
        lambda: [torch.ones(i + 1) for i in range(N)], Refused("batch"), Refused("length")
    ),
    "text": Input(lambda: "data.csv", Refused("data.csv"), TENSORS),
    "path": Input(lambda: Path("data.csv"), Refused("data.csv"), TENSORS),
    "None": Input(lambda: None, Refused("None|data"), Refused("None|tensor")),
    "a number": Input(lambda: 5, Refused("int|5"), TENSORS),
    "an object": Input(object, Refused("object"), TENSORS),
    "a class": Input(lambda: Rows, Refused("class|type|Rows"), TENSORS),
    "generator": Input(_generator, Refused("no fixed order|no length"), TENSORS),
    "set": Input(lambda: {1, 2}, Refused("set"), TENSORS),
    "IterableDataset": Input(Stream, Refused("no fixed order|no length"), TENSORS),
    "DataLoader of a stream": Input(lambda: DataLoader(Stream()), Refused("no fixed order"), TENSORS),
    "shuffled DataLoader": Input(
        lambda: DataLoader(Rows(), 4, shuffle=True), Refused("shuffle=False"), TENSORS, True
    ),
    "a model": Input(lambda: nn.Linear(3, 2), Refused("Linear"), TENSORS),
    "unequal lengths": Input(
        lambda: {"input": inputs(), "other": inputs(4)},
        Refused("length|differ"),
        Refused("length|differ|number"),
    ),
    "no length": Input(Unsized, Refused("length|__len__"), TENSORS),
    "a length that raises": Input(OddLength, Refused("length.*file is gone"), TENSORS, True),
    "random": Input(lambda: Rows(lambda i: (torch.rand(3), 0)), Refused("differs each time"), TENSORS, True),
    "raises at item 7": Input(
        lambda: Rows(_raises(7, KeyError("label"))), Refused("sample 7 .*KeyError.*label"), TENSORS, True
    ),
    "file missing at item 7": Input(
        lambda: Rows(_raises(7, FileNotFoundError("cat.png"))), Refused("sample 7 .*cat.png"), TENSORS, True
    ),
    "stops at item 5": Input(
        lambda: Rows(_raises(5, StopIteration())), Refused("sample 5 .*StopIteration"), TENSORS, True
    ),
    "shorter than its length": Input(
        lambda: Rows(lambda i: [(x, 0) for x in inputs(5)][i]),
        Refused("sample [5-8] .*IndexError"),
        TENSORS,
        True,
    ),
    "items are None": Input(lambda: Rows(lambda i: None), Refused("batch|None"), TENSORS, True),
    "items change their shape": Input(
        lambda: Rows(lambda i: (torch.ones(3 + i % 2), 0)), Refused("batch"), TENSORS, True
    ),
    "items hold text": Input(lambda: Rows(lambda i: ("a", 0)), Refused("text|tensor|samples"), TENSORS, True),
}


# Labels


class Labels(NamedTuple):
    """Labels, and what comes of them where they are classes, where they are numbers, and where unused."""

    make: Callable[[], Any]
    of_classes: Expected
    of_numbers: Expected
    unused: Expected = Same()


WRONG = Refused("label")
EVERYWHERE = (WRONG, WRONG, WRONG)

LABELS: dict[str, Labels] = {
    "int32": Labels(lambda: labels().int(), Same(), Same()),
    "uint8": Labels(lambda: labels().to(torch.uint8), Same(), Same()),
    "booleans": Labels(lambda: labels() > 0, Same(), Same()),
    "numpy": Labels(lambda: labels().numpy(), Same(), Same()),
    "list": Labels(lambda: labels().tolist(), Same(), Same()),
    "tuple": Labels(lambda: tuple(labels().tolist()), Same(), Same()),
    "column": Labels(lambda: labels()[:, None], Same(), Same()),
    "list of tensors": Labels(lambda: list(labels()), Same(), Same()),
    "floats": Labels(lambda: labels().double(), Refused("labels.long"), Right()),
    "half": Labels(lambda: labels().half(), Refused("labels.long"), Right()),
    "one-hot": Labels(lambda: torch.eye(2)[labels()].double(), Refused("argmax"), Right()),
    "values": Labels(lambda: torch.linspace(-1, 1, N).double(), Refused("class"), Right()),
    "negative": Labels(lambda: labels() - 1, Refused("from -1|index -1"), Right()),
    "beyond the outputs": Labels(lambda: labels() + 5, Right(), Right()),
    "a million classes": Labels(lambda: labels() * 10**6, Refused("1000000"), Right()),
    "one class": Labels(lambda: labels() * 0, Right(), Right()),
    "each its own": Labels(lambda: torch.arange(N), Right(), Right()),
    "NaN": Labels(lambda: labels().double() * torch.nan, WRONG, WRONG),
    "infinity": Labels(lambda: labels().double() / 0, WRONG, WRONG),
    "complex": Labels(lambda: labels().to(torch.complex64), WRONG, WRONG, Same()),
    "three dimensions": Labels(lambda: torch.zeros(N, 2, 2).long(), Refused("class|label"), Right()),
    "too few": Labels(lambda: labels(4), *EVERYWHERE),
    "too many": Labels(lambda: labels(N + 1), *EVERYWHERE),
    "empty": Labels(lambda: labels(0), *EVERYWHERE),
    "no dimension": Labels(lambda: torch.tensor(1), *EVERYWHERE),
    "text": Labels(lambda: ["cat", "dog"] * 4 + ["cat"], *EVERYWHERE),
    "a word": Labels(lambda: "class", *(Refused("class|label|column"),) * 3),
    "None among them": Labels(lambda: [0, None] * 4 + [0], *EVERYWHERE),
    "objects": Labels(lambda: np.array([0, "a", None] * 3, dtype=object), *EVERYWHERE),
    "masked": Labels(lambda: np.ma.masked_equal(labels().numpy(), 1), *(Refused("mask"),) * 3),
    "ragged": Labels(lambda: [[0], [0, 1]] * 4 + [[0]], *EVERYWHERE),
    "sparse": Labels(lambda: labels().to_sparse(), *(Refused("label.*sparse"),) * 3),
    "meta": Labels(lambda: labels().to("meta"), *(Refused("label.*meta"),) * 3),
    "a number": Labels(lambda: 5, *EVERYWHERE),
    "a dict": Labels(lambda: {0: 1}, *EVERYWHERE),
    "a set": Labels(lambda: {0, 1}, *EVERYWHERE),
    "a generator": Labels(lambda: (i for i in range(N)), *EVERYWHERE),
    "a function": Labels(lambda: len, *EVERYWHERE),
    "an object": Labels(object, *EVERYWHERE),
    "True": Labels(lambda: True, *EVERYWHERE),
}


# Models


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A small network whose parameters every floating type holds exactly."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randint(-16, 17, value.shape, generator=generator) / 16)
    return model.to(dtype)


class Around(nn.Module):
    """The network, with something done to its inputs or outputs."""

    def __init__(self, after: Callable[[torch.Tensor], Any] | None = None, before: Any = None) -> None:
        super().__init__()
        self.inside = network()
        self.after, self.before = after or (lambda y: y), before or (lambda x: x)

    def forward(self, x: torch.Tensor) -> Any:
        return self.after(self.inside(self.before(x)))


class Alone(nn.Module):
    """A module with a forward pass of its own."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *given: Any) -> Any:
        return self._forward(self, *given)


def _raise(error: BaseException) -> Any:
    raise error


def _raise_for_large(x: torch.Tensor) -> torch.Tensor:
    if (x[:, 0] == inputs()[5, 0]).any() and (x[:, 1] == inputs()[5, 1]).any():
        raise ArithmeticError("this sample is too much")
    return x


def _draw(y: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(5), np.random.rand(), random.random(), torch.rand(3)
    return y


def _hooked() -> nn.Module:
    model = network()
    model[0].register_forward_hook(lambda module, given, out: out)
    model.register_forward_pre_hook(lambda module, given: None)
    return model


def _with_gradients() -> nn.Module:
    model = network()
    model(inputs()).sum().backward()
    return model


def _tied() -> nn.Module:
    model = network()
    return nn.Sequential(model[0], model[1], model[2], nn.Identity())


def _made_in_inference() -> nn.Module:
    with torch.inference_mode():
        return network()


def _frozen(model: nn.Module | None = None) -> nn.Module:
    return (model or network()).requires_grad_(False)


def _lazy() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))


def _dynamic() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(network(torch.float32), {nn.Linear}, torch.qint8)


def _scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(network())


def _traced() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(network(), inputs())


def _filled(value: float) -> nn.Module:
    model = network()
    model[2].weight.data[0, 0] = value
    return model


def _half_meta() -> nn.Module:
    model = network()
    model[2].to("meta")
    return model


class Compiled(nn.Module):
    """What torch.compile returns holds the model under this name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model

    def forward(self, x: torch.Tensor) -> Any:
        return self._orig_mod(x)


class Model(NamedTuple):
    make: Callable[[], Any]
    expected: Expected
    of_terms: Expected | None = None


MODELS: dict[str, Model] = {
    "training mode": Model(lambda: network().train(), Same()),
    "evaluation mode": Model(lambda: network().eval(), Same()),
    "gradients in place": Model(_with_gradients, Same()),
    "hooks": Model(_hooked, Same()),
    "DataParallel": Model(lambda: nn.DataParallel(network()), Same()),
    "compiled": Model(lambda: Compiled(network()), Same()),
    "Network": Model(lambda: lw.Network(network()), Same()),
    "layers shared": Model(_tied, Same()),
    "made in inference mode": Model(_made_in_inference, Same(), Refused("inference mode")),
    "returns a tuple": Model(lambda: Around(lambda y: (y, 1)), Same()),
    "returns a list": Model(lambda: Around(lambda y: [y]), Same()),
    "returns a dict": Model(lambda: Around(lambda y: {"logits": y}), Same()),
    "returns an object": Model(lambda: Around(lambda y: SimpleNamespace(logits=y, loss=None)), Same()),
    "returns a view": Model(lambda: Around(lambda y: y.T.contiguous().T), Same()),
    "draws and seeds": Model(lambda: Around(_draw), Same()),
    "dropout": Model(lambda: nn.Sequential(OrderedDict(inside=network(), drop=nn.Dropout(0.9))), Same()),
    "writes to its inputs": Model(lambda: Around(before=lambda x: x.mul_(1)), Same()),
    "float32": Model(lambda: network(torch.float32), Same(tolerance=2e-4)),
    "float16": Model(lambda: network(torch.float16), Right()),
    "bfloat16": Model(lambda: network(torch.bfloat16), Right()),
    "detached": Model(lambda: Around(torch.detach), ZeroGradient()),
    "constant": Model(lambda: Around(lambda y: torch.ones(len(y), 2).double()), ZeroGradient()),
    "returns its input": Model(
        lambda: Alone(lambda self, x: x[:, :2], unused=nn.Parameter(torch.ones(2).double())), ZeroGradient()
    ),
    "dead": Model(lambda: Around(lambda y: torch.relu(y - 1e9)), ZeroGradient()),
    "no gradients inside": Model(lambda: Around(torch.no_grad()(lambda y: y * 1)), ZeroGradient()),
    "None": Model(lambda: None, Refused("None")),
    "text": Model(lambda: "resnet18", Refused("resnet18|str")),
    "a number": Model(lambda: 3, Refused("int|3")),
    "a class": Model(lambda: nn.Linear, Refused("Linear|type|class")),
    "a function": Model(lambda: torch.tanh, Refused("builtin|function")),
    "a list": Model(lambda: [network()], Refused("list")),
    "a state dict": Model(lambda: dict(network().state_dict()), Refused("dict")),
    "scripted": Model(_scripted, Refused("TorchScript")),
    "traced": Model(_traced, Refused("TorchScript")),
    "no parameters": Model(nn.Tanh, Refused("no parameters")),
    "buffers only": Model(
        lambda: Alone(lambda self, x: x @ self.w, w=torch.ones(3, 2).double()), Refused("no parameters")
    ),
    "all frozen": Model(_frozen, Refused("requires grad")),
    "integer parameters": Model(
        lambda: Alone(lambda self, x: x, w=nn.Parameter(torch.ones(2).long(), requires_grad=False)),
        Refused("requires grad|int64"),
    ),
    "complex parameters": Model(
        lambda: Alone(lambda self, x: (x * self.w).abs(), w=nn.Parameter(torch.ones(3).to(torch.complex128))),
        Refused("complex"),
    ),
    "on the meta device": Model(lambda: network().to("meta"), Refused("meta device")),
    "partly on the meta device": Model(_half_meta, Refused("meta device")),
    "lazy": Model(_lazy, Refused("no shape yet|uninitialized")),
    "quantized": Model(_dynamic, Refused("no parameters|requires grad")),
    "NaN in a weight": Model(lambda: _filled(torch.nan), Refused("finite")),
    "infinity in a weight": Model(lambda: _filled(torch.inf), Refused("finite")),
    "other inputs": Model(lambda: nn.Linear(5, 2).double(), CALLED),
    "images": Model(lambda: nn.Conv2d(1, 2, 3).double(), CALLED),
    "words": Model(lambda: nn.Embedding(4, 2).double(), CALLED),
    "two arguments": Model(lambda: nn.Bilinear(3, 3, 2).double(), CALLED),
    "raises ValueError": Model(lambda: Around(lambda y: _raise(ValueError("no"))), CALLED),
    "raises KeyError": Model(lambda: Around(lambda y: _raise(KeyError("no"))), CALLED),
    "raises StopIteration": Model(lambda: Around(lambda y: _raise(StopIteration())), CALLED),
    "raises AssertionError": Model(lambda: Around(lambda y: _raise(AssertionError())), CALLED),
    "raises NotImplementedError": Model(nn.ModuleList, Refused("no parameters")),
    "raises at sample 5": Model(
        lambda: Around(before=_raise_for_large), Refused(r"happened when .*samples?.*\b5\b")
    ),
    "not one alone": Model(
        lambda: Around(before=lambda x: x if len(x) > 1 else _raise(ValueError("too few"))), Refused("alone")
    ),
    "returns None": Model(lambda: Around(lambda y: None), Refused("None")),
    "returns text": Model(lambda: Around(lambda y: "cat"), Refused("str")),
    "returns a number": Model(lambda: Around(lambda y: 1.0), Refused("float")),
    "returns nothing": Model(lambda: Around(lambda y: ()), Refused("tuple")),
    "returns two tensors by name": Model(lambda: Around(lambda y: {"a": y, "b": y}), Refused("readout")),
    "returns integers": Model(lambda: Around(lambda y: y.long()), Refused("int64")),
    "returns classes": Model(lambda: Around(lambda y: y.argmax(1)), Refused("int64")),
    "returns booleans": Model(lambda: Around(lambda y: y > 0), Refused("bool")),
    "returns complex numbers": Model(lambda: Around(lambda y: y * 1j), Refused("complex")),
    "returns a loss": Model(lambda: Around(lambda y: y.sum()), Refused(r"shape \(\)|batch")),
    "returns outputs first": Model(
        lambda: Around(lambda y: y.T), Refused(r"expected|samples first|other samples|outputs \(2, 9\)")
    ),
    "returns half the batch": Model(lambda: Around(lambda y: y[::2]), Refused("expected|alone|batch")),
    "returns no outputs": Model(
        lambda: Around(lambda y: y[:, :0]), Refused("no outputs|0 outputs|0 classes|two outputs")
    ),
    "returns NaN": Model(lambda: Around(lambda y: y * torch.nan), Refused("finite")),
    "returns a sparse tensor": Model(lambda: Around(lambda y: y.to_sparse()), Refused("sparse")),
    "returns a meta tensor": Model(lambda: Around(lambda y: y.to("meta")), Refused("meta")),
    "random": Model(lambda: Around(lambda y: y + torch.rand_like(y)), Refused("random")),
    "batch statistics": Model(lambda: Around(lambda y: y - y.mean(0)), Refused("other samples")),
}


# Values of single arguments

VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "False": lambda: False,
    "0": lambda: 0,
    "1": lambda: 1,
    "2": lambda: 2,
    "-1": lambda: -1,
    "2.5": lambda: 2.5,
    "0.5": lambda: 0.5,
    "-0.5": lambda: -0.5,
    "NaN": lambda: float("nan"),
    "infinity": lambda: float("inf"),
    "-infinity": lambda: -float("inf"),
    "10**30": lambda: 10**30,
    "10**400": lambda: 10**400,
    "1e308": lambda: 1e308,
    "1e-320": lambda: 1e-320,
    "complex": lambda: 1 + 2j,
    "empty text": lambda: "",
    "text": lambda: "3",
    "a word": lambda: "nonsense",
    "bytes": lambda: b"3",
    "empty list": list,
    "list": lambda: [3],
    "list of text": lambda: ["a", "b"],
    "empty tuple": tuple,
    "tuple": lambda: (1, 2),
    "empty dict": dict,
    "dict": lambda: {"a": 1},
    "set": lambda: {1, 2},
    "object": object,
    "class": lambda: int,
    "generator": lambda: (i for i in range(3)),
    "range": lambda: range(3),
    "slice": lambda: slice(3),
    "ellipsis": lambda: ...,
    "path": lambda: Path("nowhere/at/all"),
    "Decimal": lambda: Decimal("2"),
    "Fraction": lambda: Fraction(1, 2),
    "numpy integer": lambda: np.int64(2),
    "numpy float": lambda: np.float32(0.5),
    "numpy NaN": lambda: np.float64("nan"),
    "numpy bool": lambda: np.bool_(True),
    "numpy 0-d": lambda: np.array(2),
    "numpy array": lambda: np.zeros(3),
    "numpy empty": lambda: np.zeros(0),
    "numpy objects": lambda: np.array([None, "a"], dtype=object),
    "numpy text": lambda: np.array(["a"]),
    "masked array": lambda: np.ma.masked_equal(np.arange(3), 1),
    "integer tensor": lambda: torch.tensor(2),
    "float tensor": lambda: torch.tensor(0.5),
    "NaN tensor": lambda: torch.tensor(torch.nan),
    "bool tensor": lambda: torch.tensor(True),
    "empty tensor": lambda: torch.zeros(0),
    "vector": lambda: torch.ones(3),
    "matrix": lambda: torch.ones(2, 2),
    "complex tensor": lambda: torch.ones(3, dtype=torch.complex64),
    "sparse tensor": lambda: torch.eye(3).to_sparse(),
    "meta tensor": lambda: torch.ones(3, device="meta"),
    "module": lambda: nn.Linear(2, 2),
    "dtype": lambda: torch.float32,
    "exception": lambda: ValueError("hm"),
}


class Case:
    """A model with a data set; its GramMatrix and reference are made once and serve all functions."""

    def __init__(self, model: Any, data: Any, given: Any = None) -> None:
        self.model, self.data, self.given = model, data, given

    @property
    def module(self) -> Any:
        """The model itself, also inside a Network."""
        return self.model.model if isinstance(self.model, lw.Network) else self.model

    @cached_property
    def gram(self) -> lw.GramMatrix:
        """Rows and columns are the data."""
        return lw.GramMatrix(self.model, self.batches)

    @cached_property
    def batches(self) -> lw.Batches:
        """The data with their labels."""
        return self.data if isinstance(self.data, lw.Batches) else lw.batches(self.data, labels=self.given)

    @property
    def samples(self) -> lw.Samples:
        """All samples at once."""
        return self.batches.samples(range(self.batches.n))

    @cached_property
    def reference(self) -> torch.Tensor:
        """k^C of all pairs by the oracle, in float64."""
        rows = oracle.jacobians(copy.deepcopy(self.module).double(), self.samples.inputs.double())
        return oracle.trace(oracle.correlation(rows, rows))

    @property
    def touched(self) -> list[Any]:
        """What a call could change."""
        leaves = tree_leaves((self.data, self.given))
        return [self.module, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]
