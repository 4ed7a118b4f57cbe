"""The report in a real browser: selections are linked, numbers agree with the run, text stays text."""

import json

import pytest
import torch
from browser import chromium, opened
from playwright.sync_api import TimeoutError
from sklearn.datasets import load_digits
from torch import nn

import likewise as lw

pytestmark = pytest.mark.browser

EVIL = '<script>window.hacked = 1</script><img src=x onerror="window.hacked=1">'
N = 400


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images[:N], dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels[:N])
    y[:12] = (y[:12] + 1) % 10  # wrong on purpose
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    classes = ["zero", EVIL, *"23456789"]
    out = tmp_path_factory.mktemp("report") / "run"
    extra = {EVIL: [EVIL, "plain"] * (N // 2), "a.b": torch.arange(N) + 10**12, "tiny": torch.arange(N) % 3}
    extra["tiny"] = extra["tiny"].to(torch.uint8)
    extra |= {"__proto__": ["p"] * N, "constructor": ["c\u202ed\x07"] * N}
    return lw.analyze(
        model, (x, y), out=out, classes=classes, names=[f"{EVIL}{i}" for i in range(N)], extra=extra
    )


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture
def page(browser, run):
    made, heard = opened(browser, run.folder / "report.html", viewport={"width": 1300, "height": 900})
    yield made
    assert heard["errors"] == []
    assert [url for url in heard["requests"] if not url.startswith(("file:", "blob:", "data:"))] == []
    assert len([url for url in heard["requests"] if url.startswith("file:")]) >= 1
    assert made.evaluate("window.hacked") is None
    made.context.close()


def rows(page):
    return int(page.get_attribute("#table", "data-rows"))


def shown(page):
    return int(page.get_attribute("#gallery", "data-count"))


def test_a_lasso_on_the_map_filters_table_and_pictures(page):
    area = page.locator("#map .nsewdrag").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    corners = [(0.05, 0.05), (0.5, 0.05), (0.5, 0.95), (0.05, 0.95), (0.05, 0.06)]
    points = [(box["x"] + a * box["width"], box["y"] + b * box["height"]) for a, b in corners]
    page.mouse.move(*points[0])
    page.mouse.down()
    for point in points[1:]:
        page.mouse.move(*point, steps=8)
    page.mouse.up()
    page.wait_for_selector("#selection:not([hidden])")
    page.wait_for_selector(f"#table:not([data-rows='{N}'])")
    assert 0 < rows(page) == shown(page) < N
    assert f"{rows(page)} samples: circled on the map" in page.inner_text("#selection")
    page.click("#release")
    page.wait_for_selector(f"#table[data-rows='{N}']")
    assert shown(page) == N


def open_first_row(page):
    """Click until the sample opens: a click on a row that is being drawn anew is lost."""
    for _ in range(3):
        page.locator("#table .tabulator-row").first.click()
        try:
            return page.wait_for_selector("#drawer:not([hidden])", timeout=10_000)
        except TimeoutError:
            continue
    raise AssertionError("three clicks on a row opened no sample")


def test_a_row_opens_the_sample_with_its_neighbors(page, run):
    open_first_row(page)
    worst = int(run.table["label_suspicion"].argmax())
    assert page.inner_text("#drawer-title") == f"{EVIL}{worst}"
    tiles = page.locator("#drawer .neighbors .tile")
    found = [int(tile.get_attribute("data-sample")) for tile in tiles.all()]
    assert found == run.neighbors(worst)["neighbor"].tolist()
    told = [float(tile.locator(".tile-note").inner_text()) for tile in tiles.all()]
    assert told == pytest.approx(run.neighbors(worst)["similarity"].tolist(), abs=0.006)
    tiles.first.click()
    assert page.inner_text("#drawer-title") == f"{EVIL}{found[0]}"
    page.keyboard.press("Escape")
    assert page.locator("#drawer").is_hidden()


def test_the_slider_counts_what_the_table_counts(page, run):
    page.evaluate("location.hash = 'sample=7'")
    page.wait_for_selector("#near-count[data-count]")
    count = lambda: int(page.get_attribute("#near-count", "data-count"))  # noqa: E731
    assert count() == run.table["hard_neighbors"][7]
    edges, counts = run.histogram(7)
    for threshold in (-0.5, 0.0, 0.3, 0.75):
        page.locator("#drawer-threshold").fill(str(threshold))
        page.wait_for_timeout(50)
        assert count() == counts[edges[:-1] >= threshold - 1e-6].sum(), threshold
    page.keyboard.press("Escape")
    page.locator("#table input[type=search]").first.wait_for()
    page.locator(".tabulator-col[tabulator-field=sample] input").press_sequentially("7")
    page.wait_for_selector("#table[data-rows='1']")
    cell = page.locator(".tabulator-row .tabulator-cell[tabulator-field=hard_neighbors]").first
    assert int(cell.inner_text()) == counts[edges[:-1] >= 0.75 - 1e-6].sum()


def test_review_by_keyboard_is_kept_and_downloaded(page, run, tmp_path):
    queue = (
        run.table[run.table["label_issue"]]
        .sort_values("label_suspicion", ascending=False, kind="stable")
        .index
    )
    assert len(queue) >= 4
    for key in "wrul":  # nothing was clicked and nothing has the focus
        page.keyboard.press(key)
    assert page.get_attribute("#review .progress", "data-decided") == "4"
    page.keyboard.press("ArrowLeft")
    page.reload()
    page.wait_for_selector("body[data-ready=yes]")
    assert page.get_attribute("#review .progress", "data-decided") == "4"
    with page.expect_download() as waiting:
        page.click("#download")
    path = tmp_path / "decisions.json"
    waiting.value.save_as(path)
    decided = json.loads(path.read_text())["decisions"]
    verdicts = {d["sample"]: d["verdict"] for d in decided}
    assert set(verdicts) == set(queue[:4]) and sorted(verdicts.values()) == [
        "relabel",
        "right",
        "unsure",
        "wrong",
    ]
    relabeled = next(d for d in decided if d["verdict"] == "relabel")
    assert relabeled["label"] == run.table["suggested_label"][relabeled["sample"]]
    precision = run.precision(path)
    assert (precision.wrong, precision.right, precision.unsure) == (2, 1, 1)


def test_review_keys_leave_fields_open_samples_and_what_is_off_screen_alone(page):
    decided = lambda: page.get_attribute("#review .progress", "data-decided")  # noqa: E731
    page.locator(".tabulator-col[tabulator-field=name] input").press_sequentially("wrul")
    assert decided() == "0"
    page.locator("#theme").focus()
    page.evaluate("location.hash = 'sample=7'")
    page.wait_for_selector("#drawer:not([hidden])")
    page.keyboard.press("w")
    assert decided() == "0"
    page.keyboard.press("Escape")
    page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    page.keyboard.press("w")  # brings the review back, and decides nothing unseen
    assert decided() == "0" and page.locator("#review .review-card").is_visible()
    page.keyboard.press("w")
    assert decided() == "1"
    page.evaluate("localStorage.clear()")


def test_a_cell_of_the_confusion_opens_its_samples(page, run):
    worst = run.table[run.table["label_issue"]].iloc[0]
    label, vote = int(worst["label"]), int(worst["suggested_label"])
    page.click(f"[data-cell='{label}:{vote}']")
    page.wait_for_selector("#selection:not([hidden])")
    assert rows(page) == shown(page) == run.confusion.iloc[label, vote]
    assert f"select=cell%3A{label}%3A{vote}" in page.url


def test_cards_statuses_and_bars_open_what_they_count(page, run):
    page.click("[data-opens=label_issue]")
    assert shown(page) == run.table["label_issue"].sum()
    page.click("[data-status=contested]")
    assert shown(page) == (run.table["status"] == "contested").sum()
    bar = page.locator("#density .bar-button:not([disabled])").nth(3)
    bar.click()
    assert shown(page) == int(bar.get_attribute("data-count"))
    assert sum(int(b.get_attribute("data-count")) for b in page.locator("#density .bar-button").all()) == N


def test_user_text_stays_text(page):
    assert EVIL in page.locator("#class-similarity th").nth(1).get_attribute("title")
    assert (
        page.evaluate("[...document.scripts].filter(s => s.textContent.includes('window.hacked')).length")
        == 0
    )
    assert page.locator("img[src='x']").count() == 0
    assert "<script>" in page.locator("#table .tabulator-row").first.inner_text()
    page.hover("#map .nsewdrag >> nth=0")
    for field in ("label", EVIL):
        page.locator("#table .tabulator-col").nth(columns(page).index(field)).locator("input").click()
        page.wait_for_selector(".tabulator-edit-list-item")
        assert any("<script>" in text for text in page.locator(".tabulator-edit-list-item").all_inner_texts())
        page.keyboard.press("Escape")


def test_columns_of_ones_own_are_shown_as_they_are(page):
    page.locator(".tabulator-col[tabulator-field=sample] input").press_sequentially("7")
    page.wait_for_selector("#table[data-rows='1']")
    cells = page.locator("#table .tabulator-row").first.locator(".tabulator-cell")
    assert cells.nth(columns(page).index("a.b")).inner_text() == str(10**12 + 7)
    assert cells.nth(columns(page).index("constructor")).inner_text() == "c⟨U+202E⟩d⟨U+0007⟩"
    assert cells.nth(columns(page).index("__proto__")).inner_text() == "p"
    page.select_option("#color", label="tiny")
    assert page.locator("#map .legend").count() == 0


def columns(page):
    return page.evaluate(
        "[...document.querySelectorAll('#table .tabulator-col')].map(c => c.getAttribute('tabulator-field'))"
    )


def test_coloring_and_theme_redraw_the_map(page):
    for name in page.locator("#color option").all_inner_texts():
        page.select_option("#color", label=name)
    assert "density" in page.locator("#color option").all_inner_texts()
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1300])
def test_a_deep_link_opens_on_any_screen(browser, run, scheme, width):
    page, heard = opened(
        browser,
        run.folder / "report.html",
        "#sample=3",
        color_scheme=scheme,
        viewport={"width": width, "height": 840},
    )
    assert page.inner_text("#drawer-title") == f"{EVIL}3"
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    ink, paper = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert contrast(ink, paper) > 7
    assert heard["errors"] == []
    page.emulate_media(media="print")
    assert page.locator("nav").is_hidden() and page.locator(".card").first.is_visible()
    page.context.close()


