"""A picture of a report's first screen, small: `make screenshot`."""

import io
import sys
from pathlib import Path

from browser import chromium, opened
from PIL import Image


def main(report: str, out: str) -> None:
    with chromium() as browser:
        page, _ = opened(browser, report, viewport={"width": 1360, "height": 1700})
        page.wait_for_timeout(500)
        shot = Image.open(io.BytesIO(page.screenshot(clip={"x": 0, "y": 0, "width": 1360, "height": 1600})))
    shot = shot.convert("RGB").resize((952, 1120), Image.Resampling.LANCZOS)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    shot.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(out, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
