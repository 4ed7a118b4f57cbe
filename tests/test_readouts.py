"""Readouts of many outputs, of the model's own answer and of language models; which readouts are accepted."""

import copy
import doctest
import functools
import pickle
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import likewise as lw
import likewise.readouts
from likewise.readouts import AutomaticReadout, contrast_columns, orthonormal_columns
from oracle import correlation, inner, jacobians, trace

transformers = pytest.importorskip("transformers")
VOCABULARY, LENGTHS = 11, (4, 3, 2)


def mlp(d, n=5):
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, d)).double()
    return model, torch.randn(n, 3, dtype=torch.float64)


def test_examples_in_docstrings_run():
    found = doctest.testmod(likewise.readouts)
    assert found.attempted > 30 and found.failed == 0


# ---- automatic: where no readout is given


@pytest.mark.parametrize("d", [1, 10])
def test_few_outputs_are_all_compared_without_a_notice(d):
    model, x = mlp(d)
    net = lw.Network(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = lw.similarity(net, x)
    assert net.readout is lw.all_outputs and "all_outputs, automatic" in repr(net)
    torch.testing.assert_close(found, lw.similarity(model, x, readout=lw.all_outputs))


def test_many_outputs_are_projected_announced_once_and_shown():
    model, x = mlp(30)
    gram = lw.GramMatrix(model, x)
    assert "automatic readout" in repr(gram)
    with pytest.warns(lw.ReadoutNotice, match="30 outputs.*8 random combinations.*all_outputs") as notices:
        found = gram.dense()
        gram.row_sums()
    assert len(notices) == 1 and notices[0].filename == __file__
    assert "projected_outputs(8, seed=0), automatic" in repr(gram) and "projected_outputs(8" in str(
        gram.plan()
    )
    q = orthonormal_columns(30, 8, 0)
    rows = jacobians(model, x, lambda outputs, _: outputs @ q)
    torch.testing.assert_close(found, trace(correlation(rows, rows)))


def test_a_choice_is_announced_once_for_a_model_and_readout_wherever_it_is_made():
    (model, x), (other, _) = mlp(30), mlp(30)
    with pytest.warns(lw.ReadoutNotice) as notices:
        warnings.simplefilter("always")
        lw.similarity(model, x)
        lw.GramMatrix(model, x).dense()
        lw.soft_neighbors(lw.GramMatrix(lw.Network(model, parameters="last layer"), x))
        assert len(notices) == 1
        lw.similarity(other, x)
        assert len(notices) == 2
        AutomaticReadout(model, combinations=3)(model(x))
    assert [notice.category for notice in notices] == 3 * [lw.ReadoutNotice]
    assert "3 random combinations" in str(notices[2].message)


def test_a_large_network_gets_fewer_combinations(monkeypatch):
    model, x = mlp(30)
    monkeypatch.setattr(likewise.readouts, "LARGE", 100)
    with pytest.warns(lw.ReadoutNotice, match="4 random combinations"):
        assert lw.GramMatrix(model, x).d == 4


@pytest.mark.filterwarnings("ignore::likewise.ReadoutNotice")
def test_one_choice_holds_for_all_networks_made_of_one():
    model, x = mlp(30)
    net = lw.Network(model)
    other = net.with_parameters(["0.weight"])
    other.outputs(x)
    assert net.readout is other.readout is net.exact().readout
    assert lw.Network(model, lw.all_outputs).automatic is None


@pytest.mark.filterwarnings("ignore::likewise.ReadoutNotice")
def test_pixelwise_outputs_are_projected_as_one():
    model = nn.Conv2d(1, 2, 3, padding=1).double()
    x = torch.randn(3, 1, 5, 5, dtype=torch.float64)
    q = orthonormal_columns(50, 8, 0)
    rows = jacobians(model, x, lambda outputs, _: outputs.flatten(1) @ q)
    torch.testing.assert_close(lw.similarity(model, x), trace(correlation(rows, rows)))


@pytest.mark.filterwarnings("ignore::likewise.ReadoutNotice")
def test_a_class_that_is_ruled_out_stays_out_of_combinations():
    class Masked(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            return torch.cat([self.model(x), torch.full((len(x), 3), -torch.inf).to(x)], 1)

    model, x = mlp(20)
    q = orthonormal_columns(23, 8, 0)[:20]
    rows = jacobians(model, x, lambda outputs, _: outputs @ q)
    torch.testing.assert_close(lw.similarity(Masked(model), x), trace(correlation(rows, rows)))


def language_models():
    gpt = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    bert = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    own = nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY))
    classes = nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, 5))
    return {
        "gpt2": (transformers.GPT2LMHeadModel(gpt), True),
        "masked": (transformers.BertForMaskedLM(bert), False),
        "token classes": (transformers.BertForTokenClassification(bert), False),
        "own": (own, True),
        "own token classes": (classes, False),
    }


