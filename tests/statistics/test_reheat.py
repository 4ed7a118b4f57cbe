"""Reheating: what it leaves untouched, when it stands aside, and that it finds wrong labels that were memorized."""

import random

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import likewise as lw
from likewise.runs.review import ReviewQueue
from likewise.statistics.label_issues import advice
from likewise.statistics.neighbors import class_votes


def memorize(model, x, y, steps=400, rate=3e-3):
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def digits():
    """300 digits, a fifth of them with wrong labels, and an MLP that has learned every one."""
    torch.manual_seed(0)
    images, truth = load_digits(return_X_y=True)
    x, truth = torch.tensor(images[:300] / 16, dtype=torch.float32), torch.tensor(truth[:300])
    wrong = torch.zeros(300, dtype=torch.bool)
    wrong[torch.randperm(300)[:60]] = True
    labels = torch.where(wrong, (truth + torch.randint(1, 10, (300,))) % 10, truth)
    model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))
    return memorize(model, x, labels), x, labels, wrong


@pytest.fixture(scope="module")
def reheated(digits):
    model, x, labels, _ = digits
    return lw.reheat(model, (x, labels))


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def average_precision(score, wrong):
    return average_precision_score(wrong.numpy(), score.numpy())


def test_the_model_its_gradients_and_every_generator_are_as_before(digits):
    model, x, labels, _ = digits
    model[1].eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = state(model)
    generators = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    lw.reheat(model, (x, labels), learning_rate=1e-2, epochs=1)
    assert same(before, state(model))
    assert not any(module.training for module in model.modules())
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert torch.equal(generators[0], torch.get_rng_state())
    assert (generators[1] == np.random.get_state()[1]).all()
    assert generators[2] == random.getstate()
    model[0].weight.grad = None


def test_accuracy_falls_towards_the_target_and_wrong_labels_are_forgotten_first(digits, reheated):
    _, x, labels, wrong = digits
    assert reheated.accuracy_before == 1
    assert 0.5 < reheated.target <= 0.9
    assert abs(reheated.accuracy_after - reheated.target) <= 0.07
    learned = reheated.model(x).argmax(1) == labels
    assert learned[wrong].double().mean() < learned[~wrong].double().mean() - 0.3
    assert average_precision(-reheated.margins, wrong) > 0.6
    assert 2 < reheated.epochs < 16


def test_the_same_seed_gives_the_same_numbers_and_another_one_does_not(digits, reheated):
    model, x, labels, _ = digits
    torch.manual_seed(5)
    again = lw.reheat(model, (x, labels))
    other = lw.reheat(model, (x, labels), seed=1)
    assert same(state(again.model), state(reheated.model))
    assert torch.equal(again.margins, reheated.margins)
    assert again.learning_rate == reheated.learning_rate
    assert not same(state(other.model), state(reheated.model))


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("steps", [3, 40, 70], ids=["first round", "second round", "third round"])
def test_what_was_interrupted_goes_on_to_the_same_numbers(digits, tmp_path, steps):
    model, x, labels, _ = digits
    options = {
        "learning_rate": 1e-2,
        "rounds": 3,
        "batch_size": 20,
        "checkpoint": tmp_path / "hot.safetensors",
    }
    calls = []

    def augment(inputs):
        calls.append(len(inputs))
        if len(calls) == steps:
            raise Interrupted
        return inputs + 0.01 * torch.randn_like(inputs)

    with pytest.raises(Interrupted):
        lw.reheat(model, (x, labels), augment=augment, **options)
    done = (steps - 1) // 30
    calls = [0] * 1000
    found = lw.reheat(model, (x, labels), augment=augment, **options)
    assert len(calls) - 1000 == 90 - 30 * done
    straight = lw.reheat(model, (x, labels), augment=augment, **{**options, "checkpoint": None})
    assert len(found.rounds) == 3
    for one, other in zip(found.rounds, straight.rounds, strict=True):
        assert same(state(one.model), state(other.model))
        assert one.accuracies == other.accuracies
    assert torch.equal(found.margins, straight.margins)
    assert torch.equal(found.watch.forgetting, straight.watch.forgetting)
    assert not same(state(found.rounds[0].model), state(found.rounds[1].model))
    count = len(calls)
    read = lw.reheat(model, (x, labels), augment=augment, **options)
    assert len(calls) == count, "a finished run is read, not trained"
    assert same(state(read.model), state(found.model))
    assert not any(module.training for module in read.model.modules())


