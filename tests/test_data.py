import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

import likewise as lw

X, Y = torch.randn(10, 3), torch.arange(10) % 4


class Items(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, i):
        return {"x": X[i], "label": int(Y[i])}


SOURCES = {
    "tensor and labels": lambda: lw.batches(X, 4, labels=Y),
    "array and list": lambda: lw.batches(X.numpy(), 4, labels=Y.tolist()),
    "pair": lambda: lw.batches((X, Y), 4),
    "pair of arrays": lambda: lw.batches((X.numpy(), Y.numpy()), 4),
    "pair with a list": lambda: lw.batches((X, Y.tolist()), 4),
    "dict": lambda: lw.batches({"x": X, "labels": Y}, 4),
    "dict, named column": lambda: lw.batches({"x": X, "kind": Y}, 4, labels="kind"),
    "TensorDataset": lambda: lw.batches(TensorDataset(X, Y), 4),
    "Dataset of dicts": lambda: lw.batches(Items(), 4),
    "list of pairs": lambda: lw.batches(list(zip(X, Y.tolist(), strict=True)), 4),
    "loader": lambda: lw.batches(DataLoader(TensorDataset(X, Y), batch_size=4)),
    "batches": lambda: lw.batches(lw.batches((X, Y), 2), 4),
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_gives_the_same_batches(source):
    data = SOURCES[source]()
    assert len(data) == 3 and data.n == 10 and data.size == 4
    inputs = [b.inputs["x"] if isinstance(b.inputs, dict) else b.inputs for b in data]
    assert torch.equal(torch.cat(inputs), X)
    assert torch.equal(torch.cat([b.labels for b in data]), Y)
    assert torch.cat([b.ids for b in data]).tolist() == list(range(10))
    assert torch.equal(data.labels(), Y)


def test_hugging_face_dataset():
    datasets = pytest.importorskip("datasets")
    rows = {"input_ids": torch.randint(0, 9, (10, 5)).tolist(), "text": ["a"] * 10, "label": Y.tolist()}
    dataset = datasets.Dataset.from_dict(rows)
    for form in (dataset, dataset.with_format("torch"), dataset.with_format("numpy")):
        data = lw.batches(form, 4)
        assert set(data[0].inputs) == {"input_ids"}  # no model takes text as it is
        assert torch.equal(torch.cat([b.inputs["input_ids"] for b in data]), torch.tensor(rows["input_ids"]))
        assert torch.equal(data.labels(), Y)
    with pytest.raises(TypeError, match="tokenize"):
        lw.batches(dataset.select_columns(["text"]))
    uneven = datasets.Dataset.from_dict({"input_ids": [[1], [1, 2]]})
    with pytest.raises(TypeError, match=r"'input_ids'.*pad"):
        lw.batches(uneven)[0]


def test_batches_can_be_sliced():
    data = lw.batches((X, Y), 4)
    assert data[1:].n == 6 and data[1:][0].ids.tolist() == [4, 5, 6, 7]
    assert data[-1].ids.tolist() == [8, 9]
    assert data[1:2].labels().tolist() == Y[4:8].tolist()
    assert data.take([7, 2])[0].ids.tolist() == [7, 2]
    assert data[0][1:3].ids.tolist() == [1, 2]
    with pytest.raises(IndexError):
        data[3]
    with pytest.raises(ValueError, match="step of 2"):
        data[::2]


def test_limit_takes_the_first_samples():
    assert lw.batches(X, limit=3).n == 3
    assert lw.batches(X, limit=30).n == 10


def test_several_inputs():
    data = lw.batches(((X, X + 1), Y), 4)
    assert torch.equal(data[1].inputs[1], X[4:8] + 1)
    assert lw.batches(TensorDataset(X, X, Y))[0].inputs[1].shape == (10, 3)
    unlabeled = lw.batches((X, X), labels=False)
    assert unlabeled.labels() is None and len(unlabeled[0].inputs) == 2


class Random(Items):
    def __getitem__(self, i):
        return torch.randn(3)


class Stream(IterableDataset):
    def __iter__(self):
        yield from X


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: DataLoader(TensorDataset(X), shuffle=True), ValueError, "RandomSampler.*shuffle=False"),
        (lambda: DataLoader(TensorDataset(X), sampler=RandomSampler(X)), ValueError, "different orders"),
        (lambda: Random(), ValueError, "random augmentation"),
        (lambda: Stream(), TypeError, "no length"),
        (lambda: iter(X), TypeError, "no length"),
        (lambda: torch.zeros(0, 3), ValueError, "empty"),
        (lambda: [], ValueError, "empty"),
        (lambda: (X, Y[:5]), ValueError, r"5 labels for 10 samples"),
        (lambda: {"x": X, "kind": np.array(["a"] * 10)}, TypeError, "'kind'"),
        (lambda: [object(), object()], TypeError, "collate_fn"),
    ],
)
def test_what_cannot_be_read_twice_is_refused(make, error, text):
    with pytest.raises(error, match=text):
        lw.batches(make())


