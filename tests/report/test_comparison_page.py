"""The page of two runs side by side, in a real Chromium."""

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import REPORT_VIOLATIONS, chromium
from synthetic import synthetic_run

from likewise.report.pages import comparison_page

pytestmark = pytest.mark.browser
EVIL = '<script>window.hacked = 1</script><img src=x onerror="window.hacked=1">'


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A page of two runs of the same samples, with a class of a hostile name."""
    runs = [synthetic_run(120)._replace(folder=name) for name in ("early", "late")]
    for number, run in enumerate(runs):  # one neighbor of each leaves, another one comes
        run.indices[:] = (np.arange(120)[:, None] + 1 + number + np.arange(run.indices.shape[1])) % 120
        run.manifest["classes"] = [EVIL, *run.manifest["classes"][1:]]
    lines = [("neighbors that stay", "90 %"), ("predictions that differ", EVIL)]
    made = tmp_path_factory.mktemp("comparison") / "compare.html"
    made.write_text(comparison_page(*runs, "Neighbors changed.", lines, samples=[3, 5, 8]), encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_it_shows_both_runs_without_scripts_and_axe_finds_no_violation(browser, path, width, scheme):
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.add_init_script(REPORT_VIOLATIONS)
    errors, requests = [], []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri(), wait_until="load")
    articles = page.locator("article.sides")
    assert [articles.nth(i).get_attribute("data-sample") for i in range(articles.count())] == ["3", "5", "8"]
    assert page.locator("article h3").all_inner_texts() == ["early", "late"] * 3
    assert page.locator("figure.left").count() == page.locator("figure.came").count() == 3
    assert page.evaluate("window.hacked") is None and EVIL in page.inner_text("main")
    assert page.locator("img").count() and page.evaluate(
        "[...document.images].every((i) => i.naturalWidth > 0)"
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert errors == [] and all(url.startswith(("file:", "data:")) for url in requests)
    found = Axe().run(page).response["violations"]
    assert [f"{one['id']}: {one['nodes'][0]['html'][:120]}" for one in found] == []
    context.close()
