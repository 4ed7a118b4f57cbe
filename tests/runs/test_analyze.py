"""Run folders: what is in them, that a killed run goes on, that nothing is half written or mixed up."""

import json
import random
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import likewise as lw
import likewise.gram.matrix
from likewise.runs.export import knn_graph
from likewise.runs.stages import _OutputReader


def example(n=40, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.randn(n, 5), torch.arange(n) % 3


def centered_of(gram):
    """The double-centered kernel, normalized: written out."""
    k = gram.dense().double()
    h = torch.eye(len(k), dtype=k.dtype) - 1 / len(k)
    c = h @ k @ h
    scale = c.diagonal().rsqrt()
    return scale[:, None] * c * scale


@pytest.mark.parametrize("classes", [True, False], ids=["classes", "values"])
def test_every_column_and_table_equals_the_function_of_its_name(tmp_path, classes):
    model, x, y = example()
    model, x = model.double(), x.double()
    y = y if classes else torch.randn(40, 3, dtype=torch.float64)
    found = lw.analyze(model, (x, y), out=tmp_path / "run", neighbors=4, threshold=0.3)
    gram = lw.GramMatrix(model, (x, y), centered=True)
    plain, table = gram.with_centering(False), found.table

    def close(column, expected, tolerance=1e-6):
        torch.testing.assert_close(
            torch.tensor(table[column].to_numpy()).double(),
            expected.double(),
            rtol=0,
            atol=tolerance,
            equal_nan=True,  # absent where it cannot be told
        )

    close("density", lw.soft_neighbors(plain) / 40)
    close("uncertainty", lw.uncertainty(plain))
    close("gradient_novelty", lw.novelty(plain, parameters=None))
    close("feature_novelty", lw.novelty(plain, parameters="features"))
    close("novelty", lw.novelty(plain), 1e-4)  # features are float32
    if classes:
        close("energy", -model(x).detach().logsumexp(1))
    else:
        assert "energy" not in table
    close("hard_neighbors", lw.hard_neighbors(gram, 0.3))
    close("local_density", lw.positive_neighbors(gram, 4))
    reliability = lw.reliability(gram)
    close("shift", reliability.shift)
    close("agreement", reliability.agreement)
    neighbors = lw.nearest(gram, 4)
    assert found.neighbor_matrix.tolist() == neighbors.indices.tolist()
    torch.testing.assert_close(
        torch.tensor(found.similarity_matrix), neighbors.similarities, rtol=0, atol=1e-6
    )
    histogram = lw.similarity_histogram(gram, bins=40)
    for sample in range(40):
        shown = found.histogram(sample)
        assert shown.counts.tolist() == histogram.counts[sample].tolist()
        assert shown.edges.tolist() == pytest.approx(histogram.edges.tolist())
    if not classes:
        assert "label_suspicion" not in table and "status" not in table
        return
    suspicion = lw.label_suspicion(gram)
    close("label_suspicion", suspicion.suspicion)
    close("chance_wrong", suspicion.chance_wrong)
    assert table["label_issue"].tolist() == suspicion.flagged.tolist()
    assert table["suggested_label"].tolist() == suspicion.suggested.tolist()
    assert (table["status"] == "contested").tolist() == suspicion.contested.tolist()
    assert (table["status"] == "isolated").tolist() == suspicion.isolated.tolist()
    assert table["prediction"].tolist() == model(x).argmax(1).tolist()
    similarity = lw.class_similarity(gram).mean
    torch.testing.assert_close(torch.tensor(found.class_similarity.to_numpy()), similarity, rtol=0, atol=1e-4)
    fit = lw.fit_quality(plain)
    assert found.manifest["fit"] == {
        "learned": fit.learned,
        "supported": fit.supported,
        "verdict": fit.verdict,
    }


def test_a_run_folder_holds_its_files(tmp_path):
    model, x, y = example()
    found = lw.analyze(model, (x, y), out=tmp_path / "run", neighbors=4)
    assert len(found.neighbors(7)) == 4 and len(found.neighbors(7, 2)) == 2
    assert found.summary.samples == 40
    assert found.summary.label_issues == int(found.table["label_issue"].sum())
    assert "40 samples" in repr(found) and "<table" in found._repr_html_()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "details.parquet",
        "duplicates.parquet",
        "manifest.json",
        "neighbors.parquet",
        "pictures.parquet",
        "report.html",
        "samples.parquet",
        "settings.toml",
    ]


