"""Shared words: a naive oracle, which inputs are texts, and what they change."""

import math

import pytest
import torch
from torch import Tensor, nn

import likewise as lw
from likewise.statistics.label_issues import combined_suspicion
from likewise.statistics.shared_words import (
    TokenInput,
    class_resemblance,
    distinct_tokens,
    find_token_input,
    resemblance_of_tokens,
)

WORDS, CLASSES = 40, 3


class Reader(nn.Module):
    """The mean of words with their places, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 4), nn.Embedding(100, 4)
        self.last = nn.Linear(4, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        places = self.places(torch.arange(input_ids.shape[1]))
        return self.last((self.words(input_ids) + places).mean(1))


class Columns(nn.Module):
    """An embedding of each column of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.ModuleList(nn.Embedding(WORDS, 2) for _ in range(6))
        self.last = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([embed(x[:, i]) for i, embed in enumerate(self.columns)], 1))


@pytest.fixture
def texts() -> tuple[Tensor, Tensor]:
    """Texts whose class is told by five words of its own, among others."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(90) % CLASSES
    x = torch.randint(15, WORDS, (90, 12), generator=generator)
    x[:, :3] = 5 * y[:, None] + torch.randint(0, 5, (90, 3), generator=generator)
    return x, y


def naive(x: Tensor, y: Tensor, classes: int) -> Tensor:
    """Return the cosine of each text with the other texts of each class, one by one."""
    n = len(x)
    sets = [set(row.tolist()) for row in x]
    vectors = torch.zeros(n, WORDS, dtype=torch.float64)
    for i, words in enumerate(sets):
        for word in words:
            vectors[i, word] = math.log((1 + n) / (1 + sum(word in other for other in sets))) + 1
    vectors /= vectors.norm(dim=1, keepdim=True)
    vectors -= vectors.mean(0)
    vectors /= vectors.norm(dim=1, keepdim=True)
    found = torch.zeros(n, classes, dtype=torch.float64)
    for i in range(n):
        for c in range(classes):
            total = sum(vectors[j] for j in range(n) if j != i and y[j] == c)
            if isinstance(total, Tensor):
                found[i, c] = vectors[i].dot(total) / total.norm()
    return found


def test_resemblance_is_the_naive_one(texts: tuple[Tensor, Tensor]) -> None:
    x, y = texts
    y = torch.where(torch.arange(90) == 4, CLASSES, y)  # a class of one text, which resembles nothing else
    found = class_resemblance(lw.GramMatrix(lw.Network(Reader(), lw.all_outputs), lw.batches((x, y), 7)), y)
    assert found is not None
    torch.testing.assert_close(found, naive(x, y, CLASSES + 1), rtol=0, atol=1e-12)


def test_classes_and_texts_in_several_parts_give_the_same(
    texts: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = texts
    monkeypatch.setattr("likewise.statistics.shared_words.MOST_NUMBERS", 1)
    monkeypatch.setattr("likewise.statistics.shared_words.TEXTS", 7)
    found = class_resemblance(lw.GramMatrix(lw.Network(Reader(), lw.all_outputs), (x, y)), y)
    assert found is not None
    torch.testing.assert_close(found, naive(x, y, CLASSES), rtol=0, atol=1e-12)


def test_tokens_are_the_integers_that_an_embedding_looks_up(texts: tuple[Tensor, Tensor]) -> None:
    x, y = texts
    named = {"input_ids": x, "attention_mask": torch.ones_like(x), "labels": y}
    by_name = lw.GramMatrix(lw.Network(Reader(), lw.all_outputs), named)
    assert find_token_input(by_name) == TokenInput("input_ids", "words")
    assert find_token_input(lw.GramMatrix(lw.Network(Reader(), lw.all_outputs), (x, y))) == TokenInput(
        0, "words"
    )


def test_tables_and_images_have_no_tokens(texts: tuple[Tensor, Tensor]) -> None:
    x, y = texts
    table = lw.GramMatrix(lw.Network(Columns(), lw.all_outputs), (x, y))
    values = lw.GramMatrix(lw.Network(nn.Linear(12, CLASSES), lw.all_outputs), (x.float(), y))
    named = lw.batches(x, labels=y, columns=[f"column {i}" for i in range(x.shape[1])])
    assert find_token_input(table) is None
    assert find_token_input(values) is None
    assert find_token_input(lw.GramMatrix(lw.Network(Reader(), lw.all_outputs), named)) is None
    assert (
        find_token_input(lw.GramMatrix(lw.Network(Columns(), lw.all_outputs), (x[:, :3].repeat(1, 2), y)))
        is None
    )


def test_words_find_a_label_that_the_network_has_no_idea_of(texts: tuple[Tensor, Tensor]) -> None:
    x, y = texts
    y = y.clone()
    y[7] = (y[7] + 1) % CLASSES
    torch.manual_seed(0)
    gram = lw.GramMatrix(lw.Network(Reader(), lw.all_outputs), (x, y))
    with_words, without = lw.label_suspicion(gram), lw.label_suspicion(gram, words=False)
    assert int(with_words.suspicion.argmax()) == 7
    assert 0 < with_words.words_weight <= 4
    assert without.words_weight == 0
    assert int(with_words.flagged.sum()) == int(without.flagged.sum())
    assert with_words.errors == without.errors or all(map(math.isnan, without.errors))
    assert torch.equal(with_words.suggested, without.suggested)


def test_words_that_say_nothing_change_nothing(texts: tuple[Tensor, Tensor]) -> None:
    _, y = texts
    generator = torch.Generator().manual_seed(0)
    x = torch.stack([torch.randperm(12, generator=generator) for _ in y])  # the same words in another order
    torch.manual_seed(0)
    gram = lw.GramMatrix(lw.Network(Reader(), lw.all_outputs), (x, y))
    with_words, without = lw.label_suspicion(gram), lw.label_suspicion(gram, words=False)
    assert with_words.words_weight == 0
    assert torch.equal(with_words.suspicion, without.suspicion)
    assert torch.equal(with_words.flagged, without.flagged)


def test_more_padding_changes_nothing(texts: tuple[Tensor, Tensor]) -> None:
    x, y = texts[0].clamp(max=WORDS - 2), texts[1]
    model = Reader()
    model.words.padding_idx = WORDS - 1
    wide = torch.cat([x, torch.full((90, 5), WORDS - 1)], 1)
    mask = torch.cat([torch.ones_like(x), torch.zeros(90, 5, dtype=torch.int64)], 1)
    masked = {"input_ids": torch.cat([x, x[:, :5].flip(0)], 1), "attention_mask": mask, "labels": y}
    plain = class_resemblance(lw.GramMatrix(lw.Network(Reader(), lw.all_outputs), (x, y)), y)
    padded = class_resemblance(lw.GramMatrix(lw.Network(model, lw.all_outputs), (wide, y)), y)
    by_mask = class_resemblance(lw.GramMatrix(lw.Network(Reader(), lw.all_outputs), masked), y)
    assert plain is not None and padded is not None and by_mask is not None
    assert torch.equal(plain, padded)
    assert torch.equal(plain, by_mask)


def test_tokens_of_a_hugging_face_classifier_are_found() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=WORDS, num_labels=CLASSES, **sizes)
    x = torch.randint(1, WORDS, (12, 6))
    data = {"input_ids": x, "token_type_ids": torch.zeros_like(x), "attention_mask": torch.ones_like(x)}
    net = lw.Network(transformers.BertForSequenceClassification(config).eval(), lw.all_outputs)
    found = find_token_input(lw.GramMatrix(net, {**data, "labels": torch.arange(12) % CLASSES}))
    assert found == TokenInput("input_ids", "bert.embeddings.word_embeddings", 0)


def test_numbers_of_tokens_do_not_matter_in_a_huge_vocabulary(texts: tuple[Tensor, Tensor]) -> None:
    x, y = texts
    numbers = torch.randperm(2**20, generator=torch.Generator().manual_seed(0))[:WORDS]
    some, other = (resemblance_of_tokens(*distinct_tokens(tokens), y) for tokens in (x, numbers[x]))
    torch.testing.assert_close(some, other, rtol=0, atol=1e-12)


def test_texts_without_words_classes_without_texts_and_equal_texts(texts: tuple[Tensor, Tensor]) -> None:
    x, y = texts
    real = torch.ones_like(x, dtype=torch.bool)
    real[4] = False
    found = resemblance_of_tokens(*distinct_tokens(x, real), 2 * y)
    assert (found[4] == 0).all()
    others = torch.arange(90) != 4
    assert (found[others][:, [1, 3]] == -1).all()
    assert (found[others][:, ::2].abs() < 1).all()
    for nothing in (
        resemblance_of_tokens(*distinct_tokens(x[:1]), y[:1]),
        resemblance_of_tokens(*distinct_tokens(x[:1].expand(9, -1)), y[:9]),
        resemblance_of_tokens(*distinct_tokens(x, torch.zeros_like(real)), y),
    ):
        assert (nothing == 0).all()


def test_a_text_without_words_gets_the_rank_of_the_network(texts: tuple[Tensor, Tensor]) -> None:
    x, y = texts
    real = torch.ones_like(x, dtype=torch.bool)
    real[:9] = False
    votes = torch.rand(90, CLASSES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    resemblance = resemblance_of_tokens(*distinct_tokens(x, real), y)
    without, found = combined_suspicion(votes, y), combined_suspicion(votes, y, resemblance=resemblance)
    assert found.words_weight == 4
    ranks = without.suspicion.argsort().argsort()[:9] / 89
    torch.testing.assert_close(found.suspicion[:9], ranks)
    nothing = combined_suspicion(votes, y, resemblance=torch.zeros(90, CLASSES, dtype=torch.float64))
    assert nothing.words_weight == 0
    assert torch.equal(nothing.suspicion, without.suspicion)


def test_numbers_beside_the_list_are_those_without_words(texts: tuple[Tensor, Tensor]) -> None:
    x, y = texts
    x, y = x.repeat(6, 1), y.repeat(6)
    x[:, 3:] = torch.randint(15, WORDS, (540, 9), generator=torch.Generator().manual_seed(1))
    given = torch.where(torch.arange(540) % 10 == 0, (y + 1) % CLASSES, y)
    sure = 0.9 * torch.nn.functional.one_hot(y, CLASSES).double() + 0.1 / 3  # the network knows every class
    sure += 0.02 * torch.rand(540, CLASSES, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    resemblance = resemblance_of_tokens(*distinct_tokens(x), given)
    without, found = combined_suspicion(sure, given), combined_suspicion(sure, given, resemblance=resemblance)
    assert found.words_weight > 0
    assert not math.isnan(without.precision.likely)
    assert found.errors == without.errors and found.precision == without.precision
    assert torch.equal(found.chance_wrong, without.chance_wrong)
    assert torch.equal(found.flagged, without.flagged)  # the flags that the precision is about


def test_labels_that_are_ignored_or_values_are_refused(texts: tuple[Tensor, Tensor]) -> None:
    x, y = texts
    net = lw.Network(Reader(), lw.all_outputs)
    for labels, message in ((torch.where(y == 0, -100, y), "labels are -100"), (y + 0.5, "Class numbers")):
        with pytest.raises(ValueError, match=message):
            lw.label_suspicion(lw.GramMatrix(net, (x, labels)))
