"""Answers of an index: against exact float64 gradients, and against the package's own statistics."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn

import likewise as lw
import nets
from likewise.gram import cost
from likewise.index.projection import Projector
from likewise.index.store import OutdatedIndexError
from likewise.statistics.novelty import counted_share, novel_share

WIDE = 4096  # more than outputs times parameters: every coordinate has a bucket of its own


def test_wide_sketches_give_exact_similarities(build, net, data, new):
    index = build(width=WIDE, dtype="float32")
    for centered in (True, False):
        gram = lw.GramMatrix(net, new, columns=data, centered=centered)
        expected = lw.nearest(gram, 10)
        found = index.nearest(new, 10, centered=centered)
        assert torch.equal(found.indices, expected.indices)
        assert torch.allclose(found.similarities.double(), expected.similarities, atol=1e-5)


@pytest.mark.filterwarnings("ignore::likewise.ReadoutNotice")
@pytest.mark.parametrize("labels", ["classes", "values", "none"])
def test_outputs_are_chosen_as_a_run_chooses_them(tmp_path, monkeypatch, labels):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 6)), torch.randn(70, 5)
    data = {"classes": (x, torch.arange(70) % 6), "values": (x, torch.randn(70)), "none": x}[labels]

    def readout_of(name, **options):
        index = lw.build_index(model, data, tmp_path / name, **options)
        reopened = lw.Index(index.path, model=model)  # the manifest knows the readout
        assert torch.equal(reopened.nearest(x[:3]).indices, index.nearest(x[:3]).indices)
        run = lw.analyze(index.network if options else model, data, out=tmp_path / f"run of {name}")
        return str(index.network.readout), run.manifest["options"]["readout"]

    few, of_run = readout_of("few pairs")
    assert "all_outputs" in few and of_run == "all_outputs"
    monkeypatch.setattr(cost, "FEW_MULTIPLICATIONS", 0)
    many, of_run = readout_of("many pairs")
    expected = "class_contrasts(4, seed=0)" if labels == "classes" else "projected_outputs(4, seed=0)"
    assert many == of_run == expected
    given, of_run = readout_of("given", readout=lw.projected_outputs(3))
    assert given == of_run == "projected_outputs(3, seed=0)"


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 3e-3), ("int8", 3e-2)])
def test_statistics_are_those_of_the_package(build, net, data, new, dtype, tolerance):
    index = build(width=WIDE, dtype=dtype)
    gram = lw.GramMatrix(net, new, columns=data)
    found = index.novelty(new)
    near = lw.novelty(gram, parameters=None)
    assert torch.allclose(found.gradient_novelty.double(), near, atol=tolerance)
    features = lw.novelty(gram, parameters="features")
    assert torch.allclose(found.feature_novelty.double(), features, atol=1e-4)
    assert torch.allclose(found.novelty.double(), lw.novelty(gram), atol=min(0.1, 100 * tolerance))
    for found, expected in zip(index.reliability(new), lw.reliability(gram), strict=True):
        assert torch.allclose(found.double(), expected.double(), atol=10 * tolerance)


def test_rows_with_themselves_show_the_strips_of_a_gram_matrix(build, net, data):
    from likewise.statistics.neighbors import NearestReducer, PositiveReducer

    index = build(width=WIDE, dtype="float32")
    gram = lw.GramMatrix(net, data, centered=True)
    (_, similarities), (density,) = index.pairs().visit(NearestReducer(5), PositiveReducer(4))
    assert torch.allclose(similarities.double(), lw.nearest(gram, 5).similarities, atol=1e-5)
    assert torch.allclose(density, lw.positive_neighbors(gram, 4), atol=1e-4)


def test_memory_does_not_change_answers(build, net, data, new):
    path = build().path
    index, tight = lw.Index(path, model=net), lw.Index(path, model=net, max_memory=2**20)
    tight._max_memory = 2**14  # strips of six rows
    assert torch.equal(index.nearest(data[0]).indices, tight.nearest(data[0]).indices)


def test_stated_errors_are_those_of_the_index_s_own_projection(tmp_path, monkeypatch):
    """Gradients of few directions, as of texts: all pairs of a projection err by more, or by less, than usual."""
    monkeypatch.setattr("likewise.index.projection.FEWEST_COMPARED", 120)
    torch.manual_seed(0)
    words, latent = nn.Embedding(300, 8), torch.randn(240, 3)
    model = nn.Sequential(words, nn.Flatten(), nn.Linear(40, 1)).double()
    x = (latent @ torch.randn(3, 300)).topk(5).indices
    x, new = x[:200], x[200:]
    exact = lw.GramMatrix(model, new, columns=x, centered=True).dense()
    stated, usual = [], []
    for seed in range(6):
        index = lw.build_index(model, x, tmp_path / str(seed), width=100, seed=seed, dtype="float32")
        found = index.nearest(new, len(x))
        apart = found.errors > 1e-4  # some are equal
        ratio = ((found.similarities - exact.gather(1, found.indices)) / found.errors)[apart]
        stated.append(float(ratio.square().mean().sqrt().log()))
        usual.append(stated[-1] + float(index._columns.error_factors[0].log()))
    off = [sum(value**2 for value in values) ** 0.5 for values in (stated, usual)]
    assert off[0] < 0.6 * off[1], (stated, usual)


def test_errors_of_several_data_sets_are_those_of_each_by_its_size(build, data, monkeypatch):
    monkeypatch.setattr("likewise.index.projection.FEWEST_COMPARED", 36)
    index, other = build("one", width=20), build("other", width=20, data=(data[0].flip(0)[:36], data[1][:36]))
    factors = [one._columns.error_factors.double() for one in (index, other)]
    assert all((one != 1).all() for one in factors)
    index.merge(other)
    expected = (40 * factors[0].square() + 36 * factors[1].square()).div(76).sqrt()
    assert torch.allclose(index._columns.error_factors.double(), expected)


def test_exact_answers_are_those_of_exact_gradients(build, net, data, new):
    index = build(width=100)
    index.attach(data)
    for centered in (True, False):
        expected = lw.nearest(lw.GramMatrix(net, new, columns=data, centered=centered), 6)
        found = index.nearest(new, 6, exact=True, centered=centered, candidates=40)
        assert torch.equal(found.indices, expected.indices)
        assert torch.allclose(found.similarities.double(), expected.similarities, atol=1e-6)
        assert (found.errors == 0).all()


def test_the_pass_for_exact_answers_is_made_once(build, net, data, new, monkeypatch):
    from likewise.index import query

    index, passes = build(), []
    index.attach(data)
    compute = query.mean_gradient
    monkeypatch.setattr(query, "mean_gradient", lambda *a: passes.append(1) or compute(*a))
    first = index.nearest(new, exact=True)
    again = lw.Index(index.path, model=net, data=data)
    assert torch.allclose(again.nearest(new, exact=True).similarities, first.similarities, atol=1e-6)
    assert len(passes) == 1
    again.remove([0])
    assert not list(index.path.glob("gradient-*"))
    again.nearest(new, exact=True)
    assert len(passes) == 2


def test_errors_tell_how_far_sketches_are_off(tmp_path):
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh(), nn.Conv2d(8, 1, 4))
    x = torch.randn(100, 1, 8, 8)
    exact = lw.GramMatrix(model, x[:20], columns=x, centered=True).dense().double()
    index = lw.build_index(model, x, tmp_path / "index", width=61)
    found = index.nearest(x[:20], 100)
    others = found.indices != torch.arange(20)[:, None]
    deviations = (found.similarities - exact.gather(1, found.indices)) / found.errors
    assert 0.8 < deviations[others].square().mean().sqrt() < 1.2


def test_novelty_percentiles_are_uniform_on_the_index_itself(build, net, data):
    index = build(width=WIDE, dtype="float32")
    own, gram = index._columns.reference, lw.GramMatrix(net, data)
    for found, parameters in ((own.gradient_novelty, None), (own.feature_novelty, "features")):
        assert torch.allclose(found.double(), lw.novelty(gram, parameters=parameters), atol=1e-4)
    assert torch.allclose(novel_share(own, own), lw.novelty(gram), atol=0.03)
    counted = 40 * counted_share(own, own)
    assert torch.equal(counted.sort().values.round(), torch.arange(40).double())
    far = index.novelty(data[0] * 100)
    assert far.percentile.max() <= 100 and far.percentile.min() >= 0


def test_what_an_index_stores_is_enough_to_ask(build, net, data, new):
    """The model is called for the new inputs alone, as often for many rows as for few; the data set is not there."""
    few = tuple(part[:8] for part in data)
    counts = {}
    for name, given in (("many", data), ("few", few)):
        path = build(name, data=given).path
        index = lw.Index(path, model=net)
        index.explain(new)  # traces and checks the model
        seen = []
        handle = net.register_forward_hook(
            lambda module, inputs, outputs, seen=seen: seen.append(len(inputs[0]))
        )
        index.novelty(new)
        index.reliability(new)
        index.explain(new)
        handle.remove()
        counts[name] = seen
    assert counts["many"] == counts["few"]
    assert 0 < max(counts["many"]) <= len(new)


def test_errors_do_not_depend_on_how_many_inputs_go_together(build, net, new):
    path = build().path
    index, tight = lw.Index(path, model=net), lw.Index(path, model=net, max_memory=2**20)
    tight._max_memory = 2**14  # one input
    torch.testing.assert_close(index.nearest(new).errors, tight.nearest(new).errors)
    torch.testing.assert_close(index.novelty(new).errors, tight.novelty(new).errors)


def test_explanations_show_neighbors_with_labels_and_pictures(build, data, new):
    names = [f"sample-{i}" for i in range(40)]
    texts = [f"text {i}" for i in range(40)]
    index = build(classes=["a", "b", "c"], names=names, show=texts)
    one = index.explain(new, k=3)[0]
    nearest = index.nearest(new, 3)
    assert [n.sample.row for n in one.neighbors] == nearest.indices[0].tolist()
    first = one.neighbors[0].sample
    assert first.name == names[first.row] and first.picture.content.decode() == texts[first.row]
    assert first.label == int(data[1][first.row]) and first.label_name == "abc"[first.label]
    assert one.trusted == (not one.reasons)
    assert json.loads(json.dumps(one.as_dict()))["neighbors"][0]["picture"] == texts[first.row]


def test_a_prediction_that_is_not_the_known_label_is_not_trusted(build, data, new):
    index = build(classes=["a", "b", "c"])
    plain = index.explain(new)
    predictions = torch.tensor([one.prediction for one in plain])
    assert all(one.label is None for one in plain)
    for one, told in zip(plain, index.explain((new, predictions)), strict=True):
        assert told.reasons == one.reasons and told.label == one.prediction
    for told in index.explain((new, (predictions + 1) % 3)):
        label = "abc"[(told.prediction + 1) % 3]
        assert (
            not told.trusted and told.reasons[0] == f"its own label is {label}" == told.verdict.split("; ")[0]
        )
        assert told.as_dict()["label_name"] == label


@pytest.mark.parametrize("form", ["one-hot", "one-hot floats", "floats", "column", "column of floats"])
def test_classes_are_named_and_compared_whatever_the_form_of_the_labels(build, data, new, form):
    def in_form(y):
        one_hot = torch.nn.functional.one_hot(y, 3)
        forms = {"one-hot": one_hot, "one-hot floats": one_hot.double(), "floats": y.double()}
        return (forms | {"column": y[:, None], "column of floats": y[:, None].double()})[form]

    x, y = data
    asked = torch.tensor([0, 1, 2, 0, 1])
    plain = build(classes=["a", "b", "c"]).explain((new, asked))
    index = build("other", data=(x, in_form(y)), classes=["a", "b", "c"])
    assert [str(one) for one in index.explain((new, in_form(asked)))] == [str(one) for one in plain]
    assert index.sample(4).label == int(y[4]) and index.sample(4).label_name == "abc"[int(y[4])]


def test_a_label_that_is_no_class_is_no_label_of_that_input_alone(build, new):
    told = build().explain((new, torch.tensor([0, -100, 2, 0, 1])))
    assert [one.label for one in told] == [0, None, 2, 0, 1]


def test_weak_agreement_and_confidence_are_caveats_and_only_without_them_there_is_no_sign():
    from likewise.index.explanation import Explanation

    def explain(agreement=0.95, confidence=0.95, percentile=50.0, prediction=1):
        name = "bee" if prediction == 1 else ""
        return Explanation(prediction, name, confidence, (), agreement, 0.1, 0.5, percentile, 0.01)

    assert explain().headline == "bee (95%): no sign against it"
    assert explain(agreement=0.55).verdict == "not certain: the labels of its neighbors agree with it by 55%"
    assert explain(confidence=0.6).caveats == ("the network is 60% sure",)
    assert len(explain(0.6, 0.6, 97.0).caveats) == 3 and explain(0.6, 0.6, 97.0).trusted
    assert explain(agreement=0.4).reasons and not explain(agreement=0.4).caveats
    assert explain(0.6, None, prediction=[0.25, 1.5]).headline == "0.25, 1.5: no sign against it"
    told = explain(percentile=100.0)
    assert told.headline == "bee (95%), not trusted: its novelty is more than that of any indexed sample"


@pytest.mark.parametrize(
    ("percentile", "written"),
    [(90.6, "90.6"), (96.96, "96.9"), (98.999, "98.9"), (99.99, "99.9"), (50.0, "50")],
)
def test_a_percentile_in_float32_is_rounded_down_to_tenths(percentile, written):
    from likewise.index.explanation import Explanation

    single = float(torch.tensor(percentile, dtype=torch.float32))
    told = Explanation(1, "bee", 0.9, (), 0.9, 0.1, 0.5, single, 0.01).novelty_comparison
    assert told == f"more than that of {written} % of the indexed samples"


def test_a_printed_explanation_is_a_few_lines(build, new):
    one = build(classes=["a", "b", "c"], show=[f"text {i} " * 40 for i in range(40)]).explain(new, k=8)[0]
    lines = str(one).splitlines()
    assert len(lines) == 4 and max(map(len, lines)) < 400 and "and 3 more" in lines[2]
    assert lines[0] == one.headline and lines[3] == one.counterfactual.text
    assert repr(one) == f"Explanation({one.headline}, 8 neighbors)"


def test_an_explanation_reads_the_rows_once_and_says_what_is_sketched(build, data, new, monkeypatch):
    from likewise.index.pairs import IndexPairs

    index, passes, compute = build(), [], IndexPairs._centered_similarities
    index.attach(data)
    novelty, found = index.novelty(new), index.reliability(new)
    monkeypatch.setattr(
        IndexPairs, "_centered_similarities", lambda self, rows: passes.append(1) or compute(self, rows)
    )
    told = index.explain(new)
    assert len(passes) == 1
    assert [one.novelty for one in told] == novelty.novelty.tolist()
    assert [one.agreement for one in told] == pytest.approx(found.agreement.tolist())
    assert told[0].sketched == ("similarity", "agreement", "shift", "novelty", "counterfactual")
    exact = index.explain(new, exact=True)[0]
    assert exact.exact and exact.sketched == ("agreement", "shift", "novelty", "counterfactual")
    assert exact.as_dict()["sketched"] == ["agreement", "shift", "novelty", "counterfactual"]


def test_an_index_without_labels_explains_by_neighbors_and_novelty(build, data, new):
    index = build(data=data[0])
    found = index.explain(new)[0]
    assert found.prediction is None and found.agreement is None and len(found.neighbors) == 6
    usual, unusual = (replace(found, novelty_percentile=percentile) for percentile in (50.0, 96.0))
    assert usual.headline == "nothing unusual about it"
    assert unusual.headline == "its novelty is more than that of 96 % of the indexed samples"
    with pytest.raises(ValueError, match="no labels"):
        index.reliability(new)


def test_added_rows_are_found_and_removed_ones_are_not(build, net, data, new):
    index = build(width=WIDE, dtype="float32")
    index.add((new, torch.zeros(5, dtype=torch.int64)), names=list("vwxyz"))
    assert len(index) == 45 and index.sample(43).name == "y"
    assert torch.equal(index.nearest(new, 1).indices[:, 0], torch.arange(40, 45))
    index.remove([41, 0, 7])
    assert len(index) == 42 and 41 not in index.nearest(new, 42).indices
    kept = torch.cat([data[0], new])[index.rows]
    expected = lw.nearest(lw.GramMatrix(net, new, columns=kept, centered=True), 4)
    found = index.nearest(new, 4)
    assert torch.equal(found.indices, index.rows[expected.indices])
    assert torch.allclose(found.similarities.double(), expected.similarities, atol=1e-5)
    index.attach([data, (new, torch.zeros(5, dtype=torch.int64))])
    again = index.nearest(new, 4, exact=True)
    assert torch.equal(again.indices, found.indices)
    with pytest.raises(IndexError, match="no row 41"):
        index.remove([41])


def test_zero_gradients_are_similar_to_nothing(tmp_path):
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Conv1d(2, 2, 3)

        def forward(self, x):
            return self.out(x).mean(2) * (x.abs().sum((1, 2)) > 0)[:, None]

    model = Gated()
    x = torch.randn(12, 2, 6)
    x[3] = 0
    index = lw.build_index(model, x, tmp_path / "index", width=64, dtype="float32")
    found = index.nearest(x, 12, centered=False)
    assert (found.similarities[3] == 0).all()
    assert (found.similarities[found.indices == 3] == 0).all()
    assert index.sketches([3]).abs().sum() == 0


def test_a_readout_of_the_package_is_found_by_itself(build, net, data, new):
    build("one", readout=lw.one_output(1))
    index = lw.Index(build("one", readout=lw.one_output(1)).path, model=net)
    assert index.network.readout == lw.one_output(1)
    assert index.nearest(new, 2).indices.shape == (5, 2)


def test_what_is_asked_wrongly_is_told_and_nothing_is_lost(build, net, data, new, files_of):
    index = build()
    before = files_of(index.path)
    with pytest.raises(ValueError, match=r"inputs float64 \(2, 8\).*x\[None\]"):
        index.nearest(new[0])
    with pytest.raises(ValueError, match=r"found float64 \(2, 9\)"):
        index.nearest(torch.randn(3, 2, 9, dtype=torch.float64))
    with pytest.raises(ValueError, match="found int64"):
        index.nearest(torch.ones(3, 2, 8, dtype=torch.int64))
    with pytest.raises(TypeError, match="Expected a data set"):
        index.nearest("new.png")
    with pytest.raises(ValueError, match="open the index with it"):
        lw.Index(index.path, model=net).nearest(new, exact=True)
    with pytest.raises(ValueError, match="model=model"):
        lw.Index(index.path).nearest(new)
    with pytest.raises(ValueError, match="not the one that the index was built from"):
        index.attach((data[0] + 1, data[1]))
    with pytest.raises(ValueError, match="All rows would be removed"):
        index.remove(range(40))
    with pytest.raises(ValueError, match=r"found float64 \(2, 9\)"):
        index.add((torch.randn(3, 2, 9, dtype=torch.float64), data[1][:3]))
    assert files_of(index.path) == before


def test_a_new_input_that_is_not_finite_is_named_and_nothing_is_lost(build, net, new, files_of):
    index = build()
    before, expected = files_of(index.path), index.nearest(new, 3)
    wrong = new.clone()
    wrong[2, 0, 1] = torch.nan
    for ask in (index.nearest, index.novelty, index.reliability, index.explain):
        with pytest.raises(ValueError, match="not finite"):
            ask(wrong)
    again = index.nearest(new, 3)
    assert torch.equal(again.indices, expected.indices) and files_of(index.path) == before


def test_an_index_that_another_one_changes_is_not_called_damaged(build, net, data, new):
    writer = build(width=WIDE, dtype="float32")
    unread, counted, asked = (lw.Index(writer.path, model=net) for _ in range(3))
    before, _ = asked.nearest(new, 3), len(counted)
    writer.add((new, torch.zeros(5, dtype=torch.int64)))
    writer.remove([7])
    assert torch.equal(unread.nearest(new, 3).indices, writer.nearest(new, 3).indices) and len(unread) == 44
    assert torch.equal(asked.nearest(new, 3).indices, before.indices)  # as it was opened
    with pytest.raises(OutdatedIndexError, match="open it again"):
        counted.nearest(new, 3)


def test_another_model_readout_or_precision_is_refused(build, net, new):
    path = build().path
    other = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten())
    with pytest.raises(ValueError, match="another model"):
        lw.Index(path, model=other)
    with pytest.raises(ValueError, match="another readout"):
        lw.Index(path, model=net, readout=lw.one_output(0))
    with pytest.raises(ValueError, match="another parameters"):
        lw.Index(path, model=lw.Network(net, parameters=["out.*"]))
    index = lw.Index(path, model=net)
    for write in (
        lambda bias: bias.data.add_(1),
        lambda bias: bias.detach().add_(1),
    ):  # the first is not counted
        write(net.out.bias)
        with pytest.raises(ValueError, match="another model"):
            index.nearest(new)
        write(net.out.bias.data.sub_(2))
        index.nearest(new)
    with pytest.raises(ValueError, match="another model"):
        lw.Index(path, model=net.float())


def test_the_model_is_left_as_it_was(build, net, new):
    before = {name: value.clone() for name, value in net.state_dict().items()}
    net.train()
    build().nearest(new)
    assert net.training and all(torch.equal(before[n], v) for n, v in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


def test_novelty_is_compared_in_words(build, net, data, new):
    index = lw.Index(build(width=1024).path, model=net)
    far = index.explain(100 * new)[0]
    assert (
        "% of the indexed samples" in far.novelty_comparison or "any indexed sample" in far.novelty_comparison
    )
    alone = lw.Index(build("alone", data=(data[0][:1], data[1][:1])).path, model=net)
    assert "too few" in alone.explain(new)[0].novelty_comparison


def test_an_index_that_was_just_built_and_added_to_answers_exactly(build, net, data, new):
    index = build()
    index.add(data)
    exact = index.nearest(new, k=2, exact=True, centered=False)
    expected = lw.GramMatrix(net, new, data).dense().amax(1)
    assert (exact.similarities - expected[:, None]).abs().max() < 1e-6  # each sample is there twice


def test_an_index_names_its_readout_as_the_user_writes_it(tmp_path):
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    tokens = torch.randint(0, 9, (12, 5))
    index = lw.build_index(model, tokens, tmp_path / "text", readout=lw.sequence_log_likelihood())
    assert "sequence_log_likelihood(reduce='mean', shift=None)" in repr(index)

    def own(outputs, labels):
        return outputs[:, 0, :2]

    assert repr(lw.build_index(model, tokens, tmp_path / "own", readout=own)).endswith("own)")


def test_a_first_question_may_have_texts_of_another_length_with_a_label_for_each_token(tmp_path):
    torch.manual_seed(0)
    model, readout = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)), lw.sequence_log_likelihood()
    tokens = torch.randint(0, 9, (12, 7))
    labels = tokens.clone()
    labels[:, :2] = -100
    lw.build_index(model, lw.batches(tokens, labels=labels), tmp_path / "index", readout=readout)
    for length in (0, 1, 5, 9):
        asked, answers = (torch.cat([some, some], 1)[:2, :length] for some in (tokens, labels))
        index = lw.Index(tmp_path / "index", model=model, readout=readout)
        found = index.nearest(lw.batches(asked, labels=answers), k=2, centered=False)
        if length < 2:  # nothing is predicted
            assert found.similarities.eq(0).all()
            continue
        known = lw.batches(tokens, labels=labels)
        net = lw.Network(model, readout)
        exact = lw.GramMatrix(net, lw.batches(asked, labels=answers), known).dense()
        assert (exact.gather(1, found.indices) - found.similarities).abs().max() < 0.2


def test_a_second_question_about_the_same_inputs_does_not_project_them_again(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7))
    tokens, new = torch.randint(0, 7, (40, 9)), torch.randint(0, 7, (2, 9))
    index = lw.build_index(model, tokens, tmp_path / "index", readout=lw.sequence_log_likelihood())
    calls, project = [], Projector.project_all
    monkeypatch.setattr(
        Projector, "project_all", lambda self, data: calls.append(data.n) or project(self, data)
    )
    found = index.nearest(new, k=3)
    index.passages(new, found)
    index.novelty(new.clone())
    assert calls == [2]
    fresh = lw.Index(tmp_path / "index", model=model, readout=lw.sequence_log_likelihood())
    for changed in (new[:1], new.flip(1)):
        before = len(calls)
        expected = fresh.nearest(changed, k=3)
        assert torch.equal(index.nearest(changed, k=3).similarities, expected.similarities)
        assert len(calls) == before + 2
    new[0, 0] = (new[0, 0] + 1) % 7  # written to in place
    before = index.nearest(new, k=3)
    assert torch.equal(before.similarities, fresh.nearest(new, k=3).similarities)
    with torch.no_grad():
        model[1].weight.mul_(2)
    with pytest.raises(ValueError):
        index.nearest(new, k=3)


def test_threads_that_ask_at_once_get_their_own_answers(build, new, monkeypatch):
    """The sketches of the last inputs are kept: another thread's must not be taken for them."""
    index = build(width=256)
    questions = [new[:2], new[2:4]]
    expected = [index.nearest(question, 3).similarities for question in questions]
    both, kept = threading.Barrier(2), []

    def keep(self, asked):
        kept.append(asked)
        both.wait(timeout=30)  # until the other thread has kept its own

    latest = property(lambda self: kept[-1] if kept else None, keep)
    monkeypatch.setattr(lw.Index, "_asked", latest, raising=False)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda question: index.nearest(question, 3).similarities, questions))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("change", nets.CHANGES.values(), ids=nets.CHANGES)
