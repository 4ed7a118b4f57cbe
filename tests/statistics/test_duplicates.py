"""Duplicates: planted pairs are found, honest ones are not, whatever their class."""

import pytest
import torch

import likewise as lw
from likewise.statistics.duplicates import close_pairs, differing_words, input_features, pair_similarity


@pytest.fixture(scope="module")
def digits():
    from sklearn.datasets import load_digits

    torch.set_num_threads(1)
    torch.manual_seed(0)
    pixels, classes = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels[:600] / 16, dtype=torch.float32), torch.tensor(classes[:600])
    copies = torch.cat([x[:10], x[10:20] * 0.9, x[20:30] + 0.01 * torch.randn(10, 64)])
    x, y = torch.cat([x, copies]), torch.cat([y, y[:30]])
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(100):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return lw.Network(model, lw.all_outputs), x, y


PLANTED = {(i, 600 + i) for i in range(30)}


def pairs(found):
    return set(zip(found.first.tolist(), found.second.tolist(), strict=True))


@pytest.mark.parametrize("sketch", [None, 1024])
def test_planted_pairs_are_found_and_few_others(digits, sketch):
    net, x, y = digits
    found = lw.duplicates(lw.GramMatrix(net, (x, y)), sketch=sketch)
    assert len(PLANTED - pairs(found)) <= 2  # darker and noisy copies are near the limit
    assert len(pairs(found) - PLANTED) <= 1
    assert set(found.counts[:10].tolist()) == {1}
    exact = [
        i for i, pair in enumerate(zip(found.first, found.second, strict=True)) if pair[0] < 10 <= pair[1]
    ]
    assert found.similarity[exact].numpy() == pytest.approx(1, abs=1e-5)
    assert found.input_similarity[exact].numpy() == pytest.approx(1, abs=1e-6)


def test_leaks_across_splits_are_marked_and_two_data_sets_give_the_same_pairs(digits):
    net, x, y = digits
    split = ["train"] * 600 + ["test"] * 30
    within = lw.duplicates(lw.GramMatrix(net, (x, y)), split=split)
    between = {
        pair for pair, is_across in zip(pairs_in_order(within), within.across, strict=True) if is_across
    }
    assert between == PLANTED
    gram = lw.GramMatrix(net, (x[600:], y[600:]), columns=(x[:600], y[:600]))
    found = lw.duplicates(gram)
    assert found.across.all()
    assert pairs(found) <= {(i, i) for i in range(30)}
    assert len(pairs(found)) >= 27  # though every row is a duplicate
    assert (
        len(lw.duplicates(lw.GramMatrix(net, (x[:50], y[:50]), columns=(x[300:600], y[300:600]))).first) <= 1
    )


def pairs_in_order(found):
    return list(zip(found.first.tolist(), found.second.tolist(), strict=True))


def test_a_close_class_needs_closer_pairs():
    places = torch.tensor([[1], [0], [3], [2]])  # one neighbor each: its distance is what is usual
    similarity = torch.tensor([[0.99], [0.99], [0.5], [0.999]])
    classes = torch.tensor([0, 0, 1, 1])
    spread = torch.tensor([0.99] * 20 + [0.5] * 20)[:, None]
    many = torch.cat([similarity, spread])
    where = torch.cat([places, torch.zeros(40, 1, dtype=torch.long)])
    labels = torch.cat([classes, torch.tensor([0] * 20 + [1] * 20)])
    close = close_pairs(where, many, labels, labels)
    assert close[:4, 0].tolist() == [False, False, False, True]  # .99 is usual in the first class


def test_a_class_that_the_network_does_not_tell_apart_is_left_to_the_inputs():
    torch.manual_seed(0)
    x = torch.rand(40, 3) + 0.1
    model = torch.nn.Linear(3, 2)
    net = torch.nn.Sequential(torch.nn.Threshold(10.0, 1.0), model)  # every input becomes ones
    x[7] = x[5]
    found = lw.duplicates(lw.GramMatrix(net, x))
    assert pairs(found) == {(5, 7)}
    assert found.same_label is None


def test_inputs_are_compared_as_pixels_words_or_numbers():
    images = torch.rand(6, 3, 40, 40)
    images[4] = images[1] * 0.5 + 0.1 * images.mean(0)
    features = input_features(lw.batches(images))
    assert features.shape == (6, 3 * 16 * 16)
    words = torch.randint(0, 500, (6, 20))
    words[3] = words[2].flip(0)  # the same words
    counts = input_features(lw.batches({"input_ids": words, "attention_mask": torch.ones(6, 20)}))
    assert pair_similarity(counts, torch.tensor([2]), torch.tensor([3])).item() == pytest.approx(1)
    assert input_features(lw.batches(torch.rand(4, 7))).shape == (4, 7)


def templates(n=120, copies=12):
    """Texts of one template with words in its slots, and near copies of some with one word changed."""
    chance = torch.Generator().manual_seed(0)
    ids = torch.arange(1, 17).repeat(n, 1)
    for slot in range(6, 16):
        ids[:, slot] = torch.randint(20 + 40 * slot, 60 + 40 * slot, (n,), generator=chance)
    near = ids[:copies].clone()
    near[torch.arange(copies), 4 + torch.arange(copies)] = torch.arange(1000, 1000 + copies)
    return torch.cat([ids, near]), {(i, n + i) for i in range(copies)}