@pytest.mark.parametrize("name", ["gpt2", "masked", "token classes", "own", "own token classes"])
def test_a_language_model_is_read_by_the_likelihood_of_the_text(name):
    model, causal = language_models()[name]
    tokens = torch.randint(0, VOCABULARY, (3, 6))
    data = (
        tokens if name.startswith("own") else {"input_ids": tokens, "attention_mask": torch.ones(3, 6).long()}
    )
    with pytest.warns(lw.ReadoutNotice, match="log-likelihood" if causal else "8 random combinations"):
        found = lw.similarity(model, data)
    readout = lw.sequence_log_likelihood() if causal else lw.projected_outputs(8)
    torch.testing.assert_close(found, lw.similarity(model, data, readout=readout))


# ---- projected outputs


def test_as_many_combinations_as_outputs_leave_the_similarity_as_it_is():
    model, x = mlp(4)
    exact = lw.similarity(model, x)
    for r in (4, 9):
        net = lw.Network(model, lw.projected_outputs(r, seed=3))
        assert lw.GramMatrix(net, x).d == 4
        assert (lw.GramMatrix(net, x).dense() - exact).abs().max() < 1e-9


@pytest.mark.parametrize("engine", ["auto", "autograd"])
def test_few_combinations_are_those_of_the_outputs_gradients(engine):
    model, x = mlp(7)
    jacobian = orthonormal_columns(7, 3, seed=1).T @ jacobians(model, x)
    gram = lw.GramMatrix(lw.Network(model, lw.projected_outputs(3, seed=1)), x, engine=engine)
    assert (gram.dense() - trace(correlation(jacobian, jacobian))).abs().max() < 1e-9


class Outputs(nn.Module):
    """A linear model with outputs of some shape."""

    def __init__(self, *shape):
        super().__init__()
        self.shape, self.linear = shape, nn.Linear(3, torch.Size(shape).numel()).double()

    def forward(self, x):
        return self.linear(x).tanh().reshape(len(x), *self.shape)


@pytest.mark.parametrize("shape", [(6,), (2, 5), (3, 2, 2)])
def test_outputs_of_any_shape_are_combined(shape):
    model, x = Outputs(*shape), torch.randn(4, 3).double()
    every = model(x).detach().flatten(1)
    found = lw.Network(model, lw.projected_outputs(2)).outputs(x)
    assert torch.allclose(found, every @ orthonormal_columns(every.shape[1], 2, 0))


def test_combinations_are_orthonormal_and_the_same_whichever_way_they_are_computed():
    for d, r in ((5, 5), (5, 2), (8, 2), (4000, 30)):
        q = orthonormal_columns(d, r, seed=2)
        generator = torch.Generator().manual_seed(2)
        plain, upper = torch.linalg.qr(torch.randn(d, r, dtype=torch.float64, generator=generator))
        assert (q.T @ q - torch.eye(r)).abs().max() < 1e-13
        assert (q - plain * upper.diagonal().sign()).abs().max() < 1e-13