def test_class_similarity_and_confusion_are_what_they_say(tmp_path):
    model, x, y = example()
    found = lw.analyze(model, (x, y), out=tmp_path / "run", classes=["a", "b", "c"])
    c = centered_of(lw.GramMatrix(model, (x, y)))
    pairs = ~torch.eye(40, dtype=torch.bool)
    for a in range(3):
        for b in range(3):
            expected = c[(y == a)[:, None] & (y == b) & pairs].mean()
            assert abs(found.class_similarity.iloc[a, b] - float(expected)) < 2e-4
    votes = found.confusion
    assert votes.to_numpy().sum() == 40 and list(votes.columns) == ["a", "b", "c"]
    a, b = int(found.table["label"][5]), int(found.table["suggested_label"][5])
    same = (found.table["label"] == a) & (found.table["suggested_label"] == b)
    assert votes.iloc[a, b] == same.sum()


def test_the_map_is_the_leading_part_of_the_kernel(tmp_path):
    model, x, y = example(60)
    found = lw.analyze(model, (x, y), out=tmp_path / "run", layout="pca")
    c = centered_of(lw.GramMatrix(model, (x, y)))
    values, vectors = torch.linalg.eigh(c)
    expected = (vectors * values.clamp(min=0).sqrt())[:, -2:].flip(1)
    shown = torch.tensor(found.table[["map_x", "map_y"]].to_numpy())
    for i in range(2):
        cosine = nn.functional.cosine_similarity(shown[:, i], expected[:, i], dim=0).abs()
        assert cosine > 0.999
    assert found.coordinates.shape == (60, 10)


@pytest.mark.slow
def test_umap_lays_out_the_neighbors_the_same_each_time(tmp_path):
    model, x, y = example(60)
    runs = [lw.analyze(model, (x, y), out=tmp_path / name, layout="umap") for name in "ab"]
    assert runs[0].table.equals(runs[1].table)
    shown = torch.tensor(runs[0].table[["map_x", "map_y"]].to_numpy())
    gaps = torch.cdist(shown, shown)
    near = gaps.gather(1, torch.tensor(runs[0].neighbor_matrix)).mean()
    assert near < 0.7 * gaps.mean()


def test_a_sketched_run_comes_close_and_tells_its_error(tmp_path):
    model, x, y = example(300)
    exact = lw.analyze(model, (x, y), out=tmp_path / "exact", sketch="never")
    small = lw.analyze(model, (x, y), out=tmp_path / "small", sketch=3000)
    assert exact.manifest["approximations"] == [] and "off by" in small.manifest["approximations"][0]
    for column in ("density", "label_suspicion", "novelty", "uncertainty"):
        assert exact.table[column].corr(small.table[column], method="spearman") > 0.8, column
    for readout in (lw.all_outputs, lw.log_probabilities):  # of the latter, k(x, x) is 2/3
        wide = [
            lw.analyze(
                model, (x, y), out=tmp_path / f"{readout.__name__}{s}", sketch=s, readout=readout
            ).table
            for s in ("never", 9000)
        ]
        assert (wide[0]["density"] - wide[1]["density"]).abs().max() < 0.03
    assert exact.manifest["options"]["sketch"] == 0 and small.manifest["options"]["sketch"] == 3000
    with pytest.raises(ValueError, match="integer from 16"):
        lw.analyze(model, (x, y), out=tmp_path / "x", sketch=3)


def test_pictures_of_the_report_are_those_of_the_index_and_drawn_once(tmp_path):
    model, x, y = example()
    images, asked = torch.rand(40, 8, 8, generator=torch.Generator().manual_seed(1)).numpy(), []

    def show(i):
        asked.append(i)
        return images[i]

    sketched = lw.analyze(model, (x, y), out=tmp_path / "sketched", sketch=64, show=show)
    assert sorted(asked) == list(range(40))
    index = lw.Index(tmp_path / "sketched" / "index")
    exact = lw.analyze(model, (x, y), out=tmp_path / "exact", sketch="never", show=show)
    assert len(sketched.pictures) == 40
    for i, picture in sketched.pictures.items():
        assert picture == index.sample(i).picture == exact.pictures[i]


