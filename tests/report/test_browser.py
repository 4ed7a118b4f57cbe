"""The report in a real browser: selections are linked, numbers agree with the run, text stays text."""

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pandas
import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from browser import chromium, opened
from playwright.sync_api import expect
from sklearn.datasets import load_digits
from synthetic import CLASSES, synthetic_run
from torch import nn

import likewise as lw
from likewise.report.pages import STATIC
from likewise.report.pages import page as page_of
from likewise.report.payload import pack_payload, read_run

pytestmark = pytest.mark.browser

EVIL = '<script>window.hacked = 1</script><img src=x onerror="window.hacked=1">'
N = 400
CASES = json.loads((Path(__file__).parents[1] / "statistics" / "spot_check_cases.json").read_text())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images[:N], dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels[:N])
    x[300:305] = x[200:205]  # copies
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
    extra["split"] = ["test" if i >= 303 else "train" for i in range(N)]
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
    check_quiet(made, heard)


def check_quiet(page, heard):
    """Nothing was complained of, asked of another machine, or carried out."""
    assert heard["errors"] == []
    assert [url for url in heard["requests"] if not url.startswith(("file:", "blob:", "data:"))] == []
    assert len([url for url in heard["requests"] if url.startswith("file:")]) >= 1
    assert page.evaluate("window.hacked") is None
    page.context.close()


def address(page):
    """Where the page says it is: Playwright's own `page.url` hears of it a moment later."""
    return page.evaluate("location.href")


def rows(page):
    return int(page.get_attribute("#table", "data-rows"))


def shown(page):
    return int(page.get_attribute("#gallery", "data-count"))


def decided(page):
    return int(page.get_attribute("#review .progress", "data-decided"))


def under_review(page):
    return int(page.get_attribute("#review .review-card", "data-sample"))


def circle(page, corners=((0.02, 0.02), (0.6, 0.02), (0.6, 0.98), (0.02, 0.98), (0.02, 0.03))):
    area = page.locator("#map canvas")
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    points = [(box["x"] + a * box["width"], box["y"] + b * box["height"]) for a, b in corners]
    page.mouse.move(*points[0])
    page.mouse.down()
    for point in points[1:]:
        page.mouse.move(*point, steps=8)
    page.mouse.up()
    page.wait_for_selector("#selection:not([hidden])")


def queue_of(run):
    flagged = run.table[run.table["label_issue"]]
    return flagged.sort_values("label_suspicion", ascending=False, kind="stable").index.tolist()


def test_a_circle_on_the_map_filters_table_and_pictures(page):
    circle(page)
    assert 0 < rows(page) == shown(page) < N
    assert f"{rows(page)} samples: circled on the map" in page.inner_text("#selection")
    page.click("#release")
    assert shown(page) == rows(page) == N


def test_one_filter_holds_for_table_pictures_map_and_review_and_is_cleared_at_once(page, run):
    queue, first = queue_of(run), under_review(page)
    label = int(run.table["label"][queue[3]])
    name = run.manifest["classes"][label]
    mine = run.table["label"] == label
    page.locator(".filters [data-field=label] select").select_option(f"={name}")
    page.wait_for_selector(f"#map[data-selected='{mine.sum()}']")
    assert rows(page) == shown(page) == mine.sum() < N
    left = [i for i in queue if label == run.table["label"][i]]
    assert under_review(page) == left[0]
    assert f"1 of {len(left)}" in page.inner_text("#review .progress")
    assert f"{len(left)} label" in page.inner_text("#review-filter")
    page.locator(".filters [data-field=novelty] input").fill("0.1")
    both = mine & (run.table["novelty"] >= 0.1)
    expect(page.locator("#selection")).to_contain_text(
        f"{both.sum()} samples: label {name}, novelty at least 0.1"
    )
    assert rows(page) == shown(page) == both.sum()
    page.reload()  # the filters are in the address
    page.wait_for_selector("body[data-ready=yes]")
    assert rows(page) == both.sum()
    assert page.input_value(".filters [data-field=novelty] input") == "0.1"
    page.click("[data-mode=spot]")  # a random draw stays one
    assert under_review(page) == run.manifest["spot_check"]["samples"][0]
    page.click("[data-mode=worst]")
    page.click("#release")
    page.wait_for_selector("#map[data-selected=all]")
    assert rows(page) == shown(page) == N and page.locator("#review-filter").count() == 0
    assert page.input_value(".filters [data-field=novelty] input") == "" and "where" not in address(page)
    page.reload()
    page.wait_for_selector("body[data-ready=yes]")
    assert under_review(page) == first and rows(page) == N


def test_a_filter_that_leaves_nothing_says_so_and_lets_go(page):
    page.locator(".filters [data-field=name] input").fill("no such name")
    page.wait_for_selector("#map[data-selected='0']")
    assert rows(page) == 0 and "nothing to review" in page.inner_text("#review-filter")
    page.click("#review-filter button")
    page.wait_for_selector("#map[data-selected=all]")
    assert rows(page) == N


def test_an_address_of_another_run_filters_nothing(browser, run):
    for text in ('{"no such column":"x"}', "{", '{"novelty":3}', "[]", '{"__proto__":"q"}'):
        page, heard = opened(
            browser, run.folder / "report.html", f"#where={quote(text)}&select=cell:99:1&sample=9999"
        )
        expected = 0 if "__proto__" in text else N  # a column of this run is called so
        assert rows(page) == expected and page.locator("#drawer").is_hidden()
        check_quiet(page, heard)