def test_inner_products_of_few_combinations_are_unbiased():
    model, x = mlp(6, n=3)
    jacobian = jacobians(model, x)
    exact = trace(inner(jacobian, jacobian))
    draws = torch.stack(
        [
            trace(inner(mixed, mixed))
            for mixed in (orthonormal_columns(6, 2, seed).T @ jacobian for seed in range(400))
        ]
    )
    assert ((draws.mean(0) - exact).abs() < 4 * draws.std(0) / 20).all()


def test_contrasts_are_orthonormal_and_blind_to_a_common_shift():
    for d, r in ((2, 1), (3, 2), (10, 4), (100, 4)):
        q = contrast_columns(d, r, seed=2)
        assert (q.T @ q - torch.eye(r)).abs().max() < 1e-13
        assert q.sum(0).abs().max() < 1e-13
    scores = torch.randn(5, 10)
    found = lw.class_contrasts(4)(scores)
    torch.testing.assert_close(lw.class_contrasts(4)(scores + 3), found, rtol=0, atol=1e-5)
    torch.testing.assert_close(found, scores @ contrast_columns(10, 4, 0).float())
    assert lw.class_contrasts(20)(scores).shape == (5, 9)


def test_no_two_classes_are_nearly_the_same_for_contrasts():
    def nearest(q):
        return torch.cdist(q, q).fill_diagonal_(torch.inf).min()

    seeds = range(20)
    assert min(nearest(contrast_columns(10, 4, seed)) for seed in seeds) > 0.5
    assert min(nearest(orthonormal_columns(10, 4, seed)) for seed in seeds) < 0.2


def test_products_of_contrasts_are_on_average_those_of_all_of_them():
    mean = sum((q := contrast_columns(6, 2, seed)) @ q.T for seed in range(400)) / 400
    expected = 2 / 5 * (torch.eye(6) - 1 / 6)
    assert (mean - expected).abs().max() < 0.05


def test_as_many_contrasts_as_there_are_compare_centered_scores():
    model, x = mlp(4)
    found = lw.similarity(model, x, readout=lw.class_contrasts(3))
    basis = contrast_columns(4, 3, seed=7)
    expected = lw.similarity(model, x, readout=lambda outputs, _: outputs @ basis)
    assert (found - expected).abs().max() < 1e-9


@pytest.mark.parametrize("shape", [(1,), (2, 5)])
def test_contrasts_need_scores_of_classes(shape):
    with pytest.raises(ValueError, match=r"class_contrasts needs scores of shape \(n, classes\)"):
        lw.similarity(Outputs(*shape), torch.randn(4, 3).double(), readout=lw.class_contrasts(2))


def test_a_million_outputs_are_combined_in_a_second_or_two():
    readout, y = lw.projected_outputs(8), torch.randn(2, 10**6)
    start = time.perf_counter()
    first = readout(y, None)
    assert time.perf_counter() - start < 5  # 0.4 s alone on one core
    assert first.shape == (2, 8) and torch.equal(readout(y, None), first)


