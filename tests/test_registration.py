"""The registration experiment stands on signs and formulas of its own; here they meet drawn buildings."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import likewise as lw

pytestmark = pytest.mark.experiments

FOLDER = Path(__file__).parent.parent / "experiments" / "registration"
NAMES = ("tiles", "patches", "net", "rounds", "analysis", "law", "nairobi", "study", "spread", "summary")


@pytest.fixture(scope="module")
def parts():
    """The experiment's modules, by name; forgotten afterwards, for their names are short."""
    pytest.importorskip("scipy")
    before, paths = set(sys.modules), list(sys.path)
    sys.path[:] = [str(FOLDER), *paths, str(FOLDER.parent)]
    found = {name: __import__(name) for name in NAMES}
    yield type("Parts", (), found)
    sys.path[:] = paths
    for name in {n for n in set(sys.modules) - before if n in NAMES}:
        del sys.modules[name]


def square(x, y, half):
    return np.array(
        [[x - half, y - half], [x + half, y - half], [x + half, y + half], [x - half, y + half]], float
    )


@pytest.fixture(scope="module")
def town(parts):
    """Bright square roofs on dark ground, where outlines are right."""
    chance = np.random.default_rng(0)
    outlines = [square(x, y, chance.integers(14, 24)) for x in range(80, 500, 90) for y in range(80, 500, 90)]
    drawn = parts.tiles.drawn_map(outlines, 580, 580, pad=0)[:, :, 0]
    image = np.repeat(drawn[:, :, None], 3, 2) // 2 + 60
    return [parts.tiles.Region("town", "train", image, outlines)]


def still(parts, n, scale):
    return parts.patches.drawn_poses(n, scale, torch.Generator(), moving=False, turning=False)


@pytest.mark.parametrize("scale", [1, 2, 4])
def test_an_image_moved_by_the_label_lies_under_the_map(parts, town, scale):
    of = parts.patches.sites(town, "train", scale, 64)
    poses = still(parts, len(of), scale)._replace(moved=torch.full((len(of), 2), 2.0 * scale))
    patches = parts.patches.shown(of, torch.zeros(len(of), 2), poses)
    assert torch.equal(patches.label, torch.full((len(of), 2), 2.0))
    roofs = patches.image[:, 0] > -0.2
    found = roofs.roll((-2, -2), (1, 2))  # roofs lie where the map would after moving by the label
    fill = patches.map[:, 0] > 0.5
    inner = (slice(None), slice(6, 58), slice(6, 58))
    assert (found[inner] == fill[inner]).float().mean() > 0.97
    assert (roofs[inner] == fill[inner]).float().mean() < 0.95


def test_what_annotations_lack_is_the_noise_of_labels(parts, town):
    of = parts.patches.sites(town, "train", 2, 32)
    chance = torch.Generator().manual_seed(0)
    lacking = parts.patches.drawn_noise(len(of), 10.0, seed=1)
    poses = parts.patches.drawn_poses(len(of), 2, chance, turning=False)
    patches = parts.patches.shown(of, lacking, poses)
    torch.testing.assert_close(patches.truth - patches.label, lacking / 2)


def test_turning_a_patch_turns_its_vectors(parts):
    picture, vector = torch.zeros(8, 1, 9, 9), torch.tensor([[2.0, -1.0]]).repeat(8, 1)
    picture[:, 0, 4 - 1, 4 + 2] = 1  # a dot at the vector's tip
    turned = [[parts.patches.turned(x[t : t + 1], t) for t in range(8)] for x in (picture, vector)]
    pictures, vectors = (torch.cat(values).round() for values in turned)
    for image, (x, y) in zip(pictures[:, 0], vectors.long().tolist(), strict=True):
        assert image[4 + y, 4 + x] == 1
    assert len({tuple(v) for v in vectors.tolist()}) == 8


def test_patches_are_drawn_in_their_turn(parts, town):
    of = parts.patches.sites(town, "train", 2, 32)
    poses = parts.patches.drawn_poses(len(of), 2, torch.Generator().manual_seed(0), turning=False)
    poses = poses._replace(bend=0 * poses.bend)
    lacking = parts.patches.drawn_noise(len(of), 10.0, seed=1)
    upright = parts.patches.shown(of, lacking, poses)
    for turn in range(8):
        found = parts.patches.shown(of, lacking, poses._replace(turn=torch.full((len(of),), turn)))
        for value, before in zip(found, upright, strict=True):
            torch.testing.assert_close(value, parts.patches.turned(before, turn), atol=1e-3, rtol=1e-3)


class Oracle(torch.nn.Module):
    """Finds the move within reach that fits best, from the patch alone."""

    def forward(self, image, drawn):
        best, found = torch.full((len(image),), -torch.inf), torch.zeros(len(image), 2)
        for y in range(-8, 9):
            for x in range(-8, 9):
                fit = (image[:, 0] * (drawn[:, 0].roll((y, x), (1, 2)) - 0.5)).sum((1, 2))
                better = fit > best
                best, found[better] = torch.maximum(best, fit), torch.tensor([float(x), float(y)])
        return found


