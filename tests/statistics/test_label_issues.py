"""On real images, with labels known to be wrong."""

import warnings

import pytest
import torch
from torch import nn

import likewise as lw
from likewise.statistics.label_issues import suspicion_from_votes
from likewise.statistics.neighbors import class_votes


@pytest.fixture(scope="module")
def digits():
    """300 real digits, 30 of them mislabeled, and a net that memorized them all."""
    images, labels = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    torch.manual_seed(0)
    x = torch.tensor(images[:300], dtype=torch.float32) / 16
    truth = torch.tensor(labels[:300])
    wrong = torch.zeros(300, dtype=torch.bool)
    wrong[torch.randperm(300)[:30]] = True
    given = torch.where(wrong, (truth + torch.randint(1, 10, (300,))) % 10, truth)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), given).backward()
        optimizer.step()
    assert (model(x).argmax(1) == given).all()
    return lw.GramMatrix(model, (x, given)), truth, wrong


def average_precision(score, wrong):
    hits = wrong[score.argsort(descending=True)].double()
    precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1)
    return float((precision * hits).sum() / hits.sum())


def test_memorized_wrong_labels_are_found(digits):
    gram, truth, wrong = digits
    found = lw.label_suspicion(gram)
    assert average_precision(found.suspicion, wrong) > 0.85
    assert (found.suggested == truth)[wrong].double().mean() > 0.85
    assert found.contested[wrong].double().mean() > 0.8
    assert found.contested[~wrong].double().mean() < 0.1


def test_evidence_is_the_most_alike_of_the_suggested_class(digits):
    gram, _, wrong = digits
    found = lw.label_suspicion(gram)
    evidence, labels = lw.label_evidence(gram, found, k=3), gram.columns.labels()
    assert (labels[evidence.indices] == found.suggested[:, None]).all()
    assert (evidence.indices != torch.arange(300)[:, None]).all()
    k = gram.dense().double()
    h = torch.eye(300, dtype=torch.float64) - 1 / 300
    c = h @ k @ h
    c = c / (c.diagonal()[:, None] * c.diagonal()).sqrt()
    one = int(wrong.nonzero()[0])
    others = [i for i in range(300) if labels[i] == found.suggested[one] and i != one]
    best = max(others, key=lambda i: float(c[one, i]))
    assert int(evidence.indices[one, 0]) == best
    with pytest.raises(ValueError, match="is about 2 samples, but the GramMatrix has 300"):
        lw.label_evidence(gram, found._replace(suggested=found.suggested[:2]))