def test_a_rate_is_corrected_until_accuracy_is_near_the_target(digits):
    model, x, labels, _ = digits
    for target in (0.82, 0.92):
        found = lw.reheat(model, (x, labels), target=target, rounds=2)
        assert len(found.rounds) == 2
        assert all(abs(one.accuracy_after - target) <= 0.07 for one in found.rounds)


def test_a_checkpoint_of_another_call_is_refused_by_name(digits, tmp_path):
    model, x, labels, _ = digits
    options = {"learning_rate": 1e-2, "epochs": 1, "checkpoint": tmp_path / "hot.safetensors"}
    lw.reheat(model, (x, labels), **options)
    with pytest.raises(ValueError, match="settings differ"):
        lw.reheat(model, (x, labels), **{**options, "learning_rate": 2e-2})
    with pytest.raises(ValueError, match="data differ"):
        lw.reheat(model, (x + 1e-6, labels), **options)
    for given in ("loss", "augment"):  # of the same name, or class
        first, other = {
            "loss": (nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(label_smoothing=0.2)),
            "augment": (lambda inputs: inputs + 0.1, lambda inputs: inputs + 0.2),
        }[given]
        options["checkpoint"] = tmp_path / f"{given}.safetensors"
        found = lw.reheat(model, (x, labels), **options, **{given: first})
        again = lw.reheat(model, (x, labels), **options, **{given: first})
        assert torch.equal(found.margins, again.margins)
        with pytest.raises(ValueError, match="loss, optimizer or augment differ"):
            lw.reheat(model, (x, labels), **options, **{given: other})
    options["checkpoint"].write_bytes(b"no such file")
    with pytest.raises(ValueError, match="cannot be read"):
        lw.reheat(model, (x, labels), **options)


def test_a_network_that_has_not_memorized_is_left_alone(digits):
    _, x, labels, _ = digits
    early = memorize(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), x, labels, 60)
    found = lw.reheat(early, (x, labels))
    assert found.model is None
    assert found.rounds == ()
    assert "count as memorized" in found.skipped
    assert found.skipped in repr(found)
    assert found.margins.isnan().all()
    assert found.epochs == 0


@pytest.mark.filterwarnings("ignore:.*NaN or infinite")
def test_a_rate_that_destroys_the_network_is_said_not_used(digits):
    model, x, labels, _ = digits
    found = lw.reheat(model, (x, labels), learning_rate=1e35)
    assert "lower" in found.skipped


def test_an_optimizer_that_forgets_nothing_is_said(digits):
    model, x, labels, _ = digits
    frozen = lambda parameters, lr: torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)  # noqa: E731
    assert "another optimizer" in lw.reheat(model, (x, labels), optimizer=frozen, target=0.8).skipped


def test_a_shuffled_loader_that_augments_is_read_by_position(digits):
    model, x, labels, _ = digits

    class Noisy(TensorDataset):
        def __getitem__(self, place):
            inputs, label = super().__getitem__(place)
            return {"inputs": inputs + 0.01 * torch.randn(64), "label": label}

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, input):
            return self.inner(input)

    def collate(items):
        inputs = torch.stack([item["inputs"] for item in items])
        return {"input": inputs, "labels": torch.tensor([int(item["label"]) for item in items])}

    loader = DataLoader(Noisy(x, labels), batch_size=30, shuffle=True, collate_fn=collate)
    found = lw.reheat(Named(), loader, learning_rate=1e-2, epochs=1)
    assert torch.equal(found.labels, labels)
    assert torch.equal(found.watch.labels, labels)
    assert int(found.watch.updates.min()) == int(found.watch.updates.max()) == 1


