"""Cross-validation: networks are asked only about samples that they have not seen, and go on after a stop."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import likewise as lw

N, CLASSES = 150, 3


def planted(share=0.2):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 4, generator=generator)
    truth = (x @ torch.randn(4, CLASSES, generator=generator)).argmax(1)
    wrong = torch.rand(N, generator=generator) < share
    return x, truth, torch.where(wrong, (truth + 1) % CLASSES, truth)


def train(data):
    model = torch.nn.Linear(4, CLASSES)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(15):
        for x, y in DataLoader(data, batch_size=32, shuffle=True):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model


class Lookup(torch.nn.Module):
    """Knows the labels of the samples that it has seen, and nothing else."""

    def __init__(self, data):
        super().__init__()
        self.seen = {tuple(x.tolist()): int(y) for x, y in data}
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x):
        known = [self.seen.get(tuple(row.tolist()), -1) for row in x]
        return torch.stack(
            [torch.nn.functional.one_hot(torch.tensor(y + 1), CLASSES + 1) for y in known]
        ).float()


def test_no_network_is_asked_about_what_it_was_trained_on():
    x, _, labels = planted()
    found = lw.crossval(lambda data: Lookup(data), (x, labels), folds=4)
    assert (found.probabilities.argmax(1) == 0).all()  # all are unknown
    assert found.folds.bincount().tolist() == [38, 38, 37, 37]
    for c in range(CLASSES):  # every class is dealt out
        counts = found.folds[labels == c].bincount(minlength=4)
        assert counts.max() - counts.min() <= 1


def test_wrong_labels_are_suspicious_and_numbers_follow():
    x, truth, labels = planted()
    wrong = labels != truth
    found = lw.crossval(train, (x, labels))
    top = found.suspicion.argsort(descending=True)[: int(wrong.sum())]
    assert wrong[top].double().mean() > 0.6  # 20 % by chance; many of these samples are near a border
    alone = lw.label_suspicion(found)
    assert alone.errors.low <= int(wrong.sum()) <= alone.errors.high
    torch.testing.assert_close(alone.suspicion.double(), found.suspicion)


def test_combined_suspicion_is_the_mean_of_ranks_and_the_rest_is_by_unseen_networks():
    x, _, labels = planted()
    found = lw.crossval(train, (x, labels))
    gram = lw.GramMatrix(lw.Network(train(list(zip(x, labels, strict=True))), lw.all_outputs), (x, labels))
    votes, both = lw.label_suspicion(gram), lw.label_suspicion(gram, crossval=found)
    ranks = [score.double().argsort().argsort().double() for score in (votes.suspicion, found.suspicion)]
    expected = (ranks[0] + ranks[1]) / 2 / (N - 1)
    assert torch.equal(both.suspicion.argsort(), expected.float().argsort()) or torch.allclose(
        both.suspicion.double(), expected, atol=0.02
    )  # ties share a rank
    alone = lw.label_suspicion(found)
    doubted = (alone.suggested != labels) & ~alone.isolated
    assert int(both.flagged.sum()) == min(int(alone.flagged.sum()), int(doubted.sum()))
    assert both.suspicion[both.flagged].min() >= both.suspicion[doubted & ~both.flagged].max()
    assert both.errors == alone.errors
    with pytest.raises(ValueError, match="differ from these"):
        lw.label_suspicion(gram, labels.roll(1), crossval=found)


def test_a_call_that_was_stopped_goes_on_and_gives_the_same_numbers(tmp_path):
    x, _, labels = planted()
    whole = lw.crossval(train, (x, labels), folds=3)
    calls = []

    def stopped(data):
        calls.append(len(data))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return train(data)

    with pytest.raises(KeyboardInterrupt):
        lw.crossval(stopped, (x, labels), folds=3, out=tmp_path / "a")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["fold-0.safetensors"]
    with pytest.raises(ValueError, match="folds are missing"):
        lw.CrossValidated.load(tmp_path / "a")
    lw.crossval(train, (x, labels), folds=3, out=tmp_path / "b")
    (tmp_path / "b" / "fold-1.safetensors").unlink()
    again = lw.crossval(train, (x, labels), folds=3, out=tmp_path / "b")
    for found in (again, lw.CrossValidated.load(tmp_path / "b")):
        assert torch.equal(found.probabilities, whole.probabilities)
        assert torch.equal(found.labels, labels)
        assert torch.equal(found.folds, whole.folds)


def test_a_folder_of_another_call_is_refused(tmp_path):
    x, _, labels = planted()
    lw.crossval(train, (x, labels), folds=2, out=tmp_path)
    with pytest.raises(ValueError, match="data differ"):
        lw.crossval(train, (x, labels.roll(1)), folds=2, out=tmp_path)
    with pytest.raises(ValueError, match="training function differ"):
        lw.crossval(lambda data: train(data), (x, labels), folds=2, out=tmp_path)
    with pytest.raises(ValueError, match="folds or seed differ"):
        lw.crossval(train, (x, labels), folds=2, seed=1, out=tmp_path)
    (tmp_path / "fold-0.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="Cannot read"):
        lw.crossval(train, (x, labels), folds=2, out=tmp_path)


def test_generators_are_as_before():
    x, _, labels = planted()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    lw.crossval(train, (x, labels), folds=2)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


class Items(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], int(self.y[i])


def test_data_of_any_kind_gives_the_same_folds():
    x, _, labels = planted()
    plain = lw.crossval(train, (x, labels), folds=2)
    for data in (TensorDataset(x, labels), Items(x, labels), DataLoader(Items(x, labels), 16, shuffle=True)):
        found = lw.crossval(train, data, folds=2)
        torch.testing.assert_close(found.probabilities, plain.probabilities)
    apart = lw.crossval(train, x, labels=labels, folds=2)
    torch.testing.assert_close(apart.probabilities, plain.probabilities)


def test_faults_are_named():
    x, _, labels = planted()
    with pytest.raises(TypeError, match="must return a trained"):
        lw.crossval(lambda data: 3, (x, labels))
    with pytest.raises(ValueError, match="not its classes"):
        lw.crossval(lambda data: torch.nn.Linear(4, 2), (x, labels))
    with pytest.raises(TypeError, match="class numbers"):
        lw.crossval(train, (x, labels.float()))
    with pytest.raises(ValueError, match="too few"):
        lw.crossval(train, (x, labels), folds=151)
    with pytest.raises(ValueError, match="Labels are needed"):
        lw.crossval(train, x)


def test_training_works_in_inference_mode():
    x, _, labels = planted()
    wanted = lw.crossval(train, (x, labels), folds=2)
    with torch.inference_mode():
        found = lw.crossval(train, (x, labels), folds=2)
    assert torch.equal(found.probabilities, wanted.probabilities)


def test_labels_below_zero_are_told():
    x, _, labels = planted()
    for judge in (lambda data: lw.crossval(train, data), lambda data: lw.reheat(torch.nn.Linear(4, 3), data)):
        with pytest.raises(TypeError, match="from -100 to 2"):
            judge((x, labels.masked_fill(labels == 0, -100)))


@pytest.mark.parametrize("folds", [2, 30])
@pytest.mark.parametrize("ends_in_sigmoid", [False, True])
def test_few_logits_between_0_and_1_are_no_probabilities(folds, ends_in_sigmoid):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 1), *([torch.nn.Sigmoid()] if ends_in_sigmoid else [])]
    model, x = torch.nn.Sequential(*layers), torch.randn(60, 4)
    found = lw.crossval(lambda _: model, (x, torch.arange(60) % 2), folds=folds)
    expected = model[0](x)[:, 0].sigmoid().double()
    torch.testing.assert_close(found.probabilities[:, 1], expected, rtol=1e-5, atol=1e-6)