def test_every_number_of_a_sample_says_where_it_stands(page, run):
    table = run.table
    for column, words in (("novelty", "more unusual than"), ("local_density", "higher than")):
        order = table[column].sort_values(kind="stable").index
        sample = int(order[N * 3 // 4])
        below = (table[column].astype("float32") < np.float32(table[column][sample])).mean()
        page.evaluate(f"location.hash = 'sample={sample}'")
        expect(page.locator("#drawer-title")).to_have_text(f"{EVIL}{sample}")
        text = page.inner_text(f"#drawer tr[data-field={column}] .standing-cell")
        assert f"{words} {math.floor(100 * below + 1e-9)}\u00a0% of the samples" in text
        assert f"range {table[column].min():.3f} to {table[column].max():.3f}"[:10] in text
    page.evaluate(f"location.hash = 'sample={int(table['novelty'].argmax())}'")
    expect(page.locator("#drawer .trust")).to_contain_text("the most unusual of all samples")


def test_a_circle_forgets_the_address_of_what_was_selected_before(page):
    page.click("[data-status=contested]")
    assert "select=status%3Acontested" in address(page)
    circle(page)
    assert "select" not in address(page)
    page.reload()
    page.wait_for_selector("body[data-ready=yes]")
    assert rows(page) == N and page.locator("#selection").is_hidden()


def test_a_row_opens_the_sample_with_its_neighbors(page, run):
    page.locator("#table tbody tr[data-sample]").first.click()
    page.wait_for_selector("#drawer:not([hidden])")
    worst = int(run.table["label_suspicion"].argmax())
    assert page.inner_text("#drawer-title") == f"{EVIL}{worst}"
    tiles = page.locator("#drawer .neighbors .tile")
    found = [int(tile.get_attribute("data-sample")) for tile in tiles.all()]
    assert found == run.neighbors(worst)["neighbor"].tolist()
    told = [float(tile.locator(".tile-note").inner_text()) for tile in tiles.all()]
    assert told == pytest.approx(run.neighbors(worst)["similarity"].tolist(), abs=0.006)
    tiles.first.click()
    assert page.inner_text("#drawer-title") == f"{EVIL}{found[0]}"
    assert f"sample={found[0]}" in address(page)
    page.keyboard.press("Escape")
    assert page.locator("#drawer").is_hidden() and "sample" not in address(page)


def test_a_sample_says_whether_its_prediction_can_be_trusted(page, run):
    table = run.table
    far, near = int(table["shift"].argmax()), int(table["shift"].argmin())
    assert table["shift"][far] > 0.5
    page.evaluate(f"location.hash = 'sample={far}'")
    assert "do not rely on it" in page.inner_text("#drawer .trust")
    page.evaluate(f"location.hash = 'sample={near}'")
    expect(page.locator("#drawer-title")).to_have_text(f"{EVIL}{near}")
    assert "do not rely" not in page.inner_text("#drawer .trust")
    assert f"{table['shift'][near]:.3f}" in page.inner_text("#drawer .trust")
    wrong = table.index[table["label"] != table["prediction"]]
    for sample in wrong[:3]:
        page.evaluate(f"location.hash = 'sample={sample}'")
        expect(page.locator("#drawer-title")).to_have_text(f"{EVIL}{sample}")
        told = page.inner_text("#drawer .trust")
        assert "no sign against it" not in told and "the label or the prediction is wrong" in told


def test_an_open_sample_says_its_label_its_prediction_and_why_to_relabel_it(page, run):
    table, classes = run.table, run.manifest["classes"]
    wrong = table["label"] != table["prediction"]
    assert wrong.any() and not wrong.all()
    for sample in (int(wrong.argmax()), int(wrong.argmin())):
        label, prediction = (classes[int(table[name][sample])] for name in ("label", "prediction"))
        words = (
            f"Labeled {label}, predicted {prediction}" if wrong[sample] else f"Labeled and predicted {label}"
        )
        page.evaluate(f"location.hash = 'sample={sample}'")
        expect(page.locator("#drawer .drawer-headline")).to_have_text(words)
    sample = queue_of(run)[0]
    label, vote = int(table["label"][sample]), int(table["suggested_label"][sample])
    votes = (table["label"][run.neighbor_matrix[sample]] == vote).sum()
    page.evaluate(f"location.hash = 'sample={sample}'")
    expect(page.locator("#drawer-title")).to_have_text(f"{EVIL}{sample}")
    assert label != vote and page.locator("#drawer [data-decide=relabel]").is_visible()
    expect(page.locator("#drawer .relabel-why")).to_contain_text(
        f"{votes} of the {run.neighbor_matrix.shape[1]} most similar samples are labeled {classes[vote]}"
    )


def test_the_slider_counts_what_the_table_counts(page, run):
    page.evaluate("location.hash = 'sample=7'")
    page.wait_for_selector("#near-count[data-count]")
    count = lambda: int(page.get_attribute("#near-count", "data-count"))  # noqa: E731
    assert count() == run.table["hard_neighbors"][7] - 1  # of the other samples
    edges, counts = run.histogram(7)
    for threshold in (-0.5, 0.0, 0.3, 0.75):
        page.locator("#drawer-threshold").fill(str(threshold))
        assert count() == counts[edges[:-1] >= threshold - 1e-6].sum() - 1, threshold
    bars = page.locator("#drawer .histogram rect")
    assert sum(int(bar.get_attribute("data-count")) for bar in bars.all()) == N - 1
    assert int(bars.last.get_attribute("data-count")) == counts[-1] - 1  # without the sample itself
    page.keyboard.press("Escape")
    page.locator(".filters [data-field=sample] input").press_sequentially("7")
    page.wait_for_selector("#table[data-rows='1']")
    cell = page.locator("#table tbody [data-field=hard_neighbors]").first
    assert int(cell.inner_text()) == counts[edges[:-1] >= 0.75 - 1e-6].sum()


def test_the_table_sorts_and_draws_only_what_is_seen(page, run):
    ids = lambda: [int(v) for v in page.locator("#table tbody [data-field=sample]").all_inner_texts()]  # noqa: E731
    page.locator("#table th[data-field=novelty] button").click()
    expected = run.table["novelty"].astype("float32").sort_values(ascending=False, kind="stable").index
    assert ids()[:5] == expected[:5].tolist() and len(ids()) < 60
    assert page.get_attribute("#table th[data-field=novelty]", "aria-sort") == "descending"
    page.locator("#table").evaluate("element => element.scrollTop = element.scrollHeight")
    page.wait_for_selector("#table tbody tr:last-child[aria-rowindex='402']", state="attached")
    assert ids()[-1] == expected[-1]


def test_review_keys_work_at_once_are_kept_and_downloaded(page, run, tmp_path):
    queue = queue_of(run)
    assert len(queue) >= 5
    for key in "wrul":  # nothing was clicked and nothing has the focus
        page.keyboard.press(key)
    assert decided(page) == 4 and under_review(page) == queue[4]
    page.keyboard.press("ArrowLeft")
    assert under_review(page) == queue[3]
    page.reload()
    page.wait_for_selector("body[data-ready=yes]")
    assert decided(page) == 4 and under_review(page) == queue[4]  # the first that is not decided
    with page.expect_download() as waiting:
        page.click("#download")
    path = tmp_path / "decisions.json"
    expect(page.locator("#downloaded[role=status]")).to_have_text(
        "decisions.json downloaded (4 decisions); next: likewise apply run decisions.json"
    )
    waiting.value.save_as(path)
    found = json.loads(path.read_text())
    assert set(found) == {"run", "decisions"} and found["run"] == run.manifest["data"]
    verdicts = {d["sample"]: d["verdict"] for d in found["decisions"]}
    assert [verdicts[i] for i in queue[:4]] == ["wrong", "right", "unsure", "relabel"]
    relabeled = next(d for d in found["decisions"] if d["verdict"] == "relabel")
    assert relabeled["label"] == run.table["suggested_label"][relabeled["sample"]]
    precision = run.precision(path)
    assert (precision.wrong, precision.right, precision.unsure) == (2, 1, 1)


def test_the_keys_are_shown_and_drop_is_one_of_them(page, run):
    queue = queue_of(run)
    page.keyboard.press("?")
    page.wait_for_selector("dialog.review-keys[open]")
    shown = page.locator("dialog.review-keys kbd").all_inner_texts()
    assert shown == ["l", "w", "r", "u", "d", "c", "z", "←", "→", "?"]
    page.keyboard.press("d")  # decides nothing behind the window
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog.review-keys:not([open])", state="attached")
    assert decided(page) == 0 and under_review(page) == queue[0]
    page.keyboard.press("d")
    assert decided(page) == 1 and under_review(page) == queue[1]
    page.keyboard.press("ArrowLeft")
    assert page.get_attribute("[data-verdict=drop]", "aria-pressed") == "true"


def test_the_first_card_says_how_far_the_review_is(page, run):
    card, total = page.locator(".step", has=page.locator("[data-review=worst]")), len(queue_of(run))
    assert "to review" in card.inner_text()
    page.keyboard.press("r")
    assert f"1 of {total}" in card.inner_text() and "download" not in card.inner_text()
    for _ in range(total - 1):
        page.keyboard.press("r")
    assert f"{total} of {total} labels decided: download" in card.inner_text().replace("\n", " ")
    assert "to review" not in card.inner_text()
    with page.expect_download():
        card.locator("a").click()
    page.click("#undo")
    assert f"{total - 1} of {total}" in card.inner_text()


def test_review_goes_on_beyond_the_flagged(page, run):
    flagged = int(run.table["label_issue"].sum())
    for done in range(1, flagged + 1):
        page.keyboard.press("r")
        page.wait_for_selector(f'#review [data-decided="{done}"]')
    order = (-run.table["label_suspicion"].to_numpy()).argsort(kind="stable")
    following = [int(i) for i in order if not run.table["label_issue"].iloc[i]]
    page.click("#go-on")
    page.wait_for_selector(f'#review .review-card[data-sample="{following[0]}"]')
    assert page.text_content("#review .progress") == f"{flagged + 1} of {flagged + 25} · {flagged} decided"
    page.keyboard.press("r")
    page.wait_for_selector(f'#review [data-decided="{flagged + 1}"]')
    assert page.locator("#done").count() == 0


def test_undo_takes_back_one_decision_after_the_other(page, run):
    queue = queue_of(run)
    page.keyboard.press("w")
    page.keyboard.press("r")
    page.keyboard.press("z")
    assert decided(page) == 1 and under_review(page) == queue[1]
    page.keyboard.press("u")
    page.keyboard.press("Control+z")
    page.click("#undo")
    assert decided(page) == 0 and under_review(page) == queue[0]
    page.keyboard.press("w")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("r")  # another verdict on the same sample
    page.keyboard.press("z")
    assert page.get_attribute("[data-verdict=wrong]", "aria-pressed") == "true"
    page.keyboard.press("z")
    page.keyboard.press("z")  # nothing is left
    assert decided(page) == 0 and page.inner_text("#said") == "Nothing to undo."


def test_review_keys_leave_fields_open_samples_and_what_is_off_screen_alone(page):
    page.locator(".filters [data-field=name] input").press_sequentially("wrul")
    page.wait_for_selector("#map[data-selected='0']")
    page.click("#release")
    assert decided(page) == 0
    page.locator("#theme").focus()
    page.evaluate("location.hash = 'sample=7'")
    page.wait_for_selector("#drawer:not([hidden])")
    page.keyboard.press("w")
    assert decided(page) == 0
    page.keyboard.press("Escape")
    page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    page.keyboard.press("w")  # brings the review back, and decides nothing unseen
    assert decided(page) == 0 and page.locator("#review .review-card").is_visible()
    page.keyboard.press("w")
    assert decided(page) == 1


def test_any_class_is_chosen_by_typing_a_part_of_its_name(page, run):
    first = queue_of(run)[0]
    page.keyboard.press("c")
    page.keyboard.type("7")
    assert page.locator("#picker-list [role=option]").all_inner_texts() == ["7"]
    page.keyboard.press("Enter")
    stored = page.evaluate(f"JSON.parse(localStorage.getItem('likewise:{run.manifest['data']}'))")
    assert stored == {str(first): {"verdict": "relabel", "label": 7}}
    page.keyboard.press("c")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    stored = page.evaluate(f"JSON.parse(localStorage.getItem('likewise:{run.manifest['data']}'))")
    assert stored[str(queue_of(run)[1])]["label"] == 2
    page.keyboard.press("c")
    page.keyboard.press("Escape")
    assert decided(page) == 2


def test_spot_check_estimates_are_those_of_python(page, run):
    drawn = lw.spot_check(
        run.table["label_suspicion"].to_numpy(), run.table["label_issue"].to_numpy(), count=100
    )
    assert drawn.samples.tolist() == run.manifest["spot_check"]["samples"]
    chosen = under_review(page)
    page.keyboard.press("w")  # worst first: counts only if the draw has come to it
    page.click("[data-mode=spot]")
    draws = drawn.samples.tolist()
    wrong, unsure = ({chosen: True} if chosen in draws[:14] else {}), draws[5]
    for expected in (sample for sample in draws[:14] if sample != chosen):
        sample = under_review(page)
        assert sample == expected
        key = "u" if sample == unsure else "w" if sample < 12 else "r"
        wrong[sample] = None if key == "u" else key == "w"
        page.keyboard.press(key)
    found = drawn.estimate(wrong)
    text = page.inner_text("#estimate")
    low, likely, high = (round(value) for value in found.errors)
    assert f"about {likely} are wrong ({low} to {high})" in text
    assert f"{100 * found.precision.likely:.0f}\u00a0% are wrong" in text
    assert page.get_attribute("#estimate", "data-seen") == "14"
    page.keyboard.press("z")
    assert page.get_attribute("#estimate", "data-seen") == "13"
    page.click("[data-mode=worst]")
    page.click(".step [data-review=spot]")
    assert page.get_attribute("#estimate", "data-seen") == "13"


def test_a_spot_check_is_decided_without_the_opinion_of_the_network(page, run):
    page.click("[data-mode=spot]")
    places = lambda: {  # noqa: E731
        name: page.locator(f"[data-verdict={name}]").bounding_box()["x"]
        for name in ("wrong", "right", "unsure", "other")
    }
    before, queue = places(), run.manifest["spot_check"]["samples"]
    for sample in queue[:6]:
        assert under_review(page) == sample and places() == before
        text = page.inner_text("#review .review-card")
        assert "looks like it" not in text and ", looks like" not in text and "Probability wrong" not in text
        assert page.locator("[data-verdict=relabel]").count() == 0
        assert page.locator("#review .review-card .tile").count() == 0  # neighbors' labels are an opinion
        page.keyboard.press("u")
    page.keyboard.press("l")
    assert page.locator("#picker").is_visible()
    page.keyboard.press("Escape")
    page.click("#review [aria-label=Previous]")
    assert "looks like it" in (text := page.inner_text("#review .review-card")) or ", looks like" in text
    assert page.locator("#review .review-card .tile").count() > 0


def test_without_duplicates_the_closest_pair_is_told(browser, tmp_path):
    made = synthetic_run(200)
    none = {name: np.zeros(0) for name in ("first", "second", "similarity", "input_similarity")}
    (tmp_path / "report.html").write_text(page_of(made._replace(duplicates=none)))
    page, heard = opened(browser, tmp_path / "report.html")
    closest = made.similarities[:, 0].max()
    assert f"None. The closest pair: {closest:.2f}" in page.inner_text("#duplicates-what")
    page.click("#duplicates-closest")
    first = int(made.similarities[:, 0].argmax())
    pair = page.locator("#duplicates .pair").get_attribute("data-pair")
    assert pair == f"{first}:{made.indices[first, 0]}"
    check_quiet(page, heard)


def test_any_sample_that_is_open_can_be_decided(page, run):
    sample, first = int(run.table["label_suspicion"].argmin()), under_review(page)
    assert sample not in queue_of(run)
    page.evaluate(f"location.hash = 'sample={sample}'")
    page.click("#drawer [data-decide=wrong]")
    assert "You said: wrong" in page.inner_text("#drawer .decision")
    assert page.get_attribute("#drawer [data-decide=wrong]", "aria-pressed") == "true"
    page.click("#drawer [data-decide=other]")
    page.keyboard.type("7")
    page.keyboard.press("Enter")
    stored = page.evaluate(f"JSON.parse(localStorage.getItem('likewise:{run.manifest['data']}'))")
    assert stored == {str(sample): {"verdict": "relabel", "label": 7}}
    assert under_review(page) == first and decided(page) == 0
    page.keyboard.press("Escape")
    page.click("#undo")
    page.click("#undo")
    assert page.evaluate(f"localStorage.getItem('likewise:{run.manifest['data']}')") == "{}"
    assert under_review(page) == first


def test_a_suggestion_that_neighbors_do_not_support_is_not_taken_at_one_key(browser, tmp_path):
    run = synthetic_run(300)  # neighbors are of its own class: what is flagged has another label suggested
    run.columns["prediction"] = run.columns["label"]
    path = tmp_path / "report.html"
    path.write_text(page_of(run))
    page, heard = opened(browser, path)
    sample = under_review(page)
    suggested = CLASSES[run.columns["suggested_label"][sample]]
    assert f", perhaps {suggested}" in page.inner_text("#review .verdict-line")
    assert "unlike" not in page.inner_text("#review .verdict-line")  # all neighbors carry its label
    page.locator("#review").scroll_into_view_if_needed()
    relabel = page.locator("#review [data-verdict=relabel]")
    assert relabel.locator("span").inner_text() == f"Relabel {suggested} …"
    for ask in (lambda: page.keyboard.press("l"), relabel.click):  # the key does what the button does
        ask()
        page.wait_for_selector("#picker[open]")
        assert page.inner_text("#picker [aria-selected=true]") == suggested
        page.keyboard.press("Escape")
        page.wait_for_selector("#picker:not([open])", state="attached")
        assert under_review(page) == sample and decided(page) == 0
    page.keyboard.press("l")
    page.keyboard.press("Enter")
    stored = page.evaluate(f"JSON.parse(localStorage.getItem('likewise:{run.manifest['data']}'))")
    assert stored == {
        str(sample): {"verdict": "relabel", "label": int(run.columns["suggested_label"][sample])}
    }
    assert heard["errors"] == []
    page.context.close()


@pytest.mark.parametrize(
    ("known", "says"),
    [
        ({}, "Yet all samples, weighted by similarity, and the network together support"),
        (
            {"reheated": "Reheated 4 times."},
            "Yet reheated copies of the network, which have forgotten part of",
        ),
        (
            {"reheated": "Not reheated: no."},
            "Yet all samples, weighted by similarity, and the network together",
        ),
        ({"crossval": "0f"}, "Yet networks that have not seen it predict"),
    ],
)
def test_the_review_says_who_suggests_a_label(browser, tmp_path, known, says):
    run = synthetic_run(300)
    run.manifest.update(known)
    path = tmp_path / "report.html"
    path.write_text(page_of(run))
    page, _ = opened(browser, path)
    why = page.inner_text("#review .why")
    assert says in why and "vote" not in why
    verb = "predict" if known.get("crossval") else "support"
    assert (
        f"{verb} {CLASSES[run.columns['suggested_label'][under_review(page)]]}." in why or "forgotten" in says
    )
    page.context.close()


def test_the_formula_of_the_page_is_that_of_python(page):
    source = (STATIC / "spotcheck.js").read_text()
    for case in CASES["estimates"]:
        found = page.evaluate(
            f"([sizes, decided, wrong]) => {{ {source}; return estimateErrors(sizes, decided, wrong); }}",
            [case["sizes"], case["decided"], case["wrong"]],
        )
        for name in ("precision", "errors"):
            assert (found[name] is None) == (case[name] is None), case
            if case[name] is not None:
                assert found[name] == pytest.approx(case[name])


def test_a_copy_to_drop_is_no_verdict_on_its_label(page):
    source = (STATIC / "spotcheck.js").read_text()
    draws = {"samples": [4, 7, 9], "strata": [0, 0, 1], "sizes": [5, 6]}
    decisions = {"4": {"verdict": "drop"}, "7": {"verdict": "wrong"}, "9": {"verdict": "right"}}
    found = page.evaluate(
        f"([draws, decisions]) => {{ {source}; return countDraws(draws, decisions); }}", [draws, decisions]
    )
    assert found == {"seen": 3, "decided": [1, 1], "wrong": [1, 0]}


def test_a_cell_of_the_confusion_opens_its_samples(page, run):
    table = run.table[run.table["label"] != run.table["prediction"]]
    label, said = int(table["label"].iloc[0]), int(table["prediction"].iloc[0])
    page.click(f"[data-cell='{label}:{said}']")
    page.wait_for_selector("#selection:not([hidden])")
    both = (run.table["label"] == label) & (run.table["prediction"] == said)
    assert rows(page) == shown(page) == both.sum() > 0
    assert f"select=cell%3A{label}%3A{said}" in address(page)


def test_the_keyboard_goes_where_a_step_leads(page):
    page.locator(".step [data-opens^=shift]").press("Enter")
    expect(page.locator("#samples-title")).to_be_focused()
    expect(page.locator("#samples-title")).to_be_in_viewport()


def test_steps_statuses_and_bars_open_what_they_count(page, run):
    step = page.locator(".step", has=page.locator("[data-opens^=shift]"))
    count = int(step.locator(".value").inner_text())
    step.locator("button").click()
    assert shown(page) == count == ((run.table["shift"] > 0.5) & ~run.table["label_issue"]).sum()
    page.click("[data-status=contested]")
    assert shown(page) == (run.table["status"] == "contested").sum()
    bar = page.locator("#density .bar-button:not([disabled])").nth(3)
    bar.click()
    assert shown(page) == int(bar.get_attribute("data-count"))
    assert sum(int(b.get_attribute("data-count")) for b in page.locator("#density .bar-button").all()) == N


def test_near_duplicates_are_listed_also_across_splits(page, run):
    pairs = {
        tuple(sorted((i, int(j))))
        for i in range(N)
        for j, s in zip(run.neighbor_matrix[i], run.similarity_matrix[i], strict=True)
        if np.round((min(s, 1) + 1) * 5000) / 5000 - 1 >= 0.99 - 1e-9
    }
    listed = run.duplicates
    assert int(page.get_attribute("#duplicates", "data-count")) == len(listed) >= 5
    assert page.locator("#duplicates .pair").first.get_attribute("data-pair") == (
        f"{listed['first'][0]}:{listed['second'][0]}"
    )
    page.select_option("#duplicates-level", "0.99")
    assert int(page.get_attribute("#duplicates", "data-count")) == len(pairs)
    assert {(200 + i, 300 + i) for i in range(5)} <= pairs
    page.select_option("#duplicates-across", "split")
    crossing = [pair for pair in pairs if (pair[0] >= 303) != (pair[1] >= 303)]
    assert int(page.get_attribute("#duplicates", "data-count")) == len(crossing) >= 2
    assert page.locator("#duplicates [data-pair='203:303']").count() == 1
    assert "train / test" in page.inner_text("#duplicates [data-pair='203:303']")


def test_a_copy_is_dropped_beside_its_pair_and_pairs_are_downloaded(page, run, tmp_path):
    listed, key = run.duplicates, f"likewise:{run.manifest['data']}"
    first, second = int(listed["first"][0]), int(listed["second"][0])
    card = page.locator(f"#duplicates [data-pair='{first}:{second}']")
    sides = {i: f"#{i} · {run.table['split'][i]}" for i in (first, second)}
    assert card.locator(".tile-note").all_inner_texts() == list(sides.values())
    pixels = f"pixels {listed['input_similarity'][0]:.2f}"
    assert pixels in card.inner_text()
    page.select_option("#duplicates-level", "0.9")  # the similarity of the inputs stays where it is known
    expect(card).to_contain_text(pixels)
    drop = card.locator(f"[data-drop='{second}']")
    drop.click()
    expect(drop).to_have_attribute("aria-pressed", "true")
    assert page.evaluate(f"JSON.parse(localStorage.getItem('{key}'))") == {str(second): {"verdict": "drop"}}
    with page.expect_download() as waiting:
        page.click("#duplicates-decisions")
    expect(page.locator("#duplicates-downloaded")).to_contain_text("decisions.json downloaded (1 decision)")
    waiting.value.save_as(tmp_path / "decisions.json")
    assert lw.apply_decisions(run, tmp_path / "decisions.json").kept.tolist() == [
        i != second for i in range(N)
    ]
    drop.click()
    expect(drop).to_have_attribute("aria-pressed", "false")
    assert page.evaluate(f"localStorage.getItem('{key}')") == "{}"
    page.select_option("#duplicates-level", "found")
    with page.expect_download() as waiting:
        page.click("#duplicates-csv")
    waiting.value.save_as(tmp_path / "pairs.csv")
    found = pandas.read_csv(tmp_path / "pairs.csv")
    assert found[["first", "second"]].to_numpy().tolist() == listed[["first", "second"]].to_numpy().tolist()
    assert found["second_split"].tolist() == run.table["split"][found["second"]].tolist()


def test_confused_classes_are_predicted_as_each_other(page):
    source = (STATIC / "data.js").read_text() + (STATIC / "classes.js").read_text()
    label, said = [0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 1, 0, 2, 2, 2, 1]
    columns = {
        "label": {"kind": "i", "values": label},
        "prediction": {"kind": "i", "values": said},
        "label_issue": {"kind": "truth", "values": [i == 4 for i in range(8)]},
    }
    data = {"n": 8, "k": 0, "classes": ["a", "b", "c"], "columns": columns, "neighbors": []}
    found = page.evaluate(f"(data) => {{ {source}; return mostMixed(data); }}", data)
    assert [(p["a"], p["b"], p["count"], p["share"]) for p in found] == [(0, 1, 2, 0.5), (1, 2, 1, 0.2)]


def test_where_no_prediction_is_wrong_confused_classes_are_neighbors(page, run):
    label = run.table["label"].to_numpy()
    counts = np.zeros((10, 10), dtype=int)
    wrong, seen = run.table["label_issue"].to_numpy(), np.zeros(10, dtype=int)
    assert (run.table["prediction"] == label)[~wrong].all()
    for i in np.flatnonzero(~wrong):
        for j in run.neighbor_matrix[i][~wrong[run.neighbor_matrix[i]]]:
            seen[label[i]] += 1
            a, b = sorted((label[i], label[j]))
            counts[a, b] += a != b
    a, b = np.unravel_index(counts.argmax(), counts.shape)
    first = page.locator("#mixed .mix").first
    found = tuple(int(v) for v in first.get_attribute("data-pair").split(":"))
    assert counts[found] == counts[a, b] > 0
    step = page.locator(".step", has_text="confused most")
    assert step.locator(".value").inner_text() == " · ".join(run.manifest["classes"][c] for c in found)
    i, j = (int(t.get_attribute("data-sample")) for t in first.locator(".pair").first.locator(".tile").all())
    assert {label[i], label[j]} == set(found) and not wrong[i] and not wrong[j]
    share = counts[found] / seen[list(found)].sum()
    assert f"{100 * share:.0f}\u00a0%" in step.inner_text()
    assert f"{100 * share:.{int(share < 0.1)}f}\u00a0%" in first.inner_text()
    assert j in run.neighbor_matrix[i] or i in run.neighbor_matrix[j]


def test_slices_count_what_pandas_counts(page, run):
    page.select_option("#slice-by", "split")
    page.select_option("#slice-of", "label_issue")
    expected = run.table.groupby("split")["label_issue"].mean()
    for name, share in expected.items():
        assert float(page.get_attribute(f"[data-slice='{name}']", "data-share")) == pytest.approx(
            share, abs=1e-4
        )
    page.click("[data-slice='train']")
    assert shown(page) == run.table[run.table["split"] == "train"]["label_issue"].sum()


def test_search_finds_classes_names_and_numbers(page, run):
    field = page.locator("#search input")
    field.fill("zero")
    field.press("Enter")
    zero = (run.table[["label", "prediction", "suggested_label"]] == 0).any(axis=1)
    assert shown(page) == zero.sum() and "search%3Azero" in address(page)
    for text in ("17", "#17"):
        field.fill(text)
        field.press("Enter")
        assert page.inner_text("#drawer-title") == f"{EVIL}17"
        page.keyboard.press("Escape")
    field.fill("7")  # is a class, too
    field.press("Enter")
    assert page.inner_text("#drawer-title") == f"{EVIL}7"
    assert shown(page) == ((run.table["label"] == 7) | (run.table.index == 7)).sum()
    field.fill("")
    field.press("Enter")
    assert shown(page) == N
    field.fill(str(N))  # no sample has this number
    field.press("Enter")
    assert f"found for “{N}”" in page.inner_text("#selection")


def test_words_are_explained_where_they_stand(page):
    word = page.locator("[data-word=similarity]").first
    word.focus()
    assert "training step" in page.inner_text("#tip") and word.get_attribute("aria-describedby") == "tip"
    word.press("Enter")
    assert page.locator("#word-similarity").is_visible()
    for name in page.evaluate(
        "[...document.querySelectorAll('[data-word]')].map((word) => word.dataset.word)"
    ):
        assert page.locator(f"#word-{name}").count() == 1, name


def test_pictures_and_texts_are_enlarged_on_click(page):
    page.locator("#review .enlarge").click()
    assert page.locator("#lightbox img").bounding_box()["width"] > 400
    page.keyboard.press("w")  # is not about what one sees
    assert decided(page) == 0
    page.keyboard.press("Escape")
    assert page.locator("#lightbox").is_hidden()


def test_user_text_stays_text(page):
    assert EVIL in page.locator("#class-similarity th").nth(1).get_attribute("title")
    assert (
        page.evaluate("[...document.scripts].filter(s => s.textContent.includes('window.hacked')).length")
        == 0
    )
    assert page.locator("img[src='x']").count() == 0
    assert "<script>" in page.locator("#table tbody tr").first.inner_text()
    page.hover("#map canvas")
    options = page.locator(".filters [data-field=label] option").all_inner_texts()
    assert any("<script>" in text for text in options)


def test_columns_of_ones_own_are_shown_as_they_are(page):
    page.locator(".filters [data-field=sample] input").press_sequentially("7")
    page.wait_for_selector("#table[data-rows='1']")
    cell = lambda name: page.locator(f"#table tbody td[data-field='{name}']").inner_text()  # noqa: E731
    assert cell("a.b") == str(10**12 + 7)
    assert cell("constructor") == "c⟨U+202E⟩d⟨U+0007⟩"
    assert cell("__proto__") == "p"


def test_every_column_colors_the_map_and_the_theme_redraws_it(page):
    names = page.locator("#color option").all_inner_texts()
    assert {"label", "label suspicion", "tiny", "split", "novelty"} <= set(names)
    for name in names:
        page.select_option("#color", label=name)
        assert page.locator("#legend > *").count() >= 1
    page.select_option("#layout", "pca")
    assert page.get_attribute("#map", "data-visible") == str(N)
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_zooming_in_shows_pictures(page):
    for step in range(1, 13):
        page.locator("#map-part [aria-label='Zoom in']").click()
        page.wait_for_selector(f"#map[data-zoom='{1.6**step:.2f}']")
        if int(page.get_attribute("#map", "data-visible")) <= 160:
            break
    page.wait_for_selector("#map[data-drawn=pictures]")
    page.locator("#map-part .plot-tools").get_by_text("Reset").click()
    page.wait_for_selector("#map[data-drawn=points]")


def test_ticks_of_a_logarithmic_axis_are_numbers_one_can_read(page):
    ticks = page.get_attribute("#neighborhoods", "data-ticks").split()
    values = [float(tick) for tick in ticks]
    assert 2 <= len(values) <= 12 and values == sorted(set(values))
    assert all(f"{value:g}"[0] in "1235" for value in values)


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1300, "light")])
def test_a_deep_link_opens_on_any_screen_and_axe_finds_no_violation(browser, run, width, scheme):
    page, heard = opened(
        browser,
        run.folder / "report.html",
        "#sample=3",
        color_scheme=scheme,
        viewport={"width": width, "height": 844},
    )
    assert page.inner_text("#drawer-title") == f"{EVIL}3"
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert max(paper) < 60 if scheme == "dark" else min(paper) > 200
    assert violations(page) == []
    page.keyboard.press("Escape")
    page.evaluate("document.querySelectorAll('details').forEach((part) => (part.open = true))")
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.keyboard.press("c")
    assert violations(page) == []
    page.keyboard.press("Escape")
    page.click("[data-mode=spot]")
    assert violations(page) == []
    check_quiet(page, heard)


