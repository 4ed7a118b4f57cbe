"""Readouts select, from what a model returns, the outputs whose gradients are compared.

A readout is any function (outputs, labels) -> (n, d), whatever its two arguments are called; those below
serve common cases. One with a further argument named `ids` also gets the samples' numbers, one with an
argument named `inputs` what the model was called with.
"""

import inspect
import re
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, ClassVar, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from likewise.checks import (
    check_choice,
    check_function,
    check_integer,
    check_seed,
    check_type,
    describe,
    refuse_unreadable,
)

Outputs = Any  # whatever the model returns
Inputs = Any  # whatever it was called with
Readout = Callable[..., Tensor]

IGNORED = -100  # the label of a token that does not count, as in torch.nn.functional.cross_entropy
CHUNK = 2**22  # logits that are cast, exponentiated and summed at a time, on a CPU: they stay in its cache
CHUNK_OF_GPU = 2**25  # on a GPU, which is slow at small pieces
MATRICES = 4  # that a projection keeps: one for each number of outputs, device and dtype
DRAWS = 256  # of contrasts, of which those are taken that tell classes apart best
FEW_CLASSES = 64  # up to which one draw is better than another
BLOCK = 2**16  # rows of a projection that are made orthonormal at a time
MOST_OUTPUTS = 10  # that are all compared where no readout is given
COMBINATIONS = 8  # of more; k^C then correlates .988 or better with that of all outputs (docs/method.md)
FEWER_COMBINATIONS = 4  # in a large network, where each costs: .964 or better
LARGE = 10**7  # parameters


def all_outputs(outputs: Outputs, labels: Tensor | None = None) -> Tensor:
    """All outputs of each sample, flattened; d backward passes.

    Args:
        outputs: What the model returns: a tensor (n, ...), or something with `logits` or one tensor.
        labels: Not used.

    Returns:
        (n, d) outputs.

    Example:
        >>> import torch, likewise as lw
        >>> lw.all_outputs(torch.zeros(5, 3, 2)).shape
        torch.Size([5, 6])

    """
    return _scores(outputs).flatten(1)


ROUNDING = 5e-3  # of the sum of probabilities: in bfloat16, each is rounded by up to 1/256 of itself


def are_chances(outputs: Tensor) -> bool:
    """Return whether outputs (n, d) are probabilities: the last layer is a softmax or sigmoid."""
    values = outputs.double()
    inside = bool(((values >= 0) & (values <= 1)).all())
    return inside and (outputs.shape[1] == 1 or bool((values.sum(1) - 1).abs().max() < ROUNDING))


@dataclass(frozen=True)
class _OneOutput:
    index: int

    def __call__(self, outputs: Outputs, labels: Tensor | None = None) -> Tensor:
        every = all_outputs(outputs)
        if not -every.shape[1] <= self.index < every.shape[1]:
            raise ValueError(
                f"one_output({self.index}) asks for an output that is not there: the model has "
                f"{every.shape[1]} outputs, numbered from 0."
            )
        return every[:, self.index].unsqueeze(1)


def one_output(index: int) -> Readout:
    """Return the readout of one output; d = 1.

    Args:
        index: Position in the flattened outputs, from 0; negative counts from the end.

    Returns:
        A readout (outputs, labels) -> (n, 1).

    Example:
        >>> import torch, likewise as lw
        >>> lw.one_output(2)(torch.arange(6.0).view(2, 3))
        tensor([[2.],
                [5.]])

    """
    return _OneOutput(check_integer("index", index))


def log_probabilities(outputs: Outputs, labels: Tensor | None = None) -> Tensor:
    """Log-softmax over dimension 1, which a constant added to all logits does not change.

    Its d gradients have rank d − 1, so k^C(x, x) = (d − 1)/d. d backward passes.

    Args:
        outputs: What the model returns: logits (n, classes, ...).
        labels: Not used.

    Returns:
        (n, d) log-probabilities, flattened.

    Example:
        >>> import torch, likewise as lw
        >>> lw.log_probabilities(torch.zeros(1, 2))
        tensor([[-0.6931, -0.6931]])

    """
    scores = _scores(outputs)
    if scores.shape[1] < 2:
        raise ValueError("log_probabilities needs two outputs or more: of one, log-softmax is always 0.")
    return scores.log_softmax(1).flatten(1)


def label_against_rest(outputs: Outputs, labels: Tensor | None) -> Tensor:
    """Log-odds of the label: its logit minus the log-sum-exp of the others; d = 1; section 3 of the paper.

    For a model with a single output: the logit of class 1 against class 0, signed by the label.

    Args:
        outputs: What the model returns: logits (n, classes).
        labels: (n,) class numbers.

    Returns:
        (n, 1) log-odds.

    Example:
        >>> import torch, likewise as lw
        >>> lw.label_against_rest(torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0])).round(decimals=2)
        tensor([[1.3100]])

    """
    scores, target = _scores_and_labels(outputs, labels, "label_against_rest")
    if scores.shape[1] == 1:
        signs = torch.tensor([-1, 1]).to(scores).expand(len(scores), 2)
        _check_classes(target, 2)
        return scores * signs.gather(1, target)
    _check_classes(target, scores.shape[1])
    others = scores.scatter(1, target, -torch.inf).logsumexp(1, keepdim=True)
    return scores.gather(1, target) - others


