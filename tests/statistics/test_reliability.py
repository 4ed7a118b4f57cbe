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
    for ingredient in (found.agreement, found.closeness, -found.shift, found.confidence):
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


def test_class_agreement_and_shift_are_written_out(digits):
    x, y, model = digits
    found = lw.reliability(lw.GramMatrix(model, x[400:404], columns=(x[:60], y[:60])))
    data, cross = (lw.GramMatrix(model, q, columns=x[:60]).dense().double() for q in (x[:60], x[400:404]))
    own = lw.GramMatrix(model, x[400:404]).dense().double().diagonal()
    r, s, g = cross.mean(1), data.mean(1), data.mean()
    chances = model(x).detach().double().softmax(1)
    for i in range(4):
        weights = []
        for j in range(60):
            c = cross[i, j] - r[i] - s[j] + g
            scale = (own[i] - 2 * r[i] + g) * (data[j, j] - 2 * s[j] + g)
            weights.append(max(float(c / scale.sqrt()), 0) ** 8)
        weights = torch.tensor(weights).double() / sum(weights)
        mine = chances[400 + i]
        votes = sum(weights[j] for j in range(60) if y[j] == mine.argmax())
        assert abs(float(found.agreement[i] - votes)) < 1e-3
        assert abs(float(found.shift[i]) - float((mine - weights @ chances[:60]).abs().sum() / 2)) < 1e-3


def test_no_gradient_is_novel_by_sketches_too():
    model, x = nn.Linear(4, 2, bias=False), torch.randn(50, 4).abs()
    gram = lw.GramMatrix(model, torch.zeros(2, 4), columns=x)
    with pytest.warns(lw.ZeroGradientWarning):
        exact = lw.novelty(gram, parameters=None)
    sketched = lw.novelty(gram, parameters=None, sketch=64)
    assert torch.allclose(exact, torch.ones(2)) and torch.allclose(sketched, torch.ones(2))
    assert lw.novelty(gram, sketch=64).min() > 0.99


def test_sketches_are_of_one_kernel():
    gram = lw.GramMatrix(nn.Linear(4, 2), torch.randn(20, 4), kernel=lw.SUBSPACE_MATCH)
    with pytest.raises(ValueError, match="CORRELATION"):
        lw.novelty(gram, sketch=64)
    with pytest.raises(ValueError, match="no limit"):
        lw.novelty(gram.with_kernel(lw.INFLUENCE))
    with pytest.raises(ValueError, match="no other sample"):
        lw.novelty(lw.GramMatrix(nn.Linear(4, 2), torch.randn(1, 4)))


def test_a_model_that_only_the_readout_understands():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x):
            return {"scores": self.inner(x), "other": x}

    torch.manual_seed(0)
    net = lw.Network(Two(), readout=lambda outputs, labels: outputs["scores"])
    x = torch.randn(40, 4)
    y = Two.forward(net.model, x)["scores"].argmax(1)
    assert lw.label_suspicion(lw.GramMatrix(net, (x, y))).suspicion.shape == (40,)
    frozen = nn.Linear(4, 3).requires_grad_(False)
    gram = lw.GramMatrix(lw.Network(frozen, lw.log_probabilities, parameters="*"), (x, frozen(x).argmax(1)))
    assert lw.reliability(gram).confidence is not None


def test_readouts_of_the_label_are_refused(digits):
    x, y, model = digits
    gram = lw.GramMatrix(lw.Network(model, lw.label_against_rest), (x[:50], y[:50]))
    with pytest.raises(ValueError, match="looks at the label"):
        lw.reliability(gram)
    assert lw.fit_quality(gram).learned != lw.fit_quality(gram).learned  # NaN: neighbors know the label


def test_expected_errors_are_right_on_average_where_they_were_fitted():
    torch.manual_seed(0)
    x, y = torch.randn(200, 64), torch.randn(200, 1)
    model = learned(x[:100], y[:100], 50, out=1)
    found = lw.reliability(lw.GramMatrix(model, x[100:], columns=(x[:100], y[:100])))
    calibration = lw.calibrate(found, y[100:])
    error = (model(x[100:]) - y[100:]).abs().mean()
    assert abs(float(calibration(found).mean() / error) - 1) < 1e-5