def test_names_columns_and_pictures_of_ones_own(tmp_path):
    model, x, y = example()
    texts = [f"text {i} <b>" for i in range(40)]
    found = lw.analyze(
        model,
        (x, y),
        out=tmp_path / "run",
        names=[f"s{i}.png" for i in range(40)],
        show=texts,
        extra={"odd": y % 2 == 1, "source": ["web", "book"] * 20},
    )
    assert found.place("s7.png") == 7 and found.neighbors("s7.png").equals(found.neighbors(7))
    assert found.table["odd"].dtype == bool and found.table["source"][1] == "book"
    import pandas

    pictures = pandas.read_parquet(tmp_path / "run" / "pictures.parquet")
    assert len(pictures) == 40 and pictures["content"][3].decode() == "text 3 <b>"
    for wrong, message in (
        ({"names": ["a"]}, "1 entries for 40"),
        ({"extra": {"density": y}}, "a name of ours"),
        ({"extra": {"mine": y[:3]}}, r"shape \(3,\)"),
        ({"classes": ["a", "b"]}, "2 names of classes"),
        ({"threshold": 1.5}, "threshold"),
    ):
        with pytest.raises(ValueError, match=message):
            lw.analyze(model, (x, y), out=tmp_path / f"wrong{len(list(tmp_path.iterdir()))}", **wrong)
    with pytest.raises(KeyError, match="no sample nobody"):
        found.neighbors("nobody")


def test_labels_are_optional_and_may_be_numbers(tmp_path):
    model, x, _ = example()
    without = lw.analyze(model, x, out=tmp_path / "a").table
    assert "label_suspicion" not in without and "agreement" in without and "status" in without
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    numbers = torch.randn(40)
    found = lw.analyze(one, (x, numbers), out=tmp_path / "b")
    assert found.summary.label_issues is None
    expected = (one(x)[:, 0] - numbers).abs().double()
    torch.testing.assert_close(torch.tensor(found.table["error"].to_numpy()), expected, rtol=1e-5, atol=1e-6)
    binary = lw.analyze(one, (x, (numbers > 0).long()), out=tmp_path / "c").table
    assert set(binary["prediction"]) <= {0, 1} and "label_suspicion" in binary


def mlp(d):
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, d))


def dead():
    return nn.Sequential(nn.Linear(5, 4, bias=False), nn.ReLU(), nn.Linear(4, 3, bias=False))


ODD = {
    "one sample": (mlp, 3, 1, lambda n: torch.zeros(n).long()),
    "two samples": (mlp, 3, 2, torch.arange),
    "one class": (mlp, 3, 30, lambda n: torch.zeros(n).long()),
    "more labels than outputs": (mlp, 3, 30, lambda n: torch.arange(n) % 5),
    "classes that are missing": (mlp, 9, 30, lambda n: torch.arange(n) % 2 * 8),
    "300 classes": (mlp, 3, 30, lambda n: torch.arange(n) * 10),
    "one output, many classes": (mlp, 1, 30, lambda n: torch.arange(n) % 5),
    "labels as a column": (mlp, 3, 30, lambda n: (torch.arange(n) % 3)[:, None]),
    "several numbers": (mlp, 4, 30, lambda n: torch.randn(n, 4)),
    "negative classes": (mlp, 2, 30, lambda n: torch.arange(n) % 2 * 2 - 1),
    "no gradient": (lambda d: dead(), 3, 30, lambda n: torch.arange(n) % 3),
}