def test_wrong_arguments_are_said():
    with pytest.raises(ValueError, match="size must be an integer at least 1, found -1"):
        lw.batches(X, size=-1)
    with pytest.raises(ValueError, match="limit"):
        lw.batches(X, limit=0)
    with pytest.raises(ValueError, match="9 labels for 10"):
        lw.batches(Items(), labels=torch.zeros(9))
    with pytest.raises(ValueError, match="no column 'kind'"):
        lw.batches(Items(), labels="kind")


def test_a_table_and_a_column_are_x_and_y():
    pandas = pytest.importorskip("pandas")
    table, column = pandas.DataFrame(X.numpy()), pandas.Series(Y.numpy())
    for pair in ((table, column), (table, Y), (table, Y.tolist()), (X.numpy(), column)):
        data = lw.batches(pair, 4)
        assert data.n == 10
        assert torch.equal(torch.cat([batch.inputs for batch in data]), X)
        assert torch.equal(data.labels(), Y)


def test_columns_of_a_table_are_matched_by_name():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(X.numpy(), columns=list("abc"))
    known, swapped = lw.batches((table, Y)), lw.batches(table[["c", "a", "b"]].assign(d=1.0))
    assert known.columns == ("a", "b", "c") and lw.batches(X).columns is None
    assert lw.batches(pandas.DataFrame(X.numpy())).columns is None  # numbers are places
    assert torch.equal(swapped.match_columns(known.columns).samples(range(10)).inputs, X)
    assert lw.batches(X).match_columns(known.columns).samples(range(10)).inputs.equal(X)
    assert torch.equal(lw.batches(X, columns=["c", "a", "b"]).match_columns("abc")[0].inputs, X[:, [1, 2, 0]])
    with pytest.raises(ValueError, match="this table has no column 'b': it has a, c"):
        lw.batches(table[["a", "c"]]).match_columns(known.columns)
    with pytest.raises(ValueError, match="the column 'a' twice"):
        lw.batches(table[["a", "a", "b", "c"]]).match_columns(known.columns)
    with pytest.raises(ValueError, match="2 names for 3 columns"):
        lw.batches(X, columns=["a", "b"])


def test_columns_of_each_of_several_tables_are_matched_by_name():
    pandas = pytest.importorskip("pandas")
    one, two = (pandas.DataFrame((X + i).numpy(), columns=list("abc")) for i in range(2))
    turned = (one[["c", "a", "b"]], two[["b", "c", "a"]].assign(d=1.0))
    for order, wrap in ((one, two), tuple), ((one, two), lambda tables: dict(zip("uv", tables, strict=True))):
        known, other = (lw.batches(wrap(tables), labels=Y) for tables in (order, turned))
        assert len(known.columns) == 6 and other.columns != known.columns
        found = other.match_columns(known.columns)
        assert found.columns == known.columns
        (first, second), (u, v) = (
            torch.utils._pytree.tree_leaves(b.samples(range(10)).inputs) for b in (known, found)
        )
        assert torch.equal(first, u) and torch.equal(second, v)
    known = lw.batches((one, two, Y))
    mixed = lw.batches((X, turned[1], Y)).match_columns(known.columns)  # an array has no names: as it is
    assert torch.equal(mixed[0].inputs[0], X) and torch.equal(mixed[0].inputs[1], X + 1)
    with pytest.raises(ValueError, match=r"the table of input \[1\] has no column 'a': it has b, c"):
        lw.batches((one, two[["b", "c"]], Y)).match_columns(known.columns)