def test_copies_are_not_novel(digits):
    x, _, model = digits
    data = torch.cat([x[:20]] * 3)
    assert lw.novelty(lw.GramMatrix(model, x[:20], columns=data), k=3, parameters=None).abs().max() < 1e-4
    assert (
        lw.novelty(lw.GramMatrix(model, data), k=2, parameters=None).abs().max() < 1e-4
    )  # itself is not counted


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
        (lambda g: g, lambda g: lw.novelty(g, k=0), "k must be an integer at least 1"),
        (lambda g: g, lambda g: lw.reliability(g, torch.randn(12, 3)), "cannot be compared"),
        (lambda g: g, lambda g: lw.novelty(g, sketch=0), "sketch must be an integer from 16"),
        (lambda g: g, lambda g: lw.novelty(g, sketch="never"), "sketch must be an integer from 16"),
    ],
)
def test_mistakes_are_named(what, ask, message):
    model = nn.Linear(4, 2)
    gram = lw.GramMatrix(model, torch.randn(3, 4), columns=torch.randn(12, 4))
    with pytest.raises((ValueError, TypeError), match=message):
        ask(what(gram))


def test_novelty_is_by_plain_similarities_whatever_the_matrix_is():
    gram = lw.GramMatrix(nn.Linear(4, 2), torch.randn(5, 4))
    assert torch.equal(lw.novelty(gram.with_centering(True), k=2), lw.novelty(gram, k=2))


def test_few_or_other_answers_are_refused(digits):
    x, y, model = digits
    found = lw.reliability(lw.GramMatrix(model, x[400:460], columns=(x[:400], y[:400])))
    with pytest.raises(ValueError, match="10 true labels for 60"):
        lw.calibrate(found, y[:10])
    with pytest.raises(ValueError, match="at least 50"):
        lw.calibrate(lw.Reliability(*(part[:20] for part in found)), y[400:420])
    calibration = lw.calibrate(found, y[400:460])
    for wrong in (lambda: lw.calibrate(x, y), lambda: calibration(x)):
        with pytest.raises(TypeError, match=r"likewise\.reliability"):
            wrong()
    for truth in (torch.full((60,), torch.nan), torch.zeros(60, 10)):
        with pytest.raises(ValueError, match="finite number per sample"):
            lw.calibrate(found, truth)
    with pytest.raises(ValueError, match="levels must be an integer at least 1"):
        lw.calibrate(found, y[400:460], levels=0)
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


def test_a_network_that_has_learned_all_is_not_underfit(digits):
    x, y, model = digits
    found = lw.fit_quality(lw.GramMatrix(model, (x[:400], y[:400])))
    assert found.learned > 0.99 and found.verdict == "fit"


def test_zeros_and_ones_are_classes_of_one_output_however_they_are_written():
    torch.manual_seed(0)
    x = torch.randn(120, 4)
    y = (x[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(x)[:, 0], y.float()).backward()
        optimizer.step()
    whole, written = (lw.fit_quality(lw.GramMatrix(model, (x, labels))) for labels in (y, y.float()))
    assert whole.learned == written.learned > 0.9 and whole.supported == written.supported
    assert lw.reliability(lw.GramMatrix(model, (x, y.float()))).confidence is not None


def test_integers_of_one_output_are_values():
    torch.manual_seed(0)
    x = torch.randn(100, 3)
    y = (10 * x[:, 0]).round().long() + 50
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[10.0, 0, 0]]))
        model.bias.fill_(50)
    found = lw.fit_quality(lw.GramMatrix(model, (x, y)))
    assert found.learned > 0.99  # R²


def test_noise_that_a_good_network_leaves_alone_is_no_underfit():
    torch.manual_seed(0)
    x = torch.rand(200, 1) * 2 - 1
    y = (3 * x).sin() + 0.5 * torch.randn(200, 1)
    model = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    verdicts = [lw.fit_quality(lw.GramMatrix(model, (x, y))).verdict]
    for _ in range(400):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    found = lw.fit_quality(lw.GramMatrix(model, (x, y)))
    assert [*verdicts, found.verdict] == ["underfit", "fit"] and found.learned < 0.8
    assert repr(found).startswith(f"FitQuality(fit: learned {found.learned:.2f}, supported")
    assert lw.fit_quality(lw.GramMatrix(model, (x, y)), underfit_below=0.2).verdict == "underfit"


