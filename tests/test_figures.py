"""What is drawn is what was given; bad input is refused with a reason; names are never parsed."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex

from likewise import figures
from likewise.figures import drawing

ROOT = Path(__file__).parent.parent
ODD = ["$x^2$", "<script>", "_hidden"]  # formulas, markup and matplotlib's mark of "no label"
STATUSES = ["ordinary", "isolated", "contested"]


def table_of(n, classes=3):
    rng = np.random.default_rng(1)
    numbers = {
        name: rng.random(n) + 0.01 for name in ("density", "local_density", "novelty", "map_x", "map_y")
    }
    labels = {name: np.arange(n) % classes for name in ("label", "prediction", "suggested_label")}
    status = [STATUSES[i % 3] for i in range(n)]
    agreement = [1.0 if name == "ordinary" else 0.0 for name in status]
    issue = np.arange(n) % 4 == 2
    training = {name: rng.random(n) / 2 for name in ("training_confidence", "training_variability")}
    rest = dict(agreement=agreement, label_issue=issue, status=status)
    return pd.DataFrame(numbers | labels | training | rest)


def matrix_of(n):
    return np.arange(n * n).reshape(n, n) % 7 - 2 * np.eye(n)


TABLE = table_of(40)
LEVELS = [(0.6, 0.55, 0.4, 0.7, 30), (0.9, 0.93, 0.85, 0.97, 40)]
IMAGES = np.random.default_rng(0).random((40, 5, 4))
DRAWN = {
    "neighbor_grid": lambda ax: figures.neighbor_grid(IMAGES, [0, 1], [[1, 2, 3], [0, 4, 5]], ax=ax),
    "similarity_histogram": lambda ax: figures.similarity_histogram([-1, 0, 1], [3, 4], 0.0, ax=ax),
    "density_histogram": lambda ax: figures.density_histogram(TABLE["density"], IMAGES, ax=ax),
    "neighborhoods": lambda ax: figures.neighborhoods(TABLE, ax=ax),
    "kernel_map": lambda ax: figures.kernel_map(TABLE, ax=ax),
    "confusion": lambda ax: figures.confusion([[3, 1], [0, 4]], ax=ax),
    "class_similarity": lambda ax: figures.class_similarity([[0.3, -0.1], [-0.1, 0.4]], ax=ax),
    "pair_grid": lambda ax: figures.pair_grid(IMAGES, [0, 1, 2], [3, 4, 6], [0.9, 0.8, 0.7], ax=ax),
    "cartography": lambda ax: figures.cartography(TABLE, ax=ax),
    "slices": lambda ax: figures.slices(TABLE, ax=ax),
    "calibration": lambda ax: figures.calibration(LEVELS, ax=ax),
    "dynamics": lambda ax: figures.dynamics([TABLE, TABLE], ax=ax),
}


@pytest.fixture
def ax():
    yield plt.figure(layout="constrained").add_subplot()
    plt.close("all")


def drawn(ax):
    """Draw all of it, so that what only fails when rendered fails here."""
    ax.figure.canvas.draw()
    return ax


def texts(ax):
    return [text.get_text() for text in ax.texts if text.get_text()]


def legend(ax):
    return [text.get_text().strip() for text in ax.get_legend().get_texts()]


@pytest.mark.parametrize("name", DRAWN)
def test_draws_into_the_axes_given_and_returns_them(name, ax):
    assert DRAWN[name](ax) is ax
    assert drawn(ax).get_children()
    assert len(plt.get_fignums()) == 1


@pytest.mark.parametrize("name", DRAWN)
def test_makes_a_figure_if_none_is_given(name):
    axes = DRAWN[name](None)
    assert drawn(axes) in axes.figure.axes
    plt.close("all")


def test_imports_neither_torch_nor_the_rest_of_likewise():
    texts = [path.read_text() for path in Path(figures.__file__).parent.glob("*.py")]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    allowed = {"__future__", "collections", "itertools", "matplotlib", "numpy", "pandas", "scipy", "typing"}
    others = {module for module in modules if not module.startswith("likewise.figures.")}
    assert {module.split(".")[0] for module in others} <= allowed


def test_matplotlib_is_imported_late_and_missed_with_advice():
    code = """