@dataclass(frozen=True)
class _LabelAgainstRandom:
    seed: int

    def __call__(self, outputs: Outputs, labels: Tensor | None, ids: Tensor) -> Tensor:
        scores, target = _scores_and_labels(outputs, labels, "label_against_random")
        if scores.shape[1] < 2:
            return label_against_rest(outputs, labels)
        shift = 1 + _scrambled(ids, self.seed).remainder(scores.shape[1] - 1).unsqueeze(1)
        rival = (target + shift).remainder(scores.shape[1])
        _check_classes(target, scores.shape[1])
        return scores.gather(1, target) - scores.gather(1, rival)


def label_against_random(seed: int = 0) -> Readout:
    """Return the readout of the label's logit minus that of another class drawn per sample; d = 1.

    Args:
        seed: Seed of the draw, which depends only on it and the sample's id, not on batches or processes.

    Returns:
        A readout (outputs, labels, ids) -> (n, 1).

    Example:
        >>> import torch, likewise as lw
        >>> readout = lw.label_against_random(seed=1)
        >>> readout(torch.eye(3), torch.arange(3), ids=torch.arange(3)).shape
        torch.Size([3, 1])

    """
    return _LabelAgainstRandom(check_seed("seed", seed))


def predicted_class(outputs: Outputs, labels: Tensor | None = None) -> Tensor:
    """Log-odds of the model's own answer: the largest logit minus the log-sum-exp of the others; d = 1.

    Needs no labels. With equal logits, the first one is the answer. For a model with a single output: the logit of
    class 1 against class 0, signed by the prediction. One backward pass, whatever the number of classes.

    Args:
        outputs: What the model returns: logits (n, classes).
        labels: Not used.

    Returns:
        (n, 1) log-odds; at least −log(classes − 1).

    Example:
        >>> import torch, likewise as lw
        >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 5.0]])
        >>> lw.predicted_class(logits).round(decimals=2)
        tensor([[1.3100],
                [4.3100]])
        >>> lw.similarity(torch.nn.Linear(4, 3), torch.randn(5, 4), readout=lw.predicted_class).shape
        torch.Size([5, 5])

    """
    scores = _scores(outputs)
    if scores.dim() != 2 or not scores.shape[1]:
        raise ValueError(
            f"predicted_class needs logits of shape (n, classes), found {tuple(scores.shape)}: for a language "
            "model, use likewise.sequence_log_likelihood(); for other outputs, likewise.projected_outputs(r)."
        )
    if scores.shape[1] == 1:
        return torch.where(scores.detach() >= 0, scores, -scores)
    answer = scores.detach().argmax(1, keepdim=True)
    return scores.gather(1, answer) - scores.scatter(1, answer, -torch.inf).logsumexp(1, keepdim=True)


class _Matrices:
    """Projections by number of outputs, device and dtype: a cache that is not part of a readout's identity."""

    def __init__(self) -> None:
        self._lock, self._known = Lock(), dict[tuple[int, torch.device, torch.dtype], Tensor]()

    def get(self, d: int, like: Tensor, build: Callable[[int], Tensor]) -> Tensor:
        """Return the matrix for d outputs in the device and dtype of a tensor; build it on first use."""
        key = (d, like.device, like.dtype)
        with self._lock:
            if key not in self._known:
                while len(self._known) >= MATRICES:
                    del self._known[next(iter(self._known))]
                # A new thread has no vmap, trace or inference mode around it: a constant is built there.
                with ThreadPoolExecutor(1) as thread:
                    matrix = thread.submit(lambda: build(d).to(like.device, like.dtype))
                self._known[key] = matrix.result()
            return self._known[key]

    def add_to(self, fingerprint: Any, name: str) -> None:
        """Add nothing: the cache does not distinguish readouts."""

    def __reduce__(self) -> tuple[type["_Matrices"], tuple[()]]:
        return _Matrices, ()


@dataclass(frozen=True)
class _Combinations(ABC):
    """Outputs times a matrix that follows from their number."""

    factory: ClassVar[str]  # the public function that returns it
    noun: ClassVar[str]
    r: int
    seed: int
    matrices: _Matrices = field(default_factory=_Matrices, compare=False, repr=False)

    def __repr__(self) -> str:
        return f"{self.factory}({self.r}, seed={self.seed})"

    def __call__(self, outputs: Outputs, labels: Tensor | None = None) -> Tensor:
        every = all_outputs(outputs)
        every = torch.where(every == -torch.inf, 0, every)  # a class that is ruled out has no gradient
        return every @ self.matrices.get(every.shape[1], every, self._build)

    @abstractmethod
    def _build(self, d: int) -> Tensor:
        """Return the matrix, (d, r)."""


class _ProjectedOutputs(_Combinations):
    factory, noun = "projected_outputs", "combinations"

    def _build(self, d: int) -> Tensor:
        return orthonormal_columns(d, min(self.r, d), self.seed)


class _ClassContrasts(_Combinations):
    factory, noun = "class_contrasts", "contrasts"

    def __call__(self, outputs: Outputs, labels: Tensor | None = None) -> Tensor:
        scores = _scores(outputs)
        if scores.dim() != 2 or scores.shape[1] < 2:
            raise ValueError(
                "class_contrasts needs scores of shape (n, classes) of at least two classes, found "
                f"{tuple(scores.shape)}: for other outputs, use likewise.projected_outputs(r)."
            )
        return super().__call__(outputs, labels)

    def _build(self, d: int) -> Tensor:
        return contrast_columns(d, min(self.r, d - 1), self.seed)


