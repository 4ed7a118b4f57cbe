"""Shared words: which class a text resembles by its tokens alone, without the network and without its own label."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from likewise.data import Batches
from likewise.gram import GramMatrix
from likewise.model import call_arguments

LEAST_TOKENS = 4  # of a text: fewer integers per sample are categories of a table
TRIED = 8  # samples on which the input of an embedding is looked up
TEXTS = 2**12  # at a time
MOST_NUMBERS = 2**25  # of words times classes at a time
SAME = 1e-6  # length below which a text does not differ from the mean of all


class TokenInput(NamedTuple):
    """Which input of a network holds the tokens of its texts."""

    place: int | str  # position or name of the argument
    embedding: str  # name of the module that looks them up
    padding: int | None = None  # the token that this module ignores

    def read(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """Return the tokens of a batch, and which of them are not padding, (n, t) each."""
        positional, named = call_arguments(inputs)
        tokens = named[self.place] if isinstance(self.place, str) else positional[self.place]
        real = torch.ones_like(tokens, dtype=torch.bool) if self.padding is None else tokens != self.padding
        mask = named.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == tokens.shape:
            real &= (mask != 0).to(real.device)
        return tokens, real


def find_token_input(gram: GramMatrix) -> TokenInput | None:
    """Return the integer input that an nn.Embedding looks up as it is, of the largest table if there are several.

    None for other networks: those of images and tables, also if columns of a table have embeddings of their own, or
    names. One forward pass of eight samples, and none if the network has no embedding or no input of integers.
    """
    if not gram.of_network or gram.data.columns is not None:
        return None
    tables = {
        name: module
        for name, module in gram.net.model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    if not tables:
        return None
    samples = gram.data.samples(range(min(TRIED, gram.data.n)))
    positional, named = call_arguments(gram.net.to_device(samples.inputs))
    arguments: dict[int | str, Any] = dict(enumerate(positional)) | dict(named.items())
    given = {place: value for place, value in arguments.items() if _may_be_tokens(value)}
    if not given:
        return None
    best: tuple[int, TokenInput] | None = None

    def look(name: str, module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        nonlocal best
        looked_up = arguments[0] if arguments else options.get("input")
        for place, value in given.items():
            if isinstance(looked_up, Tensor) and torch.equal(looked_up, value.to(looked_up)):
                found = module.num_embeddings, TokenInput(place, name, module.padding_idx)
                best = found if best is None or found[0] > best[0] else best

    handles = [
        module.register_forward_pre_hook(
            lambda module, arguments, options, name=name: look(name, module, arguments, options),
            with_kwargs=True,
        )
        for name, module in tables.items()
    ]
    try:
        with gram.net.evaluation_mode(), torch.no_grad():
            gram.net.function({}, samples.inputs, samples.labels, samples.ids)
    finally:
        for handle in handles:
            handle.remove()
    return None if best is None else best[1]


def class_resemblance(gram: GramMatrix, classes: Tensor) -> Tensor | None:
    """Return how much the tokens of each text resemble those of the other texts of each class.

    A text is the set of its tokens, each with weight 1 + log((1 + n) / (1 + texts that contain it)), scaled to unit
    length, less the mean of all texts, and scaled again. The result is its cosine with the sum of the other texts of
    each class. Padding (`padding_idx` of the embedding, 0 in `attention_mask`) is left out; any other token in nearly
    all texts hardly counts. The network only says which input holds the tokens. Reads the data once; no gradients, no
    pairs. Time grows with tokens times classes, memory with four bytes per distinct token of a text.

    Args:
        gram: A square matrix of a network.
        classes: (n,) class numbers.

    Returns:
        (n, classes) in float64, in [-1, 1]. -1 for a class without texts, 0 for the own class of its only text. A text
        without tokens, or equal to the mean, has 0 everywhere. None if the network does not look up tokens.

    """
    found = find_token_input(gram)
    return None if found is None else resemblance_of_texts(gram.data, found, classes)


def resemblance_of_texts(data: Batches, found: TokenInput, classes: Tensor) -> Tensor:
    """Return `class_resemblance` of texts whose tokens are in a known input."""
    read = [distinct_tokens(*found.read(batch.inputs)) for batch in data]
    tokens, counts = (torch.cat(parts) for parts in zip(*read, strict=True))
    return resemblance_of_tokens(tokens, counts, classes)


def distinct_tokens(tokens: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the distinct tokens of texts (n, t), one text after the other, (m,), and how many each has, (n,)."""
    ordered = tokens.cpu().long()
    if real is not None:
        ordered = ordered.masked_fill(~real.cpu(), -1)
    ordered = ordered.sort(1).values
    first = ordered >= 0
    first[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    return ordered[first].int(), first.sum(1)


def resemblance_of_tokens(tokens: Tensor, counts: Tensor, classes: Tensor) -> Tensor:
    """Return the cosine of each text with the other texts of each class, (n, classes), see `class_resemblance`.

    Args:
        tokens: (m,) distinct tokens of the first text, of the second, and so on.
        counts: (n,) how many each text has.
        classes: (n,) class numbers.

    """
    n, count = len(classes), int(classes.max()) + 1
    if len(tokens) == 0:
        return torch.zeros(n, count, dtype=torch.float64)
    frequency = tokens.bincount()
    words = ((frequency > 0).cumsum(0) - 1).int()[tokens.long()]
    weights = ((1 + n) / (1 + frequency[frequency > 0].double())).log() + 1
    mean = torch.zeros(len(weights), dtype=torch.float64)
    for some in _vectors(words, counts, weights):
        mean.index_add_(0, some.words, some.values / n)
    products = torch.cat([some.times(mean[:, None])[:, 0] for some in _vectors(words, counts, weights)])
    left = (1 - 2 * products + mean.dot(mean)).clamp(min=0).sqrt()  # length of a text less the mean
    scale = torch.where((left > SAME) & (counts > 0), 1 / left.clamp(min=SAME), 0)
    parts = []
    for numbers in torch.arange(count).split(max(1, MOST_NUMBERS // len(weights))):
        sums = _class_sums(words, counts, weights, classes - numbers[0], scale, len(numbers))
        sums -= mean[:, None] * F.one_hot(classes, count)[:, numbers].double().T.mv(scale)
        found = torch.cat([some.times(sums) for some in _vectors(words, counts, weights)])
        found = (found - mean @ sums) * scale[:, None]
        own = (
            (classes[:, None] == numbers) & (scale > 0)[:, None]
        ).double()  # 1 if the text is part of the sum
        squares = sums.square().sum(0) - 2 * found * own + own
        cosines = torch.where(squares > 1e-9, (found - own) / squares.clamp(min=1e-9).sqrt(), 0)
        parts.append(torch.where(own.sum(0) > 0, cosines, -1))
    return torch.where((scale > 0)[:, None], torch.cat(parts, 1).clamp(-1, 1), 0)


class _Vectors(NamedTuple):
    """Some texts as vectors of unit length, one entry for each of their words."""

    first: int  # number of the first text
    words: Tensor  # (entries,)
    texts: Tensor  # (entries,) from 0
    starts: Tensor  # (texts,) first entry of each
    values: Tensor  # (entries,)

    def times(self, matrix: Tensor) -> Tensor:
        """Return the products of texts and columns of a matrix (words, c), (texts, c)."""
        if len(self.words) == 0:
            return matrix.new_zeros(len(self.starts), matrix.shape[1])
        return F.embedding_bag(self.words, matrix, self.starts, mode="sum", per_sample_weights=self.values)


def _vectors(words: Tensor, counts: Tensor, weights: Tensor) -> Iterator[_Vectors]:
    place = 0
    for first in range(0, len(counts), TEXTS):
        sizes = counts[first : first + TEXTS]
        here = words[place : place + int(sizes.sum())].long()
        texts = torch.arange(len(sizes)).repeat_interleave(sizes)
        values = weights[here]
        squares = torch.zeros(len(sizes), dtype=torch.float64).index_add_(0, texts, values.square())
        yield _Vectors(first, here, texts, sizes.cumsum(0) - sizes, values / squares.sqrt()[texts])
        place += len(here)


def _class_sums(
    words: Tensor, counts: Tensor, weights: Tensor, classes: Tensor, scale: Tensor, count: int
) -> Tensor:
    """Return the sums of scaled texts of `count` classes, (words, count); classes beyond these are left out."""
    sums = torch.zeros(len(weights) * count, dtype=torch.float64)
    for some in _vectors(words, counts, weights):
        texts = some.first + some.texts
        inside = (classes[texts] >= 0) & (classes[texts] < count)
        place = some.words * count + classes[texts]
        sums.index_add_(0, place[inside], (some.values * scale[texts])[inside])
    return sums.view(len(weights), count)


def _may_be_tokens(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dim() == 2
        and value.shape[1] >= LEAST_TOKENS
        and value.dtype in (torch.int16, torch.int32, torch.int64, torch.uint8)
    )