import sys, numpy
from likewise import figures
from likewise.figures import drawing
assert "matplotlib" not in sys.modules and "pandas" not in sys.modules
sys.modules["matplotlib"] = None
try:
    figures.confusion([[1]])
except ImportError as error:
    print(error)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 'pip install "likewise[figures]"' in out.stdout


# neighbor_grid


def test_grid_has_a_row_per_query_with_similarities_names_and_frames(ax):
    labels = np.arange(40) % 2
    places = np.array([[1, 2, 3], [3, 4, 6]])
    similarities = np.array([[0.9, 0.8, 0.755], [0.5, 0.4, -0.3]])
    figures.neighbor_grid(IMAGES, [0, 5], places, similarities, labels, ["even", "odd"], ax)
    cells = drawn(ax).child_axes
    assert len(cells) == 8
    assert [cell.get_title() for cell in cells] == (
        ["query", "0.90", "0.80", "0.76", "query", "0.50", "0.40", "-0.30"]
    )
    assert [cell.get_xlabel() for cell in cells[:4]] == ["even", "odd", "even", "odd"]
    frames = [to_hex(cell.spines["left"].get_edgecolor()) for cell in cells]
    same, other = drawing.BLUE.lower(), drawing.VERMILION.lower()
    assert [frames[i] for i in (1, 2, 3, 5, 6, 7)] == [other, same, other, same, other, other]
    assert legend(ax) == ["the query's label", "another label"]


@pytest.mark.parametrize("shape", [(9, 4, 4), (9, 1, 4, 4), (9, 4, 4, 1), (9, 3, 4, 4), (9, 4, 4, 3)])
def test_grid_takes_images_of_any_layout_and_range(shape, ax):
    images = np.random.default_rng(0).normal(size=shape) * 300
    figures.neighbor_grid(images, [0], [[8, 1]], ax=ax)
    shown = [np.asarray(cell.images[0].get_array()) for cell in drawn(ax).child_axes]
    channels = (3,) if 3 in shape else ()
    assert {picture.shape for picture in shown} == {(4, 4, *channels)}
    assert min(picture.min() for picture in shown) == 0 and max(picture.max() for picture in shown) == 1


def test_grid_shows_the_images_at_the_places(ax):
    images = np.arange(5.0)[:, None, None] * np.ones((5, 2, 2))
    figures.neighbor_grid(images, [4], [[0, 2]], ax=ax)
    assert [float(cell.images[0].get_array().max()) for cell in ax.child_axes] == [1, 0, 0.5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(images=np.zeros((4, 2, 5, 5))), r"Images of shape \(4, 2, 5, 5\) found: pass n x h x w"),
        (dict(queries=[4]), "Places 1 to 4 found: choose from 0 to 3"),
        (dict(neighbors=[[1, -1]]), "Places -1 to 1"),
        (dict(neighbors=[1, 2]), r"neighbors: int64 \(2,\) found, pass finite numbers of shape \(1, None\)"),
        (dict(neighbors=[[1, 2], [2, 3]]), r"neighbors.*\(2, 2\)"),
        (dict(similarities=[[0.5]]), r"similarities.*\(1, 1\).*\(1, 2\)"),
        (dict(labels=[0, 1, 2]), r"labels.*\(3,\).*\(4,\)"),
        (dict(labels=[0, 1, 2, 3], classes=["a"]), "Classes up to 2 found, but 1 names"),
    ],
)
def test_grid_refuses_what_does_not_match(change, message):
    given = dict(images=np.zeros((4, 5, 5)), queries=[0], neighbors=[[1, 2]]) | change
    with pytest.raises(ValueError, match=message):
        figures.neighbor_grid(**given)
    assert not plt.get_fignums()


# Histograms