@pytest.mark.parametrize("use", [lw.label_suspicion, lw.novelty, lw.reliability, lw.fit_quality])
def test_a_model_is_no_gram_matrix(use):
    with pytest.raises(TypeError, match=r"likewise.GramMatrix\(model, data\)"):
        use(nn.Linear(3, 2))


def test_odd_labels_and_readouts_are_told():
    torch.manual_seed(0)
    model, x, y = (
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
        torch.randn(60, 4),
        torch.arange(60) % 3,
    )
    with pytest.warns(UserWarning, match="Labels go up to 5"):
        lw.label_suspicion(lw.GramMatrix(model, (x, y + 3)))
    with pytest.warns(UserWarning, match="looks at the label"):
        lw.label_suspicion(lw.GramMatrix(lw.Network(model, lw.label_against_rest), (x, y)))
    best = model(x).argmax(1)
    with pytest.warns(UserWarning, match="no more than by chance"):
        lw.label_suspicion(lw.GramMatrix(model, (x, (best + 1) % 3)))


def test_isolated_and_unreliable_are_found():
    model = nn.Linear(4, 1, bias=False).double()
    x = torch.cat([torch.eye(4)[:1].repeat(9, 1) + 0.01 * torch.rand(9, 4), torch.eye(4)[3:]]).double()
    found = lw.label_suspicion(lw.GramMatrix(model, x), torch.zeros(10).long())
    assert found.isolated.tolist() == [False] * 9 + [True]
    opposed = torch.tensor([[1.0, 0, 0, 0], [-0.9, 0.1, 0, 0], [0, 0, 1, 0]]).double()
    denoised = lw.denoising(lw.GramMatrix(model, opposed), exact=True)
    assert denoised.unreliable.tolist() == [True, True, False]
    assert denoised.factor[0] > 1 and denoised.negative_share[0] > 0.3


def deep(seed=0):
    torch.manual_seed(seed)
    layers = [nn.Linear(64, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 16)]
    return nn.Sequential(*layers, nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))


def test_a_part_of_the_network_judges_new_inputs():
    model, x, y = deep(), torch.randn(60, 64), torch.arange(60) % 4
    make = lambda net: lw.GramMatrix(net, x[:10], columns=(x[10:], y[10:]))  # noqa: E731
    gram = make(model)
    three = make(lw.Network(model, parameters=["3.*", "5.*", "6.*", "8.*"]))
    one = lw.novelty(make(lw.Network(model, parameters="8.*")), parameters=None)
    torch.testing.assert_close(
        lw.novelty(gram, parameters="last 3 layers"), lw.novelty(three, parameters=None)
    )
    torch.testing.assert_close(lw.novelty(gram, parameters="last layer"), one)
    torch.testing.assert_close(lw.novelty(gram, parameters="features"), one)
    for mine, other in zip(
        lw.reliability(gram, parameters="last 3 layers"), lw.reliability(three), strict=True
    ):
        torch.testing.assert_close(mine, other)
    square = lw.GramMatrix(model, x).with_feature_cache()
    assert square.with_parameters("*") is square
    shared = square.with_parameters("8.*")
    torch.testing.assert_close(shared.dense(), lw.GramMatrix(lw.Network(model, parameters="8.*"), x).dense())


def test_far_predictions_get_the_more_cautious_chance():
    chance = torch.Generator().manual_seed(0)
    closeness = torch.rand(600, generator=chance)
    confidence, agreement = torch.rand(2, 600, generator=chance)
    right = torch.rand(600, generator=chance) < agreement  # neighbors know, closeness and confidence do not
    held = lw.Reliability(
        closeness, agreement, torch.full((600,), 0.1), torch.zeros(600, dtype=torch.long), confidence
    )
    calibration = lw.calibrate(held, torch.where(right, 0, 1))
    agreed = lambda c: lw.Reliability(  # noqa: E731
        torch.full((40,), c), torch.ones(40), torch.full((40,), 0.1), torch.zeros(40, dtype=torch.long), None
    )._replace(confidence=torch.full((40,), 0.5))
    assert (calibration(agreed(0.2)) > 0.9).all() and calibration.applies(agreed(0.2)).all()
    with pytest.warns(lw.CalibrationWarning, match="40 of 40"):
        assert (calibration(agreed(-0.5)) < 0.7).all()  # as if neighbors had said nothing
    assert not calibration.applies(agreed(-0.5)).any()
    assert "600 held-out predictions, closeness 0.0" in repr(calibration)


