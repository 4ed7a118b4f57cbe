"""Pictures of a report for the README and the documentation: `make screenshots`.

python tests/report/screenshots.py --passages RUN/report.html docs/images     of a causal language model
"""

import io
import sys
from pathlib import Path

from browser import chromium, opened
from PIL import Image

DESKTOP = {"viewport": {"width": 1360, "height": 1130}}
PHONE = {
    "viewport": {"width": 390, "height": 844},
    "device_scale_factor": 2,
    "has_touch": True,
    "is_mobile": True,
}
SHOTS = {
    "report.png": (DESKTOP, "light", "", 1088),
    "report-dark.png": (DESKTOP, "dark", "", 1088),
    "report-phone.png": (PHONE, "light", "", 390),
    "report-phone-dark.png": (PHONE, "dark", "", 390),
    "report-sample.png": (DESKTOP, "light", "#sample=17", 1088),
    "report-classes.png": (DESKTOP, "light", "#classes-part", 1088),
}


def main(report: str, folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        for name, (screen, scheme, address, width) in SHOTS.items():
            page, _ = opened(browser, report, address, color_scheme=scheme, **screen)
            page.wait_for_timeout(500)
            if address.endswith("-part"):
                page.evaluate("(id) => document.getElementById(id).scrollIntoView()", address[1:])
                page.wait_for_timeout(200)
            shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            shot = shot.resize((width, shot.height * width // shot.width), Image.Resampling.LANCZOS)
            small = shot.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
            small.save(Path(folder) / name, optimize=True)
            page.context.close()


def passages(report: str, folder: str) -> None:
    """Draw the most novel texts with marked passages, light and dark beside each other."""
    shots = []
    with chromium() as browser:
        for scheme in ("light", "dark"):
            page, _ = opened(browser, report, color_scheme=scheme, viewport={"width": 760, "height": 1200})
            page.evaluate(
                "document.querySelectorAll('.worst-sample:nth-of-type(n + 3)').forEach((e) => e.remove())"
            )
            shot = page.locator("#worst-part").screenshot()
            shots.append(Image.open(io.BytesIO(shot)).convert("RGB"))
            page.context.close()
    both = Image.new("RGB", (sum(shot.width for shot in shots), shots[0].height))
    both.paste(shots[0], (0, 0))
    both.paste(shots[1], (shots[0].width, 0))
    small = both.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    small.save(Path(folder) / "report-passages.png", optimize=True)


if __name__ == "__main__":
    passages(*sys.argv[2:]) if sys.argv[1] == "--passages" else main(*sys.argv[1:])
