"""Several real processes give the numbers of one, or refuse by name; a lost one ends the others."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import likewise as lw
import nets
from likewise.distributed import record_passes
from likewise.gram import ProductReducer, Sketches
from likewise.statistics.neighbors import NearestReducer, VotesReducer
from likewise.statistics.novelty import ClosenessReducer

HERE = Path(__file__).parent


def results():
    """Every kind of use, as plain numbers. Three batches, so that two processes share unevenly."""
    model, x = nets.case(nets.conv, 2, 11)
    y = torch.arange(11) % 2
    gram = lw.GramMatrix(model, lw.batches((x, y), size=4))
    few = lw.GramMatrix(model, lw.batches(x[:2], size=4), lw.batches(x, size=20))
    weights = torch.linspace(-1, 1, 22, dtype=torch.float64).view(11, 2, 1)
    denoised = lw.denoising(gram, draws=8)
    return {
        "soft": lw.soft_neighbors(gram),
        "hard": lw.hard_neighbors(gram, 0.5),
        "nearest": lw.nearest(gram, 3).indices,
        "product": gram @ weights,
        "dense": gram.dense(),
        "few": lw.soft_neighbors(few),
        "centered": lw.soft_neighbors(lw.GramMatrix(model, lw.batches(x, size=4), centered=True)),
        "uncertainty": lw.uncertainty(gram),
        "factor": denoised.factor,
        "shift": denoised.shift,
        "suspicion": lw.label_suspicion(gram).suspicion,
        "classes": lw.class_similarity(gram).mean,
    }


def sketched():
    """All pairs of sketches in three blocks of rows, which processes share unevenly."""
    vectors = torch.randn(1100, 8, generator=torch.Generator().manual_seed(0))
    members = torch.nn.functional.one_hot(torch.arange(1100) % 3).double()
    source = Sketches(torch.nn.functional.normalize(vectors + 0.3, dim=1), centered=True)
    reducers = NearestReducer(5), VotesReducer(members), ClosenessReducer(5), ProductReducer(members)
    (places, similarities), (votes,), (closeness,), (sums,) = source.visit(*reducers)
    return {"places": places, "similar": similarities, "votes": votes, "close": closeness, "sums": sums}


def ragged():
    """Sketches of texts of one token in two batches and of several in the third, which only one of two ranks meets."""
    torch.manual_seed(0)
    lengths = [1] * 8 + [3, 2, 3, 1]
    texts = [torch.randint(20, (length,)) for length in lengths]
    loader = torch.utils.data.DataLoader(
        texts,
        batch_size=4,
        collate_fn=lambda items: torch.nn.utils.rnn.pad_sequence(items, batch_first=True),
    )
    gram = lw.GramMatrix(lw.Network(nets.Words().double(), lw.all_outputs), lw.batches(loader))
    return {"similar": lw.nearest(gram, 11, sketch=64).similarities}


def queries():
    """Sketches of one batch of rows, which one of two ranks computes, and of columns, which both do."""
    model, x = nets.case(nets.mlp, 2, 60)
    gram = lw.GramMatrix(model, lw.batches(x[:5] + 1, size=8), lw.batches(x, size=8))
    return {"similar": lw.nearest(gram, 11, sketch=64).similarities}


def few_rows():
    """Few rows with many columns, whose gradients do not fit: by features, and by directions of the rows."""
    found = {}
    for rows, memory in ((10, 2**17), (3, 2**18)):
        model, x = nets.case(nets.mlp, 2, 60)
        for centered in (False, True):
            gram = lw.GramMatrix(
                model,
                lw.batches(x[:rows] + 1, size=4),
                lw.batches(x, size=8),
                max_memory=memory,
                centered=centered,
            )
            with record_passes(time.perf_counter) as passes:
                found[f"{rows} {centered}"] = gram.dense()
            found[f"passes {rows} {centered}"] = [one.what for one in passes]
    return found


def torchrun(script, *arguments, ranks=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, script, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_that_share_pairs_of_sketches_give_the_bits_of_one(ranks, tmp_path):
    done = torchrun(HERE / "two_processes.py", "sketched", tmp_path, ranks=ranks)
    assert done.returncode == 0, done.stderr
    for rank in range(ranks):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for name, values in sketched().items():
            assert torch.equal(torch.tensor(found[name], dtype=values.dtype), values), name


@pytest.mark.distributed
@pytest.mark.parametrize("use", [ragged, queries], ids=["parts that change on one", "rows of one"])
def test_gradients_that_ranks_meet_differently_are_sketched_alike_on_all(use, tmp_path):
    done = torchrun(HERE / "two_processes.py", use.__name__, tmp_path)
    assert done.returncode == 0, done.stderr
    expected = use()["similar"]
    for rank in range(2):
        found = torch.tensor(json.loads((tmp_path / f"{rank}.json").read_text())["similar"])
        assert (found - expected).abs().max() < 1e-5


@pytest.mark.distributed
def test_two_processes_give_the_numbers_of_one(tmp_path):
    done = torchrun(HERE / "two_processes.py", "results", tmp_path)
    assert done.returncode == 0, done.stderr
    expected = results()
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for name, value in expected.items():
            difference = torch.tensor(found[name], dtype=torch.float64) - value
            assert difference.abs().max() < 1e-10, (rank, name)


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_columns_of_few_rows_are_shared_and_give_the_bytes_of_one_process(tmp_path, ranks):
    done = torchrun(HERE / "two_processes.py", "few", tmp_path, ranks=ranks)
    assert done.returncode == 0, done.stderr
    for name, value in few_rows().items():
        found = [json.loads((tmp_path / f"{rank}.json").read_text())[name] for rank in range(ranks)]
        if name.startswith("passes"):
            assert "reduction of pairs" not in value
            # or features that are kept: their pass is shared by columns
            assert all({"reduction of pairs", "features"} & set(one) for one in found), (name, found)
        elif name.endswith("False"):
            assert all(one == value.tolist() for one in found), name
        else:  # sums over all samples, for the mean, are of other terms
            assert all(
                (torch.tensor(one, dtype=torch.float64) - value).abs().max() < 1e-12 for one in found
            ), name


@pytest.mark.distributed
def test_an_error_in_one_process_is_raised_in_all_and_different_weights_are_refused(tmp_path):
    done = torchrun(HERE / "two_processes.py", "errors", tmp_path)
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert all("not finite" in one["text"] for one in found), found
    assert found[0]["difference"] == found[1]["difference"]
    assert "different weights and data" in found[0]["difference"]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """What each rank of each scenario of faulty_ranks.py found; started once."""
    folder = tmp_path_factory.mktemp("ranks")
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, HERE / "faulty_ranks.py", folder]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr

    def results(scenario, name=""):
        found = {}
        for rank in range(3):
            path = folder / f"{scenario}-{rank}.json"
            if path.exists():
                found[rank] = json.loads(path.read_text()).get(name)
        return {rank: result for rank, result in found.items() if result is not None}

    return results


DIFFERENCES = {
    "weights": ("weights", "6.weight"),
    "buffers": ("weights", "1.running_mean"),
    "weights_behind_the_version_counter": ("weights", "6.weight"),
    "data": ("data", "rows"),
    "order_of_data": ("data", "rows"),
    "number_of_samples": ("data", "number of rows"),
    "data_set_read_by_item": ("data", "rows"),
    "batch_size": ("options", "batches"),
    "threshold": ("options", "threshold"),
    "kernel": ("options", "exponents[0]"),
    "readout": ("options", "index"),
    "weights_of_a_product": ("options", "weights"),
    "different_calls": ("calls", "at"),
    "order_of_calls": ("calls", "at"),
}


@pytest.mark.distributed
@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_differ_are_refused_by_name_on_every_rank(what, faulty):
    kind, name = DIFFERENCES[what]
    found = faulty("different", what)
    assert {rank: result.get("error") for rank, result in found.items()} == dict.fromkeys(
        range(3), "RankMismatchError"
    )
    assert len({result["text"] for result in found.values()}) == 1
    groups = found[0]["differences"][kind][name]
    assert groups[0] not in groups[1:]  # the scenarios set rank 0 apart
    assert kind in found[0]["text"]


@pytest.mark.distributed
def test_a_group_goes_on_after_differences_and_errors(faulty):
    errors = faulty("different", "error")
    assert [errors[rank]["error"] for rank in range(3)] == ["RemoteError", "KeyError", "RemoteError"]
    model, x = nets.case(nets.conv, 2, 12)
    expected = lw.soft_neighbors(lw.GramMatrix(model, x))
    for result in faulty("different", "same").values():
        assert torch.allclose(torch.tensor(result["value"], dtype=torch.float64), expected)


LOST = {
    "ends_inside": (1, "ended before"),
    "ends_before_the_first_pass": (1, "ended before"),
    "rank_0_ends_before_the_first_pass": (0, "ended before"),
    "rank_0_ends_between_passes": (0, "ended before"),
    "leaves_without_the_call": (1, "script was through without this call"),
    "is_stopped": (1, "no sign of life for 2 s"),
    "rank_0_is_stopped": (0, "no sign of life for 2 s"),
    "is_stopped_before_the_first_pass": (1, "not come to"),
    "waits_elsewhere": (1, "is alive but has not come"),
}


@pytest.mark.distributed
@pytest.mark.parametrize("how", LOST)
def test_a_rank_that_is_lost_ends_the_others_within_five_seconds_and_is_named(how, faulty):
    lost, words = LOST[how]
    found = faulty(how)
    assert set(found) == {0, 1, 2} - {lost}
    for result in found.values():
        assert (result.get("error"), result.get("rank")) == ("RankLostError", lost), result
        assert words in result["text"]
        assert result["seconds"] < 5


@pytest.mark.distributed
def test_a_rank_that_is_late_but_alive_is_waited_for(faulty):
    found = faulty("comes_late")
    assert len(found) == 3
    assert all("value" in result for result in found.values()), found


@pytest.mark.parametrize("items", [1, 5])
def test_one_process_is_a_plain_loop(items):
    from likewise.distributed import join_results, sum_results, world_size

    spans = [range(i, i + 1) for i in range(items)]
    assert world_size() == 1
    squares = join_results(lambda span: torch.tensor([span.start**2]), spans, "squares")
    assert squares.tolist() == [i * i for i in range(items)]
    assert sum_results(lambda span: torch.tensor(float(span.start)), spans, "sum") == sum(range(items))