def test_log_odds_are_a_mean_of_two_and_no_more_than_by_confidence_beyond_what_was_seen():
    from sklearn.linear_model import LogisticRegression

    chance = torch.Generator().manual_seed(0)
    parts = [torch.rand(300, generator=chance, dtype=torch.float64) for _ in range(4)]
    right = torch.rand(300, generator=chance) < 0.2 + 0.3 * parts[0] + 0.4 * parts[3]
    classes = torch.zeros(300, dtype=torch.long)
    held = lw.Reliability(*parts[:3], classes, parts[3])
    calibration = lw.calibrate(held, (~right).long())
    odds = lambda v: v.clamp(1e-4, 1 - 1e-4).logit()  # noqa: E731
    columns = lambda r: torch.stack(  # noqa: E731
        [r.closeness, odds(r.agreement), (r.shift + 1e-3).log(), odds(r.confidence)], 1
    )
    known = columns(held)
    mean, spread = known.mean(0), known.std(0, correction=0)
    far = held._replace(closeness=held.closeness - 5)
    fitted = {}
    for name, used in (("all", slice(None)), ("confidence", slice(3, 4))):
        regression = LogisticRegression(C=1.0).fit(((known - mean) / spread)[:, used].numpy(), right.numpy())
        for asked, given in (("held", held), ("far", far)):
            standard = ((columns(given) - mean) / spread)[:, used].numpy()
            fitted[name, asked] = torch.tensor(regression.decision_function(standard))
    inside = calibration.applies(held)
    hedged = 0.4 * fitted["all", "held"] + 0.6 * fitted["confidence", "held"]
    expected = torch.where(inside, hedged, torch.minimum(hedged, fitted["confidence", "held"])).sigmoid()
    torch.testing.assert_close(calibration(held), expected, rtol=1e-6, atol=1e-8)
    with pytest.warns(lw.CalibrationWarning):
        found = calibration(far)
    hedged = 0.4 * fitted["all", "far"] + 0.6 * fitted["confidence", "far"]
    expected = torch.minimum(hedged, fitted["confidence", "far"]).sigmoid()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    assert not calibration.applies(far).any()


def test_confidence_is_taken_at_the_temperature_at_which_held_out_labels_are_most_likely(digits):
    x, y, model = digits
    sharp = nn.Sequential(*model[:-1], model[-1], Sharpened(3.0))
    held, asked = slice(400, 1000), slice(1000, 1400)
    columns = x[:100], y[:100]
    found = {
        name: [lw.reliability(lw.GramMatrix(net, x[part], columns=columns)) for part in (held, asked)]
        for name, net in (("plain", model), ("sharp", sharp))
    }
    temperatures = {}
    for name, (known, _) in found.items():
        logits = known.probabilities.double().log()
        grid = torch.logspace(-1, 1, 401, dtype=torch.float64)
        losses = torch.stack([nn.functional.cross_entropy(logits / t, y[held]) for t in grid])
        temperatures[name] = lw.calibrate(known, y[held]).temperature
        assert temperatures[name] == pytest.approx(float(grid[losses.argmin()]), rel=1e-2)
    assert temperatures["sharp"] / temperatures["plain"] == pytest.approx(3, rel=1e-3)
    known, new = found["sharp"]
    calibration = lw.calibrate(known, y[held])
    scaled = lambda part: (part.probabilities.double().log() / calibration.temperature).softmax(1)  # noqa: E731
    at_one = lambda part: part._replace(probabilities=None, confidence=scaled(part).max(1).values)  # noqa: E731
    expected = lw.calibrate(at_one(known), y[held])(at_one(new))
    torch.testing.assert_close(calibration(new), expected, rtol=0, atol=1e-3)  # both iterate
    bare = [part._replace(probabilities=None) for part in (known, new)]
    assert (lw.calibrate(bare[0], y[held])(bare[1]) - expected).abs().max() > 0.01


