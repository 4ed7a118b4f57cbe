"""Pictures of a report for the README and the documentation: `make screenshots`."""

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


if __name__ == "__main__":
    main(*sys.argv[1:])
