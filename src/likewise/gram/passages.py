"""Which tokens of a text make it similar to another: a similarity as a sum over tokens.

The log-likelihood of a text is a sum over its tokens, and so is its gradient, ∇b = Σ_j ∇b_j. Hence
k^C(a, b) = Σ_j ∇a·∇b_j / (‖∇a‖ ‖∇b‖), exactly. All ∇a·∇b_j of a text are the derivatives of its tokens'
log-likelihoods along ∇a, which one forward pass differentiated twice gives: no gradient of a token is formed.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from likewise.checks import check_integer
from likewise.data import Batches, Samples, batches
from likewise.engines import EngineName, GradientMismatchError
from likewise.engines.memory import is_out_of_memory
from likewise.gram.matrix import GramMatrix
from likewise.kernels import CORRELATION, INNER_PRODUCT
from likewise.linalg import accumulation_dtype
from likewise.model import Network, to_network
from likewise.readouts import Readout, readout_name, token_terms

PASSAGE = 8  # tokens of a passage
IDLE = 0.01  # of a passage: a token at one of its ends that contributes no more is left out
MEMORY_OF_TWICE = 4  # times the memory of a batch that is differentiated once
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}  # of sums; of half precision less can be asked for
HALF_TOLERANCE = 0.1


class MatchedPassages(NamedTuple):
    """What each token of some texts contributes to their similarity with queries.

    Example:
        >>> import torch, likewise as lw
        >>> contributions = torch.tensor([[[0.0, 0.1, -0.1, 0.4, 0.3, 0.0]]])         # a query, a text, six tokens
        >>> lw.MatchedPassages(contributions, contributions.sum(2)).strongest(3)[0, 0].tolist()
        [3, 5]

    """

    contributions: (
        Tensor  # (n, m, T) of n queries, m texts of at most T tokens; 0 at padding and what does not count
    )
    similarities: Tensor  # (n, m) k^C, the sums of the contributions

    def strongest(self, length: int = PASSAGE) -> Tensor:
        """Return the passage of each text that contributes most, (n, m, 2): its first token, and the one after.

        Args:
            length: Tokens of a passage at most; tokens at its ends that contribute less than a hundredth of it are
                left out. First and end are equal where no token contributes.

        """
        length = check_integer("length", length, 1, advice="tokens")
        rows = self.contributions.flatten(0, 1).tolist()
        found = torch.tensor([_strongest(row, length) for row in rows], dtype=torch.long)
        return found.view(*self.contributions.shape[:2], 2)


def matched_passages(
    model: nn.Module | Network,
    query: Any,
    texts: Any,
    *,
    readout: Readout | None = None,
    engine: EngineName = "auto",
) -> MatchedPassages:
    """Return what each token of texts contributes to their similarity with a query: which passages it rests on.

    contribution_j = ∇a·∇b_j / (‖∇a‖ ‖∇b‖), where ∇b = Σ_j ∇b_j is the gradient of the text's log-likelihood, ∇b_j
    that of its token j (over the number of tokens, for a mean), and a is the query. Contributions of a text sum to
    k^C(a, b), which is computed apart and compared. Which tokens of the query matter is the same with the arguments
    exchanged. One pass over queries, two over the texts, and for each query one more that takes about four training
    steps.

    Args:
        model: A language model, or a Network, which has its own readout and parameters.
        query: One text or several, such as completions: anything that `likewise.batches` accepts.
        texts: Those to look at, such as the neighbors of the query; keep them few.
        readout: `sequence_log_likelihood()` if None.
        engine: How gradients are computed.

    Returns:
        (n, m, T) contributions, and (n, m) similarities.

    Raises:
        ValueError: The readout is not a log-likelihood of a text, such as that of a classifier of texts.
        GradientMismatchError: The model cannot be differentiated twice, or contributions do not sum to the similarity.

    Example:
        >>> import torch, likewise as lw
        >>> model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7))
        >>> query, texts = torch.randint(0, 7, (1, 5)), torch.randint(0, 7, (3, 9))
        >>> found = lw.matched_passages(model, query, texts, readout=lw.sequence_log_likelihood())
        >>> found.contributions.shape
        torch.Size([1, 3, 9])
        >>> torch.allclose(found.contributions.sum(2), found.similarities, atol=1e-5)
        True
        >>> found.strongest(3).shape                                      # first token, and the one after the last
        torch.Size([1, 3, 2])

    """
    net, asked, among = to_network(model, readout), batches(query), batches(texts)
    _terms_of(net, asked)
    return passages_by(GramMatrix(net, among, engine=engine), asked, among)


def has_passages(net: Network, data: Batches) -> bool:
    """Whether similarities of a network's texts are sums over tokens."""
    first = data.samples(range(1))
    return token_terms(net.choose_readout(first.inputs, first.labels, first.ids)) is not None


