"""The live page in a real Chromium, served by a real process."""

import json
import shutil
import time
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import REPORT_VIOLATIONS, chromium
from serve_process import Server

import likewise as lw

pytestmark = pytest.mark.browser
COMPONENTS = Path(lw.__file__).parent / "components"
DROP = """
async ([address, name]) => {
  const bytes = Uint8Array.from(atob(address), (c) => c.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name, { type: "image/png" }));
  const options = { dataTransfer: transfer, bubbles: true, cancelable: true };
  document.getElementById("drop").dispatchEvent(new DragEvent("drop", options));
}
"""


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture
def live(place, tmp_path):
    """A run of its own, served."""
    shutil.copytree(place, tmp_path / "own")
    server = Server(tmp_path / "own", "run")
    server.folder = tmp_path / "own" / "run"
    yield server
    server.stop()


def opened(browser, address, **context):
    page = browser.new_context(**context).new_page()
    page.add_init_script(REPORT_VIOLATIONS)
    heard = {"errors": [], "requests": []}
    page.on("console", lambda m: heard["errors"].append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: heard["errors"].append(str(error)))
    page.on("request", lambda request: heard["requests"].append(request.url))
    page.goto(address)
    page.wait_for_selector("body[data-ready=yes]", timeout=30_000)
    return page, heard


def wait_until(page, holds):
    """Wait for what no selector can tell; the page's security policy forbids `wait_for_function`."""
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end, "It never came to be."
        page.wait_for_timeout(10)


def decide(page, key):
    """Press a key of the review, and wait until what it means is kept and taken note of."""
    page.keyboard.press(key)
    page.wait_for_selector("#queue[data-saving='0']")


def test_an_image_is_dropped_and_the_answer_read(browser, served, place):
    import base64

    page, heard = opened(browser, served.address)
    content = base64.b64encode((place / "images" / "bee" / "001.png").read_bytes()).decode()
    page.evaluate(DROP, [content, "01.png"])
    page.wait_for_selector("#answer[data-state=answered]")
    assert page.inner_text("#prediction") == "bee"
    assert page.locator("#neighbors .lw-tile").count() == 12
    page.locator("#neighbors img").first.evaluate("i => i.decode()")  # raises if it is no picture
    assert "was not trained again" in page.inner_text("#change")
    page.evaluate(DROP, [base64.b64encode(b"no image").decode(), "x.png"])
    page.wait_for_selector("#answer[data-state=failed]")
    assert "cannot be read as an image" in page.inner_text("#answer")
    assert [e for e in heard["errors"] if "422" not in e] == []
    own = served.address.rsplit("/", 2)[0]
    assert all(url.startswith((own, "data:", "blob:")) for url in heard["requests"])


def test_keys_decide_at_once_and_decisions_are_in_the_run_folder(browser, live):
    page, heard = opened(browser, live.address + "#review")
    page.wait_for_selector(".lw-card")
    saved = live.folder / "decisions.json"
    samples = []
    for key in "lrw":
        samples.append(int(page.get_attribute(".lw-card", "data-sample")))
        decide(page, key)
        page.wait_for_selector(f".lw-card:not([data-sample='{samples[-1]}'])")
    found = {d["sample"]: d for d in json.loads(saved.read_text())["decisions"]}
    assert [found[s]["verdict"] for s in samples] == ["relabel", "right", "wrong"]
    run = lw.Analysis(live.folder)
    assert found[samples[0]]["label"] == run.table["suggested_label"][samples[0]]
    decide(page, "z")
    page.wait_for_selector(f".lw-card[data-sample='{samples[2]}']")
    assert len(json.loads(saved.read_text())["decisions"]) == 2
    page.reload()
    page.wait_for_selector(f".lw-card[data-sample='{samples[2]}']")  # the first that is undecided
    page.fill(".lw-field", "cow")
    page.dispatch_event(".lw-field", "change")
    page.wait_for_selector("#queue[data-saving='0']")
    assert {d["sample"]: d.get("label_name") for d in json.loads(saved.read_text())["decisions"]}[
        samples[2]
    ] == "cow"
    assert heard["errors"] == []


