"""Two runs are compared where they compared the same outputs by the same parameters."""

import json
import re

import numpy as np
import pytest
import torch

import likewise as lw
from likewise.cli.app import exit_code
from likewise.runs.compare import compare_runs, neighbors_side_by_side, write_comparison


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


def test_neighbors_are_shown_side_by_side(tmp_path, capsys):
    torch.manual_seed(0)
    x, y = torch.randn(30, 5), torch.arange(30) % 3
    nets = [
        torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)) for _ in range(2)
    ]
    runs = [
        lw.analyze(net, (x, y), out=tmp_path / str(i), neighbors=5, classes=["a", "b", "c"])
        for i, net in enumerate(nets)
    ]
    near = neighbors_side_by_side(*runs, 7)
    first, second = (set(run.neighbor_matrix[7]) for run in runs)
    assert near["before_neighbor"].tolist() == runs[0].neighbor_matrix[7].tolist()
    assert near["before_stays"].tolist() == [i in second for i in runs[0].neighbor_matrix[7]]
    assert near["after_is_new"].tolist() == [i not in first for i in runs[1].neighbor_matrix[7]]
    assert near["before_stays"].sum() == 5 - near["after_is_new"].sum()
    assert near["after_label"].tolist() == [["a", "b", "c"][y[i]] for i in runs[1].neighbor_matrix[7]]
    words = [
        "compare",
        str(tmp_path / "0"),
        str(tmp_path / "1"),
        "--sample",
        "7",
        "-k",
        "3",
        "--format",
        "json",
    ]
    assert exit_code(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["sample"] == 7
        and [n["after_neighbor"] for n in found["neighbors"]] == near["after_neighbor"].tolist()[:3]
    )
    one = lw.analyze(
        nets[0], (x, y), out=tmp_path / "one", neighbors=5, readout=lw.one_output(0), classes=["a", "b", "c"]
    )
    for extra, code in (([], 2), (["--across-settings"], 0)):
        assert exit_code(["compare", str(tmp_path / "0"), str(one.folder), *extra]) == code
        assert exit_code(["compare", str(tmp_path / "0"), str(one.folder), "--sample", "7", *extra]) == code


EVIL = "<script>window.hacked = 1</script>"


def test_a_page_shows_the_samples_whose_neighbors_changed_most(tmp_path, capsys):
    torch.manual_seed(0)
    x, y = torch.randn(30, 1, 6, 6), torch.arange(30) % 3
    nets = [
        torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(36, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
        )
    ]
    nets.append(
        torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(36, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
        )
    )
    runs = [
        lw.analyze(net, (x, y), out=tmp_path / name, neighbors=5, classes=["a", EVIL, "c"])
        for net, name in zip(nets, ("early", "late"), strict=True)
    ]
    page = write_comparison(*runs, tmp_path / "compare.html", count=4).read_text()
    kept = compare_runs(*runs).changes["kept_neighbors"]
    found = [int(sample) for sample in re.findall(r'<article class="sides" data-sample="(\d+)"', page)]
    assert len(found) == 4 and kept[found].max() <= kept.drop(found).min()
    first = page[page.index("<article") : page.index("</article>")]
    shown = [
        int(sample) for sample in re.findall(r'<figure class="tile [a-z]*\s*" data-sample="(\d+)"', first)
    ]
    assert shown == [*runs[0].neighbor_matrix[found[0]], *runs[1].neighbor_matrix[found[0]]]
    gone = set(runs[0].neighbor_matrix[found[0]]) - set(runs[1].neighbor_matrix[found[0]])
    assert first.count('class="tile left"') == first.count('class="tile came"') == len(gone)
    assert "data:image/webp;base64," in first and "early" in page and "late" in page
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")
    words = [
        "compare",
        str(tmp_path / "early"),
        str(tmp_path / "late"),
        "--html",
        str(tmp_path / "again.html"),
    ]
    assert exit_code(words) == 0 and (tmp_path / "again.html").exists()
    with pytest.raises(ValueError, match="different data"):
        write_comparison(runs[0], lw.analyze(nets[0], x[:20], out=tmp_path / "other"), tmp_path / "no.html")
    assert not (tmp_path / "no.html").exists()


def test_another_order_of_classes_is_called_that(tmp_path):
    torch.manual_seed(0)
    model, x, y = torch.nn.Linear(4, 2), torch.randn(12, 4), torch.arange(12) % 2
    runs = [
        lw.analyze(model, (x, labels), out=tmp_path / name, classes=classes)
        for name, labels, classes in (("one", y, ["a", "b"]), ("other", 1 - y, ["b", "a"]))
    ]
    with pytest.raises(ValueError, match=r"their classes in different orders \(a, b and b, a\)"):
        compare_runs(*runs)


@pytest.mark.parametrize("n", [1, 8, 12])
def test_densities_that_are_all_the_same_have_no_rank_correlation(tmp_path, capsys, n):
    torch.manual_seed(0)
    x, net = torch.randn(n, 4).double(), torch.nn.Linear(4, 2).double()
    alike = torch.nn.Sequential(torch.nn.Threshold(10.0, 1.0), torch.nn.Linear(4, 2)).double()
    runs = [lw.analyze(model, x, out=tmp_path / str(i)) for i, model in enumerate((net, alike))]
    options = {"across_settings": True}  # parameters have other names
    summary = compare_runs(*runs, **options).summary
    assert summary.density_correlation is None and summary.kept_neighbors <= 1
    page = write_comparison(*runs, tmp_path / "page.html", **options).read_text()
    assert "then 1.000" in page and "rank correlation" not in page
    words = ["compare", str(tmp_path / "0"), str(tmp_path / "1"), "--across-settings", "--format", "json"]
    capsys.readouterr()
    assert exit_code(words) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["density_correlation"] is None


def test_samples_without_a_density_are_left_out_of_the_rank_correlation(tmp_path):
    torch.manual_seed(0)
    run = lw.analyze(torch.nn.Linear(4, 2), torch.randn(12, 4), out=tmp_path)
    run.table.loc[3, "density"] = np.nan
    assert compare_runs(run, run).summary.density_correlation == pytest.approx(1)
    run.table["density"] = np.nan
    assert compare_runs(run, run).summary.density_correlation is None