def test_similarities_at_or_above_the_threshold_are_counted_and_colored(ax):
    sims = np.random.default_rng(0).uniform(-1, 1, 5000)
    counts, edges = np.histogram(sims, 100, (-1, 1))
    figures.similarity_histogram(edges, counts, 0.9, ax)
    assert sum(bar.get_height() for bar in drawn(ax).patches) == 5000
    assert ax.get_title(loc="right") == f"{(sims >= 0.9).sum():,} at or above 0.9"
    warm = [bar for bar in ax.patches if to_hex(bar.get_facecolor()) == drawing.VERMILION.lower()]
    assert sum(bar.get_height() for bar in warm) == (sims >= 0.9).sum()
    assert ax.get_yscale() == "log"


@pytest.mark.parametrize(
    ("threshold", "count"),
    [(-1, "10"), (-0.5, "6 to 10"), (0, "6"), (0.25, "0 to 6"), (1, "0 to 6"), (2, "0 to 6"), (-9, "10")],
)
def test_a_threshold_inside_a_bin_gives_both_bounds(threshold, count, ax):
    figures.similarity_histogram([-1, 0, 1], [4, 6], threshold, ax)
    assert ax.get_title(loc="right") == f"{count} at or above {threshold:g}"


def test_a_histogram_without_threshold_or_counts_is_drawn(ax):
    figures.similarity_histogram([0, 1], [0], ax=ax)
    assert len(drawn(ax).patches) == 1 and not ax.get_title(loc="right")


def test_density_bars_count_all_samples_and_carry_the_middle_one(ax):
    density = np.array([0.0, 0.1, 0.2, 0.5, 0.9, 1.0])
    images = np.arange(6.0)[:, None, None] * np.ones((6, 2, 2))
    figures.density_histogram(density, images, bins=2, ax=ax)
    assert [bar.get_height() for bar in drawn(ax).patches] == [3, 3]
    assert [float(cell.images[0].get_array().max()) for cell in ax.child_axes] == [0, 1]  # samples 1 and 4


def test_density_bars_are_numpys(ax):
    figures.density_histogram(TABLE["density"], ax=ax)
    expected, _ = np.histogram(TABLE["density"], 12)
    assert [bar.get_height() for bar in ax.patches] == expected.tolist()