def passages_by(gram: GramMatrix, asked: Batches, among: Batches) -> MatchedPassages:
    """Return what each token of texts contributes to their plain similarity with queries.

    Args:
        gram: Has the network and the engine; its own samples, kernel and centering do not matter.
        asked: The queries.
        among: The texts.

    """
    net = gram.net
    terms = _terms_of(net, asked)
    plain = gram.with_centering(False).with_kernel(CORRELATION)
    gram = plain.with_columns(among).of_columns().with_columns(asked)
    products = gram.products()
    lengths = gram.with_kernel(INNER_PRODUCT).self_kernel().flatten().clamp(min=0).sqrt()  # ‖∇b‖
    rows, similarities, tokens = [], [], net.with_readout(terms)
    for some in torch.arange(asked.n).split(products.vectors_per_pass):
        directions = products.vjp(partial(_indicator, some))  # ∇a / ‖∇a‖, (c, p)
        similarities.append(products.jvp(directions, lambda _, outputs: outputs[:, 0]).T)
        for direction in directions:
            moves = _token_derivatives(tokens, among, direction, _batch_size(gram))
            rows.append(torch.where(lengths[:, None] > 0, moves / lengths[:, None].to(moves), 0))
    found = MatchedPassages(torch.stack(rows), torch.cat(similarities).to(rows[0]))
    _check_sums(net, among, found)
    return found


def join_passages(parts: Sequence[MatchedPassages], dim: int) -> MatchedPassages:
    """Return the contributions of several queries (dim 0) or texts (dim 1) as one, padded to the longest text."""
    longest = max(part.contributions.shape[2] for part in parts)
    padded = [
        nn.functional.pad(part.contributions, (0, longest - part.contributions.shape[2])) for part in parts
    ]
    return MatchedPassages(torch.cat(padded, dim), torch.cat([part.similarities for part in parts], dim))


def _terms_of(net: Network, data: Batches) -> Readout:
    """Return the readout of single tokens, or say what to do where there is none."""
    first = data.samples(range(1))
    chosen = net.choose_readout(first.inputs, first.labels, first.ids)
    terms = token_terms(chosen)
    if terms is None:
        raise ValueError(
            f"The readout {readout_name(chosen)} is no sum over tokens, as likewise.sequence_log_likelihood() of a "
            "language model is, so that a similarity has no parts that belong to tokens. Of a classifier of texts, "
            "leave a passage out and look by how much likewise.similarity(model, query, shortened) falls."
        )
    return terms


def _indicator(columns: Tensor, where: range) -> Tensor:
    """Return weights (b, 1, c) that are 1 where a sample is that of its column, else 0."""
    return (torch.arange(where.start, where.stop)[:, None] == columns).double().unsqueeze(1)


def _batch_size(gram: GramMatrix) -> int:
    return max(1, (gram.engine.batch_size or MEMORY_OF_TWICE) // MEMORY_OF_TWICE)


def _token_derivatives(net: Network, data: Batches, direction: Tensor, size: int) -> Tensor:
    """Return J(x) u of every token, (n, T), in float64 where the device has it; T is that of the longest batch."""
    parts = list[Tensor]()
    with net.evaluation_mode():
        for where in data.spans() if data.given else data.spans(size):
            parts += [_differentiate_twice(net, some, direction) for some in data.samples(where).split(size)]
    longest = max(part.shape[1] for part in parts)
    return torch.cat([nn.functional.pad(part, (0, longest - part.shape[1])) for part in parts])


def _differentiate_twice(net: Network, samples: Samples, direction: Tensor) -> Tensor:
    """Return J(x) u, (n, d), or say that PyTorch has no second derivative of the model."""
    try:
        return _derivatives(net, samples, direction)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise GradientMismatchError(
            f"The model cannot be differentiated twice ({reason}), so that its similarities cannot be split by tokens.",
            int(samples.ids[0]),
        ) from error


def _derivatives(net: Network, samples: Samples, direction: Tensor) -> Tensor:
    """Return J(x) u, (n, d), as the derivative of Jᵀ v · u in v."""
    with torch.enable_grad():
        parameters = {name: value.detach().requires_grad_() for name, value in net.parameters.items()}
        outputs = net.function(parameters, samples.inputs, samples.labels, samples.ids)
        v = torch.zeros_like(outputs, requires_grad=True)
        pulled = torch.autograd.grad(
            outputs, list(parameters.values()), v, create_graph=True, materialize_grads=True
        )
        split = direction.split([part.numel() for part in pulled])
        along = [(part * u.view_as(part).to(part)).sum() for part, u in zip(pulled, split, strict=True)]
        (found,) = torch.autograd.grad(torch.stack([part.to(along[0]) for part in along]).sum(), v)
    return found.to(accumulation_dtype(direction))


def _check_sums(net: Network, texts: Batches, found: MatchedPassages) -> None:
    """Raise if contributions do not sum to the similarities, which an engine computed that was checked."""
    dtype = net.dtype if net.autocast is None else net.autocast
    off = (found.contributions.sum(2) - found.similarities).abs().amax(0)
    if bool((off <= TOLERANCE.get(dtype, HALF_TOLERANCE)).all()):
        return
    worst = int(off.nan_to_num(torch.inf).argmax())
    sample = int(texts.ids[worst])
    raise GradientMismatchError(
        f"The contributions of the tokens of text {sample} sum to something else than its similarity, by "
        f"{float(off[worst]):.1e}: the model returns wrong second derivatives, or its text depends on its batch.",
        sample,
    )


def _strongest(values: list[float], length: int) -> tuple[int, int]:
    """Return the window of at most `length` values with the largest sum, without ends that are next to nothing."""
    size = min(length, len(values))
    sums = [sum(values[i : i + size]) for i in range(len(values) - size + 1)]
    start = max(range(len(sums)), key=sums.__getitem__)
    least = max(0.0, IDLE * sums[start])
    telling = [i for i in range(start, start + size) if values[i] > least]
    return (telling[0], telling[-1] + 1) if telling else (start, start)