def test_an_open_index_refuses_a_model_whose_forward_reads_something_else_since(tmp_path, change):
    model, x = nets.Settings().double(), torch.randn(50, 3, dtype=torch.float64)
    index = lw.build_index(model, x, tmp_path / "index", width=64)
    before = index.nearest(x[:2], 5)
    model.config.name, model.training = "another name", False  # which nothing depends on
    torch.testing.assert_close(index.nearest(x[:2], 5), before)
    change(model)
    with pytest.raises(ValueError, match=r"another model|computes something else"):
        index.nearest(x[:2], 5)


@pytest.mark.parametrize("settings", [{"scale": 3.0}, {"activation": torch.sin}], ids=["number", "function"])
def test_an_index_is_refused_to_a_model_with_the_same_weights_and_other_settings(tmp_path, settings):
    model, x = nets.Settings().double(), torch.randn(50, 3, dtype=torch.float64)
    lw.build_index(model, x, tmp_path / "index", width=64)
    other = nets.Settings(**settings).double()
    other.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match="another model"):
        lw.Index(tmp_path / "index", model=other)
    with pytest.raises(ValueError, match="another model"):
        lw.build_index(other, x, tmp_path / "index", width=64)
    copy = nets.Settings().double()
    copy.load_state_dict(model.state_dict())
    copy.calls = 7  # its forward writes it
    assert lw.Index(tmp_path / "index", model=copy).nearest(x[:2], 5).indices.shape == (2, 5)


