"""Settings of an index that the field uses: Adam's steps, several checkpoints, two-sided projections, unit layers."""

import copy

import pytest
import torch
from torch import nn

import likewise as lw
from likewise.gram import GramMatrix
from likewise.index.layers import SIDE, LayerProjector, LayerSettings
from likewise.index.optimizer import read_moments

transformers = pytest.importorskip("transformers")
VOCABULARY, LENGTHS = 19, (3, 7, 5, 6, 2, 7)


def causal_model(name="gpt2", dtype=torch.float64):
    torch.manual_seed(0)
    small = dict(vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, num_hidden_layers=2)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=4, max_position_embeddings=16)
    build = {
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=8, n_layer=2, n_head=2)
        ),
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, **heads)),
    }
    model = build[name]().to(dtype).eval()
    for parameter in model.parameters():  # norms and biases begin as ones and zeros
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def texts(seed=0, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(seed)
    n, length = len(lengths), max(lengths)
    ids = torch.randint(1, VOCABULARY, (n, length), generator=generator)
    mask = (torch.arange(length) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def loss_gradients(model, data):
    """Return the gradient of each text's mean loss by parameter, from a loop over single texts without padding."""
    rows = []
    for ids, mask in zip(data["input_ids"], data["attention_mask"], strict=True):
        tokens = ids[None, : mask.sum()]
        logits = model(tokens).logits[0, :-1]
        loss = nn.functional.cross_entropy(logits, tokens[0, 1:])
        names, parameters = zip(*model.named_parameters(), strict=True)
        rows.append(dict(zip(names, torch.autograd.grad(loss, parameters), strict=True)))
    return rows


def unit_length(gradient):
    """Return a gradient of length 1, flat; one that is zero stays: a text of two tokens has nothing to attend to."""
    return nn.functional.normalize(gradient.flatten(), dim=0)


def flat(rows):
    return torch.stack([torch.cat([g.flatten() for g in row.values()]) for row in rows])


def train(model, steps=3, **options):
    """Train a model for some steps and return its optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, **options)
    for step in range(steps):
        optimizer.zero_grad()
        for row in loss_gradients(model, texts(100 + step)):
            for name, parameter in model.named_parameters():
                parameter.grad = row[name] if parameter.grad is None else parameter.grad + row[name]
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


def projector(model, data, settings, width=1024):
    net = lw.Network(model, lw.sequence_log_likelihood())
    gram = GramMatrix(net, data)
    if settings.projection == "two-sided":
        return LayerProjector(gram, width, 0, settings)
    from likewise.index.projection import fit_buckets

    return LayerProjector(gram, fit_buckets(width, 1), 0, settings)


def project(one, data, rows=True):
    given = lw.batches(data)
    if not rows:
        return one.project_all(given).sketches
    with one.gram.net.evaluation_mode():
        return one.project(given.samples(range(given.n)), range(given.n)).sketches


# Of each model, what is left of its parameters without embeddings, output layer, norms and biases.
HIDDEN = {"gpt2": ("c_attn.weight", "c_proj.weight", "c_fc.weight"), "llama": ("_proj.weight",)}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("unit", ["sample", "layer", "matrix"])
def test_two_sided_projections_are_those_of_gradients_of_single_texts(name, unit):
    """GPT-2 ties its embedding to its head, and its matrices are (inputs, outputs)."""
    model, data = causal_model(name), texts()
    one = projector(model, data, LayerSettings("two-sided", unit))
    found = project(one, data)
    expected = []
    for row in loss_gradients(model, data):
        total = torch.zeros(1024 // SIDE**2, SIDE, SIDE, dtype=torch.float64)
        for parameter, gradient in row.items():
            if unit == "matrix" and not parameter.endswith(HIDDEN[name]):
                assert parameter not in one._maps
                continue
            left, right = one._maps[parameter]
            matrix = -gradient.reshape(len(gradient), -1)
            scale = 1 if unit == "sample" else 1 / matrix.norm().clamp(min=1e-12)
            total += left.mT @ matrix @ right * scale
        expected.append(nn.functional.normalize(total.flatten(), dim=0))
    assert (found - torch.stack(expected)).abs().max() < 1e-9


@pytest.mark.parametrize("projection", ["signs", "two-sided"])
def test_similarities_by_layers_are_means_of_their_cosines(projection):
    model, data = causal_model(), texts()
    one = projector(model, data, LayerSettings(projection, "layer"), 2**14)
    sketches = project(one, data)
    rows = loss_gradients(model, data)
    cosines = [
        nn.functional.normalize(torch.stack([row[name].flatten() for row in rows]), dim=1) for name in rows[0]
    ]
    total = torch.stack([c @ c.T for c in cosines]).sum(0)
    expected = total / total.diagonal().sqrt() / total.diagonal().sqrt()[:, None]
    assert (sketches @ sketches.T - expected).abs().max() < 0.05


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_sign_sketches_of_matrices_are_those_of_gradients_of_single_texts(name):
    model, data = causal_model(name), texts()
    one = projector(model, data, LayerSettings("signs", "matrix"))
    for row, sketch in zip(loss_gradients(model, data), project(one, data), strict=True):
        unit = [-unit_length(g) for k, g in row.items() if k.endswith(HIDDEN[name])]
        assert (sketch - sign_sketch(one, torch.cat(unit))).abs().max() < 1e-9


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_texts_are_chosen_by_matrices_where_asked_for(name, tmp_path):
    """Scores against a loop: centered cosines of the concatenated unit gradients of matrices."""
    model, pool, targets = causal_model(name), texts(0, (5, 7, 3, 6, 4, 7, 5, 6)), texts(1, (6, 4, 7))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    readout = lw.sequence_log_likelihood()
    index = lw.build_index(
        model, pool, tmp_path / "index", readout=readout, width=2**16, dtype="float32", unit="matrix"
    )
    assert index.manifest["projection"]["unit"] == "matrix" and "unit matrix" in repr(index)

    def units(data):
        kept = [
            {k: g for k, g in row.items() if k.endswith(HIDDEN[name])} for row in loss_gradients(model, data)
        ]
        rows = torch.stack([torch.cat([unit_length(g) for g in row.values()]) for row in kept])
        return nn.functional.normalize(rows, dim=1)

    mean = units(pool).mean(0)
    one, other = (nn.functional.normalize(units(data) - mean, dim=1) for data in (targets, pool))
    expected = one @ other.T
    for by, scores in (("max", expected.amax(0)), ("mean", expected.mean(0))):
        assert (lw.score_targets(index, targets, by=by).scores - scores).abs().max() < 0.05
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_default_index_of_texts_has_plain_gradients_and_exact_similarities(tmp_path):
    model, data = causal_model(), texts()
    with pytest.warns(lw.ReadoutNotice):
        index = lw.build_index(model, data, tmp_path / "plain")
    assert "unit" not in index.manifest["projection"]
    exact = index.nearest(data, k=3, exact=True)
    gram = lw.GramMatrix(lw.Network(model, lw.sequence_log_likelihood()), data, centered=True).dense()
    assert (exact.similarities - gram.gather(1, exact.indices)).abs().max() < 1e-6


def test_units_of_matrices_need_a_hidden_matrix(tmp_path):
    tables = ["transformer.wte.weight", "transformer.wpe.weight"]
    with pytest.raises(ValueError, match="none of the 2 selected parameters is one"):
        lw.build_index(
            causal_model(),
            texts(),
            tmp_path / "none",
            readout=lw.sequence_log_likelihood(),
            parameters=tables,
            unit="matrix",
        )


def test_rows_are_the_steps_that_adam_makes_on_single_texts():
    model, data = causal_model(), texts()
    optimizer = train(model, betas=(0.8, 0.95), eps=1e-6)
    moments = read_moments(optimizer.state_dict(), lw.Network(model))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = optimizer.state_dict()
    for row in loss_gradients(model, data):
        copied = copy.deepcopy(model)
        again = torch.optim.AdamW(copied.parameters(), lr=1.0, weight_decay=0.0)
        again.load_state_dict(copy.deepcopy(state))  # or its moments would be one with the other's
        again.param_groups[0]["lr"] = 1.0
        for name, parameter in copied.named_parameters():
            parameter.grad = row[name]
        again.step()
        for name, parameter in copied.named_parameters():
            moved = (parameter.detach() - before[name]).flatten()
            found = moments.update(name, -row[name].reshape(1, -1))[0]
            assert (found - moved).abs().max() < 1e-9


@pytest.mark.parametrize("projection", ["signs", "two-sided"])
def test_less_by_hand(projection, tmp_path):
    """Two checkpoints: rows are Adam's steps, queries plain, cosines weighted by learning rates, the best target."""
    pool, targets = texts(0, (5, 7, 3, 6, 4, 7, 5, 6)), texts(1, (6, 4, 7))
    rates, indexes = (1e-3, 3e-3), []
    expected = torch.zeros(3, 8, dtype=torch.float64)
    for number, rate in enumerate(rates):
        model = causal_model()
        optimizer = train(model, 2 + number)
        # --- LESS, written out
        one, two, eps, t = 0.9, 0.999, 1e-8, 3 + number
        names = [name for name, _ in model.named_parameters()]
        state = {name: optimizer.state[p] for name, p in model.named_parameters()}
        m = torch.cat([state[name]["exp_avg"].flatten() for name in names])
        v = torch.cat([state[name]["exp_avg_sq"].flatten() for name in names])
        g = flat(loss_gradients(model, pool))
        first = (one * m + (1 - one) * g) / (1 - one**t)
        second = (two * v + (1 - two) * g**2) / (1 - two**t)
        step = first / (second.sqrt() + eps)
        query = flat(loss_gradients(model, targets))
        cosine = nn.functional.normalize(query, dim=1) @ nn.functional.normalize(step, dim=1).T
        expected += rate / sum(rates) * cosine
        # ---
        indexes.append(
            lw.build_index(
                model,
                pool,
                tmp_path / str(number),
                readout=lw.sequence_log_likelihood(),
                width=2**15,
                dtype="float32",
                projection=projection,
                optimizer_state=optimizer,
                learning_rate=rate,
            )
        )
    found = lw.score_targets(indexes, targets, centered=False)
    assert (found.scores - expected.max(0).values).abs().max() < 0.05
    by_mean = lw.score_targets(indexes, targets, by="mean", centered=False).scores
    assert (by_mean - expected.mean(0)).abs().max() < 0.05
    best = lw.select(indexes, targets, count=1, centered=False)
    assert expected.max(0).values[int(best)] > expected.max() - 0.05
    weighted = lw.score_targets(indexes, targets, centered=False, weights=[1.0, 0.0]).scores
    alone = lw.score_targets(indexes[0], targets, centered=False).scores
    assert torch.allclose(weighted, alone, atol=1e-6)


def test_the_state_of_an_optimizer_is_read_from_all_its_forms(tmp_path):
    model = causal_model(dtype=torch.float32)
    names = [name for name, p in model.named_parameters()]
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            str(tmp_path), use_cpu=True, report_to=[], max_steps=2, save_steps=2, disable_tqdm=True
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in texts(0, (6,) * 8)["input_ids"]],
    )
    trainer.train()
    net = lw.Network(model)
    optimizer = trainer.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    forms = [
        inner,
        inner.state_dict(),
        {name: inner.state[p] for name, p in model.named_parameters()},
        tmp_path / "checkpoint-2",
        str(tmp_path / "checkpoint-2" / "optimizer.pt"),
    ]
    expected = {name: inner.state[p] for name, p in model.named_parameters()}
    for form in forms:
        moments = read_moments(form, net)
        assert moments.step == 2 and list(moments.first) == names
        for name in names:
            assert torch.equal(moments.first[name], expected[name]["exp_avg"])
            assert torch.equal(moments.second[name], expected[name]["exp_avg_sq"])
    some = torch.optim.Adam([{"params": [p]} for p in model.parameters()])
    with pytest.raises(ValueError, match="which are whose is not known"):
        read_moments(some.state_dict(), net)
    with pytest.raises(ValueError, match="no moments exp_avg"):
        read_moments(torch.optim.Adam(model.parameters()), net)
    with pytest.raises(TypeError, match="optimizer_state must be an optimizer"):
        read_moments(3, net)