def test_histograms_refuse_what_does_not_match():
    with pytest.raises(ValueError, match=r"counts: int64 \(3,\) found, pass finite numbers of shape \(2,\)"):
        figures.similarity_histogram([0, 1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="39 images found for 40 densities"):
        figures.density_histogram(TABLE["density"], IMAGES[1:])
    with pytest.raises(ValueError, match="0 bins"):
        figures.density_histogram(TABLE["density"], bins=0)
    with pytest.raises(ValueError, match=r"density: float64 \(2,\) found, pass finite"):
        figures.density_histogram([0.5, np.nan])
    assert not plt.get_fignums()


# neighborhoods and kernel_map


def test_neighborhoods_counts_and_colors(ax):
    figures.neighborhoods(TABLE, ax)
    counts = [f"{name}: {(TABLE['status'] == name).sum()}" for name in STATUSES]
    assert legend(ax) == [*counts, f"label issue: {TABLE['label_issue'].sum()}"]
    groups = [group for group in ax.collections if len(group.get_offsets())]
    assert sum(len(group.get_offsets()) for group in groups) == len(TABLE)
    colors = {to_hex(group.get_facecolor()[0]).upper() for group in groups}
    assert colors == {drawing.STATUSES[name].upper() for name in STATUSES}


def test_spread_points_stay_close_and_are_always_the_same(ax):
    table = TABLE.assign(agreement=0.5)
    drawings = [figures.neighborhoods(table, axes) for axes in (ax, ax.figure.add_subplot())]
    first, second = ([c.get_offsets() for c in axes.collections if len(c.get_offsets())] for axes in drawings)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert max(np.abs(points[:, 1] - 0.5).max() for points in first) <= 0.0201


def test_neighborhoods_with_densities_of_no_logarithm_are_drawn(ax):
    figures.neighborhoods(TABLE.assign(local_density=TABLE["local_density"] - 0.5), ax)
    assert drawn(ax).get_xscale() == "linear"


def test_neighborhoods_refuses_other_names_and_missing_columns():
    with pytest.raises(ValueError, match=r"Statuses \['odd'\] found: expected ordinary, isolated"):
        figures.neighborhoods(TABLE.assign(status="odd"))
    with pytest.raises(ValueError, match="No column 'agreement' found: choose from density, "):
        figures.neighborhoods(TABLE.drop(columns="agreement"))


@pytest.mark.parametrize("color", ["label", "prediction", "suggested_label", "status", "label_issue"])
def test_classes_have_a_color_and_a_marker_each(color, ax):
    figures.kernel_map(TABLE, color, ax=ax)
    found = sorted(TABLE[color].unique())
    assert legend(drawn(ax)) == [str(value) for value in found]
    assert [len(group.get_offsets()) for group in ax.collections] == [
        (TABLE[color] == v).sum() for v in found
    ]
    assert len({to_hex(group.get_facecolor()[0]) for group in ax.collections}) == len(found)
    assert len({group.get_paths()[0].vertices.tobytes() for group in ax.collections}) == len(found)


@pytest.mark.parametrize("layout", [None, "constrained"])
def test_a_legend_does_not_lie_on_the_next_plot(layout):
    fig, (ax, other) = plt.subplots(1, 2, layout=layout)
    figures.kernel_map(TABLE, ax=ax)
    fig.canvas.draw()
    assert not ax.get_legend().get_window_extent().overlaps(other.get_tightbbox())
    plt.close(fig)


def test_a_class_keeps_its_color_where_others_are_missing(ax):
    few = TABLE[TABLE["label"] != 0]
    figures.kernel_map(few, classes=["a", "b", "c"], ax=ax)
    assert legend(ax) == ["b", "c"]
    assert to_hex(ax.collections[0].get_facecolor()[0]) == drawing.COLORS[1].lower()


@pytest.mark.parametrize(
    "table", [table_of(40, 30), TABLE.assign(label=TABLE["density"])], ids=["many", "regression"]
)
def test_many_classes_and_numbers_share_a_color_bar(table, ax):
    figures.kernel_map(table, ax=ax)
    assert drawn(ax).get_legend() is None
    assert ax.collections[0].get_array().tolist() == table["label"].tolist()
    assert ax.figure.axes[1].get_ylabel() == "label"


def test_map_refuses_an_unknown_color_and_too_few_names():
    with pytest.raises(ValueError, match="No column 'colour' found: choose from density"):
        figures.kernel_map(TABLE, "colour")
    with pytest.raises(ValueError, match="Classes up to 2 found, but 2 names"):
        figures.kernel_map(TABLE, classes=["a", "b"])
    assert not plt.get_fignums()


# Matrices


def test_confusion_writes_counts_and_colors_only_off_the_diagonal(ax):
    counts = np.array([[1200, 3, 0], [1, 8, 0], [0, 2, 0]])
    figures.confusion(counts, ax=ax)
    assert texts(drawn(ax)) == ["1,200", "3", "1", "8", "2", "0"]
    shades = ax.images[0].get_array()
    assert shades.mask.tolist() == np.eye(3, dtype=bool).tolist()
    assert ax.images[0].get_clim() == (0, 3)
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("label", "neighbors' vote")


def test_class_similarity_is_symmetric_about_zero_and_leaves_nan_gray(ax):
    figures.class_similarity([[0.5, -0.2], [-0.001, np.nan]], ax=ax)
    assert texts(drawn(ax)) == ["0.50", "−0.20", "0.00"]
    assert ax.images[0].get_clim() == (-0.5, 0.5)


@pytest.mark.parametrize(("draw", "most"), [(figures.confusion, 20), (figures.class_similarity, 12)])
def test_cells_are_written_up_to_some_classes(draw, most, ax):
    draw(matrix_of(most) + 3, ax=ax)
    assert len(texts(ax)) > most
    assert not texts(drawn(draw(matrix_of(most + 1) + 3)))
    plt.close("all")


@pytest.mark.parametrize("draw", [figures.confusion, figures.class_similarity])
def test_matrices_must_be_square_and_named(draw):
    with pytest.raises(ValueError, match=r"matrix: .* \(2, 3\) found, pass finite numbers of shape \(2, 2\)"):
        draw(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="Classes up to 2 found, but 1 names"):
        draw(np.zeros((3, 3)), ["a"])
    assert not plt.get_fignums()


# dynamics


def test_dynamics_draws_median_band_and_samples(ax):
    tables = [pd.DataFrame({"density": np.arange(11.0) * scale}) for scale in (1, 2, 4)]
    figures.dynamics(tables, steps=[10, 20, 40], samples=[3, 7], ax=ax)
    median, third, seventh = drawn(ax).lines
    assert median.get_xdata().tolist() == [10, 20, 40]
    assert median.get_ydata().tolist() == [5, 10, 20]
    assert (third.get_ydata().tolist(), seventh.get_ydata().tolist()) == ([3, 6, 12], [7, 14, 28])
    band = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (1, 36)
    assert legend(ax) == ["10–90 % of samples", "median", "sample 3", "sample 7"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(tables=[]), r"Tables of \[\] samples"),
        (dict(tables=[TABLE, TABLE[1:]]), r"Tables of \[40, 39\] samples found"),
        (dict(tables=[TABLE], column="speed"), "No column 'speed'"),
        (dict(tables=[TABLE], column="status"), "status: .* found, pass finite numbers"),
        (
            dict(tables=[TABLE], steps=[1, 2]),
            r"steps: int64 \(2,\) found, pass finite numbers of shape \(1,\)",
        ),
        (dict(tables=[TABLE], samples=[3, 40]), r"Samples \[40\] found: choose from 0 to 39"),
    ],
)
def test_dynamics_refuses_what_does_not_match(given, message):
    with pytest.raises(ValueError, match=message):
        figures.dynamics(**given)