def test_an_index_of_two_tables_reads_each_by_name(tmp_path):
    pandas = pytest.importorskip("pandas")

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)

        def forward(self, a, b):
            return self.left(a).tanh() + self.right(b)

    one, two = (pandas.DataFrame((X + i).numpy(), columns=list("abc")) for i in range(2))
    turned = (one[["c", "a", "b"]], two[["b", "c", "a"]])
    torch.manual_seed(0)
    index = lw.build_index(Two(), lw.batches((one, two), labels=Y), tmp_path / "index")
    expected, found = (
        index.nearest(lw.batches(tables, labels=False), k=3) for tables in ((one, two), turned)
    )
    assert torch.equal(expected.similarities, found.similarities)
    assert found.indices[:, 0].tolist() == list(range(10))


def test_a_gram_matrix_of_two_tables_wants_their_columns_in_one_order():
    pandas = pytest.importorskip("pandas")
    table, net = pandas.DataFrame(X.double().numpy(), columns=list("abc")), torch.nn.Linear(3, 2).double()
    assert torch.equal(lw.similarity(net, table, table.copy()), lw.similarity(net, X.double(), X.double()))
    assert torch.equal(lw.similarity(net, table, X.double()), lw.similarity(net, table, table))
    with pytest.raises(
        ValueError, match="rows are a table of a, b, c, the columns one of b, c, a: which order"
    ):
        lw.GramMatrix(net, table, columns=table[["b", "c", "a"]])
    with pytest.raises(ValueError, match="which order"):  # one of the two is wrong, and nobody knows which
        lw.similarity(net, table[["b", "c", "a"]], table)


def test_a_label_of_a_table_is_a_column_and_text_is_named():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(X.numpy(), columns=list("abc")).assign(kind=Y.numpy())
    data = lw.batches(table, labels="kind")
    assert data.columns == ("a", "b", "c") and torch.equal(data.labels(), Y)
    with pytest.raises(ValueError, match="no column 'sort', only a, b, c, kind"):
        lw.batches(table, labels="sort")
    table["b"] = table["b"].astype(object)
    assert torch.equal(lw.batches(table, labels="kind").samples(range(10)).inputs, X.double())
    table.loc[7, "b"] = "none"
    with pytest.raises(TypeError, match="Column 'b' of the table holds text, 'none' in row 7"):
        lw.batches(table)


def test_labels_that_are_text_are_refused_as_labels():
    pandas = pytest.importorskip("pandas")
    table, words = pandas.DataFrame(X.numpy(), columns=list("abc")), [f"kind {y}" for y in Y.tolist()]
    for labels in (words, np.array(words), pandas.Series(words), pandas.Series(words, dtype="category")):
        for call in (
            lambda labels=labels: lw.batches(table, labels=labels),
            lambda labels=labels: lw.batches((table, labels)),
            lambda labels=labels: lw.batches((X, labels)),
            lambda labels=labels: lw.batches(list(X), labels=labels),
        ):
            with pytest.raises(TypeError, match=r"labels are text, such as 'kind \d'.*np.unique.*classes"):
                call()


def test_labels_beside_batches_are_refused_and_options_are_keywords(tmp_path):
    data = lw.batches((X, Y))
    with pytest.raises(ValueError, match="pass labels when you create them"):
        lw.analyze(torch.nn.Linear(3, 4), data, Y, out=tmp_path / "run")
    for positional in (
        lambda: lw.batches(X, 4, Y),
        lambda: lw.GramMatrix(torch.nn.Linear(3, 4), X, None, lw.INNER_PRODUCT),
        lambda: lw.similarity(torch.nn.Linear(3, 4), X, None, lw.predicted_class),
        lambda: lw.Network(torch.nn.Linear(3, 4), lw.all_outputs, "weight"),
    ):
        with pytest.raises(TypeError, match="positional"):
            positional()