def test_an_index_says_how_it_was_built_and_queries_follow(tmp_path):
    model, data = causal_model(), texts()
    readout = lw.sequence_log_likelihood()
    folder = tmp_path / "index"
    lw.build_index(model, data, folder, readout=readout, projection="two-sided", unit="layer", width=512)
    index = lw.Index(folder, model=model)
    assert index.manifest["projection"]["method"] == "two-sided" and index.width == 512
    found = index.nearest(data, k=2)
    assert found.indices[:, 0].tolist() == list(range(len(LENGTHS)))
    assert (found.errors[:, 0] < 1e-3).all() and (found.errors[:, 1] > 1e-3).all()
    with pytest.raises(ValueError, match="exact=True compares plain gradients"):
        index.nearest(data, exact=True)
    with pytest.raises(ValueError, match="another projection"):
        lw.build_index(model, data, folder, readout=readout, width=512)
    optimizer = train(model)
    preconditioned = lw.build_index(
        model, data, tmp_path / "adam", readout=readout, optimizer_state=optimizer
    )
    with pytest.raises(ValueError, match="rows cannot be added"):
        preconditioned.add(texts(3))
    with pytest.raises(ValueError, match="readouts of one output"):
        lw.build_index(nn.Linear(3, 2), torch.randn(9, 3), tmp_path / "two", unit="layer")