# pair_grid


def test_pairs_have_similarities_names_and_frames(ax):
    labels = np.arange(40) % 3
    figures.pair_grid(IMAGES, [0, 1, 2], [3, 5, 6], [0.98765, 0.5, 0.25], labels, ["a", "b", "c"], 2, ax)
    assert texts(drawn(ax)) == ["0.988", "0.500", "0.250"]
    insets = ax.child_axes
    assert [inset.get_xlabel() for inset in insets] == ["a", "a", "b", "c", "c", "a"]
    frames = [to_hex(inset.spines["left"].get_edgecolor()).upper() for inset in insets]
    assert frames == [drawing.GRAY] * 2 + [drawing.VERMILION] * 4
    shown = IMAGES[[[0, 3], [1, 5], [2, 6]]]
    expected = (shown - shown.min()) / np.ptp(shown)
    assert np.allclose([inset.images[0].get_array() for inset in insets], expected.reshape(6, 5, 4))
    rows = [round(inset.get_position().y0, 2) for inset in insets]
    assert rows[0] == rows[3] > rows[4] == rows[5]  # two pairs in a row


def test_pairs_refuse_what_does_not_match():
    with pytest.raises(ValueError, match=r"second: int64 \(1,\) found, pass finite numbers of shape \(2,\)"):
        figures.pair_grid(IMAGES, [0, 1], [2])
    with pytest.raises(ValueError, match="Places 0 to 40 found: choose from 0 to 39"):
        figures.pair_grid(IMAGES, [0], [40])
    with pytest.raises(ValueError, match="0 pairs per row"):
        figures.pair_grid(IMAGES, [0], [1], pairs_per_row=0)
    assert not plt.get_fignums()


# cartography


def test_cartography_draws_variability_against_confidence(ax):
    figures.cartography(TABLE, ax)
    right, wrong = (group.get_offsets() for group in drawn(ax).collections)
    expected = TABLE[["training_variability", "training_confidence"]].to_numpy()
    assert np.array_equal(right, expected[~TABLE["label_issue"]])
    assert np.array_equal(wrong, expected[TABLE["label_issue"]])
    assert legend(ax) == ["looks right: 30", "looks wrong: 10"]