def test_of_equal_evidence_the_first_comes_first():
    torch.manual_seed(0)
    x, y = torch.randn(12, 4).repeat(4, 1), (torch.arange(12) % 3).repeat(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an untrained network
        gram = lw.GramMatrix(nn.Linear(4, 3), (x, y))
        found = lw.label_suspicion(gram)
    kept = found._replace(suggested=y)
    assert lw.label_evidence(gram, kept, k=3).indices[:2].tolist() == [[12, 24, 36], [13, 25, 37]]


def test_neighbors_share_the_true_class(digits):
    gram, truth, wrong = digits
    indices = lw.nearest(gram, 1).indices[:, 0]
    assert (truth[indices] == truth)[~wrong].double().mean() > 0.8


def test_classes_are_kept_together(digits):
    gram, _, _ = digits
    mean = lw.class_similarity(gram).mean
    within, between = mean.diagonal().mean(), (mean.sum() - mean.diagonal().sum()) / 90
    assert within > between


def watch_with(labels, margins):
    """A record in which each sample was seen once, with this margin; NaN: never."""
    watch = lw.Watch(len(labels))
    seen = (~margins.isnan()).nonzero()[:, 0]
    logits = torch.zeros(len(seen), int(labels.max()) + 1, dtype=torch.float64)
    logits[torch.arange(len(seen)), labels[seen]] = margins[seen].double()
    watch.update(logits, labels[seen], seen)
    return watch


def mean_ranks(values):
    """Ranks from 0 to 1 by counting: how many are less, and half of those that are equal."""
    n = len(values)
    return torch.tensor([((values < v).sum() + ((values == v).sum() - 1) / 2) / (n - 1) for v in values])


@pytest.mark.filterwarnings("ignore:Within classes")
def test_with_a_record_suspicion_is_the_mean_of_the_ranks_of_suspicion_and_margins(digits):
    gram, _, wrong = digits
    labels = gram.columns.labels()
    rng = torch.Generator().manual_seed(0)
    margins = (torch.randn(300, generator=rng, dtype=torch.float64) - 2 * wrong).round(
        decimals=1
    )  # with ties
    margins += 10  # none is negative: a record that contests more labels than votes do would count for more
    alone, both = lw.label_suspicion(gram), lw.label_suspicion(gram, watch=watch_with(labels, margins))
    expected = (mean_ranks(alone.suspicion) + mean_ranks(-margins)) / 2
    torch.testing.assert_close(both.suspicion, expected.to(both.suspicion), rtol=0, atol=2e-3)
    assert both.suspicion.min() >= 0 and both.suspicion.max() <= 1
    for name in ("suggested", "chance_wrong", "contested", "isolated"):
        torch.testing.assert_close(getattr(alone, name), getattr(both, name), rtol=0, atol=0, equal_nan=True)


def test_where_there_is_no_margin_or_no_vote_the_other_rank_counts_alone():
    from likewise.statistics.label_issues import suspicion_from_votes

    votes = torch.tensor([[4.0, 0.0], [3.0, 1.0], [1.0, 3.0], [0.0, 0.0]])  # the last has none
    margins = torch.tensor([torch.nan, -1.0, 2.0, 3.0])
    found = suspicion_from_votes(votes, torch.tensor([0, 0, 0, 0]), margins=margins)
    assert found.suspicion.tolist() == [0, (0.5 + 1) / 2, (1 + 0.5) / 2, 0]
    unknown = suspicion_from_votes(votes, torch.tensor([0, 0, 0, 0]), margins=torch.full((4,), torch.nan))
    assert unknown.suspicion.tolist() == [0, 0.5, 1, 0]


def test_records_of_other_samples_are_refused(digits):
    gram, _, _ = digits
    labels = gram.columns.labels()
    with pytest.raises(ValueError, match="trained with another label than given"):
        lw.label_suspicion(gram, watch=watch_with(labels.flip(0), torch.ones(300)))
    with pytest.raises(ValueError, match="record is of 200 samples"):
        lw.label_suspicion(gram, watch=watch_with(labels[:200], torch.ones(200)))
    with pytest.raises(TypeError, match=r"watch must be a likewise\.Watch, found 'run\.parquet'"):
        lw.label_suspicion(gram, watch="run.parquet")


X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))


def test_labels_that_are_numbers_or_miss_a_class():
    gram = lw.GramMatrix(nn.Linear(3, 3), X)
    labels = torch.tensor([0, 1] * 6)
    one_hot = nn.functional.one_hot(labels, 3).double()
    found, expected = lw.denoising(gram, labels), lw.denoising(gram, one_hot)
    assert torch.allclose(found.smoothed_label, expected.smoothed_label)
    signs = lw.denoising(gram, 2 * labels - 1)
    assert signs.smoothed_label.shape == (12, 1)
    prices = lw.fit_quality(gram, 300_000 + labels)
    assert abs(prices.total_variance - 0.25) < 1e-9
    with pytest.raises(ValueError, match="class number of 10000000"):
        lw.class_similarity(gram, labels + 10**8)


def test_right_labels_that_heat_made_forget_are_not_flagged_without_a_group_of_wrong_ones():
    from likewise.statistics.label_issues import OpinionAfter, combined_suspicion

    torch.manual_seed(0)
    labels = torch.randint(0, 4, (400,))
    votes = 0.05 * torch.rand(400, 4).double() + nn.functional.one_hot(labels, 4)  # nobody is contested
    forgot = votes.roll(1, 1) * (torch.rand(400, 1) < 0.2) + votes * torch.rand(400, 1)
    after = OpinionAfter(torch.rand(400), forgot / forgot.sum(1, keepdim=True), None, torch.randn(400))
    found = combined_suspicion(votes, labels, None, None, after)
    assert found.contested.any()
    assert found.distinct or not found.flagged.any()


