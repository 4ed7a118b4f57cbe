"""Rows chosen for targets, against similarities written out; diversity against eigenvalues of the matrix."""

import warnings

import pytest
import torch

import likewise as lw


@pytest.fixture
def index(build, net):
    return lw.Index(build(width=1024).path, model=net)


def similarities(net, data, new, centered):
    """Targets × pool, exact: sketches of this width are."""
    return lw.GramMatrix(net, new, data[0], centered=centered).dense()


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("by", ["max", "mean"])
def test_rows_are_ranked_by_their_similarity_to_the_targets(index, net, data, new, by, centered):
    k = similarities(net, data, new, centered)
    expected = k.amax(0) if by == "max" else k.mean(0)
    found = lw.score_targets(index, new, by=by, centered=centered)
    assert torch.allclose(found.scores.double(), expected, atol=2e-3)
    assert (
        torch.equal(found.targets, k.argmax(0))
        or (k.amax(0) - k.gather(0, found.targets[None])[0]).max() < 2e-3
    )
    chosen = lw.select(index, new, count=8, by=by, centered=centered)
    assert expected[chosen].min() >= expected.sort(descending=True).values[7] - 4e-3
    assert (expected[chosen].diff() < 4e-3).all()


def test_a_share_is_rounded_up_and_the_most_similar_come_first(index, data):
    assert len(lw.select(index, data[0][:3], share=0.06)) == 3
    assert set(lw.select(index, data[0][:3], share=0.06).tolist()) == {0, 1, 2}
    assert len(lw.select(index, data[0][:3], share=1)) == 40


def test_targets_choose_in_turn(index, net, data, new):
    k = similarities(net, data, new, True)
    chosen = lw.select(index, new, count=12, by="each").tolist()
    expected, turn = [], 0
    while len(expected) < 12:
        ranking = k[turn % len(new)].argsort(descending=True).tolist()
        expected.append(next(row for row in ranking if row not in expected))
        turn += 1
    assert chosen == expected
    assert sorted(lw.select(index, new, count=40, by="each").tolist()) == list(range(40))


def test_of_equal_rows_targets_choose_the_first(build, net, data):
    index = build(data=tuple(torch.cat([part] * 4) for part in data))
    assert lw.select(index, data[0][:3], count=6, by="each").tolist() == [0, 1, 2, 40, 41, 42]


def test_duplicates_of_what_is_chosen_are_left_out(build, net, data):
    x = torch.cat([data[0][:6], data[0][:6] + 1e-9, data[0][6:12]])
    index = lw.Index(build(data=x, width=1024).path, model=net)
    chosen = lw.select(index, data[0][:2], share=1, exclude_duplicates=0.999)
    assert len(chosen) == 12
    assert len({int(row) % 6 for row in chosen if row < 12}) == 6


def test_a_diverse_selection_is_less_alike(index, net, data, new):
    k = lw.GramMatrix(net, data[0]).dense()

    def alike(rows):
        inside = k[rows][:, rows]
        return (inside.sum() - inside.trace()) / (len(rows) * (len(rows) - 1))

    plain, diverse = (lw.select(index, new, count=6, diverse=flag) for flag in (False, True))
    assert plain[0] == diverse[0]
    assert len(set(diverse.tolist())) == 6
    assert alike(diverse) < alike(plain)


def test_removed_rows_are_not_chosen(index, data):
    index.remove([0, 1])
    assert not {0, 1} & set(lw.select(index, data[0][:2], count=10).tolist())


def test_diversity_is_the_entropy_of_the_eigenvalues(build, index, net, data):
    values = torch.linalg.eigvalsh(lw.GramMatrix(net, data[0]).dense() / 40).clamp(min=0)
    expected = torch.special.entr(values).sum().exp()
    assert lw.diversity(index) == pytest.approx(float(expected), rel=2e-3)
    same = build("same", width=1024, data=data[0][:1].repeat(10, 1, 1))
    assert lw.diversity(same) == pytest.approx(1, abs=1e-2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"share": 1.5}, "share"),
        ({"count": 41}, "count"),
        ({"by": "median"}, "by"),
        ({"exclude_duplicates": 2}, "dupl"),
    ],
)
def test_what_cannot_be_chosen_is_said(index, data, options, text):
    with pytest.raises(ValueError, match=text):
        lw.select(index, data[0][:2], **options)


