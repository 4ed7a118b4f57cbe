"""Two runs are compared where they compared the same outputs by the same parameters."""

import pytest
import torch

import likewise as lw
from likewise.runs.compare import compare_runs


def test_runs_of_other_outputs_or_parameters_are_refused_unless_asked_for(tmp_path):
    torch.manual_seed(0)
    model, x = (
        torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)),
        torch.randn(20, 4),
    )
    plain = lw.analyze(model, x, out=tmp_path / "plain")
    one = lw.analyze(model, x, out=tmp_path / "one", readout=lw.one_output(0))
    last = lw.analyze(model, x, out=tmp_path / "last", parameters=["2.*"])
    assert compare_runs(plain, plain).summary.kept_neighbors == 1
    with pytest.raises(ValueError, match=r"readout all_outputs and .*--across-settings"):
        compare_runs(plain, one)
    with pytest.raises(ValueError, match=r"parameters 0\.weight.* and 2\.weight"):
        compare_runs(plain, last)
    assert compare_runs(plain, one, across_settings=True).summary.samples == 20