def test_loaders_keep_their_semantics_or_are_refused():
    data = TensorDataset(X)
    assert lw.batches(DataLoader(data, 4, drop_last=True)).n == 8
    assert lw.batches(DataLoader(data, batch_size=None)).n == 10
    for sampler in (BatchSampler(RandomSampler(data), 4, False), [[9, 8], [1]]):
        with pytest.raises(ValueError, match="batch_sampler"):
            lw.batches(DataLoader(data, batch_sampler=sampler))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([X.numpy(), torch.zeros(10).numpy()], "tuple"),
        ([X, list(range(10))], "tuple"),
        (["a", "b"], "tokenize"),
        ("data.csv", "read the data first"),
        (None, "read the data first"),
        (list(DataLoader(TensorDataset(X, torch.zeros(10).long()), 4)), "the loader itself"),
    ],
)
def test_what_is_no_data_set_is_said(data, text):
    with pytest.raises(TypeError, match=text):
        lw.batches(data)


@pytest.fixture(scope="module")
def texts():
    """Tokenizer, data set of tokens and labels, and a classifier in float64."""
    pytest.importorskip("transformers")
    datasets = pytest.importorskip("datasets")
    from transformers import GPT2ForSequenceClassification

    from texts import gpt2_config, sentences, word_tokenizer

    tokenizer = word_tokenizer()
    rows = {**tokenizer(sentences(11)), "label": [i % 3 for i in range(11)]}
    rows.pop("token_type_ids", None)
    torch.manual_seed(0)
    model = GPT2ForSequenceClassification(gpt2_config(tokenizer, num_labels=3)).double().eval()
    return tokenizer, datasets.Dataset.from_dict(rows), model


def loop_gradients(model, loader):
    """Return the gradients of all logits, (n, 3, p), from a loop over a loader, sample by sample."""
    rows = []
    for batch in loader:
        inputs = {name: value for name, value in dict(batch).items() if name != "labels"}
        for i in range(len(inputs["input_ids"])):
            logits = model(**{name: value[i : i + 1] for name, value in inputs.items()}).logits[0]
            own = list(model.parameters())
            each = [torch.autograd.grad(logit, own, retain_graph=True) for logit in logits]
            rows.append(torch.stack([torch.cat([g.flatten() for g in gradients]) for gradients in each]))
    return torch.stack(rows)


def test_loaders_of_hugging_face_data_sets_equal_a_loop_over_them(texts, tmp_path):
    from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

    tokenizer, dataset, model = texts
    collator = DataCollatorWithPadding(tokenizer)
    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], per_device_eval_batch_size=4, disable_tqdm=True
    )
    trainer = Trainer(model, arguments, eval_dataset=dataset, data_collator=collator)
    loaders = [DataLoader(dataset, batch_size=4, collate_fn=collator), trainer.get_eval_dataloader()]
    for loader in loaders:
        gradients = loop_gradients(model, loader)
        expected = torch.einsum("nap,map->nm", gradients, gradients) / 3
        found = lw.GramMatrix(lw.Network(model, lw.all_outputs), loader, kernel=lw.INNER_PRODUCT).dense()
        assert (found - expected).abs().max() < 1e-9 * expected.abs().max()
        labels = lw.batches(loader).labels()
        assert torch.equal(labels, torch.cat([batch["labels"] for batch in loader]))
        assert [b["input_ids"].tolist() for b in loader] == [
            b.inputs["input_ids"].tolist() for b in lw.batches(loader)
        ]


def test_a_sampler_of_batches_that_drops_the_last_is_followed():
    x = torch.arange(10.0)[:, None]
    sampler = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(range(10)), 4, drop_last=True)
    loader = DataLoader(torch.utils.data.TensorDataset(x), batch_sampler=sampler)
    found = lw.batches(loader)
    assert found.n == 8 and found.size == 4 == len(next(iter(loader))[0])