@pytest.mark.filterwarnings("ignore::likewise.ZeroGradientWarning")
@pytest.mark.parametrize("sketch", ["never", 64])
@pytest.mark.parametrize("name", ODD)
def test_odd_data_give_a_whole_table_and_a_report(tmp_path, name, sketch):
    make, d, n, labels = ODD[name]
    x = torch.randn(n, 5)
    x[n // 2] = 0
    found = lw.analyze(make(d), (x, labels(n)), out=tmp_path / "run", sketch=sketch)
    numbers = found.table.drop(columns="chance_wrong", errors="ignore")  # absent where it cannot be told
    odd = [name for name, column in numbers.select_dtypes("number").items() if not np.isfinite(column).all()]
    assert len(found.table) == n
    assert not odd, f"columns that are not finite: {odd}"
    assert (found.folder / "report.html").stat().st_size > 1e5
    assert len(found.neighbors(0)) == min(10, n - 1)
    assert knn_graph(found).nnz == n * min(10, n - 1)


def clustered(n=240, wrong=8):
    """Three clouds that a linear layer has learned, the first labels wrong."""
    torch.manual_seed(0)
    y = torch.arange(n) % 3
    x = nn.functional.one_hot(y, 5) * 4.0 + torch.randn(n, 5)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, x, torch.where(torch.arange(n) < wrong, (y + 1) % 3, y)


def test_labels_look_wrong_where_they_are(tmp_path):
    model, x, y = clustered()
    table = lw.analyze(model, (x, y), out=tmp_path / "run").table
    flagged = table["label_issue"].to_numpy()
    assert flagged[:8].sum() >= 7 and flagged[8:].sum() <= 4
    assert (table["suggested_label"][:8][flagged[:8]] == (y[:8] - 1).numpy()[flagged[:8]] % 3).all()


def test_what_is_decided_gives_the_precision(tmp_path):
    model, x, y = clustered()
    found = lw.analyze(model, (x, y), out=tmp_path / "run")
    flagged = found.table.index[found.table["label_issue"]].tolist()
    quiet = found.table.index[~found.table["label_issue"]].tolist()
    assert len(flagged) >= 5 and quiet
    verdicts = {
        flagged[0]: "wrong",
        flagged[1]: "relabel",
        flagged[2]: "right",
        flagged[3]: "unsure",
        flagged[4]: "drop",
        quiet[0]: "wrong",
    }
    precision = found.precision(verdicts)
    assert precision[:4] == (2, 1, 1, 1)
    assert abs(precision.share - 2 / 3) < 1e-9 and precision.low < 2 / 3 < precision.high
    path = tmp_path / "decisions.json"
    listed = [{"sample": sample, "verdict": verdict} for sample, verdict in verdicts.items()]
    path.write_text(json.dumps({"run": found.manifest["data"], "decisions": listed}))
    assert found.precision(path) == precision
    path.write_text(json.dumps({"run": "another", "decisions": []}))
    with pytest.raises(ValueError, match="another data set"):
        found.precision(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="not a decisions file"):
        found.precision(path)


def test_duplicates_are_counted_and_listed_with_their_splits(tmp_path):
    torch.manual_seed(0)
    x, y = torch.randn(80, 6), torch.arange(80) % 2
    x[41], x[60] = x[5], x[5]
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    split = ["train"] * 50 + ["test"] * 30
    found = lw.analyze(model, (x, y), out=tmp_path / "run", extra={"split": split})
    pairs = found.duplicates
    assert pairs[["first", "second"]].to_numpy().tolist() == [[5, 41], [5, 60], [41, 60]]
    assert pairs["similarity"].to_numpy() == pytest.approx(1, abs=1e-5)
    assert pairs["input_similarity"].to_numpy() == pytest.approx(1)
    assert pairs["same_label"].tolist() == [True, False, False]
    assert pairs["second_split"].tolist() == ["train", "test", "test"]
    assert found.table.index[found.table["duplicates"] == 2].tolist() == [5, 41, 60]


def test_a_cross_validation_judges_labels_too(tmp_path):
    torch.manual_seed(0)
    x, y = torch.randn(40, 5), torch.arange(40) % 3
    model = torch.nn.Linear(5, 3)
    validated = lw.crossval(lambda data: torch.nn.Linear(5, 3), (x, y), folds=2, out=tmp_path / "folds")
    found = lw.analyze(model, (x, y), out=tmp_path / "run", crossval=tmp_path / "folds")
    expected = lw.label_suspicion(lw.GramMatrix(model, (x, y)), crossval=validated)
    assert found.table["label_suspicion"].to_numpy() == pytest.approx(expected.suspicion.numpy(), abs=1e-6)
    assert found.table["label_issue"].tolist() == expected.flagged.tolist()
    suggested = torch.tensor(found.table["suggested_label"].to_numpy())
    support = validated.probabilities.gather(1, suggested[:, None])[:, 0]
    assert found.table["suggestion_support"].to_numpy() == pytest.approx(support.numpy(), abs=1e-6)
    with pytest.raises(ValueError, match="another crossval"):
        lw.analyze(model, (x, y), out=tmp_path / "run")


def watched(model, x, y, seen=40):
    watch = lw.Watch(len(x))
    with torch.no_grad():
        watch.update(model(x[:seen]), y[:seen], torch.arange(seen))
    return watch


def test_a_run_with_a_record_of_training_ranks_labels_by_both(tmp_path):
    model, x, y = example()
    watch = watched(model, x, y)
    watch.save(tmp_path / "watch.parquet")
    found = lw.analyze(model, (x, y), out=tmp_path / "run", watch=tmp_path / "watch.parquet")
    expected = lw.label_suspicion(lw.GramMatrix(model, (x, y)), watch=watch)
    assert found.table["label_suspicion"].to_numpy() == pytest.approx(expected.suspicion.numpy(), abs=1e-6)
    assert found.table["margin"].tolist() == watch.early_margins.tolist()
    assert lw.analyze(model, (x, y), out=tmp_path / "run", watch=watch).folder == found.folder
    with pytest.raises(ValueError, match="another watch"):
        lw.analyze(model, (x, y), out=tmp_path / "run")


def test_records_of_part_of_the_samples_are_named_and_of_others_refused(tmp_path):
    model, x, y = example()
    with pytest.warns(UserWarning, match="10 of 40 samples were never seen"):
        found = lw.analyze(model, (x, y), out=tmp_path / "run", watch=watched(model, x, y, seen=30))
    assert "no margin of 10 of 40 samples" in " ".join(found.manifest["caveats"])
    assert found.table["margin"].isna().sum() == 10 and found.table["label_suspicion"].notna().all()
    with pytest.raises(ValueError, match="is of 30 samples, and the data set has 40"):
        lw.analyze(model, (x, y), out=tmp_path / "other", watch=watched(model, x[:30], y[:30], 30))
    with pytest.raises(ValueError, match="labels that are classes"):
        lw.analyze(model, (x, torch.randn(40, 3)), out=tmp_path / "values", watch=watched(model, x, y))


def test_a_finished_run_is_not_done_again(tmp_path, monkeypatch):
    model, x, y = example()
    first = lw.analyze(model, (x, y), out=tmp_path / "run")
    before = {p.name: p.read_bytes() for p in first.folder.iterdir()}
    monkeypatch.setattr("likewise.runs.analyze.run_stages", lambda *_: 1 / 0)
    again = lw.analyze(model, (x, y), out=tmp_path / "run")
    assert {p.name: p.read_bytes() for p in again.folder.iterdir()} == before


def test_what_a_network_says_may_be_probabilities_or_integers_numbers(tmp_path):
    model, x, y = example()
    plain = lw.analyze(model, (x, y), out=tmp_path / "logits").table
    soft = lw.analyze(nn.Sequential(model, nn.Softmax(1)), (x, y), out=tmp_path / "soft")
    assert (soft.table["prediction"] == plain["prediction"]).all()
    assert any("probabilities" in line for line in soft.manifest["caveats"])
    torch.manual_seed(0)
    gate = nn.Sequential(nn.Linear(5, 1), nn.Sigmoid())
    binary = lw.analyze(gate, (x, y % 2), out=tmp_path / "gate").table
    assert (binary["prediction"] == (gate(x)[:, 0] > 0.5).long().numpy()).all()
    counts = lw.analyze(nn.Linear(5, 1), (x, y * 100), out=tmp_path / "counts")
    assert "error" in counts.table and "label_issue" not in counts.table
    floats = lw.analyze(model, (x, y.float()), out=tmp_path / "floats").table
    assert (floats["label_suspicion"] == plain["label_suspicion"]).all()
    with pytest.raises(ValueError, match="as many classes"):
        lw.analyze(model, (x, y * 25_000), out=tmp_path / "many")


def test_local_density_and_novelty_agree(tmp_path):
    model, x, y = clustered()
    table = lw.analyze(model, (x, y), out=tmp_path / "run").table
    assert table["local_density"].corr(table["novelty"], method="spearman") < -0.5


@pytest.mark.parametrize("form", ["list", "tuple", "dicts", "tensor", "array", "objects", "images"])
def test_a_run_that_showed_something_else_is_refused(tmp_path, form):
    from PIL import Image

    def show(value):
        listed = [f"{value} {i}" for i in range(40)]
        pixels = torch.full((40, 4, 4), value)
        return {
            "list": listed,
            "tuple": tuple(listed),
            "dicts": [{"text": text} for text in listed],
            "tensor": pixels,
            "array": pixels.numpy(),
            "objects": np.array(listed, dtype=object),
            "images": [Image.new("L", (4, 4), value) for _ in range(40)],
        }[form]

    model, x, y = example()
    out = tmp_path / "run"
    lw.analyze(model, (x, y), out=out, show=show(1))
    lw.analyze(model, (x, y), out=out, show=show(1))
    with pytest.raises(ValueError, match="another naming"):
        lw.analyze(model, (x, y), out=out, show=show(2))


def test_another_model_data_set_or_option_is_refused(tmp_path):
    model, x, y = example()
    out = tmp_path / "run"
    lw.analyze(model, (x, y), out=out)
    with pytest.raises(ValueError, match="another model"):
        lw.analyze(example(seed=1)[0], (x, y), out=out)
    with pytest.raises(ValueError, match="another data"):
        lw.analyze(model, (x + 1, y), out=out)
    with pytest.raises(ValueError, match=r"other options \(neighbors: there 10, here 3"):
        lw.analyze(model, (x, y), out=out, neighbors=3)
    with pytest.raises(ValueError, match="another naming"):
        lw.analyze(model, (x, y), out=out, classes=["a", "b", "c"])
    other = nn.Sequential(model[0], nn.ReLU(), model[2])  # the same weights
    with pytest.raises(ValueError, match="another model"):
        lw.analyze(other, (x, y), out=out)
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="something else than a run"):
        lw.analyze(model, (x, y), out=tmp_path / "else")
    with pytest.raises(FileNotFoundError, match="no run"):
        lw.Analysis(tmp_path)


