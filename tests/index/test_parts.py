"""Parts and several data sets put together."""

import pytest
import torch

import likewise as lw
from likewise.index.shards import share_work


@pytest.fixture
def parts(build, tmp_path):
    def call(n, **options):
        return [build(f"part-{i}", part=(i, n), **options).path for i in range(1, n + 1)]

    return call


@pytest.mark.parametrize("n", [1, 3, 4, 6])
def test_merged_parts_are_the_bytes_of_one_process(build, parts, tmp_path, n, files_of):
    whole = build("whole").path
    merged = lw.merge_indexes(parts(n)[::-1], tmp_path / "merged")
    assert files_of(merged.path) == files_of(whole)


def test_a_part_cannot_be_asked(parts, net, new):
    index = lw.Index(parts(2)[0], model=net)
    with pytest.raises(ValueError, match="part 1 of 2"):
        index.nearest(new)


def test_parts_that_do_not_fit_are_refused_by_name(build, parts, net, data, tmp_path):
    one, two = parts(2)
    out = tmp_path / "merged"
    with pytest.raises(ValueError, match="Parts 2 of 2 are missing"):
        lw.merge_indexes([one], out)
    with pytest.raises(ValueError, match="both part 1 of 2"):
        lw.merge_indexes([one, one], out)
    other = build("other", part=(2, 2), data=(data[0] + 1, data[1])).path
    with pytest.raises(ValueError, match="another data set"):
        lw.merge_indexes([one, other], out)
    with torch.no_grad():
        net.out.bias.add_(1)
    other = build("trained", part=(2, 2)).path
    with pytest.raises(ValueError, match="another model"):
        lw.merge_indexes([one, other], out)
    assert not out.exists()
    lw.merge_indexes([one, two], out)


def test_a_damaged_part_is_noticed_and_redone_alone(build, parts, tmp_path, files_of):
    one, two = parts(2)
    before = files_of(two)
    shard = next(two.glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match="checksum"):
        lw.merge_indexes([one, two], tmp_path / "merged")
    build("part-2", part=(2, 2))
    assert files_of(two) == before
    merged = lw.merge_indexes([one, two], tmp_path / "merged")
    assert files_of(merged.path) == files_of(build("whole").path)


def test_indexes_of_several_data_sets_answer_as_one(build, net, data, new, tmp_path):
    x, y = data
    one, other = build("one", data=(x[:25], y[:25]), width=4096, dtype="float32"), None
    other = build("other", data=(x[25:], y[25:]), width=4096, dtype="float32")
    other.remove([2])
    merged = lw.merge_indexes([one.path, other.path], tmp_path / "merged")
    kept = torch.tensor([i for i in range(40) if i != 27])
    expected = lw.nearest(lw.GramMatrix(net, new, columns=x[kept], centered=True), 5)
    found = lw.Index(merged.path, model=net).nearest(new, 5)
    assert torch.equal(found.indices, kept[expected.indices])
    assert torch.allclose(found.similarities.double(), expected.similarities, atol=1e-5)
    one.merge(other)
    assert torch.equal(one.nearest(new, 5).indices, found.indices)
    assert torch.equal(one.labels, y[kept])
    narrow = build("narrow", width=64)
    with pytest.raises(ValueError, match="another projection"):
        one.merge(narrow)


@pytest.mark.parametrize(
    ("shards", "weight", "ranks"), [(24, 2, 2), (7, 3, 3), (1, 4, 3), (0, 2, 2), (5, 0, 1)]
)
def test_ranks_share_shards_and_the_comparison_evenly(shards, weight, ranks):
    spans, other = [range(10 * i, 10 * i + 10) for i in range(shards)], range(240, 240)
    work = share_work(spans, other, weight, ranks)
    assert [span for span in work if len(span)] == spans
    assert [i % ranks for i, span in enumerate(work) if span is other] == [ranks - 1]
    loads = [sum(len(span) for span in work[rank::ranks]) for rank in range(ranks)]
    loads[-1] += 10 * weight
    assert max(loads) - min(loads) <= 10 or max(loads) == 10 * weight


@pytest.mark.parametrize(
    "labels",
    [None, torch.eye(3).repeat(2, 1), torch.rand(6), torch.tensor([0.0, 1, 2, 0, 1, 2])],
    ids=range(4),
)
def test_labels_of_another_kind_are_neither_added_nor_merged(build, tmp_path, net, data, labels):
    """They are read as one tensor, which would fail from then on, or be of values in place of classes."""
    index, x = build(), data[0][:6] + 1
    more = x if labels is None else (x, labels)
    other = lw.build_index(net, more, tmp_path / "other", width=64)
    for call in (lambda: index.add(more), lambda: index.merge(other)):
        with pytest.raises(ValueError, match=r"[Ll]abels"):
            call()
    with pytest.raises(ValueError, match=r"[Ll]abels"):
        lw.merge_indexes([index.path, other.path], tmp_path / "merged")
    assert torch.equal(lw.Index(index.path, model=net).labels, data[1])
    index.add((x, torch.zeros(6, dtype=torch.int8)))
    assert index.labels.dtype == torch.int64
    assert len(index) == 46
