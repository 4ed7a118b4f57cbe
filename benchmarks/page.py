"""The page of benchmarks: `make benchmarks-page` writes docs/benchmarks.md and its plots from benchmarks/results.

Nothing is measured here; the page names the command that measures each table again.
"""

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import records
from PIL import Image

from likewise.figures.drawing import COLORS, GRAY, MARKERS

DOCS = Path(__file__).parents[1] / "docs"
IMAGES = DOCS / "images" / "benchmarks"
WORKS = {
    "a": "Gram, wide linear layer",
    "b": "Gram, convolutions",
    "c": "10 × 10 blocks",
    "d": "512 × 64 cosines",
    "e": "10 × 10 blocks of K^C",
    "f": "512 × 64 Gram",
}
AXES = {"N": "samples N", "d": "outputs d", "p": "parameters p"}
Line = dict[str, Any]


def read(name: str) -> list[Line]:
    return list(records.lines(records.FOLDER / name))


def save(figure: plt.Figure, name: str) -> None:
    """Write a picture of few colors."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGES / name, dpi=110)
    plt.close(figure)
    with Image.open(IMAGES / name) as picture:
        picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(IMAGES / name, optimize=True)


def draw_scaling(lines: list[Line]) -> None:
    """Draw time and memory against N, d and p, one curve for each way."""
    figure, grid = plt.subplots(2, 3, figsize=(10, 5.6), layout="constrained", sharex="col", sharey="row")
    ways = list(dict.fromkeys(line["setting"]["way"] for line in lines))
    for column, (axis, title) in enumerate(AXES.items()):
        for row, (key, unit) in enumerate(
            (("seconds", "CPU seconds"), ("mebibytes", "peak MiB above set-up"))
        ):
            ax = grid[row, column]
            for slot, way in enumerate(ways):
                chosen = [
                    line
                    for line in lines
                    if line["setting"]["axis"] == axis and line["setting"]["way"] == way
                ]
                x = [line["setting"][axis.lower()] for line in chosen]
                y = [max(line[key], 0.01) for line in chosen]
                ax.plot(x, y, color=COLORS[slot], marker=MARKERS[slot], ms=5, lw=1.3, label=way)
            ax.set(xscale="log", yscale="log")
            ax.spines[["top", "right"]].set_visible(False)
            ax.minorticks_off()
            ax.set_xticks(x, [f"{value:,}" for value in x])
            if column == 0:
                ax.set_ylabel(unit)
            if row == 1:
                ax.set_xlabel(title)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    save(figure, "scaling.png")


def draw_peers(lines: list[Line]) -> None:
    """Draw the time of each peer on each work, over ours."""
    ours = {
        line["setting"]["work"]: line["seconds"] for line in lines if line["setting"]["peer"] == "likewise"
    }
    ratios = defaultdict(dict)
    for line in lines:
        name, work = line["setting"]["peer"], line["setting"]["work"]
        if name != "likewise" and "seconds" in line:
            ratios[name][work] = line["seconds"] / ours[work]
    names = sorted(ratios, key=lambda name: -statistics.median(ratios[name].values()))
    figure, ax = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for slot, (work, title) in enumerate(WORKS.items()):
        points = [(ratios[name][work], place) for place, name in enumerate(names) if work in ratios[name]]
        ax.scatter(
            *zip(*points, strict=True), 32, COLORS[slot], marker=MARKERS[slot], label=f"{work}: {title}"
        )
    ax.axvline(1, color=GRAY, lw=1, ls="--")
    ax.set(
        xscale="log", xlabel="CPU seconds over those of likewise", yticks=range(len(names)), yticklabels=names
    )
    ax.set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    ax.minorticks_off()
    ax.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize="small")
    save(figure, "peers.png")


def peers_table(lines: list[Line]) -> list[str]:
    """Return the table of peers: CPU seconds and peak MiB for each work, the least bold."""
    cells, about = defaultdict(dict), {}
    for line in lines:
        name, work = line["setting"]["peer"], line["setting"]["work"]
        cells[name][work] = line
        about[name] = (line["version"], line["date"])
    least = {
        work: {
            key: min(found[work][key] for found in cells.values() if key in found.get(work, {}))
            for key in ("seconds", "mebibytes")
        }
        for work in WORKS
    }

    def text(line: Line | None, work: str) -> str:
        if line is None:
            return "–"
        if "cannot" in line:
            return "no"
        parts = [
            f"**{line[key]}**" if line[key] == least[work][key] else f"{line[key]}"
            for key in ("seconds", "mebibytes")
        ]
        return " s, ".join(parts)

    table = ["| peer | version | date | " + " | ".join(WORKS) + " |", "|---" * (3 + len(WORKS)) + "|"]
    for name, found in cells.items():
        row = [name, *about[name], *(text(found.get(work), work) for work in WORKS)]
        table.append("| " + " | ".join(row) + " |")
    return table


def growth_table(lines: list[Line]) -> list[str]:
    """Return by which factor time and memory grow from the first to the last point of each axis."""
    table = [
        "| way | " + " | ".join(f"time, memory over {title}" for title in AXES.values()) + " |",
        "|---|---|---|---|",
    ]
    for way in dict.fromkeys(line["setting"]["way"] for line in lines):
        row = [way]
        for axis in AXES:
            own = [line for line in lines if (line["setting"]["axis"], line["setting"]["way"]) == (axis, way)]
            first, last = own[0], own[-1]
            size = last["setting"][axis.lower()] / first["setting"][axis.lower()]
            time, memory = (last[key] / max(first[key], 0.01) for key in ("seconds", "mebibytes"))
            row.append(f"× {time:.1f}, × {memory:.1f} (size × {size:.0f})")
        table.append("| " + " | ".join(row) + " |")
    return table


def index_table() -> list[str]:
    """Return the table of sketches at equal bytes."""
    found = json.loads((records.FOLDER / "index_peers.json").read_text())
    table = ["| | CPU seconds | error of similarities | top-10 kept |", "|---|---|---|---|"]
    for name in (name for name in found if isinstance(found[name], dict)):
        row = found[name]
        error, kept = row["root mean square error"], row["top-10 kept"]
        table.append(f"| {name} | {row['cpu seconds']:.1f} | {error:.3f} | {kept:.3f} |")
    return table


def smoke_table() -> list[str]:
    """Return the table of recorded ratios."""
    found = json.loads((records.FOLDER / "smoke.json").read_text())
    rows = [f"| {name} | {value:.2f} |" for name, value in found["ratios"].items()]
    return [
        f"Recorded on {found['date']} with torch {found['torch']}.",
        "",
        "| ratio | recorded |",
        "|---|---|",
        *rows,
    ]


def page() -> str:
    """Return the page."""
    peers, scaling = read("peers.jsonl"), read("scaling.jsonl")
    draw_peers(peers)
    draw_scaling(scaling)
    date, versions = scaling[-1]["date"], scaling[-1]["versions"]
    median = statistics.median(
        line["seconds"] / ours["seconds"]
        for line in peers
        for ours in peers
        if line["setting"]["peer"] != "likewise" == ours["setting"]["peer"]
        and line["setting"]["work"] == ours["setting"]["work"]
        and "seconds" in line
    )
    parts = [
        "# Benchmarks\n",
        "What `likewise` costs, compared with other libraries. `make benchmarks-page` writes this page from",
        "`benchmarks/results`. All numbers, including missed targets and GPUs: [in detail](../benchmarks/README.md).",
        "How good the answers are: [uses](uses.md).\n",
        "## Peers\n",
        "Exact gradient kernels by twelve ways of ten other libraries, one CPU thread, each in a fresh process: in the",
        f"median they take {median:.1f} times our CPU seconds. CPU seconds, peak MiB above set-up; least in bold.\n",
        "![CPU seconds of each library over those of likewise](images/benchmarks/peers.png)\n",
        *peers_table(peers),
        "",
        "; ".join(f"{work}: {title}" for work, title in WORKS.items())
        + ". a and b: 256 × 256, about 100 k parameters,",
        "one output; c: 128 × 128, ten outputs; d to f: a conv net of 96 k parameters. *no*: the library cannot; –:",
        "not measured. `python benchmarks/peers.py` measures again; its first lines say how to install the peers.\n",
        "## Growth with samples, outputs and parameters\n",
        f"A small conv net, `max_memory` 256 MiB, one thread of a busy CPU, {date}, likewise",
        f"{versions['likewise']}, torch {versions['torch']}. `python benchmarks/scaling.py` measures it again.\n",
        "![Time and memory against N, d and p](images/benchmarks/scaling.png)\n",
        *growth_table(scaling),
        "",
        "`N_S` takes two passes: time grows with N, memory does not. Pairs grow with N². Every call of likewise traces",
        "the network and checks gradients again; on networks this small torch.func takes as long, and more memory.",
        "Not measured against N, d and p: libraries other than torch.func, and GPUs. Single points on an H200:",
        "[in detail](../benchmarks/README.md#common-networks-in-plain-epochs).\n",
        "## Sketches at equal bytes\n",
        "An index of 1,004 numbers per sample: time to build, error against exact similarities, neighbors kept. traker",
        "0.3.2, dattri 0.3.0, 2026-11-16, by `python benchmarks/index.py peers --samples 400 --queries 100`.\n",
        *index_table(),
        "",
        "## Ratios that are watched\n",
        "`make bench-smoke` measures these ratios again, inside one run, and exits with code 1 if one is more than",
        "twice as large.\n",
        *smoke_table(),
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Write the page and its plots."""
    plt.switch_backend("Agg")
    (DOCS / "benchmarks.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
