"""What the results say in numbers: means over repeats with 95 % intervals (Student's t)."""

from typing import Any

import numpy as np
import spread

Results = dict[str, dict[str, Any]]


def by_kind(found: Results) -> dict[str, list[dict[str, Any]]]:
    """Return the repeats of each kind of rounds."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for result in found.values():
        if "errors" in result:
            kinds.setdefault(result["kind"], []).append(result)
    order = ("original", "extra noise", "aligned again", "no retraining", "true labels", "longer")
    return {kind: kinds[kind] for kind in order if kind in kinds}


def laws(found: Results) -> list[dict[str, Any]]:
    """Return all measurements of noise that is left."""
    return [r for r in found.values() if "σ factor" in r]


def looks(found: Results) -> list[dict[str, Any]]:
    """Return what networks are like, a result for each repeat."""
    return [r for r in found.values() if "looks" in r]


def interval(values: list[float]) -> tuple[float, float]:
    """Return the mean and half its 95 % interval; not a number for a single value."""
    return float(np.mean(values)), spread.interval(values)


def said(values: list[float], digits: int = 2) -> str:
    """Return the mean with its interval as text; of fewer than three values, each."""
    mean, half = interval(values)
    if len(values) < 3:
        return "; ".join(f"{value:.{digits}f}" for value in values)
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def told(found: Results) -> None:
    """Print the results."""
    for kind, runs in by_kind(found).items():
        for role in runs[0]["errors"]:
            columns = zip(*([e["median"] for e in r["errors"][role]] for r in runs), strict=True)
            print(f"{kind:14} {role:14} median error  " + "  ".join(said(list(c)) for c in columns))
    for turn in range(3):
        runs = [r["looks"][turn] for r in looks(found) if turn < len(r["looks"])]
        if runs:
            print(f"\nround {turn + 1}")
            for name, values in _looked(runs).items():
                print(f"  {name:44} {said(values, 3)}")
    cases: dict[str, list[dict[str, Any]]] = {}
    for r in laws(found):
        name = f"{'warm' if r['warm'] else 'cold'} N {r['n']} σ {r['sigma']:g} copies {r['copies']}"
        cases.setdefault(name + ("" if r["fresh"] else " same"), []).append(r)
    keys = ("left", "left beside", "σ factor", "σ hat", "σ hat beside", "factor", "error", "error beside")
    for name, rows in cases.items():
        print(f"{name:28} " + "  ".join(f"{k} {said([r[k] for r in rows], 3)}" for k in keys))


def _looked(runs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the numbers of one round, a value for each repeat."""
    found: dict[str, list[float]] = {}
    denoising = [r["denoising"] for r in runs]
    for name, value in denoising[0].items():
        if isinstance(value, float):
            found[name] = [d[name] for d in denoising]
        elif name != "points":
            found[f"{name}, median"] = [d[name][2] for d in denoising]
    found["factor / floor, median"] = [d["factor"][2] / d["floor"] for d in denoising]
    found["N_S / N, median"] = [float(np.median(r["density"]["soft"])) / r["density"]["n"] for r in runs]
    if all("among all" in r for r in runs):
        for name in ("factor", "neighbors", "negative"):
            found[f"among all patches: {name}, median"] = [r["among all"][name][2] for r in runs]
        every = [r["among all"] for r in runs]
        found["among all patches: factor / floor, median"] = [a["factor"][2] / a["floor"] for a in every]
    found["N_S, seconds"] = [r["density"]["seconds"] for r in runs]
    for kind in ("plain", "centered"):
        for name in ("mean", "deviation", "skew"):
            found[f"similarity, {kind}, {name}"] = [r["histograms"][kind][name] for r in runs]
    for kernel, values in runs[0]["rotations"].items():
        for name in values:
            found[f"turned: {kernel}, {name}"] = [r["rotations"][kernel][name] for r in runs]
    return found