@pytest.mark.parametrize("sketch", ["never", 64])
def test_a_stage_that_was_tampered_with_is_done_again(tmp_path, monkeypatch, sketch):
    model, x, y = example()
    whole = lw.analyze(model, (x, y), out=tmp_path / "whole", sketch=sketch)
    monkeypatch.setattr("likewise.runs.tables._neighbor_table", lambda *_: 1 / 0)
    out = tmp_path / "run"
    with pytest.raises(ZeroDivisionError):
        lw.analyze(model, (x, y), out=out, sketch=sketch)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="not finished"):
        lw.Analysis(out)
    (out / "stages" / "pairs.npz").write_bytes(b"broken")
    assert lw.analyze(model, (x, y), out=out, sketch=sketch).table.equals(whole.table)


def test_a_run_from_sketches_calls_the_model_once_on_most_samples(tmp_path):
    model, x, y = example(400)
    seen = []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    found = lw.analyze(model, (x, y), out=tmp_path / "run", sketch=64, index=False)
    assert sum(seen) < 1.5 * 400
    with torch.no_grad():
        outputs = model(x)
    assert found.table["prediction"].tolist() == outputs.argmax(1).tolist()
    torch.testing.assert_close(torch.tensor(found.table["energy"].to_numpy()).float(), -outputs.logsumexp(1))