def violations(page):
    found = Axe().run(page).response["violations"]
    return [(v["id"], node["html"][:120]) for v in found for node in v["nodes"]]


def test_on_a_phone_the_decisions_are_in_reach_without_scrolling(browser, run):
    page, heard = opened(
        browser,
        run.folder / "report.html",
        viewport={"width": 390, "height": 844},
        has_touch=True,
        is_mobile=True,
    )
    for verdict in ("wrong", "right", "unsure", "drop", "other"):
        box = page.locator(f"[data-verdict={verdict}]").bounding_box()
        assert 0 <= box["y"] and box["y"] + box["height"] <= 844 and box["height"] >= 30, verdict
    assert page.locator("#apply").is_visible() and page.locator(".keys").is_hidden()
    assert "likewise apply run decisions.json" in page.inner_text("#apply")
    assert "--wrong keep" in page.inner_text("#apply")
    assert "leaves the sample out" in page.get_attribute("[data-verdict=wrong]", "title")
    page.tap("[data-verdict=right]")
    assert decided(page) == 1
    check_quiet(page, heard)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_print_shows_findings_on_white_and_hides_what_is_pressed(page, scheme):
    page.emulate_media(media="print", color_scheme=scheme)
    assert page.locator("nav").is_hidden() and page.locator(".actions").is_hidden()
    assert page.locator("h1").is_visible() and page.locator(".step").first.is_visible()
    assert page.locator("#review .review-card").is_visible() and page.locator("#map").is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


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


