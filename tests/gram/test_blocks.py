"""All pairs of sketches block by block: each pair of blocks once, the same as whole rows and as plain float64."""

from itertools import combinations_with_replacement

import pytest
import torch

import likewise as lw
import nets
from likewise.distributed import only_part
from likewise.gram import Reducer, Sketches, blocks, pair_source
from likewise.runs.columns import PAIR_STATISTICS, Request, Targets, visit_pairs
from likewise.statistics.neighbors import NearestReducer, PositiveReducer
from likewise.statistics.novelty import ClosenessReducer
from likewise.statistics.target_issues import WeightedSumReducer


class WholeRows(Reducer):
    """A reducer that is shown whole rows only."""

    def __init__(self, reducer):
        self.reducer, self.results, self.centered = reducer, reducer.results, reducer.centered

    def __call__(self, strip):
        assert strip.columns is None
        return self.reducer(strip)


@pytest.fixture
def side(monkeypatch):
    """Sets how many rows and columns a block has at most."""
    return lambda value: monkeypatch.setattr(blocks, "BLOCK", value)


def vectors(n, width=12, seed=0):
    found = torch.randn(n, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = torch.nn.functional.normalize(found + 0.3, dim=1)
    if n > 6:
        found[n // 2] = 0  # a zero gradient
        found[n - 1] = found[1]  # duplicates
    return found


def request_for(n, labels, k=4):
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(n, 3, generator=generator)
    given = {
        "classes": torch.arange(n) % 3,
        "none": None,
        "several": (torch.rand(n, 3, generator=generator) > 0.5).float(),
        "values": 1e3 + torch.randn(n, 3, generator=generator),
    }[labels]
    known = Targets(given, outputs, is_classifier=labels != "values")
    return Request(n, min(k, n - 1), 0.5, known, 0)


def by_rows(source, request):
    """The same statistics, every row with all its columns at a time."""
    found = source.visit(*(WholeRows(statistic.reducer(request)) for statistic in PAIR_STATISTICS))
    names = [name for statistic in PAIR_STATISTICS for name in statistic.names]
    return dict(zip(names, [part for parts in found for part in parts], strict=True))


def assert_close(found, expected, tolerance=1e-11):
    """Compare statistics; of duplicates, either may be the neighbor, since their similarities round differently."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].shape == values.shape and found[name].dtype == values.dtype, name
        if name != "indices":
            assert torch.allclose(found[name].double(), values.double(), rtol=tolerance, atol=tolerance), name


def written_out(v, request, centered):
    """The statistics of all pairs from dense matrices in float64."""
    n, k = len(v), request.k
    h = torch.eye(n, dtype=v.dtype) - 1 / n
    plain = v @ v.T
    left = h @ v
    left[(v == 0).all(1)] = 0
    left = torch.nn.functional.normalize(left, dim=1)
    near = left @ left.T
    similarity = near if centered else plain
    others = similarity - torch.diag(torch.full((n,), torch.inf, dtype=v.dtype))
    plain_others = plain - torch.diag(torch.full((n,), torch.inf, dtype=v.dtype))
    apart = 1 - torch.eye(n, dtype=v.dtype)
    weights = near.clamp(min=0).pow(8) * apart
    values = request.targets.predictions.values.double()
    bins = ((similarity + 1) * 20).floor().clamp(0, 39).long()
    return {
        "similarities": others.sort(1, descending=True).values[:, :k],
        "counts": torch.nn.functional.one_hot(bins, 40).sum(1),
        "hard_neighbors": (similarity >= request.threshold).sum(1),
        "local_density": similarity.clamp(min=0).pow(4).sum(1),
        "closeness": plain_others.sort(1, descending=True).values[:, : min(10, n - 1)].mean(1).nan_to_num(),
        "votes": (near.clamp(min=0).pow(4) * apart) @ request.targets.votes,
        "neighbor_means": torch.where(
            weights.sum(1, keepdim=True) > 0,
            weights @ values / weights.sum(1, keepdim=True),
            (values.sum(0) - values) / max(n - 1, 1) if n > 1 else values,
        ),
        "class_sums": similarity @ request.targets.members,
        "self_similarity": similarity.diagonal(),
        "probe_sums": similarity @ request.probes.double(),
    }, similarity


@pytest.mark.parametrize("labels", ["classes", "none", "several", "values"])
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize(
    ("n", "block"), [(1, 512), (2, 1), (7, 3), (41, 8), (41, 40), (41, 41), (64, 13), (30, 512)]
)
def test_blocks_give_what_is_written_out_and_what_whole_rows_give(n, block, centered, labels, side):
    side(block)
    request, v = request_for(n, labels), vectors(n)
    source = Sketches(v, centered=centered)
    found = visit_pairs(source, request)
    assert_close(found, by_rows(source, request))
    expected, similarity = written_out(v, request, centered)
    for name, values in expected.items():
        assert torch.allclose(found[name].double(), values.double(), rtol=1e-9, atol=1e-9), name
    assert torch.allclose(similarity.gather(1, found["indices"]), found["similarities"])
    assert (found["indices"] != torch.arange(n)[:, None]).all()


def test_float32_is_as_good_by_blocks(side):
    side(16)
    request, v = request_for(100, "classes"), vectors(100)
    found = visit_pairs(Sketches(v.float(), centered=True), request)
    expected, _ = written_out(v, request, True)
    for name in expected.keys() - {
        "counts",
        "hard_neighbors",
    }:  # which may round to the other side of an edge
        assert torch.allclose(found[name].double(), expected[name].double(), rtol=2e-5, atol=2e-5), name


@pytest.mark.parametrize("shape", [(1, 1), (5, 40), (40, 5), (33, 64)])
@pytest.mark.parametrize("block", [1, 8, 512])
def test_rectangular_blocks(shape, block, side):
    side(block)
    rows, columns = vectors(shape[0], seed=3), vectors(shape[1])
    values = torch.randn(shape[1], 2, dtype=torch.float64)
    own = torch.arange(shape[0]) % shape[1]
    k = min(4, shape[1] - 1)
    reducers = (NearestReducer(k), WeightedSumReducer(values), PositiveReducer(3), ClosenessReducer(k, own))
    for centered in (False, True):
        source = Sketches(rows, columns=columns, centered=centered)
        found, expected = source.visit(*reducers), source.visit(*map(WholeRows, reducers))
        for some, others in zip(found, expected, strict=True):
            for a, b in zip(some, others, strict=True):
                assert a.dtype == b.dtype
                assert torch.allclose(a.double(), b.double(), atol=1e-12) or not a.is_floating_point()


def test_equal_similarities_go_to_the_first_sample(side):
    v = torch.eye(4, dtype=torch.float64).repeat(6, 1)  # six copies of each, all similarities 0 or 1
    expected = None
    for block in (1, 5, 7, 24, 512):
        side(block)
        ((indices, similarities),) = Sketches(v).visit(NearestReducer(7))
        for i in range(24):
            copies = [j for j in range(24) if j % 4 == i % 4 and j != i]
            different = [j for j in range(24) if j % 4 != i % 4]
            assert indices[i].tolist() == copies + different[:2]
        assert expected is None or torch.equal(similarities, expected)
        expected = similarities


def test_each_pair_of_blocks_is_computed_once(side, monkeypatch):
    side(4)
    computed = []
    plain = Sketches._block

    def count(self, here, there):
        computed.append((here, there))
        return plain(self, here, there)

    monkeypatch.setattr(Sketches, "_block", count)
    visit_pairs(Sketches(vectors(20), centered=True), request_for(20, "classes"))
    spans = [range(start, start + 4) for start in range(0, 20, 4)]
    assert computed == list(combinations_with_replacement(spans, 2))


@pytest.mark.parametrize("parts", [2, 3, 7])
def test_shares_of_the_rows_have_the_bits_of_all(parts, side, monkeypatch):
    side(6)
    reducers = [statistic.reducer(request_for(44, "classes")) for statistic in PAIR_STATISTICS[:7]]
    source = Sketches(vectors(44).float(), centered=True)
    whole = source.visit(*reducers)
    total = None
    for i in range(1, parts + 1):
        with only_part("pairs of sketches", i, parts):
            found = source.visit(*reducers)
        total = (
            found
            if total is None
            else [tuple(a + b for a, b in zip(x, y, strict=True)) for x, y in zip(total, found, strict=True)]
        )
    for some, others in zip(total, whole, strict=True):
        for a, b in zip(some, others, strict=True):
            assert torch.equal(a, b)


def test_memory_bounds_the_blocks(monkeypatch):
    seen = []
    plain = Sketches._block

    def note(self, here, there):
        seen.append(len(here) * len(there))
        return plain(self, here, there)

    monkeypatch.setattr(Sketches, "_block", note)
    for max_memory in (1, 2**12, 2**16):
        seen.clear()
        Sketches(vectors(50), max_memory=max_memory).visit(NearestReducer(3))
        assert max(seen) * blocks.BLOCK_BYTES <= max(max_memory, blocks.BLOCK_BYTES)


def test_a_reducer_of_whole_rows_beside_others_keeps_its_place(side):
    side(5)
    source = Sketches(vectors(23), centered=True)
    nearest, density = NearestReducer(3), PositiveReducer(4)
    first, second, third = source.visit(nearest, WholeRows(density), density)
    assert len(first) == 2
    assert torch.allclose(second[0], third[0])


@pytest.mark.parametrize("net", [nets.mlp, nets.conv])
@pytest.mark.parametrize("outputs", [1, 3])
def test_sketches_of_several_outputs(net, outputs, side):
    model, x = nets.case(net, outputs, 19)
    gram = lw.GramMatrix(model, x, centered=True)
    source = pair_source(gram, 64)
    reducers = NearestReducer(4), PositiveReducer(4), ClosenessReducer(4)
    expected = source.visit(*map(WholeRows, reducers))
    side(5)
    for some, others in zip(source.visit(*reducers), expected, strict=True):
        assert torch.allclose(some[-1], others[-1], atol=1e-5)


def test_progress_goes_by_rows(side, monkeypatch):
    side(10)
    spans = []
    join = blocks.join_results
    monkeypatch.setattr(
        blocks, "join_results", lambda f, s, *more: join(lambda w: spans.append(w) or f(w), s, *more)
    )
    Sketches(vectors(25)).visit(NearestReducer(3))
    assert [len(span) for span in spans] == [9, 9, 7]