def test_standard_errors_of_two_sided_sketches_hold():
    """Of 2,000 pairs by 20 seeds, about 95 % of the exact similarities are within two standard errors."""
    from likewise.gram import similarity_errors

    model, data = causal_model(), texts(0, (6, 7, 5, 6, 4, 7, 5, 6, 7, 3, 4))
    net = lw.Network(model, lw.sequence_log_likelihood())
    exact = lw.GramMatrix(net, data).dense()
    gram, inside = GramMatrix(net, data), []
    apart = ~torch.eye(len(exact), dtype=torch.bool)
    for seed in range(20):
        one = LayerProjector(gram, 1024, seed, LayerSettings("two-sided"))
        sketches = project(one, data)
        errors = similarity_errors(sketches, sketches, 1, SIDE**2)
        inside.append(((sketches @ sketches.T - exact).abs() <= 1.96 * errors)[apart])
    assert 0.9 < torch.cat(inside).double().mean() < 0.99


def test_layers_whose_gradient_is_rounding_do_not_count():
    """A bias of attention's keys moves nothing: in float32 its gradient is noise, which unit length would blow up."""
    sizes = dict(hidden_size=8, ffn_dim=8, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=8)
    config = transformers.OPTConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes)
    torch.manual_seed(0)
    model, data = transformers.OPTForCausalLM(config).eval(), texts()
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    row = loss_gradients(model, data)[1]
    assert 0 < row["model.decoder.layers.0.self_attn.k_proj.bias"].norm() < 1e-6
    low = project(projector(model, data, LayerSettings("two-sided", "layer")), data).double()
    high = project(projector(model.double(), data, LayerSettings("two-sided", "layer")), data)
    assert (low @ low.T - high @ high.T).abs().max() < 1e-4


