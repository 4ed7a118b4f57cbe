"""What a run says of wrong labels is true, or that it cannot tell, where a network is memorized or weak."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import likewise as lw
from likewise.report.payload import read_run
from likewise.report.verdict import steps, verdict
from likewise.runs.review import ReviewQueue

WORDS, LENGTH = 60, 12


class TextNet(nn.Module):
    """One layer of attention over the words of a text, their mean, a perceptron."""

    def __init__(self, classes, width=24):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.last = nn.Linear(width, classes)

    def forward(self, tokens):
        return self.last(self.block(self.words(tokens)).mean(1))


def texts(n, classes, seed):
    """Texts of common words, a quarter of them words that their class prefers."""
    chance = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    common = torch.randint(WORDS, (n, LENGTH), generator=chance)
    own = labels[:, None] * (WORDS // classes) + torch.randint(
        WORDS // classes, (n, LENGTH), generator=chance
    )
    return torch.where(torch.rand(n, LENGTH, generator=chance) < 0.25, own, common), labels


def pictures(n, classes, seed):
    """Pictures of 8 x 8 that show a faint pattern of their class in noise."""
    chance = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    patterns = torch.randn(classes, 1, 8, 8, generator=torch.Generator().manual_seed(99))
    return 0.22 * patterns[labels] + torch.randn(n, 1, 8, 8, generator=chance), labels


def spoil(labels, classes, share, seed):
    chance = torch.Generator().manual_seed(seed)
    wrong = torch.rand(len(labels), generator=chance) < share
    return torch.where(
        wrong, (labels + torch.randint(1, classes, labels.shape, generator=chance)) % classes, labels
    )


def train(model, x, y, epochs):
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(epochs):
        for chosen in torch.randperm(len(x)).split(50):
            optimizer.zero_grad()
            F.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
    return model.eval()


def accuracy(model, x, y):
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


def check_verdict(run, wrong):
    """Numbers hold the truth; where there are none, the run, its report and its repr say that it cannot tell."""
    told, first = run.manifest["wrong_labels"], verdict(read_run(run.folder))
    flagged = torch.tensor(run.table["label_issue"].to_numpy())
    said = " ".join([first.headline, first.detail, *(part for caveat in first.caveats for part in caveat)])
    if told["errors"] is None:
        assert told["reason"] and told["precision"] is None and run.table["chance_wrong"].isna().all()
        assert "One network cannot tell how many" in said and "one network cannot tell how many" in repr(run)
        assert "None of" not in said and "none known" not in said
    else:
        low, _, high = told["errors"]
        assert low <= int(wrong.sum()) <= high
    if told["precision"] is not None:
        low, likely, high = told["precision"]
        assert low <= float(wrong[flagged].double().mean()) <= high
        assert abs(float(wrong[flagged].double().mean()) - likely) <= 0.25
    return told


@pytest.fixture(scope="module")
def memorized():
    torch.manual_seed(0)
    x, truth = texts(400, 4, seed=0)
    labels = spoil(truth, 4, 0.1, seed=1)
    model = train(TextNet(4), x, labels, 50)
    assert accuracy(model, x, labels) > 0.98
    return model, x, labels, truth


@pytest.mark.parametrize("reheat", [False, True])
def test_a_memorized_text_classifier_is_not_said_to_have_nothing_wrong(tmp_path, memorized, reheat):
    model, x, labels, truth = memorized
    run = lw.analyze(model, (x, labels), out=tmp_path / "run", reheat=reheat)
    told = check_verdict(run, labels != truth)
    if not reheat:
        assert told["errors"] is None and "memorized" in told["reason"]
    elif told["errors"] is None:
        assert told["reason"].startswith(("The mean of the reheated copies", "The votes of similar samples"))
    assert ("suggestion_support" in run.table) is reheat
    if reheat:  # doubtful by those who suggest, not by neighbors, which all have the label that was memorized
        table = run.table
        others = table["suggested_label"] != table["label"]
        queue = ReviewQueue(run).entries(0, len(table))
        entries = [entry for entry in queue if others[entry["sample"]]]
        assert entries
        for entry in entries:
            assert entry["doubtful"] == (table["suggestion_support"][entry["sample"]] < 0.5)


@pytest.mark.parametrize("share", [0.0, 0.15])
@pytest.mark.parametrize("reheat", [False, True])
def test_a_weak_image_network_promises_nothing_of_what_it_flags(tmp_path, reheat, share):
    torch.manual_seed(0)
    x, truth = pictures(500, 5, seed=0)
    labels = spoil(truth, 5, share, seed=1)
    layers = [nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)]
    model = train(nn.Sequential(*layers), x, labels, 5)
    assert 0.35 < accuracy(model, *pictures(500, 5, seed=5)) < 0.7
    run = lw.analyze(model, (x, labels), out=tmp_path / "run", reheat=reheat)
    told = check_verdict(run, labels != truth)
    assert not told["distinct"] and told["precision"] is None
    assert any("label" in step.text for step in steps(read_run(run.folder)))