def test_combinations_are_computed_once_whoever_asks_first():
    readout, y, found = lw.projected_outputs(3), torch.randn(2, 50).double(), []
    threads = [threading.Thread(target=lambda: found.append(readout(y, None))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(one, found[0]) for one in found)
    copies = [copy.deepcopy(readout), pickle.loads(pickle.dumps(readout)), lw.projected_outputs(3)]
    assert all(torch.equal(other(y, None), found[0]) and other == readout for other in copies)
    under_vmap = torch.func.vmap(lambda row: lw.projected_outputs(3)(row[None], None)[0])(y)
    assert torch.allclose(under_vmap, found[0])


def test_a_projection_that_was_used_is_the_same_readout_as_one_that_was_not():
    from likewise.fingerprint import Fingerprint
    from likewise.identity import fingerprint_code

    used = lw.projected_outputs(2)
    used(torch.randn(2, 9), None)
    entries = []
    for readout in (used, lw.projected_outputs(2), lw.projected_outputs(2, seed=1), lw.projected_outputs(3)):
        fingerprint = Fingerprint()
        fingerprint.add("readout", readout)
        entries.append((fingerprint.entries, fingerprint_code(readout)))
    assert entries[0] == entries[1]
    for other in entries[2:]:
        assert entries[0][0] != other[0] and entries[0][1] != other[1]


# ---- the predicted class


def test_predicted_class_refuses_a_model_without_outputs():
    with pytest.raises(ValueError, match=r"found \(3, 0\)"):
        lw.predicted_class(torch.zeros(3, 0))


@pytest.mark.parametrize("d", [1, 2, 5])
def test_predicted_class_is_the_log_odds_of_the_answer(d):
    model, x = mlp(d)

    def naive(outputs, labels):
        if d == 1:
            return outputs if outputs.item() >= 0 else -outputs
        answer = int(outputs[0].argmax())
        others = torch.stack([outputs[0, c] for c in range(d) if c != answer])
        return (outputs[0, answer] - others.exp().sum().log())[None, None]

    jacobian = jacobians(model, x, naive)
    gram = lw.GramMatrix(lw.Network(model, lw.predicted_class), x, kernel=lw.INNER_PRODUCT)
    assert gram.d == 1
    assert (gram.dense() - trace(inner(jacobian, jacobian))).abs().max() < 1e-9 * jacobian.square().sum()
    p = model(x).detach().softmax(1).amax(1)
    if d > 1:
        assert torch.allclose(gram.outputs()[:, 0], (p / (1 - p)).log())


def test_the_first_of_equal_logits_is_the_answer():
    z = torch.zeros(1, 3, requires_grad=True)
    lw.predicted_class(z).sum().backward()
    assert torch.equal(z.grad, torch.tensor([[1.0, -0.5, -0.5]]))


# ---- language models


class Float64Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


class InFloat64(nn.Module):
    """A model whose norms and states, which transformers computes in float32 whatever the model's type, are float64."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        with Float64Mode():
            return self.model(**inputs)


def language_model(name):
    torch.manual_seed(0)
    small = dict(vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=4, max_position_embeddings=16)
    t5 = dict(vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    mamba = dict(state_size=4, num_hidden_layers=1, hidden_size=8, time_step_rank=2, use_mambapy=False)
    build = {
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=8, n_layer=1, n_head=2)
        ),
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, **heads)),
        "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**small, **heads)),
        "gemma": lambda: transformers.GemmaForCausalLM(transformers.GemmaConfig(**small, **heads)),
        "mamba": lambda: transformers.MambaForCausalLM(
            transformers.MambaConfig(vocab_size=VOCABULARY, **mamba)
        ),
        "t5": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(**t5, decoder_start_token_id=0)
        ),
    }
    return InFloat64(build[name]().double())


NAMES = ["gpt2", "llama", "qwen3", "gemma", "mamba", "t5"]


def texts(name, model, seed=0):
    """Ragged texts, padded on the right, the first two tokens a prompt that does not count."""
    generator = torch.Generator().manual_seed(seed)
    n, length = len(LENGTHS), max(LENGTHS)
    ids = torch.randint(1, VOCABULARY, (n, length), generator=generator)
    mask = (torch.arange(length) < torch.tensor(LENGTHS)[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :1] = -100
    data = {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}
    if name == "t5":
        data["decoder_input_ids"] = model.model.prepare_decoder_input_ids_from_labels(labels=labels)
    return data


def token_likelihoods(name, model, data, i):
    """One text alone, without its padding: log p of each token at its position, by log_softmax."""
    length = LENGTHS[i]
    one = {key: value[i : i + 1, :length] for key, value in data.items() if key != "labels"}
    if name == "t5":
        one["input_ids"], one["attention_mask"] = (
            data[k][i : i + 1] for k in ("input_ids", "attention_mask")
        )
    logp = model(**one).logits[0].log_softmax(-1)
    labels, row = data["labels"][i, :length], []
    for t in range(length):
        where = t if name == "t5" else t - 1
        counts = where >= 0 and labels[t] != -100
        row.append(logp[where, labels[t]] if counts else logp.new_zeros(()))
    return torch.stack(row + [logp.new_zeros(())] * (max(LENGTHS) - length))


def gradients(outputs, wanted):
    rows = [torch.autograd.grad(y, wanted, retain_graph=True, materialize_grads=True) for y in outputs]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def all_likelihoods(outputs, labels, inputs):
    """Three readouts side by side: a model is traced once for all of them."""
    readouts = (lw.token_log_likelihood, lw.sequence_log_likelihood("sum"), lw.sequence_log_likelihood())
    return torch.cat([readout(outputs, labels, inputs=inputs) for readout in readouts], 1)


@pytest.mark.parametrize("name", NAMES)
def test_sequence_and_token_likelihoods_are_those_of_each_text_alone(name):
    model = language_model(name).eval()
    data = texts(name, model)
    wanted, rows, values = list(model.parameters()), [], []
    for i in range(len(LENGTHS)):
        tokens = token_likelihoods(name, model, data, i)
        counted = (data["labels"][i] != -100).sum()
        every = torch.cat([tokens, tokens.sum()[None], tokens.sum()[None] / counted])
        rows.append(gradients(every, wanted))
        values.append(every.detach())
    jacobian = torch.stack(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none of them needs the slow engine
        gram = lw.GramMatrix(lw.Network(model, all_likelihoods), data, kernel=lw.Kernel(0, 0, lw.whole_block))
        found = gram.dense()
    expected = torch.einsum("ntp,msp->nmts", jacobian, jacobian)
    assert (found - expected).abs().max() < 1e-9 * expected.abs().max()
    assert (gram.outputs() - torch.stack(values)).abs().max() < 1e-9


def test_padding_on_the_left_counts_for_nothing_either():
    model = language_model("llama").eval()
    data = texts("llama", model)
    ends = [
        dict(zip(data, (v[i, :length] for v in data.values()), strict=True))
        for i, length in enumerate(LENGTHS)
    ]

    def pad(value, fill):
        return nn.functional.pad(value, (max(LENGTHS) - len(value), 0), value=fill)

    left = {key: torch.stack([pad(one[key], -100 if key == "labels" else 0) for one in ends]) for key in data}
    left["position_ids"] = (left["attention_mask"].cumsum(1) - 1).clamp(min=0)
    for given in (data, {k: v for k, v in data.items() if k != "labels"}):
        moved = {key: left[key] for key in (*given, "position_ids")}
        net = lw.Network(model, lw.sequence_log_likelihood())
        one, other = (lw.batches(d).samples(range(len(LENGTHS))) for d in (given, moved))
        assert (
            net.outputs(one.inputs, one.labels) - net.outputs(other.inputs, other.labels)
        ).abs().max() < 1e-9


def test_without_labels_the_model_predicts_its_own_input():
    model = language_model("gpt2").eval()
    data = texts("gpt2", model)
    labels = data["input_ids"].masked_fill(data["attention_mask"] == 0, -100)
    net = lw.Network(model, lw.sequence_log_likelihood("sum"))
    inputs = {key: data[key] for key in ("input_ids", "attention_mask")}
    expected = -float(model(**inputs, labels=labels).loss.detach())
    found = net.outputs(inputs)
    assert torch.equal(found, net.outputs(inputs, labels))
    assert float(found.sum() / (labels[:, 1:] != -100).sum()) == pytest.approx(expected, rel=1e-12)


def test_a_text_without_a_token_that_counts_has_a_zero_gradient():
    model = language_model("gpt2")
    ids = torch.randint(0, VOCABULARY, (3, 4))
    labels = ids.clone()
    labels[1] = -100
    with pytest.warns(lw.ZeroGradientWarning):
        gram = lw.GramMatrix(
            lw.Network(model, lw.sequence_log_likelihood()), {"input_ids": ids, "labels": labels}
        )
        found = gram.dense()
    assert torch.equal(gram.zero_gradients(), torch.tensor([False, True, False]))
    assert (found[1] == 0).all()


def test_chunks_of_half_precision_logits_are_summed_in_float32(monkeypatch):
    logits = torch.randn(3, 7, 50, dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.randint(0, 50, (3, 7))
    exact = logits.detach().double().requires_grad_()
    readout = lw.sequence_log_likelihood("sum")
    readout(exact, tokens, inputs=tokens).sum().backward()
    for chunk in (likewise.readouts.CHUNK, 3 * 50 * 2, 1):
        monkeypatch.setattr(likewise.readouts, "CHUNK", chunk)
        logits.grad = None
        found = readout(logits, tokens, inputs=tokens)
        found.sum().backward()
        assert found.dtype == torch.float32
        expected = readout(logits.detach().double(), tokens, inputs=tokens)
        assert (found - expected).abs().max() < 1e-4
        assert (logits.grad.double() - exact.grad).abs().max() < 2**-8


@pytest.mark.parametrize("chunk", [1, 40, 130, 10**6])
def test_gradients_of_chunks_are_those_of_all_logits(monkeypatch, chunk):
    monkeypatch.setattr(likewise.readouts, "CHUNK", chunk)
    logits = torch.randn(3, 7, 9, dtype=torch.float64)
    tokens = torch.randint(0, 9, (3, 7))
    weights = torch.randn(3, 7, dtype=torch.float64)
    found, expected = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    (lw.token_log_likelihood(found, tokens, tokens) * weights).sum().backward()
    plain = expected.log_softmax(2)[:, :-1].gather(2, tokens[:, 1:, None])[:, :, 0]
    (plain * weights[:, 1:]).sum().backward()
    assert (found.grad - expected.grad).abs().max() < 1e-14


def test_no_float32_copy_of_half_precision_logits_is_kept():
    logits = torch.randn(2, 64, 1000, dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.randint(0, 1000, (2, 64))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        lw.token_log_likelihood(logits, tokens, tokens)
    assert not [t for t in kept if t.dtype == torch.float32 and t.numel() >= logits.numel() // 10]


def test_likelihoods_are_differentiated_forward_twice_and_under_vmap():
    logits, tokens = torch.randn(2, 5, 4, dtype=torch.float64), torch.randint(0, 4, (2, 5))

    def plain(z):
        logp = z.log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None])[:, :, 0]
        return nn.functional.pad(logp, (1, 0))

    def ours(z):
        return lw.token_log_likelihood(z, tokens, tokens)

    def squares(f):
        return lambda z: torch.func.grad(lambda y: f(y).square().sum())(z).square().sum()

    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        assert (transform(ours)(logits) - transform(plain)(logits)).abs().max() < 1e-12
    assert (
        torch.func.grad(squares(ours))(logits) - torch.func.grad(squares(plain))(logits)
    ).abs().max() < 1e-12


def test_training_terms_take_likelihoods():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)).double()
    x = torch.randint(0, 7, (4, 5))
    term = lw.losses.pair(model, x[:2], x[2:], readout=lw.sequence_log_likelihood())
    term.mean().backward()
    gradient = model[1].weight.grad.clone()
    model.zero_grad()

    def unit(tokens):
        logp = model(tokens[None]).log_softmax(-1)[0, :-1].gather(1, tokens[1:, None]).mean()
        g = torch.cat(
            [g.flatten() for g in torch.autograd.grad(logp, tuple(model.parameters()), create_graph=True)]
        )
        return g / g.norm()

    expected = -torch.stack([unit(x[i]) @ unit(x[i + 2]) for i in range(2)]).mean()
    expected.backward()
    assert float(term.mean()) == pytest.approx(float(expected), abs=1e-9)
    assert (model[1].weight.grad - gradient).abs().max() < 1e-9


@pytest.mark.parametrize(
    ("labels", "inputs", "text"),
    [
        (torch.zeros(2).long(), torch.zeros(2, 3).long(), r"labels=False"),
        (None, torch.zeros(2, 3), "needs tokens"),
        (None, {"decoder_input_ids": torch.zeros(2, 3).long()}, "needs labels"),
        (None, (torch.zeros(2, 3).long(), torch.ones(2, 3).long()), "needs tokens"),
        (torch.full((2, 3), 9), torch.zeros(2, 3).long(), r"among the 5 classes"),
        (torch.zeros(2, 3).long(), {"attention_mask": torch.ones(2, 1, 3, 3)}, "attention mask must be"),
    ],
)
def test_tokens_that_do_not_fit_are_named(labels, inputs, text):
    with pytest.raises(ValueError, match=text):
        lw.sequence_log_likelihood()(torch.randn(2, 3, 5), labels, inputs=inputs)


# ---- preference pairs


@pytest.mark.parametrize("name", NAMES)
def test_completions_against_alternatives_are_differences_of_likelihoods(name):
    model = language_model(name).eval()
    one, other = texts(name, model), texts(name, model, seed=1)
    other = {
        key: torch.cat([value, value[:, :1].clone().fill_(-100 if key == "labels" else 0)], 1)
        for key, value in other.items()
    }
    pairs = {f"chosen_{k}": v for k, v in one.items()} | {f"rejected_{k}": v for k, v in other.items()}
    wanted, rows = list(model.parameters()), []
    for i in range(len(LENGTHS)):
        difference = sum(
            sign * token_likelihoods(name, model, data, i).sum() for sign, data in ((1, one), (-1, other))
        )
        rows.append(gradients([difference], wanted))
    net = lw.Network(lw.CompletionPairs(model), lw.completion_against_alternative)
    expected = torch.einsum("ntp,msp->nm", torch.stack(rows), torch.stack(rows))
    found = lw.GramMatrix(net, pairs, kernel=lw.INNER_PRODUCT).dense()
    assert (found - expected).abs().max() < 1e-9 * expected.abs().max()


def test_a_pair_without_an_alternative_is_refused():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    with pytest.raises(ValueError, match="no inputs named rejected_"):
        lw.CompletionPairs(model)(chosen_input=torch.zeros(2, 3).long())
    with pytest.raises(TypeError, match="CompletionPairs"):
        lw.completion_against_alternative(torch.randn(2, 3, 5), None, torch.zeros(2, 3).long())


# ---- who looks at labels, and what is a readout


def of_label(outputs, labels):
    return outputs.gather(1, labels[:, None])


def classified(n=24, classes=3):
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, classes)).double()
    x = torch.randn(n, 3).double()
    return model, x, model(x).argmax(1)


@pytest.mark.parametrize("sort", [False, True])
def test_a_readout_of_the_users_that_looks_at_labels_is_noticed(sort):
    model, x, y = classified()
    y = y.sort().values if sort else y
    gram = lw.GramMatrix(lw.Network(model, of_label), (x, y))
    with pytest.warns(UserWarning, match="looks at the label"):
        lw.label_suspicion(gram)
    with pytest.raises(ValueError, match="looks at the label"):
        lw.reliability(gram)
    assert lw.fit_quality(gram).learned != lw.fit_quality(gram).learned  # NaN: neighbors know the label


@pytest.mark.parametrize(
    "readout", [lambda outputs, labels: outputs[:, :2], lw.predicted_class, lw.projected_outputs(2)]
)
def test_a_readout_that_ignores_labels_is_left_alone(readout):
    model, x, y = classified()
    gram = lw.GramMatrix(lw.Network(model, readout), (x, y))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lw.label_suspicion(gram)
        lw.reliability(gram)


def test_labels_of_one_class_alone_do_not_hide_a_readout_that_looks_at_them():
    model, x, _ = classified()
    for label in (0, 2):
        assert lw.Network(model, of_label).reads_labels(x, torch.full((24,), label))
    calls = []

    def counted(outputs, labels):
        calls.append(labels)
        return outputs

    net = lw.Network(model, counted)
    assert not net.reads_labels(x, None) and calls == []
    for _ in range(3):
        assert not net.reads_labels(x, torch.arange(24) % 3)
    assert len(calls) == 2  # tried once


@pytest.mark.parametrize(
    "readout",
    [
        *(
            lw.GramMatrix,
            lw.Network,
            lw.similarity,
            lw.nearest,
            lw.soft_neighbors,
            lw.CORRELATION,
            "all_outputs",
            3,
        ),
        *(lw.one_output, lw.label_against_random, lw.projected_outputs, lw.sequence_log_likelihood),
        *(lambda outputs: outputs, lambda outputs, labels, weights: outputs, lambda: None),
    ],
)
def test_what_is_no_readout_is_refused(readout):
    with pytest.raises(TypeError, match=r"readout must be a function \(outputs, labels\)"):
        lw.Network(nn.Linear(3, 2), readout)


@pytest.mark.parametrize(
    "readout",
    [
        lambda outputs, labels: outputs,
        lambda outputs, labels, ids: outputs * ids[:, None],
        lambda outputs, labels, inputs: outputs * inputs,
        lambda outputs, labels, inputs, ids: outputs * ids[:, None] * inputs,
        lambda outputs, labels, i=1: outputs[:, i],
        lambda inputs, ids: inputs * 2,
        lambda outputs, labels, inputs, ids, /: outputs * ids[:, None] * inputs,
        functools.partial(lambda outputs, labels, scale: outputs * scale, scale=2.0),
    ],
)
def test_readouts_get_what_they_declare(readout):
    model, x = nn.Linear(3, 3).double(), torch.randn(4, 3).double()
    k = lw.GramMatrix(lw.Network(model, readout), x, kernel=lw.INNER_PRODUCT).dense()
    assert torch.allclose(
        k, lw.GramMatrix(lw.Network(model, readout), x, kernel=lw.INNER_PRODUCT, engine="autograd").dense()
    )


@pytest.mark.parametrize("given", [0, 1.5, "8"])
def test_a_wrong_number_of_combinations_is_refused(given):
    with pytest.raises((TypeError, ValueError), match="r must be an integer"):
        lw.projected_outputs(given)


def test_wrong_options_of_a_likelihood_are_refused():
    with pytest.raises(ValueError, match="reduce must be 'mean' or 'sum'"):
        lw.sequence_log_likelihood("max")
    with pytest.raises(TypeError, match="shift must be"):
        lw.sequence_log_likelihood(shift=1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *(("likewise:GramMatrix", "is the class GramMatrix"), ("likewise:similarity", "readout must be")),
        *(("likewise:projected_outputs", "called first"), ("main_tensor", "no readout 'main_tensor'")),
        *(("torch", "no readout 'torch'"), ("projected_outputs", "no readout 'projected_outputs'")),
    ],
)
def test_the_command_refuses_what_is_no_readout(name, message, tmp_path, capsys):
    from likewise.cli.app import exit_code

    np.savez(tmp_path / "x.npz", x=np.zeros((4, 3), dtype=np.float32))
    (tmp_path / "net.py").write_text("import torch\nmodel = lambda: torch.nn.Linear(3, 2)\n")
    given = ["plan", f"{tmp_path}/net.py:model", f"{tmp_path}/x.npz"]
    assert exit_code([*given, "--readout", "predicted_class"]) == 0
    capsys.readouterr()
    assert exit_code([*given, "--readout", name]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_draws_of_different_seeds_are_independent():
    from likewise.readouts import _scrambled

    ids = torch.arange(20_000)
    for rivals in (2, 9, 99):
        first = _scrambled(ids, 0) % rivals
        assert torch.bincount(first).max() < 1.3 * len(ids) / rivals
        for seed in range(1, 5):
            equal = (_scrambled(ids, seed) % rivals == first).double().mean()
            assert abs(equal - 1 / rivals) < 0.02
        pairs = first[:-1] * rivals + first[1:]
        assert len(pairs.unique()) > 0.8 * min(rivals**2, len(ids) * 0.8)
