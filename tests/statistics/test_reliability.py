"""What speaks for a prediction, what is novel, what a fit is worth: real digits."""

import pytest
import torch
from torch import nn

import likewise as lw


def learned(x, y, epochs, width=48, out=10, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, out)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    loss = nn.functional.cross_entropy if out > 1 else nn.functional.mse_loss
    for _ in range(epochs):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def digits():
    images, labels = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))  # writers come in turn
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    return x, y, learned(x[:400], y[:400], 150)


def test_trusted_predictions_are_right_more_often(digits):
    x, y, model = digits
    gram = lw.GramMatrix(model, x[400:1400], columns=(x[:400], y[:400]))
    found = lw.reliability(gram)
    right = found.prediction == y[400:1400]
    assert 0.8 < right.double().mean() < 0.99
    for ingredient in (found.agreement, found.density, -found.shift, found.confidence):
        order = ingredient.argsort()
        assert right[order[500:]].double().mean() > right[order[:500]].double().mean()
    assert ((found.agreement >= 0) & (found.agreement <= 1)).all()
    chances = model(x[400:1400]).detach().softmax(1)
    assert torch.equal(found.prediction, chances.argmax(1))
    torch.testing.assert_close(found.confidence, chances.max(1).values)


def test_calibrated_chances_hold_on_new_data(digits):
    x, y, model = digits
    reliability = lambda part: lw.reliability(lw.GramMatrix(model, x[part], columns=(x[:400], y[:400])))  # noqa: E731
    held, asked = slice(400, 1000), slice(1000, 1797)
    calibration = lw.calibrate(reliability(held), y[held])
    chance = calibration(reliability(asked))
    right = (model(x[asked]).argmax(1) == y[asked]).double()
    assert abs(float(chance.mean() - right.mean())) < 0.05
    low, high = chance < 0.9, chance >= 0.97
    assert right[low].mean() < right[high].mean() and right[high].mean() > 0.95
    assert sum(level.samples for level in calibration.levels) == 600
    assert all(level.low <= level.found <= level.high for level in calibration.levels)


def test_values_have_an_expected_error():
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(900, 64, generator=chance)
    y = torch.where(x[:, :1] > 0, (3 * x[:, 1:2]).sin() * 2, x[:, 1:2])  # hard on one side
    model = learned(x[:300], y[:300], 300, out=1)
    reliability = lambda part: lw.reliability(lw.GramMatrix(model, x[part], columns=(x[:300], y[:300])))  # noqa: E731
    calibration = lw.calibrate(reliability(slice(300, 600)), y[300:600])
    expected = calibration(reliability(slice(600, 900)))
    error = (model(x[600:]) - y[600:]).abs().detach()[:, 0].double()
    order = expected.argsort()
    assert error[order[:150]].mean() < error[order[150:]].mean()
    assert 0.5 < float(expected.mean() / error.mean()) < 2


def test_a_sample_has_no_vote_on_itself():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(30, 3)
    labels = torch.randint(0, 3, (30,))
    labels[0] = model(x).argmax(1)[0]
    before = lw.reliability(lw.GramMatrix(model, (x, labels))).agreement[0]
    labels[0] = (labels[0] + 1) % 3
    assert lw.reliability(lw.GramMatrix(model, (x, labels))).agreement[0] == before


def test_another_kind_of_input_is_novel(digits):
    x, _, model = digits
    noise = torch.rand(200, 64, generator=torch.Generator().manual_seed(0))
    known, novel = (lw.novelty(lw.GramMatrix(model, q, columns=x[:400])) for q in (x[400:600], noise))
    assert (novel[:, None] > known).double().mean() > 0.95
    sketched = lw.novelty(lw.GramMatrix(model, noise, columns=x[:400]), sketch=1024)
    assert (sketched - novel).abs().max() < 0.1


def test_copies_are_not_novel(digits):
    x, _, model = digits
    data = torch.cat([x[:20]] * 3)
    assert lw.novelty(lw.GramMatrix(model, x[:20], columns=data), k=3).abs().max() < 1e-4
    assert lw.novelty(lw.GramMatrix(model, data), k=2).abs().max() < 1e-4  # itself is not counted


def test_sketches_say_nearly_the_same(digits):
    x, y, model = digits
    gram = lw.GramMatrix(model, x[400:500], columns=(x[:400], y[:400]))
    exact, small = lw.reliability(gram), lw.reliability(gram, sketch=2048)
    assert (exact.agreement - small.agreement).abs().mean() < 0.05
    suspicion = [lw.label_suspicion(lw.GramMatrix(model, (x[:400], y[:400])), sketch=s) for s in (None, 2048)]
    assert (suspicion[0].suspicion - suspicion[1].suspicion).abs().mean() < 0.02


@pytest.mark.parametrize(
    "what, ask, message",
    [
        (lambda g: g, lambda g: lw.reliability(g, torch.zeros(5).long()), "5 labels"),
        (lambda g: g, lw.reliability, "Labels of the columns"),
        (lambda g: g.with_kernel(lw.INNER_PRODUCT), lw.novelty, "no limit"),
        (lambda g: g, lambda g: lw.novelty(g, k=0), "At least one neighbor"),
        (lambda g: g, lambda g: lw.reliability(g, torch.randn(12, 3)), "cannot be compared"),
    ],
)
def test_mistakes_are_named(what, ask, message):
    model = nn.Linear(4, 2)
    gram = lw.GramMatrix(model, torch.randn(3, 4), columns=torch.randn(12, 4))
    with pytest.raises(ValueError, match=message):
        ask(what(gram))


def test_centering_is_refused_for_novelty():
    with pytest.raises(ValueError, match="centered=False"):
        lw.novelty(lw.GramMatrix(nn.Linear(4, 2), torch.randn(5, 4), centered=True))


def test_few_or_other_answers_are_refused(digits):
    x, y, model = digits
    found = lw.reliability(lw.GramMatrix(model, x[400:460], columns=(x[:400], y[:400])))
    with pytest.raises(ValueError, match="at least 50"):
        lw.calibrate(found, y[:10])
    calibration = lw.calibrate(found, y[400:460])
    with pytest.raises(ValueError, match="Calibrated on classes"):
        calibration(found._replace(confidence=None))


def test_verdicts_follow_training(digits):
    x, y, _ = digits
    x, chance = x[:300], torch.Generator().manual_seed(0)
    labels = torch.where(torch.rand(300, generator=chance) < 0.4, (y[:300] + 3) % 10, y[:300])
    early = lw.fit_quality(lw.GramMatrix(learned(x, y[:300], 3), (x, y[:300])))
    right = lw.fit_quality(lw.GramMatrix(learned(x, y[:300], 60), (x, y[:300])))
    heart = lw.fit_quality(lw.GramMatrix(learned(x, labels, 400, width=128), (x, labels)))
    assert early.verdict == "underfit" and heart.verdict == "overfit"
    assert heart.gap > 0.15 > right.gap
    assert early.learned < right.learned <= 1 and heart.learned > 0.95