def test_an_index_of_texts_with_token_labels_in_batches_of_several_lengths(tmp_path):
    """A causal model and the collator of Hugging Face: neighbors are those of a loop over single texts."""
    pytest.importorskip("transformers")
    datasets = pytest.importorskip("datasets")
    from torch.utils.data import DataLoader
    from transformers import DataCollatorForLanguageModeling, GPT2LMHeadModel

    from texts import gpt2_config, sentences, word_tokenizer

    tokenizer = word_tokenizer()
    rows = datasets.Dataset.from_dict({"input_ids": tokenizer(sentences(30))["input_ids"]})
    torch.manual_seed(0)
    model = GPT2LMHeadModel(gpt2_config(tokenizer)).eval()
    loader = DataLoader(rows, batch_size=4, collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False))
    gradients = []
    for row in rows:
        tokens = torch.tensor([row["input_ids"]])
        loss = model(tokens, labels=tokens).loss
        parts = torch.autograd.grad(loss, list(model.parameters()))
        gradients.append(torch.nn.functional.normalize(torch.cat([p.flatten() for p in parts]), dim=0))
    cosines = torch.stack(gradients) @ torch.stack(gradients).T
    readout = lw.sequence_log_likelihood()
    found = lw.similarity(model, loader, readout=readout)
    assert (found - cosines).abs().max() < 1e-5
    index = lw.build_index(model, loader, tmp_path / "index", readout=readout, width=2048, unit="sample")
    sketches = index.sketches(index.rows)
    assert (sketches @ sketches.T - cosines).square().mean().sqrt() < 0.05
    assert index.nearest(loader, k=1).indices[:, 0].tolist() == list(range(30))


def test_hidden_states_are_averaged_by_position_without_padding():
    pytest.importorskip("transformers")
    from transformers import GPT2LMHeadModel

    from texts import gpt2_config, sentences, word_tokenizer

    tokenizer = word_tokenizer()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(gpt2_config(tokenizer)).train()
    rows = tokenizer(sentences(12))["input_ids"]
    data = lw.batches([{"input_ids": row} for row in rows], 5, pad_id=tokenizer.pad_token_id)
    found = lw.pooled_states(model, data)
    expected = []
    for row in rows:
        with torch.no_grad():
            states = model.eval().transformer(torch.tensor([row])).last_hidden_state[0]
        total = sum((i + 1) * state for i, state in enumerate(states))
        expected.append(torch.nn.functional.normalize(total, dim=0))
    expected = torch.stack(expected)
    assert (found - expected).abs().max() < 1e-5
    model.train()
    chosen = lw.select_by_states(model, data, data.take([3, 8]), count=4, by="each")
    assert chosen[:2].tolist() == [3, 8] and model.training
    by_mean = lw.select_by_states(model, data, data.take([3, 8]), share=0.25, by="mean")
    scores = (expected[[3, 8]] @ expected.T).mean(0)
    assert set(by_mean.tolist()) == set(scores.topk(3).indices.tolist())  # those of 3 and 8 are equal
    with pytest.raises(TypeError, match="no model of transformers"):
        lw.pooled_states(torch.nn.Embedding(3, 2), torch.zeros(2, 2).long())


def test_an_index_of_a_model_that_expands_positions_over_the_batch(tmp_path):
    """GPT-NeoX takes another branch for a batch of one, by which the size of gradients was measured."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    config = transformers.GPTNeoXConfig(vocab_size=19, max_position_embeddings=16, **sizes)
    tokens = torch.randint(0, 19, (9, 6))
    index = lw.build_index(
        transformers.GPTNeoXForCausalLM(config).eval(),
        tokens,
        tmp_path / "index",
        readout=lw.sequence_log_likelihood(),
    )
    assert index.nearest(tokens, k=1).indices[:, 0].tolist() == list(range(9))


@pytest.mark.parametrize("by", ["max", "mean", "each"])
def test_targets_with_a_zero_gradient_are_warned_of(tmp_path, by):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 1, bias=False))
    net[0].bias.data.fill_(-0.1)
    net[2].weight.data.fill_(1.0)
    pool = 3 * torch.randn(20, 4)
    index = lw.build_index(net, pool, tmp_path / "index")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lw.select(index, pool[:2], count=3, by=by)
    with pytest.warns(UserWarning, match=r"1 of 3 targets has a zero gradient.*places 1\)"):
        lw.select(index, torch.stack([pool[0], torch.zeros(4), pool[1]]), count=3, by=by)
