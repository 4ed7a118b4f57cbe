"""How long a report of 50,000 samples takes to open: measured and printed, not asserted."""

import statistics

import pytest
from browser import chromium, opened
from synthetic import synthetic_run

from likewise.report.pages import page as page_of

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.mark.parametrize("n", [50_000, 100_000])
def test_a_large_report_is_drawn_whole(tmp_path, n):
    path = tmp_path / "report.html"
    path.write_text(page_of(synthetic_run(n)))
    times = []
    with chromium() as browser:
        for _ in range(5):
            page, heard = opened(browser, path, viewport={"width": 1360, "height": 900})
            assert heard["errors"] == [] and page.get_attribute("#table", "data-rows") == str(n)
            assert page.get_attribute("#map", "data-visible") == str(n)
            times.append(
                [int(page.get_attribute("body", f"data-{name}")) for name in ("interactive", "drawn")]
            )
            page.context.close()
    interactive, drawn = (sorted(column) for column in zip(*times, strict=True))
    size = path.stat().st_size / 1e6
    print(
        f"\n{n:,} samples, {size:.1f} MB: interactive after {statistics.median(interactive) / 1000:.1f} s "
        f"({interactive[0] / 1000:.1f} to {interactive[-1] / 1000:.1f}), every part drawn after "
        f"{statistics.median(drawn) / 1000:.1f} s ({drawn[0] / 1000:.1f} to {drawn[-1] / 1000:.1f})"
    )