def test_any_loss_and_probabilities_and_one_output():
    torch.manual_seed(0)
    x = torch.randn(80, 6, dtype=torch.float64)
    y = (x[:, 0] > 0).long()
    y[:8] = 1 - y[:8]
    body = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 2)).double()
    model = memorize(nn.Sequential(*body), x, y, 600, 1e-2)
    with_softmax = nn.Sequential(*body, nn.Softmax(1))
    logits, chances = (lw.reheat(m, (x, y), target=0.85) for m in (model, with_softmax))
    torch.testing.assert_close(logits.margins, chances.margins, rtol=1e-4, atol=1e-4)

    single = nn.Sequential(*body[:2], nn.Linear(64, 1)).double()
    with torch.no_grad():
        single[2].weight[:] = body[2].weight[1] - body[2].weight[0]
        single[2].bias[:] = body[2].bias[1] - body[2].bias[0]
    one = lw.reheat(single, (x, y), learning_rate=1e-2)
    assert one.accuracy_before == logits.accuracy_before == 1
    sigmoid = lw.reheat(nn.Sequential(*single, nn.Sigmoid()), (x, y), learning_rate=1e-2)
    torch.testing.assert_close(
        one.margins.clamp(-20, 20), sigmoid.margins.clamp(-20, 20), rtol=1e-3, atol=1e-3
    )

    calls = []

    def loss(outputs, labels):
        calls.append(outputs.shape)
        return nn.functional.multi_margin_loss(outputs, labels)

    lw.reheat(model, (x, y), loss=loss, learning_rate=1e-2, epochs=1)
    assert calls
    with pytest.raises(ValueError, match="one number"):
        lw.reheat(model, (x, y), loss=lambda a, b: a, learning_rate=1e-2, epochs=1)


def test_labels_that_are_no_classes_are_refused(digits):
    model, x, labels, _ = digits
    for wrong, error in ((labels.double(), TypeError), (labels - 1, TypeError), (labels + 5, ValueError)):
        with pytest.raises(error):
            lw.reheat(model, (x, wrong))
    with pytest.raises(TypeError, match="argmax"):
        lw.reheat(model, (x, nn.functional.one_hot(labels)))
    with pytest.raises(ValueError, match="Labels are needed"):
        lw.reheat(model, x)
    with pytest.raises(TypeError, match="optimizer"):
        lw.reheat(model, (x, labels), optimizer="adam")


def test_only_parameters_that_require_grad_are_trained(digits):
    model, x, labels, _ = digits
    model[0].requires_grad_(False)
    try:
        found = lw.reheat(model, (x, labels), learning_rate=1e-2, epochs=1)
    finally:
        model[0].requires_grad_(True)
    assert torch.equal(found.model[0].weight, model[0].weight)
    assert not torch.equal(found.model[3].weight, model[3].weight)


def test_suspicion_with_reheated_copies_ranks_wrong_labels_higher(digits):
    model, x, labels, wrong = digits
    gram = lw.GramMatrix(model, (x, labels))
    hot = lw.reheat(model, (x, labels), rounds=4)
    before, after = lw.label_suspicion(gram), lw.label_suspicion(gram, reheat=hot)
    assert before.reheated is None
    assert after.reheated is hot
    assert average_precision(after.suspicion, wrong) > average_precision(before.suspicion, wrong) + 0.003
    by_copies = [lw.label_suspicion(lw.GramMatrix(one.model, (x, labels))).contested for one in hot.rounds]
    assert after.contested[torch.stack(by_copies).all(0)].all(), (
        "the copies are asked, not the memorized network"
    )


def test_suspicion_is_the_weighted_mean_of_the_ranks_before_after_and_while_hot(digits, reheated):
    model, x, labels, _ = digits

    def ranks(score):
        smaller = (score[None] < score[:, None]).double().sum(1)
        ties = (score[None] == score[:, None]).double().sum(1)
        return (smaller + (ties - 1) / 2) / (len(score) - 1)

    found = lw.label_suspicion(lw.GramMatrix(model, (x, labels)), reheat=reheated)
    grams = [lw.GramMatrix(m, (x, labels)) for m in (model, reheated.model)]
    before, after = (lw.label_suspicion(gram) for gram in grams)
    contested = [int((class_votes(gram, labels).argmax(1) != labels).sum()) for gram in grams]
    weight = 2 * min(1, contested[0] / contested[1]) ** 4
    parts = weight * ranks(before.suspicion) + 2 * ranks(after.suspicion) + ranks(-reheated.margins)
    torch.testing.assert_close(found.suspicion.double(), parts / (3 + weight), rtol=0, atol=1e-6)


