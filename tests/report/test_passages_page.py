"""Marked passages in a real browser: what the file says is what a reader sees, in light, in dark, on a phone."""

import json

import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from browser import chromium, opened

import likewise as lw
from likewise.cli.app import exit_code
from texts import byte_tokenizer, facts, save_language_model

pytest.importorskip("transformers")
pytestmark = pytest.mark.browser

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}

# Of text on its mark: the least ratio of relative luminances, as WCAG defines it.
LEAST_CONTRAST = """() => {
  const parse = (text) => {
    const numbers = text.match(/[\\d.]+/g).map(Number);
    return text.startsWith("color(") ? numbers.map((v, i) => (i < 3 ? 255 * v : v)) : numbers;
  };
  const linear = (v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const paper = parse(getComputedStyle(document.querySelector("#drawer")).backgroundColor);
  const ratios = [...document.querySelectorAll("#drawer .tile.passages mark")].map((mark) => {
    const style = getComputedStyle(mark);
    const [r, g, b, alpha = 1] = parse(style.backgroundColor);
    const back = [r, g, b].map((v, i) => alpha * v + (1 - alpha) * paper[i]);
    const [dim, bright] = [luminance(back), luminance(parse(style.color))].sort((a, b) => a - b);
    return (bright + 0.05) / (dim + 0.05);
  });
  return Math.min(...ratios);
}"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("passages")
    texts = facts(40)
    save_language_model(root / "model", texts, byte_tokenizer(texts))
    (root / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = [str(root / "model"), str(root / "texts.jsonl"), "--text", "text", "--quiet"]
    assert exit_code(["analyze", *words, "--out", str(root / "run"), "--passages", "10"]) == 0
    return lw.Analysis(root / "run")


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


def written(share):
    """A share as the page writes it."""
    return f"{100 * share:.{1 if abs(share) < 0.1 else 0}f}".replace("-", "−") + "\u00a0% of the similarity"


def test_every_mark_of_the_file_is_on_the_page_with_its_share(run, browser):
    page, heard = opened(browser, run.folder / "report.html")
    seen = 0
    for sample, rows in run.passages.groupby("sample", sort=False):
        page.evaluate(f"location.hash = 'sample={sample}'")
        page.wait_for_function(f"document.getElementById('drawer-title').textContent === 'Sample {sample}'")
        for row in rows.itertuples():
            tile = page.locator(f'#drawer .tile.passages[data-sample="{row.neighbor}"]')
            assert tile.locator(".marked").text_content() == row.text
            marks = tile.locator("mark").evaluate_all(
                "all => all.map((m) => [m.textContent, m.title, Number(m.style.getPropertyValue('--strength'))])"
            )
            most = max(row.contributions)
            assert len(marks) == len(row.starts)
            triples = zip(row.starts, row.ends, row.contributions, strict=True)
            for (text, title, strength), (start, end, value) in zip(marks, triples, strict=True):
                assert text == row.text[start:end]
                assert title == written(value / row.similarity)
                assert strength == pytest.approx(max(0, value) / most, abs=1e-3)
            assert tile.locator("u").text_content() == row.text[row.passage_start : row.passage_end]
            label = tile.get_attribute("aria-label")
            assert row.text[row.passage_start : row.passage_end].strip() in label
            assert f"plain similarity {row.similarity:.2f}" in label
            seen += 1
    assert seen == len(run.passages) == 30 and heard["errors"] == []
    page.context.close()


def test_the_page_says_of_which_pairs_passages_are_known(run, browser):
    page, heard = opened(browser, run.folder / "report.html")
    assert "for the 10 texts that are most novel, with the 3 nearest" in page.text_content(
        "#worst .passage-legend"
    )
    assert page.locator("#worst .tile.passages").count() == 12
    assert "30 pairs" in page.text_content("#run-part")
    other = next(i for i in run.table.index if i not in set(run.passages["sample"]))
    page.evaluate(f"location.hash = 'sample={other}'")
    page.wait_for_function(f"document.getElementById('drawer-title').textContent === 'Sample {other}'")
    assert "not for this one" in page.text_content("#drawer .passage-legend")
    assert page.locator("#drawer .tile.passages").count() == 0
    assert heard["errors"] == []
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", [{"viewport": {"width": 1300, "height": 900}}, PHONE])
def test_marks_can_be_read_in_light_and_dark_and_nothing_is_cut(run, browser, scheme, screen):
    first = int(run.passages["sample"].iloc[0])
    page, _ = opened(browser, run.folder / "report.html", f"#sample={first}", color_scheme=scheme, **screen)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    found = Axe().run(page, context="#drawer").response["violations"]
    found += Axe().run(page, context="#worst").response["violations"]
    assert [(v["id"], [n["html"][:120] for n in v["nodes"]]) for v in found] == []
    contrast = page.evaluate(LEAST_CONTRAST)
    assert contrast > 4.5, contrast
    page.context.close()


def test_a_log_likelihood_is_shown_as_such_and_as_no_prediction(run, browser):
    page, heard = opened(browser, run.folder / "report.html", "#sample=3")
    value = f"{run.table['log_likelihood'][3]:.3f}"
    assert page.locator("#drawer .drawer-headline").inner_text() == f"Log-likelihood {value}"
    assert page.locator("#drawer .trust").count() == 0
    assert page.locator("#color").input_value() == "novelty"
    assert "log_likelihood" in page.locator("#color option").evaluate_all("all => all.map((o) => o.value)")
    assert page.locator("#next-part").count() == 0 or "predict" not in page.locator("#next-part").inner_text()
    page.select_option("#color", "log_likelihood")
    said = page.locator("body").inner_text().lower()
    assert "predict" not in said and "no labels" not in said and "rely on" not in said
    assert not heard["errors"]