def test_a_perfect_network_aligns_all(parts, town):
    views = {scale: parts.patches.sites(town, "train", scale, 48) for scale in (4, 1)}
    lacking = parts.patches.drawn_noise(len(views[1]), 6.0, seed=0)
    left = parts.rounds.aligned({4: Oracle(), 1: Oracle()}, views, lacking)
    assert lacking.norm(dim=1).median() > 5
    assert left.norm(dim=1).median() < 1.5


def test_the_best_answer_to_noisy_labels_is_the_mean_of_what_they_may_mean(parts):
    chance = torch.Generator().manual_seed(0)
    lacking = 3 * torch.randn(4000, 2, generator=chance)
    added = 16 * (2 * torch.rand(4000, 2, generator=chance) - 1)
    seen = added + lacking
    best = parts.rounds.best_possible(seen, lacking, 16.0)
    here = (seen[:, 0] - 14).abs() < 0.5
    assert abs(added[here, 0].mean() - best[here, 0].mean()) < 0.4
    near = (seen[:, 0].abs()) < 4
    torch.testing.assert_close(best[near, 0], seen[near, 0], atol=0.4, rtol=0)
    assert (best[here, 0] < seen[here, 0] - 0.5).all()  # too little, where annotations lie on the same side


def test_turned_patches_leave_no_error_on_one_side(parts):
    settings = parts.rounds.Settings((8, 4), 40, 8, 16, 1, 1, 1e-3, sigma=15.3, extra=0.0)
    lacking = parts.patches.drawn_noise(300, settings.sigma, seed=0)
    medians = [left.norm(dim=1).median() for left in parts.rounds.best_chain(settings, lacking)]
    assert medians[0] > 15 and 1 < medians[1] < 5
    assert medians[2] < 0.5 and medians[3] < 0.01  # nothing is diluted once errors are small


def test_matches_are_products_at_each_displacement(parts):
    torch.manual_seed(0)
    image, drawn = torch.randn(2, 2, 3, 10, 10).unbind(0)
    found = parts.net.matches(image, drawn, reach=2)
    assert found.shape == (2, 3, 5, 5)
    inner = drawn[..., 2:-2, 2:-2]
    for j, i in ((0, 0), (2, 2), (4, 1)):
        expected = (image[..., j : j + 6, i : i + 6] * inner).mean((2, 3))
        torch.testing.assert_close(found[:, :, j, i], expected)


@pytest.fixture(scope="module")
def small(parts, town):
    torch.manual_seed(0)
    of = parts.patches.sites(town, "train", 4, 32)
    which, poses = parts.analysis.drawn_sample(of, 20)
    lacking = parts.patches.drawn_noise(len(of), 4.0, seed=0)[which]
    return parts.net.Alignment(4, 8).double(), parts.patches.Patches(
        *(v.double() for v in parts.patches.shown(of.take(which), lacking, poses))
    )