def test_votes_of_a_memorized_network_count_less_where_they_contest_fewer_labels_than_other_judges():
    from likewise.statistics.crossval import CrossValidated
    from likewise.statistics.label_issues import OpinionAfter, combined_suspicion

    torch.manual_seed(0)
    labels = torch.randint(0, 4, (400,))
    own, other = (nn.functional.one_hot((labels + step) % 4, 4).double() for step in (0, 1))
    noise = 0.01 * torch.rand(400, 4).double()

    def contesting(count):
        return noise + torch.where(torch.arange(400)[:, None] < count, other, own)

    def ranks(score):
        return score.argsort().argsort().double() / 399

    def suspicion(count, *args):
        return combined_suspicion(contesting(count), labels, *args, dtype=torch.float64).suspicion

    memorized, early = own, contesting(50) / contesting(50).sum(1, keepdim=True)
    copies, hot = torch.randperm(400).double() / 400, torch.randn(400).double()
    margins = torch.arange(400).double() - 39.5
    for before, after, weight in ((20, 40, 2 / 16), (40, 40, 2), (60, 40, 2), (0, 0, 2), (0, 40, 0)):
        opinion = OpinionAfter(copies, contesting(after), None, hot)
        expected = weight * ranks(suspicion(before)) + 2 * ranks(copies) + ranks(-hot)
        found = suspicion(before, None, None, opinion)
        torch.testing.assert_close(found, expected / (3 + weight), rtol=0, atol=1e-6)
    for before, chances, weight in (
        (20, memorized, 2 / 16),
        (60, memorized, 2),
        (20, early, 2),
        (20, None, 2),
    ):
        expected = weight * ranks(suspicion(before, chances)) + 2 * ranks(-margins)
        found = suspicion(before, chances, margins)
        torch.testing.assert_close(found, expected / (2 + weight), rtol=0, atol=1e-6)
    unseen = CrossValidated(
        contesting(80) / contesting(80).sum(1, keepdim=True), labels, torch.zeros(400).long()
    )
    expected = 2 / 16 * ranks(suspicion(40, memorized)) + 2 * ranks(unseen.suspicion)
    found = suspicion(40, memorized, None, None, unseen)
    torch.testing.assert_close(found, expected / (2 + 2 / 16), rtol=0, atol=1e-6)


def test_a_record_in_another_order_within_classes_is_told(digits):
    gram, _, _ = digits
    labels = gram.columns.labels()
    suspicion = lw.label_suspicion(gram).suspicion.double()
    margins = 1 - 2 * suspicion + 0.01 * torch.randn(300, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lw.label_suspicion(gram, watch=watch_with(labels, margins))
    mixed = margins.clone()
    for number in labels.unique():
        here = (labels == number).nonzero()[:, 0]
        mixed[here] = margins[here.roll(len(here) // 2)]
    with pytest.warns(UserWarning, match="another order"):
        lw.label_suspicion(gram, watch=watch_with(labels, mixed))


def test_with_more_rankings_as_many_are_flagged_and_the_most_suspicious(digits):
    gram, _, _ = digits
    labels = gram.columns.labels()
    alone = lw.label_suspicion(gram)
    margins = 1 - 2 * alone.suspicion.double()
    margins[alone.flagged.nonzero()[0, 0]] = 9  # training never doubted this one
    both = lw.label_suspicion(gram, watch=watch_with(labels, margins))
    assert 0 < int(both.flagged.sum()) <= int(alone.flagged.sum())
    doubted = (both.suggested != labels) & ~both.isolated
    assert both.suspicion[both.flagged].min() >= both.suspicion[doubted & ~both.flagged].max()


def test_suspicion_is_the_margin_and_a_tenth_of_the_surprise_from_0_to_1():
    """Written out for each sample; in a network that confuses classes the label with the smaller share comes first."""
    import math

    from likewise.statistics.label_issues import suspicion_from_votes

    generator = torch.Generator().manual_seed(0)
    votes, given = torch.rand(60, 4, generator=generator).double(), torch.arange(60) % 4
    chances = torch.softmax(torch.randn(60, 4, generator=generator).double() * 3, 1)
    found = suspicion_from_votes(votes, given, chances, dtype=torch.float64).suspicion
    for i, label in enumerate(given.tolist()):
        b = [(float(votes[i, c] / votes[i].sum()) + float(chances[i, c])) / 2 for c in range(4)]
        margin = (1 - b[label] + max(b[c] for c in range(4) if c != label)) / 2
        surprise = math.log(1.01 / (b[label] + 0.01))
        assert float(found[i]) == pytest.approx(
            (margin + 0.1 * surprise) / (1 + 0.1 * math.log(101)), abs=1e-12
        )
    certain = torch.eye(4).double()[torch.tensor([0, 1])]
    ends = suspicion_from_votes(certain, torch.tensor([0, 3]), certain, dtype=torch.float64).suspicion
    torch.testing.assert_close(ends, torch.tensor([0.0, 1.0]).double())


def test_scores_of_words_are_no_probabilities_of_the_classes_of_texts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 30))
    tokens, labels = torch.randint(30, (40, 6)), torch.arange(40) % 2
    gram = lw.GramMatrix(lw.Network(model, lw.sequence_log_likelihood()), tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that predictions match no label, say
        found = lw.label_suspicion(gram, labels, words=False)
    expected = suspicion_from_votes(class_votes(gram, labels), labels)
    torch.testing.assert_close(found.suspicion, expected.suspicion.to(found.suspicion))