def test_cartography_needs_a_record_of_training():
    with pytest.raises(ValueError, match="No column 'training_variability' found"):
        figures.cartography(TABLE.drop(columns="training_variability"))


# slices


def test_slices_are_shares_with_the_intervals_of_wilson(ax):
    table = pd.DataFrame(
        {"label": [0] * 10 + [2] * 20, "label_issue": [True] * 2 + [False] * 8 + [True] * 15 + [False] * 5}
    )
    figures.slices(table, classes=["a", "b", "c"], ax=ax)
    assert [bar.get_width() for bar in drawn(ax).patches] == [0.75, 0.2]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["c (n = 20)", "a (n = 10)"]
    assert ax.get_title(loc="right") == "all samples: 56.7%"
    ends = ax.collections[0].get_segments()
    z = 1.959964
    for (low, high), hits, n in zip([segment[:, 0] for segment in ends], (15, 2), (20, 10), strict=True):
        middle, spread = (
            hits / n + z * z / (2 * n),
            z * np.sqrt(hits / n * (1 - hits / n) / n + z * z / (4 * n * n)),
        )
        assert (low, high) == pytest.approx(
            np.array([middle - spread, middle + spread]) / (1 + z * z / n), abs=1e-6
        )
    assert ax.lines[0].get_xdata()[0] == pytest.approx(17 / 30)


def test_slices_of_numbers_are_quintiles_and_count_the_largest_tenth(ax):
    table = pd.DataFrame({"size": np.arange(50.0), "novelty": np.arange(50.0)[::-1], "label_issue": False})
    figures.slices(table, by="size", of="novelty", ax=ax)
    assert [bar.get_width() for bar in drawn(ax).patches] == [
        0.5,
        0,
        0,
        0,
        0,
    ]  # 5 of 50 are above the 90th percentile
    names = [tick.get_text() for tick in ax.get_yticklabels()]
    assert names == [f"{name} (n = 10)" for name in ("< 10", "10 to 20", "20 to 30", "30 to 40", "≥ 40")]
    assert ax.get_xlabel() == "share of the largest tenth of novelty"


@pytest.mark.parametrize(("of", "share"), [("mistakes", 0.5), ("isolated", 0.25)])
def test_slices_count_mistakes_and_isolated_samples(of, share, ax):
    table = pd.DataFrame({"source": list("aaaa"), "label": [0, 1, 0, 1], "prediction": [0, 0, 1, 1]})
    figures.slices(table.assign(status=["isolated", *["ordinary"] * 3]), by="source", of=of, ax=ax)
    assert [bar.get_width() for bar in drawn(ax).patches] == [share]


def test_slices_show_the_largest_shares_first_and_no_more_than_asked(ax):
    table = pd.DataFrame({"source": list("abcd"), "label_issue": [False, True, False, True]})
    figures.slices(table, by="source", most=3, ax=ax)
    assert [tick.get_text()[0] for tick in drawn(ax).get_yticklabels()] == ["b", "d", "a"]
    with pytest.raises(ValueError, match="No column 'origin' found"):
        figures.slices(table, by="origin")


# calibration


def test_calibration_draws_what_was_found_with_its_interval(ax):
    figures.calibration(LEVELS, ax)
    diagonal, points, *_ = drawn(ax).lines
    assert np.array_equal(points.get_xydata(), [[0.6, 0.55], [0.9, 0.93]])
    assert np.array_equal(diagonal.get_xdata(), diagonal.get_ydata())
    (bars,) = ax.collections
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [
        pytest.approx([0.4, 0.7]),
        pytest.approx([0.85, 0.97]),
    ]
    assert ax.get_title(loc="right") == "70 held-out predictions"


