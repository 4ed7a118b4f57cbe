"""The record of a training run against loops that are written out."""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import likewise as lw
from likewise import files
from likewise import watch as watch_module

RESULTS = ("margins", "early_margins", "losses", "confidence", "variability", "correctness", "forgetting")


def random_updates(n, classes, steps, seed=0, batch=16):
    """Batches of (logits, labels, ids) with ids that repeat, also within a batch."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (n,), generator=torch.Generator().manual_seed(99))
    for _ in range(steps):
        ids = torch.randint(0, n, (batch,), generator=rng)
        yield torch.randn(batch, classes, generator=rng, dtype=torch.float64) * 3, labels[ids], ids


def written_out(n, updates):
    """Every result by its definition, from lists of all updates of each sample."""
    rows = [[] for _ in range(n)]
    for logits, labels, ids in updates:
        batch = []
        for z, y in zip(logits.double(), labels.tolist(), strict=True):
            others = [float(v) for k, v in enumerate(z) if k != y]
            margin = float(z[y]) - max(others)
            chance = math.exp(float(z[y])) / sum(math.exp(float(v)) for v in z)
            batch.append((margin, -math.log(chance), chance, margin > 0))
        for place, i in enumerate(ids.tolist()):
            rest = [row[3] for k, row in enumerate(batch) if k != place]
            right = np.mean(rest) if rest else math.nan
            rows[i].append((*batch[place], (1 - right) * right**2 if rest else 1))
    found = {name: np.full(n, np.nan) for name in RESULTS}
    for i, seen in enumerate(rows):
        if not seen:
            continue
        margins, losses, chances, correct, weights = zip(*seen, strict=True)
        found["early_margins"][i] = np.average(margins, weights=np.array(weights) + 1e-6)
        found["margins"][i], found["losses"][i] = np.mean(margins), np.mean(losses)
        found["confidence"][i], found["variability"][i] = np.mean(chances), np.std(chances)
        found["correctness"][i] = np.mean(correct)
        found["forgetting"][i] = sum(a and not b for a, b in itertools.pairwise(correct))
    return found


def assert_same(watch, expected, tolerance=1e-9):
    for name in RESULTS:
        np.testing.assert_allclose(
            getattr(watch, name), expected[name], atol=tolerance, rtol=tolerance, err_msg=name
        )


@pytest.mark.parametrize("steps", [1, 7, 200])  # fewer and more than wait before they are added
def test_results_are_those_of_written_out_loops(steps):
    n, updates = 23, list(random_updates(23, 5, steps))
    watch = lw.Watch(n)
    for step in updates:
        watch.update(*step)
    assert_same(watch, written_out(n, updates))


def test_results_do_not_depend_on_when_they_are_read():
    updates = list(random_updates(11, 3, 90))
    read, unread = lw.Watch(11), lw.Watch(11)
    for step in updates:
        read.update(*step)
        read.scalars()
        unread.update(*step)
    assert_same(read, {name: getattr(unread, name).numpy() for name in RESULTS}, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_is_read_exactly_and_added_in_float64(dtype):
    updates = [(z.to(dtype), y, i) for z, y, i in random_updates(9, 4, 30)]
    watch = lw.Watch(9)
    for step in updates:
        watch.update(*step)
    assert watch.margins.dtype == torch.float64
    assert_same(watch, written_out(9, updates), 1e-5)


def test_losses_near_zero_and_far_above_are_exact():
    watch = lw.Watch(2)
    watch.update(
        torch.tensor([[40.0, 0.0, 0.0], [0.0, 900.0, 0.0]]), torch.tensor([0, 0]), torch.tensor([0, 1])
    )
    np.testing.assert_allclose(watch.losses, [2 * math.exp(-40), 900], rtol=1e-5)


def test_one_logit_is_that_of_class_one():
    z, y = torch.tensor([1.5, -0.5]), torch.tensor([1, 1])
    flat, column = lw.Watch(2), lw.Watch(2)
    flat.update(z, y, [0, 1])
    column.update(z[:, None], y[:, None], [0, 1])
    assert flat.margins.tolist() == column.margins.tolist() == [1.5, -0.5]


def test_samples_never_seen_are_nan_and_named():
    watch = lw.Watch(4)
    watch.update(torch.eye(3)[:2], [0, 1], [3, 0])
    for name in RESULTS:
        assert getattr(watch, name).isnan().tolist() == [False, True, True, False]
    assert watch.unseen.tolist() == [1, 2] and watch.labels.tolist() == [1, -1, -1, 0]
    assert "2 never seen" in repr(watch) and watch.scalars()["watch/unseen"] == 2
    with pytest.warns(UserWarning, match="2 of 4 samples were never seen in training: 1, 2"):
        watch.margins_for(torch.tensor([1, 0, 0, 0]))


def test_samples_without_finite_logits_are_left_out_and_counted():
    watch = lw.Watch(2)
    watch.update(torch.tensor([[1.0, 0.0], [math.nan, 0.0]]), [0, 0], [0, 1])
    watch.update(torch.tensor([[math.inf, 0.0], [3.0, 1.0]]), [0, 0], [0, 1])
    with pytest.warns(UserWarning, match="2 updates with NaN or infinite logits"):
        assert watch.margins.tolist() == [1, 2]
    assert watch.left_out.tolist() == [1, 1]


def test_updates_count_once_where_warnings_are_errors():
    watch = lw.Watch(2)
    watch.update(torch.tensor([[1.0, 0.0], [torch.nan, 0.0]]), torch.tensor([0, 0]), torch.tensor([0, 1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="left out"):
            watch.updates  # noqa: B018
        assert watch.updates.tolist() == [1, 0] and watch.left_out.tolist() == [0, 1]


def test_masked_classes_do_not_count():
    watch = lw.Watch(1)
    watch.update(torch.tensor([[1.0, 0.25, -math.inf]]), [0], [0])
    assert watch.margins.tolist() == [0.75]


@pytest.mark.parametrize(
    "logits, labels, ids, message",
    [
        (torch.zeros(2, 3), [0, 1], [0, 5], "ids must be from 0 to 4 for 5 samples, found 5"),
        (torch.zeros(2, 3), [0, 1], [0, -1], "found -1"),
        (torch.zeros(2, 3), [0, 3], [0, 1], "labels must be from 0 to 2 for 3 classes, found 3"),
        (torch.zeros(2, 3), [0, -100], [0, 1], "label -100"),
        (torch.zeros(2, 7, 3), [0, 1], [0, 1], r"found \(2, 7, 3\).*For tokens or pixels"),
        (torch.zeros(2, 3), [0], [0, 1], r"labels must have shape \(2,\)"),
        (torch.zeros(2, 3), torch.eye(3)[:2], [0, 1], "labels.argmax"),
        (torch.zeros(2, 3), [0.5, 1.0], [0, 1], "labels must be integers"),
        (torch.zeros(2, 3), [0, 1], [True, False], "ids must be integers"),
        (torch.zeros(2, 3), [0, 1], ["a", "b"], "ids"),
        (torch.zeros(2, 3, dtype=torch.long), [0, 1], [0, 1], "logits must be floating-point"),
    ],
)
def test_faulty_updates_are_refused_with_what_to_do(logits, labels, ids, message):
    with pytest.raises((ValueError, TypeError), match=message):
        lw.Watch(5).update(logits, labels, ids)


def test_labels_that_change_during_training_are_refused():
    watch = lw.Watch(3)
    watch.update(torch.zeros(1, 3), [1], [2])
    watch.update(torch.zeros(1, 3), [0], [2])
    for _ in range(2):  # no number is returned later either
        with pytest.raises(ValueError, match="of sample 2 from 1 to 0"):
            _ = watch.margins


def test_updates_wait_for_a_bounded_number_of_steps():
    watch = lw.Watch(16)
    for step in random_updates(16, 3, 3 * watch_module.PENDING_UPDATES + 1):
        watch.update(*step)
    assert len(watch._pending) == 1


def test_tensors_given_to_an_update_may_be_overwritten():
    watch, (z, y, i) = lw.Watch(8), next(random_updates(8, 3, 1))
    expected = written_out(8, [(z.clone(), y.clone(), i.clone())])
    watch.update(z, y, i)
    z.zero_(), y.zero_(), i.zero_()
    assert_same(watch, expected)


def test_a_record_is_read_back_as_it_was_and_goes_on(tmp_path):
    updates = list(random_updates(13, 4, 40))
    whole, first = lw.Watch(13), lw.Watch(13)
    for step in updates:
        whole.update(*step)
    for step in updates[:15]:
        first.update(*step)
    first.save(tmp_path / "new" / "run.parquet")
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["run.parquet"]
    again = lw.Watch.load(tmp_path / "new" / "run.parquet")
    assert again.table().equals(first.table())
    for step in updates[15:]:
        again.update(*step)
    assert_same(again, {name: getattr(whole, name).numpy() for name in RESULTS}, 1e-12)


def test_a_save_that_fails_leaves_the_record_before(tmp_path, monkeypatch):
    path, watch = tmp_path / "run.parquet", lw.Watch(3)
    watch.save(path)
    before = path.read_bytes()
    watch.update(torch.eye(3), [0, 1, 2], [0, 1, 2])
    monkeypatch.setattr(files.os, "fsync", lambda number: (_ for _ in ()).throw(OSError(5, "broken")))
    with pytest.raises(OSError, match="broken"):
        watch.save(path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_files_that_are_no_record_are_refused(tmp_path):
    import pandas

    other, text = tmp_path / "other.parquet", tmp_path / "text.parquet"
    pandas.DataFrame({"a": [1]}).to_parquet(other)
    text.write_text("text")
    for path in (other, text):
        with pytest.raises(ValueError, match="is not a record"):
            lw.Watch.load(path)
    with pytest.raises(FileNotFoundError, match="There is no record"):
        lw.Watch.load(tmp_path / "none.parquet")


def test_merged_ranks_have_the_results_of_one_process():
    """Each sample is seen once an epoch, by a rank that changes; ranks are merged after each epoch."""
    n, classes, epochs = 24, 3, 6
    rng = torch.Generator().manual_seed(3)
    labels = torch.randint(0, classes, (n,), generator=rng)
    one, total = lw.Watch(n), lw.Watch(n)
    for _ in range(epochs):
        order, logits = torch.randperm(n, generator=rng), torch.randn(n, classes, generator=rng)
        ranks = [total.empty_part() for _ in range(3)]
        for start in range(0, n, 4):
            ids = order[start : start + 4]
            one.update(logits[ids], labels[ids], ids)
            ranks[start // 4 % 3].update(logits[ids], labels[ids], ids)
        for rank in ranks:
            total.merge(rank)
    assert_same(total, {name: getattr(one, name).numpy() for name in RESULTS}, 1e-12)
    assert one.forgetting.sum() > 0


def test_merging_does_not_depend_on_the_order_of_the_records():
    updates = list(random_updates(9, 3, 8))
    whole = lw.Watch(9)
    for step in updates:
        whole.update(*step)
    for swapped in (False, True):
        early = lw.Watch(9)
        for step in updates[:4]:
            early.update(*step)
        late = early.empty_part()
        for step in updates[4:]:
            late.update(*step)
        into, other = (late, early) if swapped else (early, late)
        into.merge(other)
        assert_same(into, {name: getattr(whole, name).numpy() for name in RESULTS}, 1e-12)


def test_parts_of_a_record_travel_as_tensors():
    a, b, both = lw.Watch(10), lw.Watch(10), lw.Watch(10)
    for k, step in enumerate(random_updates(10, 3, 6)):
        (a, b)[k % 2].update(*step)
    both.merge(a)
    both.merge(b)
    for span in (slice(0, 7), slice(7, 10)):
        a.merge_part(span, b.part(span))
    assert a.table().equals(both.table())


@pytest.mark.parametrize(
    "other, message",
    [
        (lambda: lw.Watch(4), "of 4 samples cannot be merged with one of 3"),
        (lambda: watch_of([1]), "of sample 0 from 0 to 1"),
        (lambda: {}, "other must be a Watch"),
    ],
)
def test_records_of_other_samples_are_not_merged(other, message):
    watch = watch_of([0])
    with pytest.raises((ValueError, TypeError), match=message):
        watch.merge(other())
    with pytest.raises(ValueError, match="itself"):
        watch.merge(watch)


def watch_of(labels):
    watch = lw.Watch(3)
    watch.update(torch.zeros(len(labels), 2), labels, list(range(len(labels))))
    return watch


def test_margins_are_refused_beside_labels_of_other_samples():
    watch = watch_of([0, 1, 0])
    assert watch.margins_for(torch.tensor([0, 1, 0])).shape == (3,)
    with pytest.raises(ValueError, match="2 of 3 samples were trained with another label than given: 0, 1"):
        watch.margins_for(torch.tensor([1, 0, 0]))
    with pytest.raises(ValueError, match="record is of 3 samples"):
        watch.margins_for(torch.tensor([0, 1]))


def trained(watch):
    """The weights of a small network with dropout and batch normalization, watched or not."""
    torch.manual_seed(0)
    x = torch.randn(60, 6)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    loader = DataLoader(data if watch is None else lw.WithIndex(data), 16, shuffle=True)
    for _ in range(3):
        for x, y, *ids in loader:
            logits = model(x)
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits, y).backward()
            optimizer.step()
            if watch is not None:
                watch.update(logits, y, ids[0])
                watch.scalars()
    return model.state_dict()


def test_weights_are_bit_identical_with_and_without_a_watch():
    watch = lw.Watch(60)
    plain, watched = trained(None), trained(watch)
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
    assert (watch.updates == 3).all()


def test_positions_survive_subsets_and_samplers():
    data = lw.WithIndex(TensorDataset(torch.arange(20.0), torch.arange(20)))
    loader = DataLoader(Subset(data, list(range(5, 15))), 4, shuffle=True)
    rows = [torch.stack([y, ids]) for _, y, ids in loader]
    y, ids = torch.cat(rows, 1)
    assert torch.equal(y, ids) and ids.sort().values.tolist() == list(range(5, 15))


class Batched:
    """A data set that reads several samples in one call, as those of Hugging Face do."""

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return {"x": torch.tensor(float(i)), "labels": i % 2}

    def __getitems__(self, places):
        return [self[i] for i in places]


def test_positions_join_mappings_tuples_and_single_values():
    assert lw.WithIndex(Batched())[-1]["sample_index"] == 5
    batch = next(iter(DataLoader(lw.WithIndex(Batched()), 3)))
    assert batch["sample_index"].tolist() == [0, 1, 2] and batch["x"].tolist() == [0, 1, 2]
    assert lw.WithIndex([[7, 8]])[0] == (7, 8, 0) and lw.WithIndex(["a", "b"])[1] == ("b", 1)
    with pytest.raises(ValueError, match="do not wrap the data set twice"):
        lw.WithIndex(lw.WithIndex(Batched()))[0]
    for wrong in (iter([1]), {"x": [1]}, DataLoader([1, 2])):
        with pytest.raises(TypeError, match="dataset must"):
            lw.WithIndex(wrong)


def test_batches_of_few_and_many_logits_and_classes_mix(monkeypatch):
    monkeypatch.setattr(watch_module, "PENDING_LOGITS", 60)
    watch, updates = lw.Watch(20), []
    for k, (z, y, i) in enumerate(random_updates(20, 3, 40)):
        size = 16 if k % 3 else 8
        z = torch.cat([z, torch.randn(16, 2, dtype=z.dtype)], 1) if k % 5 == 0 else z.float()
        updates.append((z[:size], y[:size], i[:size]))
        watch.update(*updates[-1])
    assert {part.logits is None for part in watch._pending} == {True, False}
    assert_same(watch, written_out(20, updates), 1e-5)


def test_an_empty_batch_adds_nothing():
    watch = lw.Watch(2)
    watch.update(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long))
    assert watch.updates.sum() == 0


def test_updates_after_everything_is_learned_hardly_count():
    watch, labels, ids = lw.Watch(4), torch.tensor([0, 0, 1, 1]), torch.arange(4)
    for _ in range(3):  # the last two labels are contradicted, and then memorized
        watch.update(torch.tensor([[2.0, 0.0]] * 4), labels, ids)
    for _ in range(50):
        watch.update(torch.tensor([[9.0, 0.0]] * 2 + [[0.0, 9.0]] * 2), labels, ids)
    assert (watch.margins > 8).all()
    assert watch.early_margins.tolist() == pytest.approx([2, 2, -2, -2], abs=0.01)


def test_a_record_without_weighted_margins_counts_updates_alike(tmp_path):
    import pyarrow.parquet

    watch = lw.Watch(11)
    for step in random_updates(11, 3, 9):
        watch.update(*step)
    watch.save(tmp_path / "new.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "new.parquet")
    metadata = {**table.schema.metadata, b"likewise.watch": b"1"}
    older = table.drop_columns(["weight_sum", "weighted_margin_sum"]).replace_schema_metadata(metadata)
    pyarrow.parquet.write_table(older, tmp_path / "old.parquet")
    found = lw.Watch.load(tmp_path / "old.parquet")
    np.testing.assert_allclose(found.early_margins, watch.margins, rtol=1e-12)