@pytest.mark.parametrize("shards", [0, 1], ids=["all sketched", "some sketched"])
def test_a_run_that_was_stopped_before_its_outputs_were_kept_reads_them_again(tmp_path, monkeypatch, shards):
    model, x, y = example(600)
    whole = lw.analyze(model, (x, y), out=tmp_path / "whole", sketch=64)
    if shards:
        collect, done = _OutputReader.collect, []
        monkeypatch.setattr(
            _OutputReader, "collect", lambda *a: 1 / (1 - len(done)) and done.append(collect(*a))
        )
    else:
        monkeypatch.setattr("likewise.runs.stages._measure_error", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lw.analyze(model, (x, y), out=tmp_path / "run", sketch=64)
    monkeypatch.undo()
    assert not (tmp_path / "run" / "stages" / "outputs.npz").exists()
    assert any((tmp_path / "run" / "stages").glob("sketch-*"))
    assert lw.analyze(model, (x, y), out=tmp_path / "run", sketch=64).table.equals(whole.table)


def test_names_of_too_few_classes_are_refused_before_gradients_are_sketched(tmp_path, monkeypatch):
    model, x, y = example(60)
    monkeypatch.setattr("likewise.runs.stages._sketched_statistics", lambda *_: 1 / 0)
    with pytest.raises(ValueError, match="give a name for each class"):
        lw.analyze(model, (x, y), out=tmp_path / "run", sketch=64, classes=["a", "b"])


def test_settings_are_kept_and_say_what_is_wrong(tmp_path):
    from likewise.runs.settings import Settings, read_settings

    settings = Settings(model="net.py:model", data="x.npz", neighbors=5, classes=("a", 'b "quoted"'))
    path = tmp_path / "settings.toml"
    path.write_text(settings.text())
    assert read_settings(path) == settings
    for text, message in (
        ("model = 3", "model"),
        ('model = "a:b"', "data"),
        (settings.text() + "colour = 1\n", "no setting 'colour'"),
        (settings.text().replace("neighbors = 5", "neighbors = 0"), "neighbors"),
        ("model = ", "not TOML"),
        (Settings(model="(given in Python)", data="(given in Python)").text(), "started in Python"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_settings(path)


SCRIPT = """
import sys, time, torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[2])
from test_analyze import example
import likewise as lw
from likewise.runs.export import knn_graph
from likewise.runs.stages import _OutputReader
model, x, y = example(400)
from likewise import files
from likewise.runs import stages
plain = files.write_atomically
def slow(*given):
    time.sleep(0.03)
    digest = plain(*given)
    time.sleep(0.03)
    return digest
files.write_atomically = slow
stages.SHARD = 100
lw.analyze(model, (x, y), out=sys.argv[1], sketch=sys.argv[3] if sys.argv[3] == "never" else int(sys.argv[3]))
"""


TABLES = ("samples.parquet", "neighbors.parquet", "duplicates.parquet", "details.parquet", "pictures.parquet")


def killed_and_resumed(tmp_path, times, sketch):
    def start(out):
        words = [sys.executable, "-c", SCRIPT, str(out), str(Path(__file__).parent), sketch]
        return subprocess.Popen(words)

    assert start(tmp_path / "whole").wait() == 0
    begun = time.perf_counter()
    assert start(tmp_path / "again").wait() == 0
    whole, chance = time.perf_counter() - begun, random.Random(0)
    for i in range(times):
        out = tmp_path / f"killed{i}"
        process = start(out)
        time.sleep(chance.uniform(0.4, 1) * whole)
        process.kill()
        process.wait()
        assert start(out).wait() == 0
        for name in TABLES:
            assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), (i, name)
        assert json.loads((out / "manifest.json").read_text())["finished"]
        assert not list(out.glob("**/*.part*"))


@pytest.mark.parametrize("sketch", ["never", "64"])
def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path, sketch):
    killed_and_resumed(tmp_path, 1, sketch)


@pytest.mark.slow
@pytest.mark.parametrize("sketch", ["never", "64"])
def test_a_run_killed_at_ten_moments_goes_on_to_the_same_bytes(tmp_path, sketch):
    killed_and_resumed(tmp_path, 10, sketch)


def test_a_run_killed_before_its_first_note_goes_on(tmp_path):
    model, x, y = example()
    (tmp_path / "manifest.part.json").write_text("{")
    assert len(lw.analyze(model, (x, y), out=tmp_path).table) == 40


class CountedImages(torch.utils.data.Dataset):
    """Images that count how often each is decoded."""

    def __init__(self, n):
        self.images = torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        self.reads = torch.zeros(n, dtype=torch.long)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        self.reads[i] += 1
        return self.images[i], i % 3


def image_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("sketch", ["never", 64], ids=["exact", "sketched"])
def test_analyze_sets_up_one_engine_and_decodes_each_sample_once(tmp_path, monkeypatch, sketch):
    selections, select = [], likewise.gram.matrix.select_engine
    monkeypatch.setattr(
        likewise.gram.matrix, "select_engine", lambda *a, **k: selections.append(1) or select(*a, **k)
    )
    images = CountedImages(60)
    data = lw.batches(images, 16)
    images.reads.zero_()  # it was tried whether images are the same each time
    found = lw.analyze(image_model(), data, out=tmp_path / "cached", sketch=sketch)
    assert len(selections) == 1
    assert images.reads.tolist() == [1] * 60
    in_memory = lw.analyze(
        image_model(), (images.images, torch.arange(60) % 3), out=tmp_path / "whole", sketch=sketch
    )
    np.testing.assert_allclose(
        found.table.select_dtypes("number"), in_memory.table.select_dtypes("number"), rtol=1e-4, atol=1e-5
    )


def test_samples_that_fit_into_no_cache_are_read_three_times_for_sketches(tmp_path, monkeypatch):
    monkeypatch.setattr(lw.Batches, "with_cache", lambda data, max_bytes: (data, 0))
    images = CountedImages(400)
    data = lw.batches(images)
    images.reads.zero_()
    lw.analyze(
        image_model(), data, out=tmp_path / "run", sketch=64, index=False
    )  # whose pictures take another
    extra = 128 + 8 + 6  # samples compared both ways, of the model's behavior, of the set-up of the engine
    assert int((images.reads > 3).sum()) <= extra
    assert int(images.reads.sum()) <= 3 * 400 + extra + 20


def test_samples_that_fit_into_no_cache_are_read_three_times_for_exact_pairs(tmp_path, monkeypatch):
    monkeypatch.setattr(lw.Batches, "with_cache", lambda data, max_bytes: (data, 0))
    images = CountedImages(400)
    data = lw.batches(images)
    images.reads.zero_()
    lw.analyze(image_model(), data, out=tmp_path / "run", sketch="never")
    extra = 8 + 6  # samples of the model's behavior, of the set-up of the engine
    assert int((images.reads > 3).sum()) <= extra
    assert int(images.reads.sum()) <= 3 * 400 + extra + 20


def test_gradients_that_fit_into_no_memory_are_computed_again_for_each_strip_only(tmp_path, monkeypatch):
    monkeypatch.setattr(lw.Batches, "with_cache", lambda data, max_bytes: (data, 0))
    images = CountedImages(400)
    data = lw.batches(images)
    gram = lw.GramMatrix(image_model(), data, max_memory=2**20)
    strips = gram.tiles().strips
    assert len(strips) > 1 and not gram.tiles().fits
    images.reads.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # little memory is slow, and it says so
        found = lw.analyze(
            image_model(), data, out=tmp_path / "run", sketch="never", layout="pca", max_memory=2**20
        )
    # outputs, a vjp and a jvp pass for each of three sums (their vectors do not fit together), strips, pictures
    by_strips = gram.tiles().gradient_evaluations / 400
    assert images.reads.double().mean() <= 1 + 3 * 2 + by_strips + 1 + 0.2
    monkeypatch.undo()
    # rounding moves samples on a map of neighbors, so the one of directions is compared
    whole = lw.analyze(image_model(), data, out=tmp_path / "whole", sketch="never", layout="pca").table
    for column in found.table.select_dtypes("number"):
        np.testing.assert_allclose(found.table[column], whole[column], rtol=1e-4, atol=2e-5)


def test_a_cache_holds_no_more_than_it_may_and_changes_no_batch():
    images = CountedImages(40)
    data = lw.batches(images)
    images.reads.zero_()
    size = 4 * 3 * 8 * 8
    cached, reserved = data.with_cache(10 * (size + 1000))
    assert reserved == 10 * (size + 1000)
    for _ in range(2):
        for size in (7, 40):
            parts = [cached.samples(where) for where in cached.spans(size)]
            assert torch.equal(torch.cat([part.inputs for part in parts]), images.images)
    once = int((images.reads == 1).sum())
    assert 8 <= once <= 12 and set(images.reads.tolist()) == {1, 4}


def test_a_collate_function_that_takes_items_apart_does_not_spoil_the_cache():
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, i):
            return {"x": torch.full((2,), float(i)), "labels": i}

    def collate(items):
        labels = torch.tensor([item.pop("labels") for item in items])
        return {"x": torch.stack([item["x"].mul_(2) for item in items]), "labels": labels}

    cached, _ = lw.batches(torch.utils.data.DataLoader(Rows(), batch_size=3, collate_fn=collate)).with_cache(
        10**6
    )
    for _ in range(2):
        assert cached[1].inputs["x"].tolist() == [[6.0, 6.0], [8.0, 8.0], [10.0, 10.0]]
        assert cached[1].labels.tolist() == [3, 4, 5]


def test_a_cache_gives_the_columns_of_a_hugging_face_data_set_as_they_are():
    datasets = pytest.importorskip("datasets")
    rows = {"seed": list(range(9)), "label": [0, 1, 2] * 3}
    for form in ("plain", "torch"):
        dataset = datasets.Dataset.from_dict(rows)
        dataset = dataset.with_format("torch") if form == "torch" else dataset
        cached, _ = lw.batches(dataset).with_cache(10**6)
        for size in (2, 4, 9):
            parts = [cached.samples(where) for where in cached.spans(size)]
            assert torch.cat([part.inputs["seed"] for part in parts]).tolist() == rows["seed"]
            assert torch.cat([part.labels for part in parts]).tolist() == rows["label"]