def test_calibration_takes_the_levels_of_a_calibration(ax):
    import torch

    import likewise as lw

    torch.manual_seed(0)
    share, classes = torch.linspace(0, 1, 60), torch.zeros(60, dtype=torch.long)
    found = lw.calibrate(lw.Reliability(share, share, 1 - share, classes, share), torch.arange(60) % 2)
    figures.calibration(found.levels, ax)
    assert len(drawn(ax).lines[1].get_xdata()) == len(found.levels)


def test_calibration_refuses_intervals_beside_what_was_found():
    with pytest.raises(ValueError, match="pass low <= found <= high"):
        figures.calibration([(0.6, 0.55, 0.6, 0.7, 30)])
    with pytest.raises(ValueError, match=r"levels: float64 \(1, 2\) found"):
        figures.calibration([(0.6, 0.55)])


# The gallery


def test_the_gallery_shows_every_figure():
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    for name in DRAWN:
        assert f"lw.figures.{name}(" in page, "run make gallery"
    for picture in re.findall(r"\(images/gallery/(\w+\.png)\)", page):
        assert (ROOT / "docs" / "images" / "gallery" / picture).stat().st_size < 60_000


# Everywhere


def shown_names(ax):
    """Return what a reader sees of the names: matplotlib's text after its own parsing."""
    found = [*ax.get_xticklabels(), *ax.get_yticklabels(), *(cell.xaxis.label for cell in ax.child_axes)]
    found += ax.get_legend().get_texts() if ax.get_legend() else []
    parsed = [text._preprocess_math(text.get_text()) for text in found]
    assert not any(math for _, math in parsed)
    return {name.strip() for name, _ in parsed}


def test_names_are_plain_text(ax):
    names = ODD[:1] * 2 + ODD[1:]  # a lone "$" and a pair
    table = table_of(8, 4)
    for draw in (
        lambda axes: figures.kernel_map(table, classes=names, ax=axes),
        lambda axes: figures.confusion(matrix_of(4) + 2, names, axes),
        lambda axes: figures.class_similarity(matrix_of(4), names, axes),
        lambda axes: figures.neighbor_grid(IMAGES[:8], [0], [[1, 2, 3]], None, table["label"], names, axes),
    ):
        axes = drawn(draw(ax.figure.add_subplot()))
        assert set(ODD) <= shown_names(axes)


def test_odd_column_names_are_plain_text(ax):
    table = TABLE.rename(columns={"novelty": "$_novelty$"})
    figures.kernel_map(table, "$_novelty$", ax=ax)
    figures.dynamics([table], "$_novelty$", ax=ax)
    drawn(ax)
    for label in (ax.yaxis.label, ax.figure.axes[1].yaxis.label):
        assert label._preprocess_math(label.get_text()) == ("$_novelty$", False)


def test_long_names_are_cut_and_lines_joined():
    assert drawing.plain_text("a" * 30) == "a" * 23 + "…"
    assert drawing.plain_text("two\nlines") == "two lines"


@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning", "ignore:.*deprecated")
@pytest.mark.parametrize(
    "table",
    [table_of(1, 1), table_of(9, 1).assign(density=0.25, agreement=1.0, map_x=0.0, map_y=0.0, novelty=0.0)],
    ids=["one sample", "constant"],
)
def test_one_sample_one_class_and_constant_values_are_drawn(table, ax):
    images = np.ones((len(table), 3, 3))
    one = ax.figure.add_subplot
    drawn(figures.neighbor_grid(images, [0], [[0]], [[1.0]], table["label"], ax=one()))
    drawn(figures.similarity_histogram([-1, 1], [1], 0.5, ax=one()))
    bars = drawn(figures.density_histogram(table["density"], images, ax=one())).patches
    assert sum(bar.get_height() for bar in bars) == len(table)
    drawn(figures.neighborhoods(table, ax=one()))
    drawn(figures.kernel_map(table, ax=one()))
    drawn(figures.kernel_map(table, "novelty", ax=one()))
    assert texts(drawn(figures.confusion([[0]], ["only"], ax=one()))) == ["0"]
    assert texts(drawn(figures.class_similarity([[0.0]], ax=one()))) == ["0.00"]
    drawn(figures.dynamics([table], samples=[0], ax=one()))