def test_factors_are_those_of_the_library(parts, small):
    model, patches = small
    gram = parts.analysis.matrix(model, patches)
    blocks = gram.with_kernel(parts.law.BLOCKS).dense()
    found = lw.denoising(gram, exact=True)
    torch.testing.assert_close(parts.law.factors(blocks), found.factor, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(
        parts.law._means(blocks, patches.label), found.smoothed_label, rtol=1e-5, atol=1e-8
    )


def test_the_hat_matrix_is_kernel_regression_that_misses_as_much(parts, small):
    model, patches = small
    blocks = parts.analysis.matrix(model, patches).with_kernel(parts.law.BLOCKS).dense()
    label = patches.label
    missed = 0.3 * float(label.square().sum())
    hat = parts.law.hat_matrix(blocks, blocks, label, missed)
    left = (label.flatten() - hat @ label.flatten()).square().sum()
    assert abs(float(left) / missed - 1) < 1e-6
    assert 0 < hat.trace() < label.numel()


def test_copies_with_the_same_noise_are_turned_with_it(parts, small):
    _, patches = small
    case = parts.law.Case(20, 1.0, copies=8, fresh=False)
    found = parts.law.noisy(patches, case, seed=0)
    noise = (found.label - found.truth).unflatten(0, (8, 20))
    torch.testing.assert_close(noise.norm(dim=2), noise[:1].norm(dim=2).expand(8, -1))
    fresh = parts.law.noisy(patches, case._replace(fresh=True), seed=0)
    assert not torch.allclose((fresh.label - fresh.truth)[20:40].norm(dim=1), noise[1].norm(dim=1))


def test_what_is_told_of_denoising_follows_from_its_parts(parts, small):
    model, patches = small
    found = parts.analysis.self_denoising(model, patches, scale=4)
    exact = lw.denoising(parts.analysis.matrix(model, patches), exact=True)
    assert found["factor"][2] == pytest.approx(float(exact.factor.median()), rel=0.1)
    error = 4 * (lw.GramMatrix(model, patches.labeled).outputs() - patches.truth).norm(dim=1)
    assert found["error"][2] == pytest.approx(float(np.median(error.numpy())), rel=1e-6)
    json.dumps(found)


def test_outlines_on_edges_have_the_larger_slope(parts, town):
    n = len(town[0].outlines)
    for move in (np.array([5.0, 0.0]), np.array([0.0, -7.0])):
        before, after, _ = parts.nairobi.scores(town, "train", np.tile(move, (n, 1)))
        assert (before > after).all()


def test_a_chain_trains_aligns_and_sums_up(parts, town):
    settings = parts.rounds.Settings((4, 2), 32, 4, 8, 3, 8, 1e-3, 10.0, 5.0, rounds=2)
    views = {s: parts.patches.sites(town, "train", s, 32) for s in settings.scales}
    for kind, networks in (("original", 2), ("no retraining", 1), ("true labels", 1)):
        lacking, models = parts.rounds.chain(kind, views, settings, 0, {"again": views})
        assert len(models) == networks
        assert len(lacking["train"]) == (2 if kind == "true labels" else 3)
        assert models[0][4].seen == 24


def test_missing_data_are_named(parts, tmp_path, monkeypatch):
    monkeypatch.delenv("LIKEWISE_DATA", raising=False)
    with pytest.raises(SystemExit, match="--data"):
        parts.tiles.folder(None)
    with pytest.raises(SystemExit, match="aerial-banepa"):
        parts.tiles.folder(tmp_path)


@pytest.fixture
def experiment(parts, tmp_path, monkeypatch):
    """The experiment as it is started, with options; its data are empty, its results go to a folder."""
    for name in ("aerial-5aoi", "aerial-banepa"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)

    def started(*options):
        places = ["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["registration", "--quick", *places, *options])
        runpy.run_path(str(FOLDER / "__main__.py"), run_name="__main__")

    return started


def test_results_of_less_time_are_made_anew(parts, experiment, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(parts.study.Study, "law", lambda *_: made.append("law") or {})
    for minutes, expected in (("1", 1), ("1", 0), ("0.5", 0), ("2", 1), ("inf", 1), ("1", 0), ("inf", 0)):
        made.clear()
        experiment("--only", "law-*-200-*", "--minutes", minutes)
        assert len(made) == expected
    (file,) = (tmp_path / "out").iterdir()
    found = json.loads(file.read_text(encoding="utf-8"))
    assert (found.pop("limit"), found.pop("device")) == (None, "cpu")
    del found["plan"]["smaller"]["rounds"]  # older results lack what was no setting then
    file.write_text(json.dumps(found), encoding="utf-8")
    experiment("--only", "law-*-200-*")
    assert not made


def test_kept_results_are_known(parts):
    known = runpy.run_path(str(FOLDER / "__main__.py"), run_name="registration")["known"]
    kept = FOLDER.parent / "results" / "registration"
    for folder, plan in ((kept, parts.study.full()), (kept / "small", parts.study.repeated())):
        found = {file.name: known(file, plan) for file in folder.glob("*-[0-9]*.json")}
        assert found and all(found.values())


def test_no_time_is_refused(experiment, capsys):
    with pytest.raises(SystemExit, match="2"):
        experiment("--minutes", "0")
    assert "above 0" in capsys.readouterr().err


def test_parts_are_named_where_none_is_meant(experiment):
    with pytest.raises(SystemExit, match=r"'rounds-\*-7'.*rounds-original-0, rounds-true-labels-0, looks-0"):
        experiment("--only", "law-*", "rounds-*-7")


def test_nothing_to_draw_names_what_makes_it(experiment):
    with pytest.raises(SystemExit, match="this makes them: python experiments/registration --quick"):
        experiment("--draw")


def test_a_file_that_is_no_result_is_named(experiment, tmp_path):
    (tmp_path / "out").mkdir()
    for text, options in (('{"seed": 0}', ["--only", "looks-0"]), ("[]", ["--draw"]), ("{", ["--draw"])):
        (tmp_path / "out" / "looks-0.json").write_text(text, encoding="utf-8")
        with pytest.raises(SystemExit, match=r"looks-0\.json is no result"):
            experiment(*options)


@pytest.fixture
def study(parts, tmp_path):
    return parts.study.Study(parts.study.quick(), tmp_path, "cpu", [0], 1.0)


def test_missing_weights_are_named_once(study, capsys):
    assert [study.weights(), study.weights()] == [None, None]
    assert capsys.readouterr().err.count("no pretrained/squeezenet") == 1


def test_only_networks_that_are_needed_again_are_kept(parts, study, monkeypatch):
    made, lacking = [], {"train": [torch.ones(3, 2)]}
    monkeypatch.setattr(parts.study.Study, "_chain", lambda _, *of: made.append(of) or (lacking, []))
    for _ in range(2):
        assert "best possible" in study.rounds("extra noise", 0)["errors"]
        study.looks(0)
    assert made == [("extra noise", 0), ("original", 0), ("extra noise", 0)]
    assert list(lacking) == ["train"]