def test_texts_of_several_lengths_are_padded_with_the_pad_id_or_refused_with_the_line_to_write(texts):
    from transformers import DataCollatorWithPadding

    tokenizer, dataset, _ = texts
    columns, items = dataset[:], [dict(row) for row in dataset]
    expected = DataCollatorWithPadding(tokenizer)([dict(row) for row in dataset])
    without_mask = [{k: v for k, v in item.items() if k != "attention_mask"} for item in items]
    tensors = [{k: torch.tensor(v) for k, v in item.items()} for item in items]
    for given in (dataset, dataset.with_format("torch"), columns, items, tensors, without_mask):
        found = lw.batches(given, pad_id=tokenizer.pad_token_id)[0]
        assert torch.equal(found.inputs["input_ids"], expected["input_ids"])
        assert torch.equal(found.inputs["attention_mask"], expected["attention_mask"])
        assert torch.equal(found.labels, expected["labels"])
        with pytest.raises(TypeError, match=r"batches\(dataset, pad_id=tokenizer.pad_token_id\)"):
            lw.batches(given)[0]
    with pytest.raises(TypeError, match="'pixels' has rows of 1 to 2 entries"):
        lw.batches({"pixels": [[1.0], [1.0, 2.0]], "input_ids": [[1], [1]]}, pad_id=0)


def test_token_labels_of_batches_of_several_lengths_are_joined(texts):
    from transformers import DataCollatorForLanguageModeling

    tokenizer, dataset, _ = texts
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    rows = dataset.remove_columns("label")
    whole = collator([dict(row) for row in rows])["labels"]
    assert torch.equal(lw.batches(DataLoader(rows, batch_size=3, collate_fn=collator)).labels(), whole)


def test_how_far_texts_are_padded_does_not_change_their_fingerprint(texts):
    from likewise.identity import read_data

    tokenizer, dataset, _ = texts
    found = [read_data(lw.batches(dataset, size, pad_id=tokenizer.pad_token_id))[0] for size in (1, 4, 11)]
    assert len(set(found)) == 1
    other = dataset.select(range(10, -1, -1))
    assert read_data(lw.batches(other, pad_id=tokenizer.pad_token_id))[0] not in found


def mix(items):
    x, y = default_collate(items)
    return torch.lerp(x, x.roll(1, 0), torch.rand(())), y


COLLATES = {
    "sorts": (
        lambda items: default_collate(sorted(items, key=lambda item: float(item[0].sum()))),
        "changes the order of samples",
    ),
    "turns round": (lambda items: default_collate(items[::-1]), "changes the order of samples"),
    "mixes": (mix, "changes the order of samples"),
    "drops": (lambda items: default_collate(items[:3]), "one row for each"),
}


@pytest.mark.parametrize(("collate", "text"), COLLATES.values(), ids=COLLATES)
def test_collate_functions_that_do_not_keep_the_order_are_refused(collate, text):
    with pytest.raises(ValueError, match=text):
        lw.batches(DataLoader(TensorDataset(X, Y), batch_size=4, collate_fn=collate))


def test_a_loader_reads_what_its_sampler_does():
    data = lw.batches(DataLoader(TensorDataset(X, Y), batch_size=4, sampler=SequentialSampler(range(7))))
    assert data.n == 7 and torch.equal(data[1].inputs, X[4:7])


def test_a_loader_without_batches_converts_each_item():
    data = lw.batches(
        DataLoader(TensorDataset(X, Y), batch_size=None, collate_fn=lambda item: (2 * item[0], item[1]))
    )
    assert torch.equal(data[0].inputs, 2 * X) and torch.equal(data.labels(), Y)


@pytest.mark.parametrize(
    "n, size, count", [(100, 32, 64), (100, 5, 40), (7, 32, 64), (64, 8, 64), (65, 64, 16), (1, 4, 8)]
)
def test_samples_from_all_over_come_in_batches_of_one_batch_of_the_data(n, size, count):
    """A loader may return images of one size in each batch: those of two do not go together."""

    class Images(torch.utils.data.Dataset):
        def __len__(self):
            return n

        def __getitem__(self, i):
            return torch.full((1, 4 + i // size, 4), float(i))

    data = lw.batches(torch.utils.data.DataLoader(Images(), batch_size=size))
    places, some = data.spread(count)
    assert [int(value) for batch in some for value in batch.inputs[:, 0, 0, 0]] == places
    assert len(set(places)) == len(places) <= max(count, 8)
    assert places[0] == 0 and len(places) >= min(n, count) // 2
    assert places[-1] >= n - 1 - min(size, 8)


def test_samples_of_tensors_are_spread_evenly():
    places, some = lw.batches(torch.arange(100.0)[:, None]).spread(12)
    assert some.samples(range(12)).inputs[:, 0].tolist() == places
    assert places == torch.linspace(0, 99, 12).long().tolist()