def numbers(n):
    return nn.Linear(6, 1), (torch.randn(n, 6), torch.randn(n) * 100)


def unlabeled(n):
    return nn.Linear(6, 3), torch.randn(n, 6)


def signals(n):
    model = nn.Sequential(nn.Conv1d(1, 2, 5), nn.Flatten(), nn.Linear(2 * 124, 2))
    x = torch.randn(n, 1, 128)
    return model, (x, torch.arange(n) % 2)


def many_classes(n):
    return nn.Linear(6, 100), (torch.randn(n, 6), torch.arange(n) % 100)


@pytest.mark.parametrize("make", [numbers, unlabeled, signals, many_classes])
@pytest.mark.parametrize("n", [1, 120])
def test_every_kind_of_run_is_drawn(browser, tmp_path, make, n):
    model, data = make(n)
    found = lw.analyze(model, data, out=tmp_path / "run")
    page, heard = opened(browser, found.folder / "report.html", "#sample=0&select=status:contested")
    assert heard["errors"] == [] and rows(page) <= n
    assert page.locator("#drawer").is_visible()
    page.context.close()


def test_many_points_are_drawn_by_webgl_and_few_without_eval(browser, run, tmp_path):
    found = lw.analyze(*unlabeled(4100), out=tmp_path / "run")
    page, heard = opened(browser, found.folder / "report.html")
    policy = "document.querySelector('meta[http-equiv]').content"
    assert "unsafe-eval" in page.evaluate(policy) and heard["errors"] == []
    assert page.evaluate("document.getElementById('map').data[0].type") == "scattergl"
    assert "WebGL is not supported" not in page.inner_text("#map")
    page.context.close()
    page, _ = opened(browser, run.folder / "report.html")
    assert "eval" not in page.evaluate(policy)
    page.context.close()


def test_without_webgl_some_points_stand_for_all(browser, tmp_path):
    model, data = unlabeled(4500)
    found = lw.analyze(model, data, out=tmp_path / "run")
    hidden = "HTMLCanvasElement.prototype.getContext = () => null"
    page, _ = opened(browser, found.folder / "report.html", before=hidden)
    drawn = "document.getElementById('map').data.reduce((sum, trace) => sum + trace.x.length, 0)"
    assert page.evaluate(drawn) == 2250
    page.context.close()


def contrast(a, b):
    """WCAG's contrast of two colors."""

    def light(color):
        parts = [float(v) / 255 for v in color[color.index("(") + 1 : -1].split(",")[:3]]
        linear = [v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(a), light(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)
