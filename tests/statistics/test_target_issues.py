"""Targets that are not one class a sample: votes are the naive sums, and planted errors come first."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import likewise as lw
from likewise.statistics.target_issues import is_label_matrix, values_from_votes


def naive_weights(gram):
    """Return max(centered similarity, 0)^4 without the diagonal, from explicit gradients."""
    k = gram.with_centering(True).dense().double()
    weights = k.clamp(min=0).pow(4)
    return weights.fill_diagonal_(0)


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3)).double()
    return lw.Network(model, lw.all_outputs)


def test_votes_on_several_labels_are_those_of_all_pairs(net):
    x = torch.randn(40, 5, dtype=torch.float64)
    y = (x[:, :3] > 0).long()
    gram = lw.GramMatrix(net, (x, y))
    found = lw.multilabel_suspicion(gram)
    weights = naive_weights(gram)
    shares = weights @ y.double() / weights.sum(1, keepdim=True)
    opinion = (shares + net.model(x).detach().sigmoid()) / 2
    torch.testing.assert_close(found.suspicion, (y - opinion).abs())
    assert torch.equal(found.suggested, opinion > 0.5)
    torch.testing.assert_close(found.samples, found.suspicion.amax(1))


def trained(model, x, loss, steps=150):
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(x)).backward()
        optimizer.step()
    return model


def test_flipped_labels_come_first_though_the_network_was_trained_with_them():
    torch.manual_seed(0)
    x = torch.randn(300, 6)
    truth = (x[:, :4] + 0.3 * x[:, 1:5] > 0).float()
    wrong = torch.rand(300, 4) < 0.04
    y = torch.where(wrong, 1 - truth, truth)
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    model = trained(
        torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)),
        x,
        lambda o: loss(o, y),
    )
    found = lw.multilabel_suspicion(lw.GramMatrix(lw.Network(model, lw.all_outputs), (x, y)))
    top = found.suspicion.flatten().argsort(descending=True)[: int(wrong.sum())]
    assert wrong.flatten()[top].double().mean() > 0.7  # 4 % by chance


@pytest.mark.parametrize("epochs", [60, 1500])
def test_exchanged_values_come_first_also_where_they_are_memorized(epochs):
    torch.manual_seed(0)
    x = torch.randn(250, 4)
    truth = x @ torch.tensor([1.0, -2.0, 0.5, 1.5]) + 0.1 * torch.randn(250)
    wrong = torch.zeros(250, dtype=torch.bool)
    wrong[torch.randperm(250)[:10]] = True
    y = torch.where(wrong, truth + 6 * torch.sign(torch.randn(250)), truth)
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    trained(model, x, lambda o: torch.nn.functional.mse_loss(o[:, 0], y), epochs)
    found = lw.value_suspicion(lw.GramMatrix(model, (x, y)))
    assert wrong[found.score.argsort(descending=True)[:10]].double().mean() >= 0.6
    assert wrong[found.flagged].double().mean() > 0.5
    assert found.expected.shape == (250, 1)


def test_scores_of_honest_values_are_standard_normal():
    torch.manual_seed(0)
    x = torch.randn(600, 3)
    y = x @ torch.tensor([1.0, 2.0, -1.0]) + 0.5 * torch.randn(600)
    model = torch.nn.Linear(3, 1)
    trained(model, x, lambda o: torch.nn.functional.mse_loss(o[:, 0], y), 300)
    found = lw.value_suspicion(lw.GramMatrix(model, (x, y)))
    assert 0.62 < (found.score < 1).double().mean() < 0.75
    assert (found.score < 2).double().mean() > 0.92
    assert found.flagged.sum() <= 3


def mostly_zero_counts():
    torch.manual_seed(0)
    y = torch.where(torch.rand(300) < 0.8, 0, torch.poisson(torch.full((300,), 5.0)))
    y[7] = 60  # a wrong count
    return torch.randn(300, 4), y


def test_of_counts_that_are_mostly_zero_the_others_are_not_flagged():
    x, y = mostly_zero_counts()
    model = torch.nn.Linear(4, 1)
    for weight in (0, 0.05):  # it predicts nearly a constant
        torch.nn.init.constant_(model.weight, weight)
        found = lw.value_suspicion(lw.GramMatrix(model, (x, y)))
        assert found.score.argmax() == 7 and found.flagged[7] and found.score[7] < 30
        assert found.flagged.sum() <= 3 < (y > 0).sum() / 10


def test_nothing_is_flagged_where_all_residuals_are_equal():
    torch.manual_seed(0)
    x = torch.randn(300, 4)
    found = lw.value_suspicion(lw.GramMatrix(torch.nn.Linear(4, 1), (x, torch.full((300,), 0.3))))
    assert found.score.abs().max() == 0 and not found.flagged.any()
    values = torch.stack([x[:, 0], x[:, 1]], 1).double()
    same, one = values.mean(0).expand(300, 2), torch.ones(300).double()
    wanted = values_from_votes(same, one, values, None)
    biased = values_from_votes(same, one, values, values + 0.5)  # the network is off by the same everywhere
    torch.testing.assert_close(biased.score, wanted.score)
    constant = values_from_votes(same, one, torch.full((300, 2), 0.3).double(), values)
    assert constant.score.max() == 0


def test_a_wrong_word_and_a_wrong_patch_are_found_where_they_are():
    torch.manual_seed(0)
    words = torch.randint(0, 30, (40, 8))
    labels = words % 3
    labels[5, 2] = (labels[5, 2] + 1) % 3
    labels[6, 7] = -100
    model = torch.nn.Sequential(torch.nn.Embedding(30, 16), torch.nn.Linear(16, 3))
    trained(model, words, lambda o: torch.nn.functional.cross_entropy(o.flatten(0, 1), labels.flatten()), 60)
    found = lw.cell_suspicion(model, (words, labels), sketch=None)
    assert divmod(int(found.cells.nan_to_num(-1).argmax()), 8) == (5, 2)
    assert int(found.samples.argmax()) == 5
    assert int(found.suggested[5, 2]) == int(words[5, 2]) % 3
    assert found.cells[6, 7].isnan()
    assert int(found.suggested[6, 7]) == -1

    images = torch.randn(20, 1, 12, 12)
    masks = (torch.nn.functional.avg_pool2d(images, 3, 1, 1)[:, 0] > 0).long()
    masks[3, 4:8, 8:12] = 1 - masks[3, 4:8, 8:12]
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.Tanh(), torch.nn.Conv2d(8, 2, 1))
    trained(net, images, lambda o: torch.nn.functional.cross_entropy(o, masks), 80)
    found = lw.cell_suspicion(net, (images, masks), cell=4, sketch=None)
    assert found.cells.shape == (20, 3, 3)
    assert divmod(int(found.cells.argmax()), 9) == (3, 5)


def test_faults_are_named(net):
    x = torch.randn(20, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match="matrix of 0 and 1"):
        lw.multilabel_suspicion(lw.GramMatrix(net, (x, torch.arange(20) % 3)))
    with pytest.raises(ValueError, match="Values of one data set"):
        lw.value_suspicion(lw.GramMatrix(net, x))
    with pytest.raises(ValueError, match="Masks"):
        lw.cell_suspicion(net, (x, torch.rand(20)))
    conv = torch.nn.Conv2d(1, 2, 3, padding=1)
    with pytest.raises(ValueError, match="one class for each pixel"):
        lw.cell_suspicion(conv, (torch.randn(4, 1, 8, 8), torch.full((4, 8, 8), 5)), cell=4)
    with pytest.raises(ValueError, match="No cell"):
        lw.cell_suspicion(conv, (torch.randn(4, 1, 8, 8), torch.full((4, 8, 8), 255)), cell=4)


def test_one_hot_classes_are_no_label_matrix():
    assert not is_label_matrix(torch.eye(3)[torch.tensor([0, 1, 2, 0])])
    assert is_label_matrix(torch.tensor([[1, 1, 0], [0, 0, 0]]))
    assert not is_label_matrix(torch.tensor([[0.5, 1.0], [0.0, 0.0]]))
    assert not is_label_matrix(torch.tensor([0, 1, 1]))


def test_runs_say_that_a_sample_may_have_several_labels_and_which_looks_wrong(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(60, 4)
    y = (x[:, :3] > 0).long()
    y[7, 1] = 1 - y[7, 1]
    model = torch.nn.Linear(4, 3, bias=False)
    model.weight.data = 4 * torch.eye(3, 4)
    found = lw.analyze(model, (x, y), out=tmp_path / "several", readout=lw.all_outputs)
    expected = lw.multilabel_suspicion(lw.GramMatrix(lw.Network(model, lw.all_outputs), (x, y)))
    assert found.table["target_suspicion"].to_numpy() == pytest.approx(expected.samples.numpy(), abs=1e-5)
    assert found.table["suspicious_class"][7] == 1
    assert any("which may have several" in line for line in found.manifest["caveats"])
    assert "error" not in found.table
    values = lw.analyze(model, (x, x[:, :3] * 4), out=tmp_path / "values", readout=lw.all_outputs)
    score = lw.value_suspicion(lw.GramMatrix(lw.Network(model, lw.all_outputs), (x, x[:, :3] * 4)))
    assert values.table["target_suspicion"].to_numpy() == pytest.approx(score.suspicion.numpy(), abs=1e-3)


def test_batches_without_a_label_masks_of_any_type_and_several_inputs():
    torch.manual_seed(0)
    conv, images, masks = nn.Conv2d(1, 3, 3, padding=1), torch.randn(6, 1, 8, 8), torch.randint(3, (6, 8, 8))
    masks[2] = 255
    wanted = lw.cell_suspicion(conv, (images, masks), cell=4, sketch=None)
    for given in (masks, masks.to(torch.uint8)):
        loader = DataLoader(TensorDataset(images, given), batch_size=1)
        found = lw.cell_suspicion(conv, loader, cell=4, sketch=None)
        assert torch.allclose(found.cells, wanted.cells, equal_nan=True) and found.cells[2].isnan().all()

    numbers = (images[:, 0] > 0).long()  # as bool, 255 would be True
    wanted = lw.cell_suspicion(conv, (images, numbers), cell=4, sketch=None)
    found = lw.cell_suspicion(conv, (images, numbers.bool()), cell=4, sketch=None)
    assert torch.equal(found.cells, wanted.cells) and not found.cells.isnan().any()


def test_sequences_with_a_mask_are_the_same_as_a_tuple_and_as_a_mapping():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(9, 5), nn.Linear(5, 3)

        def forward(self, words, mask):
            return self.head(self.words(words) * mask[..., None])

    torch.manual_seed(0)
    net, words, mask = Tagger(), torch.randint(9, (8, 5)), torch.rand(8, 5)
    labels = torch.randint(3, (8, 5))
    wanted = lw.cell_suspicion(net, {"words": words, "mask": mask}, labels, sketch=None)
    found = lw.cell_suspicion(net, ((words, mask), labels), sketch=None)
    assert torch.allclose(found.cells, wanted.cells)


def test_probabilities_of_a_model_that_ends_in_a_softmax_are_taken_as_they_are():
    words = torch.arange(60).reshape(10, 6) % 12
    table = torch.nn.functional.one_hot(torch.arange(12) % 3, 3).float() * 5
    logits = nn.Sequential(nn.Embedding.from_pretrained(table, freeze=False))
    chances = nn.Sequential(nn.Embedding.from_pretrained(table, freeze=False), nn.Softmax(-1))
    by_logits = lw.cell_suspicion(logits, (words, words % 3), sketch=None)
    by_chances = lw.cell_suspicion(chances, (words, words % 3), sketch=None)
    assert by_logits.cells.max() < 0.1 and by_chances.cells.max() < 0.1


def test_cells_are_judged_in_the_precision_of_the_network():
    lower = []

    class Noting(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(12, 4), nn.Linear(4, 3)

        def forward(self, x):
            out = self.head(self.words(x))
            lower.append(out.dtype)
            return out

    torch.manual_seed(0)
    words = torch.arange(60).reshape(10, 6) % 12
    lw.cell_suspicion(lw.Network(Noting(), autocast=torch.bfloat16), (words, words % 3), sketch=None)
    assert lower[-1] == torch.bfloat16  # the pass over whole samples is the last


@pytest.mark.parametrize(
    ("labels", "note"),
    [
        (torch.arange(120) % 40, "there is one output: they are taken as numbers"),
        (
            torch.arange(480).view(120, 4) % 3,
            "Labels are 4 integers for each sample, and there are 8 outputs",
        ),
    ],
    ids=["numbers", "a mask of fewer pixels"],
)
def test_a_note_says_what_integer_labels_are_taken_for(labels, note, tmp_path):
    torch.manual_seed(0)
    outputs = 1 if labels.dim() == 1 else 8
    found = lw.analyze(
        nn.Linear(4, outputs), (torch.randn(120, 4), labels), out=tmp_path / "run", index=False
    )
    assert any(note in line for line in found.manifest["caveats"])