def projected_outputs(r: int, seed: int = 0) -> Readout:
    """Return the readout of r random orthonormal combinations of all outputs: d becomes r.

    y Q with Q (d, r), QᵀQ = Id, the same for all samples. Costs r backward passes instead of d. The estimate of k^I is
    unbiased; r = d rotates the outputs and does not change k^C. "Few combinations of many outputs" in the docs shows
    how close small r comes. Q is computed once for each d (10⁶ outputs, r = 8: half a second).

    Args:
        r: Number of combinations; more than there are outputs means all of them.
        seed: Seed of the combinations, which depend only on it, d and r.

    Returns:
        A readout from outputs of any shape (n, ...) to (n, min(r, d)). All samples must have the same number of
        outputs: pad sequences to one length for all batches.

    Example:
        >>> import torch, likewise as lw
        >>> model, x = torch.nn.Linear(4, 1000), torch.randn(5, 4)
        >>> gram = lw.GramMatrix(lw.Network(model, lw.projected_outputs(8)), x)
        >>> gram.d, gram.dense().shape
        (8, torch.Size([5, 5]))

    """
    return _ProjectedOutputs(check_integer("r", r, 1), check_seed("seed", seed))


def class_contrasts(r: int, seed: int = 0) -> Readout:
    """Return the readout of r random orthonormal contrasts of class scores: combinations whose weights add up to 0.

    What is added to the scores of all classes changes no probability, and does not count here. Of 256 draws, the one
    whose two most similar classes are furthest apart is taken (beyond 64 classes, the first): a draw of
    `projected_outputs` can treat two classes as one. r = classes − 1 leaves out their sum alone. `analyze` compares
    four contrasts where it sketches the gradients of a classifier.

    Args:
        r: Number of contrasts; at most classes − 1 are used.
        seed: Seed of the draws, on which the contrasts depend, beside the number of classes and r.

    Returns:
        A readout from scores (n, classes) to (n, min(r, classes − 1)).

    Example:
        >>> import torch, likewise as lw
        >>> scores = torch.randn(5, 10)
        >>> readout = lw.class_contrasts(4)
        >>> readout(scores).shape, torch.allclose(readout(scores), readout(scores + 1), atol=1e-6)
        (torch.Size([5, 4]), True)

    """
    return _ClassContrasts(check_integer("r", r, 1), check_seed("seed", seed))


def contrast_columns(d: int, r: int, seed: int) -> Tensor:
    """Return orthonormal columns (d, r) that add up to 0, whose two nearest rows of 256 draws are furthest apart.

    The criterion treats all outputs alike, so that over seeds Q Qᵀ is on average that of a uniform draw.
    """
    draws = DRAWS if d <= FEW_CLASSES else 1
    generator = torch.Generator("cpu").manual_seed(seed)
    gaussian = torch.randn(draws, d, r, dtype=torch.float64, device="cpu", generator=generator)
    columns = torch.linalg.qr(gaussian - gaussian.mean(1, keepdim=True)).Q
    if draws == 1:
        return columns[0]
    apart = torch.cdist(columns, columns)
    apart.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    return columns[apart.amin((1, 2)).argmax()]


def orthonormal_columns(d: int, r: int, seed: int) -> Tensor:
    """Return Q of the QR decomposition of a Gaussian (d, r) matrix, R with a positive diagonal, in float64.

    So Q is uniform over all matrices with orthonormal columns. A tall G is well-conditioned, and Q = G R⁻¹, with R from
    the Cholesky decomposition of GᵀG, needs no memory besides G.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    gaussian = torch.randn(d, r, dtype=torch.float64, device="cpu", generator=generator)
    if d < 4 * r:
        q, upper = torch.linalg.qr(gaussian)
        return q * torch.where(upper.diagonal() < 0, -1.0, 1.0)
    upper = torch.linalg.cholesky(gaussian.T @ gaussian, upper=True)
    inverse = torch.linalg.solve_triangular(upper, torch.eye(r, dtype=torch.float64), upper=True)
    for block in gaussian.split(BLOCK):
        block.copy_(block @ inverse)
    return gaussian


class _TokenLogProbabilities(torch.autograd.Function):
    """log p(target) at every position, (n, T), from logits (n, T, V) in any floating type.

    Logits are cast to float32 some positions at a time, forward and backward, and are all that is kept for the
    backward: half-precision logits never exist in float32 as a whole. One operation whatever the number of chunks, so
    that models are traced alike at all batch sizes. Works under vmap, forward mode and twice backward.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, targets: Tensor) -> Tensor:
        def likelihoods(part: Tensor, where: _Where) -> Tensor:
            return part.gather(2, targets[where][..., None])[..., 0] - part.logsumexp(2)

        return _join(logits, likelihoods)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits, targets = ctx.saved_tensors

        def spread(part: Tensor, where: _Where) -> Tensor:
            g, target = gradient[where][..., None], targets[where][..., None]
            return (-g * part.softmax(2)).scatter_add(2, target, g).to(logits.dtype)

        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return _join(logits, spread), None
        result = torch.empty_like(logits)  # the same, without copies
        for part, where in _chunks(logits):
            g, target, shares = gradient[where][..., None], targets[where][..., None], part.softmax(2)
            own = g - g * shares.gather(2, target)
            torch.mul(shares, -g, out=result[where]).scatter_(2, target, own.to(logits.dtype))
        return result, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:
        logits, targets = ctx.saved_tensors

        def moves(part: Tensor, where: _Where) -> Tensor:
            move = tangent[where].to(part.dtype)
            return move.gather(2, targets[where][..., None])[..., 0] - (part.softmax(2) * move).sum(2)

        return _join(logits, moves)