def test_half_precision_moves_similarities_by_a_thousandth():
    model, data = causal_model(dtype=torch.float32), texts(0, (16,) * 8)
    exact = project(projector(copy.deepcopy(model).double(), data, LayerSettings("two-sided")), data)
    low = lw.Network(model, lw.sequence_log_likelihood(), autocast=torch.bfloat16)
    found = project(LayerProjector(GramMatrix(low, data), 1024, 0, LayerSettings("two-sided")), data).double()
    errors = (found @ found.T - exact @ exact.T).abs()
    assert errors.mean() < 1e-3 and errors.max() < 5e-3


@pytest.mark.parametrize("projection", ["signs", "two-sided"])
def test_texts_of_one_length_go_together_and_keep_their_order(projection):
    from likewise.index.projection import split_by_length

    lengths = tuple(2 + 5 * i % 14 for i in range(48))
    model, data = causal_model(), {**texts(0, lengths), "labels": texts(0, lengths)["input_ids"]}
    samples = lw.batches(data).samples(range(48))
    places, parts = split_by_length(samples)
    assert len(parts) == 3 and sorted(torch.cat(places).tolist()) == list(range(48))
    tokens = sum(part.inputs["input_ids"].numel() for part in parts)
    assert tokens < 0.8 * samples.inputs["input_ids"].numel()
    for where, part in zip(places, parts, strict=True):
        assert part.inputs["input_ids"].shape == part.labels.shape == part.inputs["attention_mask"].shape
        assert part.inputs["attention_mask"].sum() == samples.inputs["attention_mask"][where].sum()
    one = projector(model, data, LayerSettings(projection))
    with one.gram.net.evaluation_mode():
        whole = torch.cat([one._project(samples[i : i + 1], None).sketches for i in range(48)])
        assert (one.project_query(samples).sketches - whole).abs().max() < 1e-9
    left = {name: value.flip(1) for name, value in data.items()}  # padded on the left: nothing is cut
    assert len(split_by_length(lw.batches(left).samples(range(48)))[1]) == 1