def test_auto_reheats_what_is_memorized_and_leaves_the_rest_alone(digits):
    model, x, labels, _ = digits
    found = lw.label_suspicion(lw.GramMatrix(model, (x, labels)), reheat="auto")
    assert len(found.reheated.rounds) == 4
    early = memorize(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), x, labels, 60)
    gram = lw.GramMatrix(early, (x, labels))
    found = lw.label_suspicion(gram, reheat="auto")
    assert "count as memorized" in found.reheated.skipped
    assert torch.equal(found.suspicion, lw.label_suspicion(gram).suspicion)
    assert lw.label_suspicion(gram, reheat=False).reheated is None


@pytest.mark.filterwarnings("ignore:Only .* of the predictions")
def test_reheated_networks_of_other_labels_are_refused(digits, reheated):
    model, x, labels, _ = digits
    gram = lw.GramMatrix(model, (x, labels))
    with pytest.raises(ValueError, match="reheated with 300 labels"):
        lw.label_suspicion(gram, labels.flip(0), reheat=reheated)
    with pytest.raises(TypeError, match="auto"):
        lw.label_suspicion(gram, reheat="always")


@pytest.fixture(scope="module")
def runs(digits, tmp_path_factory):
    """The run of a memorized network, and that with reheated copies."""
    model, x, labels, _ = digits
    folder = tmp_path_factory.mktemp("runs")
    return [lw.analyze(model, (x, labels), out=folder / str(hot), reheat=hot) for hot in (False, True)]


def test_review_and_log_say_that_reheated_copies_suggest_a_label(runs):
    judges = (
        ("all samples, weighted by similarity, and the network", "support"),
        ("reheated copies", "predict"),
    )
    for run, (judge, verb) in zip(runs, judges, strict=True):
        other = (run.table["suggested_label"] != run.table["label"]).to_numpy()
        told = [ReviewQueue(run).entry(int(i)) for i in np.flatnonzero(other)[:5]]
        assert told and all(e["judge"].startswith(judge) for e in told)
        assert all(e["judge"].endswith(f"{verb} {e['suggested_label_name']}") for e in told)
        same = int(np.flatnonzero(~other)[0])
        assert "judge" not in ReviewQueue(run).entry(same)
        log = lw.apply_decisions(run, {told[0]["sample"]: "wrong", same: "wrong"}).changes.set_index("sample")
        assert log["reason"][told[0]["sample"]].startswith(f"judged wrong; {told[0]['judge']}, suspicion")
        assert log["reason"][same].startswith("judged wrong; no other label is suggested, suspicion")


def test_nobody_is_told_to_reheat_what_was_reheated(tmp_path):
    torch.manual_seed(0)
    x, labels = torch.randn(120, 16), torch.randint(3, (120,))  # nothing but noise: nobody can tell
    model = memorize(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 3)), x, labels)
    for hot in (False, True):
        found = lw.label_suspicion(lw.GramMatrix(model, (x, labels)), reheat=hot)
        run = lw.analyze(model, (x, labels), out=tmp_path / str(hot), reheat=hot)
        for told in (repr(found), run.manifest["wrong_labels"]["reason"]):
            assert "likewise.spot_check" in told
            assert ("likewise.reheat" in told) is not hot
    assert "crossval" not in advice(validated=True) and "likewise.reheat" in advice(validated=True)


def test_a_run_judges_labels_by_reheated_copies_and_says_what_it_cost(digits, runs, tmp_path):
    model, x, labels, wrong = digits
    plain, found = runs
    scores = [torch.tensor(run.table["label_suspicion"].to_numpy()) for run in (plain, found)]
    assert average_precision(scores[1], wrong) > average_precision(scores[0], wrong)
    assert "Reheated 4 times" in found.manifest["reheated"]
    assert "Reheated 4 times" in (found.folder / "report.html").read_text()
    assert lw.analyze(model, (x, labels), out=found.folder, reheat=True).folder == found.folder
    with pytest.raises(ValueError, match="another reheat"):
        lw.analyze(model, (x, labels), out=found.folder)
    early = memorize(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), x, labels, 60)
    skipped = lw.analyze(early, (x, labels), out=tmp_path / "early", reheat=True)
    assert "Not reheated" in skipped.manifest["reheated"]
    with pytest.raises(ValueError, match="labels that are classes"):
        lw.analyze(model, (x, torch.randn(300, 2)), out=tmp_path / "values", reheat=True)