class Sharpened(nn.Module):
    """Outputs times a factor: the same predictions, surer."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, outputs):
        return self.factor * outputs


def test_probabilities_are_needed_where_they_were_calibrated_on_and_unknown_classes_tell_nothing():
    chance = torch.Generator().manual_seed(0)
    share = torch.rand(80, generator=chance)
    logits = torch.randn(80, 3, generator=chance)
    probabilities, truth = logits.softmax(1), torch.arange(80) % 4  # a class that the network lacks
    confidence, prediction = probabilities.max(1)
    held = lw.Reliability(share, share, 1 - share, prediction, confidence, probabilities)
    calibration = lw.calibrate(held, truth)
    known = truth < 3
    expected = lw.calibrate(lw.Reliability(*(part[known] for part in held)), truth[known]).temperature
    assert calibration.temperature == pytest.approx(expected)
    assert lw.calibrate(held, torch.full((80,), 7)).temperature == 1
    with pytest.raises(ValueError, match="probabilities of all classes"):
        calibration(held._replace(probabilities=None))
    without = lw.calibrate(held._replace(probabilities=None), truth)
    assert without.temperature is None
    torch.testing.assert_close(without(held), without(held._replace(probabilities=None)))


def test_sketched_novelty_costs_one_forward_pass_more_than_its_first_ingredient(digits):
    x, _, model = digits
    counts = {}
    for parameters in (None, "auto", "features"):
        gram, seen = lw.GramMatrix(model, x[400:450], columns=x[:300]), []
        handle = model.register_forward_hook(lambda module, i, o, seen=seen: seen.append(len(i[0])))
        lw.novelty(gram, parameters=parameters, sketch=256)
        handle.remove()
        counts[parameters] = sum(seen)
    assert 350 <= counts["features"] <= 360
    assert counts["auto"] - counts[None] <= 360


@pytest.mark.filterwarnings("ignore:.*less similar to the training data")
@pytest.mark.parametrize("same", ["closeness", "agreement", "shift", "confidence"])
@pytest.mark.parametrize("n", [60, 200, 777])
def test_an_ingredient_that_is_the_same_for_all_held_out_predictions_has_no_weight(n, same):
    generator = torch.Generator().manual_seed(n)
    parts = torch.rand(4, n, generator=generator)
    given = dict(zip(("closeness", "agreement", "shift", "confidence"), parts, strict=True))
    given[same] = torch.full((n,), 1.0 if same == "agreement" else 0.7)
    held = lw.Reliability(prediction=torch.zeros(n, dtype=torch.long), **given)
    calibration = lw.calibrate(held, torch.randint(2, (n,), generator=generator))
    other = held._replace(**{same: given[same] * 0.9})
    if same != "closeness":  # which also says where the calibration applies
        torch.testing.assert_close(calibration(other), calibration(held))
    values = held._replace(prediction=parts[:1].T, confidence=None)
    if same != "confidence":
        expected = lw.calibrate(values, parts[:1].T + torch.randn(n, 1, generator=generator))
        torch.testing.assert_close(expected(values._replace(**{same: given[same] * 0.9})), expected(values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounded_probabilities_are_probabilities(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Softmax(1))
    with torch.no_grad():
        model[2].weight.mul_(4)
    model, x = model.to(dtype), torch.randn(200, 6).to(dtype)
    found = lw.reliability(lw.GramMatrix(model, x, columns=(x, torch.arange(200) % 5)))
    assert torch.equal(found.confidence, model(x).max(1).values)


def test_what_is_not_known_is_not_calibrated_on():
    """Of many outputs an index stores none, and tells no shift."""
    share = torch.linspace(0.1, 0.9, 80)
    held = lw.Reliability(share, share, 1 - share, torch.zeros(80, dtype=torch.long), share)
    calibration = lw.calibrate(held, torch.arange(80) % 2)
    unknown = held._replace(shift=torch.full((80,), torch.nan))
    for asked in (lambda: calibration(unknown), lambda: lw.calibrate(unknown, torch.arange(80) % 2)):
        with pytest.raises(ValueError, match="NaN for shift"):
            asked()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_one_hot_labels_are_classes(digits, dtype):
    x, y, model = digits
    one_hot = nn.functional.one_hot(y[:400]).to(dtype)
    gram = lw.GramMatrix(model, x[400:420], columns=(x[:400], one_hot))
    expected = lw.reliability(gram, y[:400])
    for found, known in zip(lw.reliability(gram), expected, strict=True):
        assert torch.equal(found, known)
    train = lw.GramMatrix(model, x[:100])
    of_one_hot, of_numbers = lw.fit_quality(train, one_hot[:100]), lw.fit_quality(train, y[:100])
    assert (of_one_hot.learned, of_one_hot.supported) == (of_numbers.learned, of_numbers.supported)
    assert of_one_hot.verdict == of_numbers.verdict