def test_the_mean_gradient_that_is_kept_is_never_that_of_rows_removed_since(build, net, data, new):
    index = build()
    before = lw.Index(index.path, model=net, data=data)
    before.nearest(new)
    index.remove(range(20))
    before.nearest(new, exact=True)  # of the rows as they were when it was opened
    rest = data[0][20:]
    expected = lw.nearest(lw.GramMatrix(net, new, columns=rest, centered=True), 5)
    found = lw.Index(index.path, model=net, data=data).nearest(new, 5, exact=True, candidates=len(rest))
    assert torch.equal(found.indices - 20, expected.indices)
    assert torch.allclose(found.similarities.double(), expected.similarities, atol=1e-5)


def test_an_index_in_which_centering_leaves_only_rounding_says_so(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
    with pytest.warns(UserWarning, match="20 of 20 samples .* ask the index with centered=False"):
        lw.build_index(model, 1e-4 * torch.randn(20, 6), tmp_path / "index", width=64)


def test_inputs_that_are_not_finite_are_named_by_the_first_question_too(tmp_path):
    """On which the model is traced: without a trace gradients of linear layers come in other parts."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(50, 4)
    lw.build_index(model, x, tmp_path / "index", width=64)
    bad = x[:3].clone()
    bad[2] = torch.nan
    for first in (bad, bad[2:], bad[[2, 0]]):
        index = lw.Index(tmp_path / "index", model=model)
        with pytest.raises(ValueError, match=r"not finite, the first with ids \[\d\]"):
            index.nearest(first)
        assert index.nearest(x[:3], 5).indices.shape == (3, 5)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(30, 8), nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, tokens, mask=None):
        return self.head(torch.tanh(self.hidden(self.embedding(tokens))).mean(1))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_the_first_question_to_an_index_of_texts_may_be_of_any_length(tmp_path, length, named):
    """One of a single token, whose gradients are outer products, was refused as if from another machine."""
    torch.manual_seed(0)
    model, texts, asked = Words().double().eval(), torch.randint(30, (80, 6)), torch.randint(30, (2, length))

    def inputs(tokens):
        return {"tokens": tokens, "mask": torch.ones_like(tokens)} if named else tokens

    lw.build_index(lw.Network(model, lw.all_outputs), inputs(texts), out=tmp_path / "index", width=8192)
    found = lw.Index(tmp_path / "index", model=model).nearest(inputs(asked), 5)
    net = lw.Network(model, lw.all_outputs)
    exact = lw.GramMatrix(net, asked, columns=texts, engine="autograd", centered=True).dense()
    apart = (found.similarities - exact.gather(1, found.indices)).abs()
    assert (apart < 4 * found.errors).all() and apart.max() < 0.04


@pytest.mark.parametrize(
    "rows", [torch.arange(40) == 7, [True] * 40, [1.5], torch.tensor([3.0])], ids=range(4)
)
def test_only_numbers_of_rows_are_taken_for_rows(build, rows):
    index = build()
    for call in (index.remove, index.sketches):
        with pytest.raises(TypeError, match="must be the numbers of rows"):
            call(rows)
    assert len(index) == 40
    index.remove([])
    index.remove(index.rows[torch.arange(40) == 7])
    assert 7 not in index.rows
    assert len(index) == 39