def test_keys_are_those_of_the_report(browser, live):
    page, heard = opened(browser, live.address + "#review")
    page.wait_for_selector(".lw-card")
    first = page.get_attribute(".lw-card", "data-sample")
    page.keyboard.press("?")
    page.wait_for_selector("dialog.review-keys[open]")
    shown = page.locator("dialog.review-keys kbd").all_inner_texts()
    assert shown == ["l", "w", "r", "u", "d", "c", "z", "←", "→", "?"]
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog.review-keys:not([open])", state="attached")
    decide(page, "d")
    page.wait_for_selector(f".lw-card:not([data-sample='{first}'])")
    saved = json.loads((live.folder / "decisions.json").read_text())["decisions"]
    assert [(entry["sample"], entry["verdict"]) for entry in saved] == [(int(first), "drop")]
    page.keyboard.press("c")
    page.wait_for_selector(".lw-field:focus")
    assert heard["errors"] == []


def test_a_doubtful_suggestion_is_not_taken_at_one_key(browser):
    page = browser.new_page()
    page.set_content("<div id=queue></div>")
    script = "".join((COMPONENTS / name).read_text() for name in ("keys.js", "components.js"))
    entries = [
        {"sample": 4, "name": "a", "label": 0, "label_name": "ant", "suggested_label": 1, "doubtful": True},
        {"sample": 5, "name": "b", "label": 0, "label_name": "ant", "suggested_label": 1, "doubtful": False},
        {"sample": 6, "name": "c", "label": 1, "label_name": "bee", "suggested_label": 1, "doubtful": False},
    ]
    entries = [
        {**entry, "suggested_label_name": "bee", "neighbors": [], "picture": None, "judge": "copies say bee"}
        for entry in entries
    ]
    page.evaluate(
        """async ([script, entries]) => {
          const { mountReview } = await import("data:text/javascript," + encodeURIComponent(script));
          window.kept = {};
          const load = async (start, count) => entries.slice(start, start + count);
          const decide = async (sample, decision) => { window.kept[sample] = decision; };
          const counts = { total: entries.length, flagged: entries.length, decisions: {} };
          const source = { classes: ["ant", "bee"], ...counts, load, decide, everywhere: true };
          mountReview(document.getElementById("queue"), source);
        }""",
        [script, entries],
    )
    page.wait_for_selector(".lw-card[data-sample='4'] [data-doubtful]")
    assert page.inner_text(".lw-question") == "Labeled ant, perhaps bee"
    assert "copies say bee" in page.inner_text(".lw-card")
    assert page.inner_text("[data-verdict=relabel]").startswith("Relabel bee …")
    for ask in (lambda: page.click("[data-verdict=relabel]"), lambda: page.keyboard.press("l")):
        ask()
        page.wait_for_selector(".lw-field:focus")
        assert page.input_value(".lw-field") == "bee"  # Enter takes it
        assert page.get_attribute(".lw-card", "data-sample") == "4" and page.evaluate("window.kept") == {}
        page.evaluate("document.activeElement.blur()")
    page.keyboard.press("l")
    page.keyboard.press("Enter")
    page.wait_for_selector(".lw-card[data-sample='5']")
    page.wait_for_selector("#queue[data-saving='0']")
    assert page.evaluate("window.kept") == {"4": {"verdict": "relabel", "label": 1}}
    page.keyboard.press("z")
    page.wait_for_selector(".lw-card[data-sample='4']")
    page.wait_for_selector("#queue[data-saving='0']")
    page.fill(".lw-field", "bee")
    page.dispatch_event(".lw-field", "change")  # once more when the field goes: not about the next sample
    page.wait_for_selector(".lw-card[data-sample='5']")
    page.wait_for_selector("#queue[data-saving='0']")
    assert list(page.evaluate("window.kept")) == ["4"]
    assert "looks like bee" in page.inner_text(".lw-question")
    page.keyboard.press("l")
    page.wait_for_selector(".lw-card[data-sample='6'] [data-verdict=relabel][disabled]")
    page.keyboard.press("l")  # it looks like its label: nothing to take
    page.wait_for_selector("#queue[data-saving='0']")
    relabeled = {"verdict": "relabel", "label": 1}
    assert page.evaluate("window.kept") == {"4": relabeled, "5": relabeled}
    page.close()


