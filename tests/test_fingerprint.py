"""Fingerprints tell what differs, whatever the layout, and let rounding pass."""

import numpy as np
import pytest
import torch

import likewise as lw
import nets
from likewise.fingerprint import CACHED_CHUNK, ChecksumCache, Close, Fingerprint, checksums, differing


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_checksums_tell_every_change_and_exchange_and_ignore_the_layout(dtype):
    x = torch.randn(30, 40).mul(3)
    x = x > 0 if dtype == torch.bool else x.to(dtype)
    changed, exchanged = x.clone(), x.clone()
    changed[29, 39] = ~changed[29, 39] if dtype == torch.bool else changed[29, 39] + 1
    places = (x != x[0, 0]).nonzero()[0]
    exchanged[0, 0], exchanged[tuple(places)] = x[tuple(places)].clone(), x[0, 0].clone()
    same = x.T.contiguous().T
    found = checksums([x, same, changed, exchanged])
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_checksums_of_many_numbers_are_sums_weighted_by_their_places():
    x = torch.randint(-9, 9, (CACHED_CHUNK + 1000,))
    expected = sum((2 * i + 1) * value for i, value in enumerate(x.tolist())) % 2**64
    assert checksums([x]) == [f"{expected:016x}"]


def test_checksums_of_a_model_follow_writes_also_behind_the_version_counter():
    array = np.zeros(1000)
    weight, cache = torch.zeros(1000), ChecksumCache()
    tensors = {"weight": weight, "shared": torch.from_numpy(array)}
    found = [cache.get(tensors)]
    weight[5] += 1
    found.append(cache.get(tensors))
    weight.data.add_(1)
    found.append(cache.get(tensors))
    array += 1
    found.append(cache.get(tensors))
    assert len({str(one) for one in found}) == 4
    assert cache.get(tensors) == found[-1]


def test_floats_agree_within_rounding_and_numbers_of_ranks_tell_who_differs():
    exact = [{"threshold": Close([0.5], 0.5, 1e-9)}] * 2 + [{"threshold": Close([0.6], 0.6, 1e-9)}]
    assert differing(exact) == {"threshold": [0, 0, 1]}
    computed = []
    for noise in (0, 1e-7, 1e-2):
        fingerprint = Fingerprint()
        fingerprint.add("weights", torch.ones(100) + noise)
        computed.append(fingerprint.entries["options"])
    assert differing(computed[:2]) == {}
    assert differing(computed) == {"weights": [0, 0, 1]}


def test_functions_are_told_apart_by_what_they_capture():
    def over(threshold):
        return lambda k: (k > threshold).sum(1)

    entries = []
    for threshold in (1, 1, 2):
        fingerprint = Fingerprint()
        fingerprint.add("reduce", over(threshold))
        entries.append(fingerprint.entries["options"])
    assert differing(entries) == {"threshold": [0, 0, 1]}


def test_a_network_s_fingerprint_is_that_of_its_copy_on_another_rank():
    entries = []
    for _ in range(2):
        model, x = nets.case(nets.SmallTransformer, 2, 4)
        fingerprint = Fingerprint()
        fingerprint.add("gram", lw.GramMatrix(lw.Network(model, lw.one_output(1)), x))
        entries.append(fingerprint.entries)
    assert set(entries[0]) == {"weights", "data", "options"}
    for kind in entries[0]:
        assert differing([one[kind] for one in entries]) == {}
