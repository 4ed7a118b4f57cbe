"""Pictures of the live page, from the digits example with some labels wrong: `make screenshot-serve`."""

import io
import random
import subprocess
import sys
from pathlib import Path

from browser import chromium
from PIL import Image
from serve_process import Server

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "analyze" / "images.py"
WRONG = 24
SHOTS = {
    "serve": ("ask", {"viewport": {"width": 1280, "height": 840}}),
    "serve-dark": ("review", {"viewport": {"width": 1280, "height": 760}, "color_scheme": "dark"}),
    "serve-phone": ("review", {"viewport": {"width": 390, "height": 844}}),
}


def prepare(folder: Path) -> None:
    """Write images, mislabel some, and analyze them."""
    subprocess.run([sys.executable, EXAMPLE, folder], check=True)
    chance, images = random.Random(0), sorted((folder / "digits").glob("*/*.png"))
    for image in chance.sample(images, WRONG):
        others = [name for name in "0123456789" if name != image.parent.name]
        image.rename(folder / "digits" / chance.choice(others) / image.name)
    words = [f"{EXAMPLE}:model", "digits", "--weights", "resnet.safetensors", "--gray", "--sketch", "1024"]
    subprocess.run(
        [sys.executable, "-m", "likewise", "analyze", *words, "--out", "run"], cwd=folder, check=True
    )


def main(folder: str, out: str) -> None:
    place = Path(folder)
    if not (place / "run").exists():
        prepare(place)
    server = Server(place, "run")
    asked = sorted((place / "digits" / "3").glob("*.png"))[4]
    try:
        with chromium() as browser:
            for name, (part, context) in SHOTS.items():
                page = browser.new_context(**context).new_page()
                page.goto(f"{server.address}#{part}")
                page.wait_for_selector("body[data-ready=yes]")
                if part == "ask":
                    page.set_input_files("#file", str(asked))
                    page.wait_for_selector("#answer[data-state=answered]")
                page.wait_for_timeout(500)
                shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
                shot.quantize(256, dither=Image.Dither.NONE).save(Path(out) / f"{name}.png", optimize=True)
    finally:
        server.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