def test_the_report_is_shown_and_its_decisions_are_the_same(browser, live):
    page, _ = opened(browser, live.address + "#review")
    page.wait_for_selector(".lw-card")
    first = int(page.get_attribute(".lw-card", "data-sample"))
    decide(page, "r")
    page.wait_for_selector(f".lw-card:not([data-sample='{first}'])")
    second = int(page.get_attribute(".lw-card", "data-sample"))
    page.click("nav [data-part=report]")
    frame = page.frame_locator("#report iframe")
    frame.locator("body[data-ready=yes]").wait_for(timeout=30_000, state="attached")
    run = lw.Analysis(live.folder)
    key = json.dumps(f"likewise:{run.manifest['data']}")
    third = int(run.table["label_suspicion"].drop([first, second])[run.table["label_issue"]].idxmax())

    def decided():
        found = json.loads((live.folder / "decisions.json").read_text())["decisions"]
        return {d["sample"]: d["verdict"] for d in found}

    def report_writes(decisions):
        """Write what the report's review would: all decisions that it knows."""
        text = json.dumps({str(sample): {"verdict": verdict} for sample, verdict in decisions.items()})
        taken = int(page.get_attribute("body", "data-taken"))
        frame.locator("body").evaluate(f"() => localStorage.setItem({key}, {json.dumps(text)})")
        page.wait_for_selector(f"body[data-taken='{taken + 1}']")  # not only answered: taken over by the page

    kept = frame.locator("body").evaluate(f"() => JSON.parse(localStorage.getItem({key}))")
    assert kept == {str(first): {"verdict": "right"}}
    report_writes({first: "right", third: "wrong"})
    assert decided() == {first: "right", third: "wrong"}
    report_writes({third: "unsure"})  # it did not know of the first: nothing was taken back
    assert decided() == {first: "right", third: "unsure"}
    report_writes({first: "right"})  # what was decided there is undone there
    assert decided() == {first: "right"}
    page.click("nav [data-part=review]")
    decide(page, "u")
    page.wait_for_selector(f".lw-card:not([data-sample='{second}'])")
    page.click("nav [data-part=report]")
    frame.locator("body[data-ready=yes]").wait_for(timeout=30_000, state="attached")
    kept = frame.locator("body").evaluate(f"() => JSON.parse(localStorage.getItem({key}))")
    assert set(kept) == {str(first), str(second)} and decided() == {first: "right", second: "unsure"}
    frame.locator("#review").scroll_into_view_if_needed()
    wait_until(page, lambda: page.evaluate("document.activeElement.tagName") == "IFRAME")
    taken = int(page.get_attribute("body", "data-taken"))
    page.keyboard.press("w")  # the report's own key: it has the focus
    page.wait_for_selector(f"body[data-taken='{taken + 1}']")
    assert decided() == {first: "right", second: "unsure", third: "wrong"}


def test_a_report_opened_before_a_decision_is_kept_shows_it(browser, live):
    page, _ = opened(browser, live.address + "#review")
    page.wait_for_selector(".lw-card")
    sample = page.get_attribute(".lw-card", "data-sample")
    held = []
    page.route("**/decisions", lambda route: held.append(route))  # a method has no attributes
    page.keyboard.press("r")
    wait_until(page, lambda: held)
    page.click("nav [data-part=report]")
    body = page.frame_locator("#report iframe").locator("body[data-ready=yes]")
    body.wait_for(timeout=30_000, state="attached")
    page.evaluate("document.querySelector('#report iframe').dataset.early = 'yes'")
    held[0].continue_()
    page.wait_for_selector("#report iframe:not([data-early])")
    body.wait_for(timeout=30_000, state="attached")
    assert body.locator(f".review-card:not([data-sample='{sample}'])").count() == 1


