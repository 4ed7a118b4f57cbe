"""Run the notebooks in a Jupyter kernel and store their outputs: `make notebooks`, `python notebooks/execute.py text`.

Outputs are stored small: pictures with few colors, nothing that changes from run to run.
"""

import base64
import io
import os
import platform
import sys
from pathlib import Path

import nbformat
import torch
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).parent
MOST_BYTES = 60_000  # of a picture


def main(names: list[str]) -> None:
    """Execute the notebooks of these names, or all."""
    os.environ |= {"OMP_NUM_THREADS": "1", "MATPLOTLIBRC": str(FOLDER / "matplotlibrc")}
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not names or path.stem in names:
            notebook = nbformat.read(path, as_version=4)
            NotebookClient(notebook, timeout=300, kernel_name="python3").execute(cwd=str(FOLDER))
            sizes = clean(notebook)
            nbformat.write(notebook, path)
            print(f"{path.name}: pictures of {', '.join(f'{size / 1000:.0f} kB' for size in sizes)}")


def clean(notebook: nbformat.NotebookNode) -> list[int]:
    """Take away what changes from run to run, make pictures small, and return their sizes in bytes."""
    versions = {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__.split("+")[0],
    }
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "versions": versions,
    }
    sizes = []
    for number, cell in enumerate(notebook.cells):
        tags = cell.metadata.get("tags")  # "varies": the test does not compare what the cell prints
        cell.id, cell.metadata = f"cell-{number}", {"tags": tags} if tags else {}
        if cell.cell_type != "code":
            continue
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]  # progress
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                picture = shrink(base64.b64decode(output.data["image/png"]))
                sizes.append(len(picture))
                output.data, output.metadata = {"image/png": base64.b64encode(picture).decode()}, {}
    if max(sizes, default=0) > MOST_BYTES:
        raise ValueError(f"A picture has {max(sizes):,} bytes, more than {MOST_BYTES:,}: draw it smaller.")
    return sizes


def shrink(picture: bytes) -> bytes:
    """Return a PNG with 256 colors, or fewer if it is still too large."""
    for colors in (256, 64, 32):
        content = io.BytesIO()
        Image.open(io.BytesIO(picture)).convert("RGB").quantize(colors).save(content, "PNG", optimize=True)
        if content.tell() <= MOST_BYTES:
            break
    return content.getvalue()


if __name__ == "__main__":
    main(sys.argv[1:])
