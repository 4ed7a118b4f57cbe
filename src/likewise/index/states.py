"""Hidden states of texts, and the texts of a pool that are nearest by them: the baseline beside gradients."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from likewise.checks import check_choice, check_integer, check_number, describe
from likewise.data import batches
from likewise.model import Network, to_network
from likewise.statistics.neighbors import merge_largest


def pooled_states(model: nn.Module | Network, data: Any) -> Tensor:
    """Return the last hidden states of texts, averaged with weights that grow by position, of length 1.

    The representation of RDS+ (Ivison et al. 2025): token i of T counts i / Σ i, because later tokens have seen more of
    the text; padding counts nothing. One forward pass. Their cosines are the usual baseline beside gradients.

    Args:
        model: A model of transformers, which returns hidden states when asked to.
        data: Texts as tokens; anything that `likewise.batches` accepts.

    Returns:
        (n, width) unit vectors, float32, on the CPU.

    Raises:
        TypeError: The model returns no hidden states.

    Example:
        >>> import torch, likewise as lw
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> sizes = dict(vocab_size=9, n_positions=8, n_embd=8, n_layer=1, n_head=2)
        >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        >>> lw.pooled_states(model, {"input_ids": torch.randint(1, 9, (5, 8))}).shape
        torch.Size([5, 8])

    """
    net = to_network(model)
    given = batches(data)
    found = []
    with net.evaluation_mode(), torch.no_grad():
        for samples in given:
            inputs = net.to_device(samples.inputs)
            named = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
            states = _hidden_states(net.model, named)
            mask = named.get("attention_mask")
            mask = torch.ones(states.shape[:2], device=states.device) if mask is None else mask
            counts = (mask != 0).float()
            weights = counts.cumsum(1) * counts
            pooled = (states.float() * weights[:, :, None]).sum(1)
            found.append(normalize(pooled, dim=1).cpu())
    return torch.cat(found)


def select_by_states(
    model: nn.Module | Network,
    pool: Any,
    targets: Any,
    *,
    share: float = 0.05,
    count: int | None = None,
    by: Literal["max", "mean", "each"] = "max",
) -> Tensor:
    """Return the texts of a pool whose hidden states are most like those of targets, best first: RDS+.

    The baseline to run beside `likewise.select`, at the price of a forward pass over the pool.

    Args:
        model: A model of transformers.
        pool: Texts to choose from; anything that `likewise.batches` accepts.
        targets: Texts like those one wants to do well on.
        share: Which part of the pool is chosen, rounded up.
        count: How many are chosen, in place of `share`.
        by: As for `likewise.select`: "max", "mean", or "each" for targets that choose in turn.

    Returns:
        (count,) positions in the pool, best first.

    Example:
        >>> import torch, likewise as lw
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> sizes = dict(vocab_size=9, n_positions=8, n_embd=8, n_layer=1, n_head=2)
        >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        >>> pool = torch.randint(1, 9, (20, 8))
        >>> lw.select_by_states(model, {"input_ids": pool}, {"input_ids": pool[3:4]}, count=1).tolist()
        [3]

    """
    check_choice("by", by, ("max", "mean", "each"))
    similarity = pooled_states(model, targets) @ pooled_states(model, pool).T
    n = similarity.shape[1]
    if count is None:
        wanted = count_of_share(n, check_number("share", share, 0, 1))
    else:
        wanted = check_integer("count", count, 1, n, f"texts, of which the pool has {n:,}")
    if by == "each":
        return choose_in_turn(merge_largest(None, similarity, 0, wanted).indices, wanted)
    scores = similarity.amax(0) if by == "max" else similarity.mean(0)
    return scores.argsort(descending=True, stable=True)[:wanted]


def count_of_share(n: int, share: float) -> int:
    """Return how many of n are a share of them, rounded up, at least one."""
    return min(n, max(1, -int(-(n * share - 1e-9) // 1)))


def choose_in_turn(rankings: Tensor, wanted: int) -> Tensor:
    """Return what is chosen if each row of rankings (t, k) takes in turn its first column that is left.

    Ends when `wanted` are chosen, or one whose turn it is has none left.
    """
    chosen: dict[int, None] = {}
    waiting = [iter(ranking) for ranking in rankings.tolist()]
    while len(chosen) < wanted:
        for ranking in waiting:
            row = next((row for row in ranking if row not in chosen), None)
            if row is None:
                return torch.tensor(list(chosen), dtype=torch.int64)
            chosen[row] = None
            if len(chosen) == wanted:
                break
    return torch.tensor(list(chosen), dtype=torch.int64)


def _hidden_states(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Return the last hidden states, (n, tokens, width)."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "output_hidden_states"):
        raise TypeError(
            f"{type(model).__name__} is no model of transformers, which returns hidden states when asked to: found "
            f"{describe(config)} as its config."
        )
    outputs = model(**inputs, output_hidden_states=True)
    states = getattr(outputs, "hidden_states", None)
    if states is None:
        states = getattr(outputs, "decoder_hidden_states", None)
    if not states:
        raise TypeError(f"{type(model).__name__} returned no hidden states.")
    return states[-1]