def vectors(n):
    return nn.Linear(6, 3), (torch.randn(n, 6), torch.randn(n, 3))


def several_labels(n):
    x = torch.randn(n, 6)
    return nn.Linear(6, 3), (x, (x[:, :3] > 0).float())


@pytest.mark.parametrize("make", [numbers, unlabeled, signals, many_classes, vectors, several_labels])
@pytest.mark.parametrize("n", [1, 120])
def test_every_kind_of_run_is_drawn(browser, tmp_path, make, n):
    model, data = make(n)
    found = lw.analyze(model, data, out=tmp_path / "run")
    page, heard = opened(browser, found.folder / "report.html", "#sample=0&select=status:contested")
    assert rows(page) <= n
    assert page.locator("#drawer").is_visible()
    check_quiet(page, heard)


def test_a_record_of_training_is_told(browser, tmp_path):
    model, (x, y) = signals(60)
    watch = lw.Watch(60)
    for _ in range(3):
        watch.update(model(x).detach(), y, torch.arange(60))
    found = lw.analyze(model, (x, y), out=tmp_path / "run", watch=watch)
    page, heard = opened(browser, found.folder / "report.html")
    against = int((found.table["margin"] < 0).sum())
    assert f"{against} labels that training mostly contradicted" in page.inner_text("#training-what")
    hard = int((found.table["training_confidence"] < 0.25).sum())
    assert f"{hard} with a confidence below 0.25" in page.inner_text("#training-what")
    assert found.table["training_confidence"].to_numpy() == pytest.approx(watch.confidence.numpy())
    assert page.get_attribute("#training", "data-visible") == "60"
    check_quiet(page, heard)