_Where = tuple[slice, slice]  # texts and their positions


def _join(logits: Tensor, function: Callable[[Tensor, _Where], Tensor]) -> Tensor:
    """Return function(logits in float32 or wider, their place) of all chunks, (n, T, ...)."""
    texts: dict[int, list[Tensor]] = {}
    for part, where in _chunks(logits):
        texts.setdefault(where[0].start, []).append(function(part, where))
    return torch.cat([torch.cat(parts, 1) for parts in texts.values()])


def _chunks(logits: Tensor) -> Iterator[tuple[Tensor, _Where]]:
    """Yield logits in float32 or wider, with their place: of whole texts where they are small."""
    n, length, vocabulary = logits.shape
    limit = CHUNK if logits.device.type == "cpu" else CHUNK_OF_GPU
    texts = max(1, limit // max(1, length * vocabulary))
    positions = min(max(1, limit // max(1, vocabulary)), max(1, length))
    wide = torch.promote_types(logits.dtype, torch.float32)
    for i in range(0, max(1, n), texts):
        for j in range(0, max(1, length), positions):
            where = slice(i, i + texts), slice(j, j + positions)
            yield logits[where].to(wide), where


def token_log_likelihood(
    outputs: Outputs, labels: Tensor | None, inputs: Inputs = None, *, shift: bool | None = None
) -> Tensor:
    """Log-likelihood of each token of a sequence given those before it, at the token's own position; d = T.

    Positions that do not count are 0 with a zero gradient: padding (attention_mask 0), labels of −100, the first token,
    which no model predicts, and a token after padding. T backward passes. The (T, T) blocks of
    `Kernel(0, 0, whole_block)` hold similarities between tokens: entry t, s of block x, x' is the inner product of the
    gradients of token t of x and token s of x'. Divided by both norms it is their cosine, as below; CORRELATION would
    whiten the tokens of one text against each other.

    Args:
        outputs: What the model returns, with logits (n, T, vocabulary).
        labels: (n, T) tokens, not shifted, −100 for those that do not count; None uses the model's input_ids.
        inputs: What the model was called with: a tensor of tokens, or a dict with input_ids and attention_mask.
        shift: Whether the logits at a position predict the next token. None: yes, unless inputs have
            decoder_input_ids (encoder-decoder models). For masked language models, use
            functools.partial(token_log_likelihood, shift=False).

    Returns:
        (n, T) log-probabilities, at least float32.

    Example:
        >>> import torch, likewise as lw
        >>> model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7))
        >>> tokens = torch.randint(0, 7, (3, 5))
        >>> net = lw.Network(model, lw.token_log_likelihood)
        >>> kernel = lw.Kernel(0, 0, lw.whole_block)
        >>> blocks = lw.GramMatrix(net, tokens, kernel=kernel).dense()
        >>> blocks.shape
        torch.Size([3, 3, 5, 5])
        >>> norms = torch.stack([blocks[i, i].diagonal().sqrt() for i in range(3)]).clamp(min=1e-30)
        >>> cosines = blocks / norms[:, None, :, None] / norms[None, :, None, :]
        >>> bool(cosines.abs().max() < 1.001)
        True

    """
    likelihoods, _ = _token_likelihoods(outputs, labels, inputs, shift)
    return likelihoods


@dataclass(frozen=True)
class _SequenceLogLikelihood:
    reduce: Literal["mean", "sum"]
    shift: bool | None

    def __repr__(self) -> str:
        return f"sequence_log_likelihood(reduce={self.reduce!r}, shift={self.shift})"

    def __call__(self, outputs: Outputs, labels: Tensor | None, inputs: Inputs = None) -> Tensor:
        return _sequence_likelihood(outputs, labels, inputs, self.shift, self.reduce)

    def terms(self, outputs: Outputs, labels: Tensor | None, inputs: Inputs = None) -> Tensor:
        """Return the per-token terms whose sum the readout returns, (n, T)."""
        likelihoods, counted = _token_likelihoods(outputs, labels, inputs, self.shift)
        return likelihoods if self.reduce == "sum" else likelihoods / _count(counted)


def is_log_likelihood(readout: Readout) -> bool:
    """Whether a readout is the log-likelihood of a text as a whole."""
    return isinstance(readout, _SequenceLogLikelihood)


def sequence_log_likelihood(reduce: Literal["mean", "sum"] = "mean", shift: bool | None = None) -> Readout:
    """Return the readout of a language model's log-likelihood of a text; d = 1.

    The sum, or the mean, of log p(token | those before) over the tokens that count. These exclude padding
    (attention_mask 0), tokens with a label of −100 (such as a prompt), the first token, which no model predicts, and a
    token after padding; texts may be padded on either side. A text without such a token has a zero gradient. Logits in
    half precision are cast to float32 in parts. One backward pass.

    Pass labels with the data, under "labels" in a dict. Encoder-decoder models (T5) are called without labels and need
    decoder_input_ids among the inputs: model.prepare_decoder_input_ids_from_labels(labels).

    Args:
        reduce: "mean" does not favor long texts; "sum" is the log-likelihood proper.
        shift: Whether the logits at a position predict the next token. None: yes, unless inputs have
            decoder_input_ids (encoder-decoder models). False for masked language models.

    Returns:
        A readout (outputs, labels, inputs) -> (n, 1). Labels are (n, T) tokens as the model gets them, not shifted;
        without labels, the input_ids count.

    Example:
        >>> import torch, likewise as lw
        >>> model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7))
        >>> tokens = torch.randint(0, 7, (3, 5))
        >>> lw.similarity(model, tokens, readout=lw.sequence_log_likelihood()).shape
        torch.Size([3, 3])

    """
    check_choice("reduce", reduce, ("mean", "sum"))
    if shift is not None and not isinstance(shift, bool):
        raise TypeError(f"shift must be True, False or None, found {describe(shift)}.")
    return _SequenceLogLikelihood(reduce, shift)


class CompletionPairs(nn.Module):
    """A language model that reads a completion and an alternative, for `completion_against_alternative`.

    Called with chosen_input_ids, chosen_attention_mask, rejected_input_ids, ..., it calls the model with the chosen_...
    inputs, then with the rejected_... inputs, without the prefix. chosen_labels and rejected_labels are for the readout
    and are not passed on. The two texts may have different lengths. Its parameters are the model's, prefixed by
    "model.".

    Args:
        model: A causal or encoder-decoder language model.

    Example:
        >>> import torch, likewise as lw
        >>> model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7))
        >>> pairs = {"chosen_input": torch.randint(0, 7, (3, 5)), "rejected_input": torch.randint(0, 7, (3, 6))}
        >>> {name: tuple(part.shape) for name, part in lw.CompletionPairs(model)(**pairs).items()}
        {'chosen': (3, 5, 7), 'rejected': (3, 6, 7)}

    """

    SIDES = ("chosen", "rejected")

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> dict[str, Tensor]:
        """Return the logits of both texts, {"chosen": (n, T, vocabulary), "rejected": ...}."""
        logits = {}
        for side in self.SIDES:
            named = _side(inputs, side)
            named.pop("labels", None)
            logits[side] = main_tensor(self.model(**named))
        return logits


def completion_against_alternative(
    outputs: Outputs,
    labels: Tensor | None,
    inputs: Inputs,
    *,
    reduce: Literal["mean", "sum"] = "sum",
    shift: bool | None = None,
) -> Tensor:
    """Log-likelihood of a completion minus that of an alternative, as in preference pairs; d = 1.

    For `CompletionPairs(model)` and inputs named chosen_... and rejected_...: input_ids, attention_mask and, if part of
    the text does not count, labels with −100 there. A prompt that both share cancels in the sum in any case. One
    backward pass through two calls of the model.

    Args:
        outputs: What CompletionPairs returns.
        labels: Not used: each text has its own among the inputs.
        inputs: Dict of chosen_... and rejected_... tensors.
        reduce: "sum" as in preference optimization; "mean" per token. functools.partial sets it.
        shift: As for `sequence_log_likelihood`.

    Returns:
        (n, 1) differences, at least float32.

    Example:
        >>> import torch, likewise as lw
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed, self.out = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7)
        ...     def forward(self, input_ids):
        ...         return self.out(self.embed(input_ids).cumsum(1).tanh())
        >>> pairs = {
        ...     "chosen_input_ids": torch.randint(0, 7, (3, 5)),
        ...     "rejected_input_ids": torch.randint(0, 7, (3, 6)),
        ... }
        >>> net = lw.Network(lw.CompletionPairs(Model()), lw.completion_against_alternative)
        >>> lw.GramMatrix(net, pairs).dense().shape
        torch.Size([3, 3])

    """
    known = isinstance(outputs, Mapping) and set(CompletionPairs.SIDES) <= set(outputs)
    if not known or not isinstance(inputs, Mapping):
        raise TypeError(
            "completion_against_alternative needs the outputs of likewise.CompletionPairs(model) for inputs named "
            f"chosen_input_ids, rejected_input_ids, ..., found {describe(outputs)}: use "
            "Network(CompletionPairs(model), completion_against_alternative)."
        )
    one, other = (
        _sequence_likelihood(outputs[side], named.pop("labels", None), named, shift, reduce)
        for side in CompletionPairs.SIDES
        for named in (_side(inputs, side),)
    )
    return one - other


class ReadoutNotice(UserWarning):
    """Says which readout was chosen automatically, and how to choose another.

    Example:
        >>> import torch, likewise as lw
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", lw.ReadoutNotice)      # the choice is fine
        ...     gram = lw.GramMatrix(torch.nn.Linear(4, 20), torch.randn(5, 4))
        ...     gram.d
        8

    """


# The names of readouts that were announced, by model: a model has many Networks.
_announced = WeakKeyDictionary[nn.Module, set[str]]()


class AutomaticReadout:
    """The default readout: chosen by what the model returns at its first call, then fixed.

    A causal language model gets `sequence_log_likelihood()`. Other models get all outputs up to `most_outputs` of them,
    beyond that `projected_outputs(combinations)`. A `ReadoutNotice` announces any choice other than all outputs, once
    for a model and readout.

    Args:
        model: The model whose outputs are read.
        most_outputs: Up to this many outputs, all are compared.
        combinations: Number of combinations of more outputs; None: 8, or 4 for more than ten million parameters.
        contrasts: Whether outputs (n, classes) are scores of classes, whose `class_contrasts` are taken.

    """

    def __init__(
        self,
        model: nn.Module,
        most_outputs: int = MOST_OUTPUTS,
        combinations: int | None = None,
        contrasts: bool = False,
    ) -> None:
        self._model, self._contrasts = model, contrasts
        self.most_outputs = most_outputs
        self.combinations = usual_combinations(model) if combinations is None else combinations
        self.chosen: Readout | None = None
        self.outputs = 0  # of a sample, of which the readout was chosen

    def __repr__(self) -> str:
        return "automatic readout" if self.chosen is None else f"{readout_name(self.chosen)}, automatic"

    def __call__(self, outputs: Outputs, labels: Tensor | None = None, inputs: Inputs = None) -> Tensor:
        """Return the outputs that the chosen readout selects."""
        readout = self.choose(outputs, labels, inputs)
        return readout(outputs, labels, inputs) if check_readout(readout).has("inputs") else readout(outputs)

    def choose(self, outputs: Outputs, labels: Tensor | None, inputs: Inputs) -> Readout:
        """Return the readout; choose it by these shapes if that has not happened yet."""
        if self.chosen is None:
            scores = _scores(outputs)
            self.outputs = scores[0].numel()
            self.chosen = self._select(scores, labels, inputs)
            announced, name = _announced.setdefault(self._model, set()), readout_name(self.chosen)
            if self.chosen is not all_outputs and name not in announced:
                warnings.warn(self._message(scores), ReadoutNotice, stacklevel=depth_in_package())
                announced.add(name)
        return self.chosen

    def add_to(self, fingerprint: Any, name: str) -> None:
        """Add how it chooses to what ranks must share: the choice follows from it."""
        fingerprint.put(
            "options", name, f"automatic, {self.most_outputs}, {self.combinations}, {self._contrasts}"
        )

    def _select(self, scores: Tensor, labels: Tensor | None, inputs: Inputs) -> Readout:
        if _predicts_tokens(self._model, scores, labels, inputs):
            return sequence_log_likelihood()
        if self.outputs <= self.most_outputs:
            return all_outputs
        combine = class_contrasts if self._contrasts and scores.dim() == 2 else projected_outputs
        return combine(self.combinations)

    def _message(self, scores: Tensor) -> str:
        found = f"{type(self._model).__name__} returns {self.outputs:,} outputs a sample"
        if isinstance(self.chosen, _Combinations):
            return (
                f"{found}: gradients of {self.combinations} random {self.chosen.noun} of them are compared, "
                f"readout=likewise.{self.chosen.factory}({self.combinations}). All of them: "
                "readout=likewise.all_outputs; of classes also likewise.predicted_class."
            )
        return (
            f"{found}, {scores.shape[2]:,} at each of {scores.shape[1]:,} tokens: gradients of the text's mean "
            "log-likelihood are compared, readout=likewise.sequence_log_likelihood(). Others: "
            "likewise.token_log_likelihood, likewise.projected_outputs(r)."
        )


def usual_combinations(model: nn.Module) -> int:
    """Return the default number of combinations of many outputs."""
    p = sum(parameter.numel() for parameter in model.parameters())
    return COMBINATIONS if p <= LARGE else FEWER_COMBINATIONS


def depth_in_package() -> int:
    """Return the stack level of the caller's caller outside of this package: the line that a warning names."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("likewise."):
        frame, depth = frame.f_back, depth + 1
    return depth


def readout_name(readout: Readout) -> str:
    """Return the name of a readout for messages, plans, manifests and reports."""
    return str(getattr(readout, "__name__", readout))


def _predicts_tokens(model: nn.Module, scores: Tensor, labels: Tensor | None, inputs: Inputs) -> bool:
    """Whether scores predict the next token: a causal or encoder-decoder language model.

    Models of transformers say whether they generate text. Other models do if an embedding has as many tokens as there
    are scores: a model that classifies tokens has fewer classes.
    """
    if scores.dim() != 3:
        return False
    tokens = labels
    if tokens is None and not _is_encoder_decoder(inputs):
        tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.shape != scores.shape[:2]:
        return False
    can_generate = getattr(model, "can_generate", None)
    if callable(can_generate):
        return bool(can_generate())
    return any(isinstance(m, nn.Embedding) and m.num_embeddings == scores.shape[2] for m in model.modules())


def looks_at_label(readout: Readout) -> bool | None:
    """Return whether a readout depends on the label; None for a custom readout.

    `Network.reads_labels` tests custom readouts.
    """
    if readout is label_against_rest or isinstance(readout, _LabelAgainstRandom):
        return True
    blind = isinstance(readout, _OneOutput | _ProjectedOutputs)
    return False if blind or readout in (all_outputs, log_probabilities, predicted_class) else None


def reads_text(readout: Readout) -> bool:
    """Whether a readout returns likelihoods of text rather than logits of classes."""
    return isinstance(readout, _SequenceLogLikelihood) or readout is token_log_likelihood


def token_terms(readout: Readout) -> Readout | None:
    """Return the readout of the per-token terms of which this one is the sum; None if it is not such a sum."""
    return readout.terms if isinstance(readout, _SequenceLogLikelihood) else None


class ExtraArguments(NamedTuple):
    """Which of `ids` and `inputs` a readout takes besides outputs and labels."""

    by_place: tuple[str, ...] = ()  # positional-only, in order
    by_name: tuple[str, ...] = ()

    def has(self, name: str) -> bool:
        """Whether it takes this one."""
        return name in self.by_place or name in self.by_name


def check_readout(readout: Any) -> ExtraArguments:
    """Return what a readout takes besides outputs and labels; raise if it is not a readout."""
    expected = "(outputs, labels) -> (n, d), with further arguments ids or inputs if it needs them"
    calls = ", ".join(f"{factory.__name__}(...)" for factory in FACTORIES)
    check_function("readout", readout, expected, f"{calls} are called first")
    if readout in FACTORIES:
        raise TypeError(f"readout must be a function {expected}: {readout.__name__} is called first.")
    name = getattr(readout, "__qualname__", repr(readout))
    module = str(getattr(readout, "__module__", ""))
    inner = module.startswith("likewise.") and module != __name__ and "<locals>" not in name
    if inner and inspect.isroutine(readout):
        raise TypeError(f"readout must be a function {expected}: likewise.{name} is something else.")
    try:
        signature = inspect.signature(readout)
    except ValueError:  # of some functions written in C nothing is known
        return ExtraArguments()
    given = list(signature.parameters.values())
    further = [p for i, p in enumerate(given) if i > 1 or p.kind is p.KEYWORD_ONLY]
    further = [parameter for parameter in further if parameter.name in ("ids", "inputs")]
    extra = ExtraArguments(
        tuple(parameter.name for parameter in further if parameter.kind is parameter.POSITIONAL_ONLY),
        tuple(parameter.name for parameter in further if parameter.kind is not parameter.POSITIONAL_ONLY),
    )
    try:
        signature.bind(None, None, *extra.by_place, **dict.fromkeys(extra.by_name))
    except TypeError as error:
        raise TypeError(
            f"readout must be a function {expected}: {name} takes {signature}, {error}."
        ) from error
    return extra


FACTORIES: tuple[Any, ...] = (
    one_output,
    label_against_random,
    projected_outputs,
    class_contrasts,
    sequence_log_likelihood,
)
NAMED: Mapping[str, Readout] = {  # what settings and the command line call them
    "all_outputs": all_outputs,
    "log_probabilities": log_probabilities,
    "label_against_rest": label_against_rest,
    "predicted_class": predicted_class,
    "sequence_log_likelihood": sequence_log_likelihood(),
    "token_log_likelihood": token_log_likelihood,
}


def named_readout(text: str) -> Readout | None:
    """Return the readout of a name in NAMED, or of "projected_outputs(8)" and "class_contrasts(4, seed=0)"."""
    combinations = re.fullmatch(r"(projected_outputs|class_contrasts)\((\d+)(?:, *seed=(\d+))?\)", text)
    if combinations is not None:
        combine = projected_outputs if combinations[1] == "projected_outputs" else class_contrasts
        return combine(int(combinations[2]), int(combinations[3] or 0))
    return NAMED.get(text)


def main_tensor(outputs: Outputs) -> Tensor:
    """Return the tensor to read: `logits` if there are any, the first of a tuple, the only one of a dict.

    A dict with several candidates is an error.
    """
    found = _find_main_tensor(outputs)
    if found is not None:
        return found
    named = _named_tensors(outputs)
    kind = f"{type(outputs).__name__} with tensors {sorted(named)}" if named else type(outputs)
    raise TypeError(
        f"The model returned {kind}, and it is not clear which tensor is meant: pass a readout, "
        "for example readout=lambda outputs, labels: outputs['name'].flatten(1)."
    )


def has_scores(outputs: Outputs) -> bool:
    """Whether `all_outputs` can read what a model returned; else only a readout of the user's own understands it."""
    found = _find_main_tensor(outputs)
    if found is None or found.layout is not torch.strided or found.is_nested or found.is_quantized:
        return False
    return found.is_floating_point()


def _find_main_tensor(outputs: Outputs) -> Tensor | None:
    if isinstance(outputs, Tensor):
        return outputs
    named = _named_tensors(outputs)
    if "logits" in named:
        return named["logits"]
    if isinstance(outputs, tuple | list) and len(outputs) and isinstance(outputs[0], Tensor):
        return outputs[0]
    return next(iter(named.values())) if len(named) == 1 else None


def _named_tensors(outputs: Outputs) -> dict[str, Tensor]:
    items = outputs if isinstance(outputs, Mapping) else getattr(outputs, "__dict__", {})
    return {str(k): v for k, v in items.items() if isinstance(v, Tensor) and v.is_floating_point()}


def _scores(outputs: Outputs) -> Tensor:
    scores = main_tensor(outputs)
    refuse_unreadable("The model's output", scores)
    if not scores.is_floating_point():
        raise TypeError(
            f"The model's output must be real floating numbers, found {describe(scores)}: it has no "
            "gradients. Let the model return scores, not classes."
        )
    if scores.dim() == 0:
        raise ValueError(
            "The model returned one number, of shape (), for the whole batch: expected outputs for each sample, "
            "(n, d). Let the model return them rather than their loss."
        )
    return scores.unsqueeze(1) if scores.dim() == 1 else scores


def _scores_and_labels(outputs: Outputs, labels: Tensor | None, name: str) -> tuple[Tensor, Tensor]:
    scores = _scores(outputs)
    if labels is None:
        raise ValueError(
            f"{name} needs labels: pass the data as (X, y) or batches(X, labels=y), or labels=y to a training term "
            "(two_batches: labels_a and labels_b)."
        )
    check_type("labels", labels, Tensor, "a tensor of class numbers")
    wrong = labels.is_floating_point() or labels.is_complex() or labels.numel() != len(scores)
    if wrong or scores.dim() != 2:
        raise ValueError(
            f"{name} needs one class number per sample and (n, classes) outputs, found labels of "
            f"{labels.dtype} {tuple(labels.shape)} and outputs {tuple(scores.shape)}. If floats are classes, pass "
            "labels.long(); if one-hot, labels.argmax(1)."
        )
    return scores, labels.reshape(-1, 1).long()


def _side(inputs: Mapping[str, Any], side: str) -> dict[str, Any]:
    """Return the inputs of one of two texts, by their names without its prefix."""
    prefix = side + "_"
    found = {name.removeprefix(prefix): value for name, value in inputs.items() if name.startswith(prefix)}
    if not found:
        raise ValueError(
            f"There are no inputs named {prefix}..., only {', '.join(map(str, inputs))}: a pair needs "
            "chosen_input_ids and rejected_input_ids, and an attention_mask for each if texts are padded."
        )
    return found


def _sequence_likelihood(
    outputs: Outputs, labels: Tensor | None, inputs: Inputs, shift: bool | None, reduce: str
) -> Tensor:
    likelihoods, counted = _token_likelihoods(outputs, labels, inputs, shift)
    total = likelihoods.sum(1, keepdim=True)
    return total if reduce == "sum" else total / _count(counted)


def _count(counted: Tensor) -> Tensor:
    """Return how many tokens of each text count, (n, 1), at least 1."""
    return counted.sum(1, keepdim=True).clamp(min=1)


def _token_likelihoods(
    outputs: Outputs, labels: Tensor | None, inputs: Inputs, shift: bool | None
) -> tuple[Tensor, Tensor]:
    """Return the log-likelihood of each token at its own position, 0 if it does not count, and which count."""
    logits = _scores(outputs)
    shifted = not _is_encoder_decoder(inputs) if shift is None else shift
    tokens = _tokens(inputs) if labels is None else labels
    if logits.dim() != 3 or tokens.shape != logits.shape[:2] or tokens.is_floating_point():
        raise ValueError(
            "A log-likelihood of tokens needs logits (n, T, vocabulary) and tokens (n, T), found logits "
            f"{tuple(logits.shape)} and {describe(tokens)} as {'input_ids' if labels is None else 'labels'}. "
            "To leave out labels of another kind, use batches(data, labels=False)."
        )
    counted = tokens != IGNORED
    mask = _mask(inputs, tokens)
    if mask is not None:
        counted = counted & mask
    if shifted:  # the logits of a token are those of the position before it
        before = torch.zeros_like(counted)
        counted = torch.cat([before[:, :1], counted[:, 1:] & (True if mask is None else mask[:, :-1])], 1)
    targets = torch.where(counted, tokens, 0).long()
    if shifted:  # tokens move to their logits: to slice the logits would copy them
        targets = targets.roll(-1, 1)
    _check_classes(targets, logits.shape[2])
    likelihoods = _TokenLogProbabilities.apply(logits, targets)
    if shifted:
        likelihoods = likelihoods.roll(1, 1)
    return torch.where(counted, likelihoods, 0), counted


def _is_encoder_decoder(inputs: Inputs) -> bool:
    return isinstance(inputs, Mapping) and any(str(name).startswith("decoder_input") for name in inputs)


def _tokens(inputs: Inputs) -> Tensor:
    """Return the tokens that a model was given, if there are no labels."""
    tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or _is_encoder_decoder(inputs):
        raise ValueError(
            "A log-likelihood needs tokens: pass labels (n, T) with the data, or, for a model that predicts its own "
            "input, input_ids among its inputs. An encoder-decoder model needs labels."
        )
    return tokens


def _mask(inputs: Inputs, tokens: Tensor) -> Tensor | None:
    """Return which tokens are text rather than padding, if the inputs say so."""
    if not isinstance(inputs, Mapping):
        return None
    mask = inputs.get("decoder_attention_mask" if _is_encoder_decoder(inputs) else "attention_mask")
    if mask is None:
        return None
    if mask.shape != tokens.shape:
        raise ValueError(
            f"The attention mask must be (n, T) like the tokens, {tuple(tokens.shape)}, to mark padding; found "
            f"{tuple(mask.shape)}."
        )
    return mask != 0


def _check_classes(target: Tensor, classes: int) -> None:
    """Raise if a label is none of the classes. Labels on a GPU are not looked at: that would wait for it."""
    if target.device.type != "cpu" or not target.numel():
        return
    try:
        low, high = int(target.min()), int(target.max())
    except RuntimeError:  # inside vmap, which shows no values; torch refuses such an index by itself
        return
    if low < 0 or high >= classes:
        raise ValueError(
            f"Labels must be among the {classes} classes of the model, 0 to {classes - 1}: found labels from {low} to "
            f"{high}."
        )


def _scrambled(ids: Tensor, seed: int) -> Tensor:
    """Return pseudorandom non-negative integers from id and seed, by the steps of SplitMix64."""
    mixed = (ids.long() + 1 + (seed + 1) * 0x632BE59BD9B4E019 % 2**62) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ ((mixed >> shift) & (2 ** (64 - shift) - 1))) * factor
    return (mixed ^ ((mixed >> 31) & (2**33 - 1))) & (2**62 - 1)