OTHERS = [("qwen3", "signs"), ("gemma", "two-sided"), ("mamba", "two-sided"), ("t5", "signs")]
TURNED = [(name, "two-sided" if projection == "signs" else "signs") for name, projection in OTHERS]


@pytest.mark.parametrize(
    ("name", "projection"), [*OTHERS, *(pytest.param(*case, marks=pytest.mark.slow) for case in TURNED)]
)
def test_projections_of_other_models_are_those_of_gradients_of_single_texts(name, projection):
    """Every setting at once, in float64, with ragged padding and prompts that do not count."""
    import test_readouts as cases

    model = cases.language_model(name).eval()
    data, wanted = cases.texts(name, model), dict(model.named_parameters())
    rows = []
    for i in range(len(cases.LENGTHS)):
        tokens = cases.token_likelihoods(name, model, data, i)
        value = tokens.sum() / (data["labels"][i] != -100).sum()
        parts = torch.autograd.grad(value, list(wanted.values()), materialize_grads=True)
        rows.append(dict(zip(wanted, parts, strict=True)))
    generator = torch.Generator().manual_seed(1)
    state = {
        k: {
            "exp_avg": 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype),
            "exp_avg_sq": torch.rand(p.shape, generator=generator, dtype=p.dtype),
            "step": 5,
        }
        for k, p in wanted.items()
    }
    net = lw.Network(model, lw.sequence_log_likelihood())
    moments = read_moments(state, net)
    one = projector(model, data, LayerSettings(projection, "layer", moments))
    found = project(one, data)
    for row, sketch in zip(rows, found, strict=True):
        steps = {k: moments.update(k, g.reshape(1, -1))[0] for k, g in row.items()}
        unit = {k: step / step.norm() for k, step in steps.items()}
        if projection == "two-sided":
            total = 0
            for k, step in unit.items():
                left, right = one._maps[k]
                total = total + left.mT @ step.reshape(left.shape[1], right.shape[1]) @ right
            expected = nn.functional.normalize(total.flatten(), dim=0)
        else:
            expected = sign_sketch(one, torch.cat([unit[k] for k in one._numels]))
        assert (sketch - expected).abs().max() < 1e-9


def sign_sketch(one, vector):
    """Return the sums of a vector's entries in their buckets, with the signs of entries and of runs, one by one."""
    signs, runs = one._sketch._maps[:2]
    buckets, total = one._sketch.buckets, torch.zeros(len(runs), one._sketch.buckets, dtype=torch.float64)
    for i, value in enumerate(vector * signs[: len(vector)]):
        total[:, i % buckets] += runs[:, i // buckets] * value
    return nn.functional.normalize(total.flatten(), dim=0)


def test_texts_longer_than_those_that_were_measured_come_in_smaller_batches(monkeypatch):
    lengths = (4, 4, 4, *(16,) * 29)
    rows = [{"input_ids": row[:n]} for row, n in zip(texts(0, lengths)["input_ids"], lengths, strict=True)]
    model, data = causal_model(), lw.batches(rows, pad_id=0)
    one = projector(model, data, LayerSettings("two-sided"))
    expected = project(one, data)
    monkeypatch.setattr(one.gram.engine, "_gradient_size", 64)  # of texts of 4 tokens
    sizes, inner = [], one._project
    monkeypatch.setattr(
        one, "_project", lambda part, moments: sizes.append(len(part)) or inner(part, moments)
    )
    assert (project(one, data) - expected).abs().max() < 1e-9
    assert (
        max(sizes) <= 16 and sum(sizes) == 32
    )  # four times as many tokens take four times as much, at least
