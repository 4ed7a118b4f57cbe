"""What experiments/mnist.py found, in words, from its results."""

import numpy as np
from mnist_figures import Line, areas, final, gains, shape, sorted_lines
from spread import interval


def compare_runs(lines: list[Line], others: list[Line]) -> None:
    """Print how far what the terms add agrees with other results of the same settings and seeds."""
    lines, others = _at_common_moments(lines, others)
    gaps, apart = [], []
    for line, other in zip(lines, others, strict=True):
        cell = line["cell"]
        of = final if cell["study"] == "long" else areas
        mine, theirs = gains(line, lines, of), gains(other, others, of)
        if cell["term"] == "none" or mine is None or theirs is None:
            continue
        gap = mine - theirs
        gaps.append(abs(gap.mean()))
        if gaps[-1] > interval(gap):
            about = f"{cell['study']} {cell['net']}, {shape(cell)}, {cell['samples']} images, {cell['term']}"
            apart.append(f"{about} × {cell['weight']:g}: {mine.mean():+.3f}, there {theirs.mean():+.3f}")
    if not gaps:
        print("no effect is in both")
        return
    size = f"{np.median(gaps):.3f} in the median, {max(gaps):.3f} at most"
    print(f"{len(gaps)} effects are in both, at the same moments; they differ by {size}")
    print(f"{len(apart)} by more than the 95 % interval of the difference", *apart, sep="\n")


def _at_common_moments(lines: list[Line], others: list[Line]) -> tuple[list[Line], list[Line]]:
    """Return the settings that are in both, at the moments that are in both."""
    found: tuple[list[Line], list[Line]] = ([], [])
    for line in sorted_lines(lines):
        for other in (one for one in others if one["cell"] == line["cell"]):
            steps = sorted(set(line["steps"]) & set(other["steps"]))
            for one, kept in zip((line, other), found, strict=True):
                right = [one["right"][one["steps"].index(step)] for step in steps]
                kept.append({**one, "steps": steps, "right": right})
    return found


def told(lines: list[Line]) -> None:
    """Print what each term adds in each setting."""
    print("mean test accuracy over the steps (study long: at the end), %, and what the term adds, points")
    print(
        "ratio: the paper's term as written; +cos: as in the published code; × weight, 1 being the usual one"
    )
    for line in sorted_lines(lines):
        cell = line["cell"]
        about = f"{cell['study']:8} {cell['data']:13} {cell['net']:29} {shape(cell):20}"
        extra = f" n {cell['samples']} noise {cell['noise']}" if cell["study"] == "long" else ""
        values, of = (final(line), final) if cell["study"] == "long" else (areas(line), areas)
        gain = None if cell["term"] == "none" else gains(line, lines, of)
        adds = "" if gain is None else f"  adds {gain.mean():+.3f} ± {interval(gain):.3f}"
        print(f"{about} {cell['term']:5} × {cell['weight']:<5g}{extra} {values.mean():.3f}{adds}")