def test_keys_that_come_faster_than_answers_decide_one_sample_each(browser, live):
    page, heard = opened(browser, live.address + "#review")
    page.wait_for_selector(".lw-card")
    held = []
    page.route("**/decisions", lambda route: held.append(route))
    samples = []
    for key in "rwu":  # no decision is answered yet
        samples.append(int(page.get_attribute(".lw-card", "data-sample")))
        page.keyboard.press(key)
    page.keyboard.press("z")
    assert page.get_attribute("#queue", "data-saving") == "4" and len(set(samples)) == 3
    for _ in range(4):  # one after the other, in their order
        wait_until(page, lambda: held)
        held.pop().continue_()
    page.wait_for_selector("#queue[data-saving='0']")
    found = json.loads((live.folder / "decisions.json").read_text())["decisions"]
    assert {d["sample"]: d["verdict"] for d in found} == {samples[0]: "right", samples[1]: "wrong"}
    assert heard["errors"] == []


def test_two_writes_of_the_report_at_once_are_both_kept(browser, live):
    page, _ = opened(browser, live.address + "#report")
    frame = page.frame_locator("#report iframe")
    frame.locator("body[data-ready=yes]").wait_for(timeout=30_000, state="attached")
    run = lw.Analysis(live.folder)
    key = json.dumps(f"likewise:{run.manifest['data']}")
    held = []
    page.route("**/decisions", lambda route: held.append(route))
    for decisions in ({"3": {"verdict": "right"}}, {"3": {"verdict": "right"}, "7": {"verdict": "wrong"}}):
        text = json.dumps(json.dumps(decisions))
        frame.locator("body").evaluate(f"() => localStorage.setItem({key}, {text})")
    for _ in range(2):  # the second was written before the first was answered
        wait_until(page, lambda: held)
        held.pop().continue_()
    page.wait_for_selector("body[data-taken='2']")
    found = json.loads((live.folder / "decisions.json").read_text())["decisions"]
    assert {d["sample"]: d["verdict"] for d in found} == {3: "right", 7: "wrong"}
    kept = frame.locator("body").evaluate(f"() => JSON.parse(localStorage.getItem({key}))")
    assert kept == {"3": {"verdict": "right"}, "7": {"verdict": "wrong"}}


def test_the_page_names_the_run_and_the_report_needs_no_file(browser, live):
    (live.folder / "report.html").unlink()
    page, heard = opened(browser, live.address + "#report", viewport={"width": 1300, "height": 900})
    frame = page.frame_locator("#report iframe")
    frame.locator("body[data-ready=yes]").wait_for(timeout=30_000, state="attached")
    assert "likewise apply run run/decisions.json" in frame.locator("#apply").inner_text()
    page.click("nav [data-part=review]")
    assert page.inner_text("#command") == "likewise apply run run/decisions.json"
    assert [url for url in heard["requests"] if url.endswith("/report-data")]
    own = live.address.rsplit("/", 2)[0]
    assert all(url.startswith((own, "data:", "blob:")) for url in heard["requests"])
    assert heard["errors"] == []


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1300, "light")])
def test_axe_finds_no_violation(browser, served, place, width, scheme):
    page, _ = opened(browser, served.address, color_scheme=scheme, viewport={"width": width, "height": 844})
    page.set_input_files("#file", str(place / "images" / "bee" / "001.png"))
    page.wait_for_selector("#answer[data-state=answered]")
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.click("nav [data-part=review]")
    page.wait_for_selector(".lw-card")
    assert violations(page) == []


def violations(page):
    found = Axe().run(page).response["violations"]
    return [(v["id"], node["html"][:120]) for v in found for node in v["nodes"]]


def test_a_phone_shows_the_buttons_without_scrolling(browser, served):
    page, heard = opened(browser, served.address + "#review", viewport={"width": 390, "height": 844})
    page.wait_for_selector(".lw-card")
    for verdict in ("relabel", "right", "wrong", "drop", "unsure"):
        box = page.locator(f"[data-verdict={verdict}]").bounding_box()
        assert 0 <= box["x"] and box["x"] + box["width"] <= 390 and box["y"] + box["height"] <= 844, verdict
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert heard["errors"] == []