def test_near_copies_among_texts_of_a_template_are_found_and_ratio_matters():
    ids, planted = templates()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(1100, 8), torch.nn.Linear(8, 2))
    gram = lw.GramMatrix(model, ids)
    found = [pairs(lw.duplicates(gram, ratio=ratio)) for ratio in (None, 0.03, 0.5)]
    assert planted <= found[0] and len(found[0]) <= len(planted) + 5
    assert not found[1] & planted  # one word of sixteen is more than 3 %
    assert len(found[2]) > 5 * len(found[0])


def test_one_hot_labels_are_classes_and_one_class_is_a_label(digits):
    net, x, y = digits
    one_hot = torch.nn.functional.one_hot(y)
    expected = lw.duplicates(lw.GramMatrix(net, (x, y)))
    for labels in (one_hot, one_hot.float(), y[:, None]):
        found = lw.duplicates(lw.GramMatrix(net, (x, labels)))
        assert pairs(found) == pairs(expected)
        assert torch.equal(found.same_label, expected.same_label)
        assert pairs(lw.duplicates(lw.GramMatrix(net, x), labels)) == pairs(expected)
    alike = lw.duplicates(lw.GramMatrix(net, (x, torch.zeros_like(y)))).same_label
    assert alike is not None and alike.all()
    assert lw.duplicates(lw.GramMatrix(net, (x, torch.rand(len(x))))).same_label is None


def test_class_numbers_as_floats_are_classes(digits):
    net, x, y = digits
    expected = lw.duplicates(lw.GramMatrix(net, (x, y)))
    for found in (
        lw.duplicates(lw.GramMatrix(net, (x, y.float()))),
        lw.duplicates(lw.GramMatrix(net, x), y.float()),
    ):
        assert pairs(found) == pairs(expected) and torch.equal(found.same_label, expected.same_label)


def test_labels_that_are_no_classes_are_refused_or_values(digits):
    net, x, y = digits
    x, y = x[:40], y[:40]
    for wrong, message in (
        (torch.where(y == 0, -1, y), "Class numbers from 0"),
        (torch.where(y == 0, -1.0, y.float()), "Class numbers from 0"),
        (torch.where(y == 0, -100, y), "are -100"),
        (torch.where(y == 0, torch.nan, y.float()), "NaN or infinite"),
        (y + 10**9, "more than 100000 classes"),
    ):
        for build in (
            lambda wrong=wrong: lw.duplicates(lw.GramMatrix(net, (x, wrong))),
            lambda wrong=wrong: lw.duplicates(lw.GramMatrix(net, x), wrong),
            lambda wrong=wrong: lw.duplicates(lw.GramMatrix(net, (x, wrong), columns=(x, y))),
        ):
            with pytest.raises(ValueError, match=message):
                build()
    one = torch.nn.Linear(64, 1)
    for values in (y - 5, y + 10**9, y.float(), torch.rand(40) + 10):
        assert lw.duplicates(lw.GramMatrix(one, (x, values))).same_label is None


class PaddedTexts(torch.nn.Module):
    """The mean of the words of texts, which 0 fills up."""

    def __init__(self):
        super().__init__()
        self.words, self.last = torch.nn.Embedding(500, 16, padding_idx=0), torch.nn.Linear(16, 3)

    def forward(self, ids):
        real = (ids != 0)[..., None]
        return self.last((self.words(ids) * real).sum(1) / real.sum(1))


def test_padding_that_the_network_ignores_is_no_word():
    torch.manual_seed(0)
    ids = torch.randint(1, 500, (60, 8)) * (torch.arange(8) < torch.randint(4, 9, (60, 1)))
    ids[40] = ids[3]
    model, padded = PaddedTexts(), torch.nn.functional.pad(ids, (0, 56))
    for x in (ids, padded):
        found = lw.duplicates(lw.GramMatrix(model, x))
        assert pairs(found) == {(3, 40)}
    apart = lw.duplicates(lw.GramMatrix(model, padded[:30], columns=padded[30:]))
    assert pairs(apart) == {(3, 10)}


def test_a_ratio_that_is_given_holds_where_chance_would_allow_less():
    torch.manual_seed(0)
    x = torch.randn(200, 2)  # two dimensions: pairs are close by chance
    gram = lw.GramMatrix(torch.nn.Linear(2, 2), x)
    counts = [len(lw.duplicates(gram, ratio=ratio).first) for ratio in (None, 0.02, 0.2, 0.8)]
    assert counts[0] <= counts[1] < counts[2] < counts[3]


def test_words_that_differ_are_counted_of_the_longer_text():
    counts = torch.tensor([[2.0, 1, 1, 0], [2, 1, 0, 0], [0, 0, 0, 4]])
    places = torch.tensor([[0, 1, 2], [0, 1, 2], [0, 1, 2]])
    expected = torch.tensor([[0, 0.25, 1], [0.25, 0, 1], [1, 1, 0]])
    torch.testing.assert_close(differing_words(counts, counts, places), expected)


def test_faults_are_named(digits):
    net, x, y = digits
    gram = lw.GramMatrix(net, (x[:20], y[:20]))
    with pytest.raises(ValueError, match="split must name"):
        lw.duplicates(gram, split=["a"] * 3)
    with pytest.raises(ValueError, match="class numbers"):
        lw.duplicates(gram, labels=torch.rand(20))
    with pytest.raises(ValueError, match="One sample"):
        lw.duplicates(lw.GramMatrix(net, x[:1]))