def test_many_samples_are_shaded_and_stay_all_there(browser, tmp_path):
    (tmp_path / "report.html").write_text(page_of(synthetic_run(25_000, pictures=50)))
    page, heard = opened(browser, tmp_path / "report.html", viewport={"width": 1300, "height": 900})
    assert page.get_attribute("#map", "data-drawn") == "density"
    assert page.get_attribute("#map", "data-visible") == "25000"
    for _ in range(6):
        page.locator("#map-part [aria-label='Zoom in']").click()
    page.wait_for_selector("#map[data-drawn=points]")
    circle(page)
    assert 0 < rows(page) < 25_000
    check_quiet(page, heard)


def test_the_same_page_is_served_with_its_data_from_its_own_origin(browser, run):
    found = read_run(run.folder)
    bare = found._replace(pictures={})  # a server has them
    text = json.dumps({"kind": "text", "content": EVIL}).encode()
    packed = pack_payload(bare, picture_source="pictures/{sample}")
    answers = {"/": ("text/html", page_of(found, source="data").encode()), "/data": ("", packed)}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            kind, content = answers.get(self.path, ("", text if "/pictures/" in self.path else None))
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Type", kind or "application/octet-stream")
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *given):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        page = browser.new_page()
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        origin = f"http://127.0.0.1:{server.server_port}/"
        page.goto(origin)
        page.wait_for_selector("body[data-ready=yes]")
        assert under_review(page) == queue_of(run)[0]
        expect(page.locator("#review .enlarge .picture.text")).to_have_text(EVIL)
        assert page.evaluate("window.hacked") is None
        assert f"{origin}pictures/{queue_of(run)[0]}" in asked
        assert all(url.startswith((origin, "blob:", "data:")) for url in asked) and f"{origin}data" in asked
        page.close()
    finally:
        server.shutdown()
        server.server_close()
