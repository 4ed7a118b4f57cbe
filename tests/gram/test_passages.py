"""Contributions of tokens to a similarity: against one backward pass for each token, in float64."""

import copy
import doctest

import pytest
import torch
from torch import nn

import likewise as lw
import likewise.gram.passages
from likewise.gram.passages import MatchedPassages

transformers = pytest.importorskip("transformers")
from test_readouts import LENGTHS, gradients, language_model, texts, token_likelihoods  # noqa: E402
from texts import WrongSecondDerivative  # noqa: E402


def test_examples_in_docstrings_run():
    found = doctest.testmod(likewise.gram.passages)
    assert found.attempted > 5 and found.failed == 0


def contributions_one_by_one(name, model, query, data, reduce):
    """A backward pass for each token of each text alone, and one for each query."""
    wanted = list(model.parameters())

    def of_tokens(given, i):
        rows = gradients(token_likelihoods(name, model, given, i), wanted)
        return rows / (given["labels"][i] != -100).sum() if reduce == "mean" else rows

    n = len(LENGTHS)
    found = torch.zeros(n, n, max(LENGTHS), dtype=torch.float64)
    for i in range(n):
        a = of_tokens(query, i).sum(0)
        for j in range(n):
            b = of_tokens(data, j)
            found[i, j] = b @ a / a.norm() / b.sum(0).norm()
    return found


@pytest.mark.parametrize(
    ("name", "reduce"),
    [("gpt2", "mean"), ("llama", "mean"), ("llama", "sum"), ("mamba", "mean"), ("t5", "mean")],
)
def test_contributions_are_those_of_each_token_alone_and_sum_to_the_similarity(name, reduce):
    model = language_model(name).eval()
    query, data = texts(name, model, seed=1), texts(name, model)
    before = copy.deepcopy(model.state_dict())
    readout = lw.sequence_log_likelihood(reduce)
    found = lw.matched_passages(model, query, data, readout=readout)
    expected = contributions_one_by_one(name, model, query, data, reduce)
    assert found.contributions.shape == expected.shape
    assert (found.contributions - expected).abs().max() < 1e-9
    similarities = lw.similarity(model, query, data, readout=readout)
    assert (found.similarities - similarities).abs().max() < 1e-9
    assert (found.contributions.sum(2) - similarities).abs().max() < 1e-9
    assert (found.contributions[:, data["labels"] == -100] == 0).all()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.filterwarnings("ignore::likewise.ReadoutNotice")
def test_texts_of_several_lengths_keep_their_places_whatever_the_batches():
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    ).double()
    rows = [{"input_ids": torch.randint(1, 11, (length,))} for length in (3, 9, 5, 2)]
    query = rows[:1]
    whole = lw.matched_passages(model, lw.batches(query, pad_id=0), lw.batches(rows, pad_id=0))
    apart = lw.matched_passages(
        model, lw.batches(query, pad_id=0), lw.batches(rows, size=1, pad_id=0), engine="autograd"
    )
    assert whole.contributions.shape == apart.contributions.shape == (1, 4, 9)
    torch.testing.assert_close(whole.contributions, apart.contributions, rtol=0, atol=1e-9)
    assert (whole.contributions[0, 0, 3:] == 0).all() and (whole.contributions[0, :, 0] == 0).all()


class Memory(nn.Module):
    """A model of the next token from the one before: what it learns of a pair of words lies in one row."""

    def __init__(self, words):
        super().__init__()
        self.scores = nn.Embedding(words, words)

    def forward(self, input_ids):
        return self.scores(input_ids)


def test_the_passage_that_a_completion_rests_on_is_found():
    model = Memory(40)
    generator = torch.Generator().manual_seed(0)
    pool = torch.randint(10, 40, (6, 20), generator=generator)
    pool[2, 8:12] = torch.tensor([1, 2, 3, 4])  # the only text that says so
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for _ in range(30):
        loss = -lw.sequence_log_likelihood()(model(pool), None, pool).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    query = torch.tensor([[1, 2, 3, 4]])
    readout = lw.sequence_log_likelihood()
    found = lw.matched_passages(model, query, pool, readout=readout)
    assert found.similarities[0].argmax() == 2
    assert found.strongest(4)[0, 2].tolist() == [
        9,
        12,
    ]  # of token 8, which opens the passage, nothing before it speaks
    assert found.contributions[0, 2, 9:12].sum() > 0.99 * found.similarities[0, 2]


def test_the_strongest_passage_has_no_idle_ends():
    values = torch.tensor(
        [[[0.0, 0.1, -0.2, 0.3, 0.4, 0.0, 0.05], [-1.0, -2.0, -1.0, 0.0, -1.0, -1.0, -1.0]]]
    )
    found = MatchedPassages(values, values.sum(2))
    assert found.strongest(3).tolist() == [[[3, 5], [2, 2]]]
    assert found.strongest(100).tolist() == [[[1, 7], [0, 0]]]
    with pytest.raises(ValueError, match="length"):
        found.strongest(0)


def test_a_text_without_a_gradient_has_no_contributions():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)).double()
    data = {"input": torch.randint(0, 7, (2, 5)), "labels": torch.full((2, 5), -100)}
    data["labels"][0] = data["input"][0]
    with pytest.warns(lw.ZeroGradientWarning):
        found = lw.matched_passages(model, data, data, readout=lw.sequence_log_likelihood())
    assert (found.contributions[1] == 0).all() and (found.contributions[:, 1] == 0).all()
    assert found.similarities[0, 0] > 0.999


def test_a_classifier_of_texts_is_told_what_to_do_instead():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(20, 3))
    with pytest.raises(ValueError, match="leave a passage out"):
        lw.matched_passages(model, torch.zeros(1, 5).long(), torch.zeros(2, 5).long())


class Wrong(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, input_ids):
        return self.out(WrongSecondDerivative.apply(self.embed(input_ids)))


def test_a_model_that_is_wrong_twice_differentiated_is_refused():
    tokens = torch.randint(0, 7, (2, 5))
    with pytest.raises(lw.GradientMismatchError, match="sum to something else"):
        lw.matched_passages(Wrong(), tokens, tokens, readout=lw.sequence_log_likelihood())
