"""The tables of docs/uses.md, from the results in benchmarks/results: `python benchmarks/uses.py`."""

import math
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from records import FOLDER, lines
from scipy.stats import spearmanr

from likewise.statistics.fit import decide_verdict

sys.path.append(str(Path(__file__).parent.parent / "experiments"))
from spread import interval

PAGE = Path(__file__).parent.parent / "docs" / "uses.md"
Rows = list[dict[str, Any]]
STAGES = ("early", "memorized")
SHORT = {
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "turned mnist": "turned MNIST",
    "table": "table of digits",
}
LABELS = (
    "likewise",
    "cross-validation",
    "margin over training",
    "loss",
    "EL2N",
    "neighbors in features",
    "self-influence",
    "TRAK",
)
OWN = ("likewise", "with record", "reheated", "reheated with record", "margin over training", "early margin")


def grouped(rows: Iterable[Any], key: Callable[[Any], tuple[Any, ...]]) -> dict[tuple[Any, ...], list[Any]]:
    found = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return dict(found)


def table(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    first = list(head)
    return "\n".join("| " + " | ".join(row) + " |" for row in (first, ["---"] * len(first), *map(list, body)))


def best(values: list[float], largest: bool, digits: str, of: int | None = None) -> list[str]:
    """Return the values as text, the best of the first `of` in bold."""
    top = (max if largest else min)(values[: of or len(values)])
    shown = [format(v, digits).replace("0.", ".", 1) if abs(v) < 1 else format(v, digits) for v in values]
    return [
        f"**{text}**" if v == top and i < (of or len(values)) else text
        for i, (v, text) in enumerate(zip(values, shown, strict=True))
    ]


def labels(rows: Rows) -> str:
    cases = [(row["setting"], stage, row[stage]["scores"]) for row in rows for stage in STAGES]
    order = list(STAGES)
    body = []
    groups = grouped(cases, lambda c: (c[1], c[0]["noise"], c[0]["data"]))
    for (stage, noise, data), found in sorted(groups.items(), key=lambda g: (order.index(g[0][0]), g[0][1:])):
        body.append([stage, noise, SHORT[data], str(len(found)), *_scores(found)])
    body.append(["**all**", "", "", str(len(cases)), *_scores(cases)])
    return table(["network", "noise", "data", "runs", *LABELS, "likewise − CV"], body)


def _scores(found: list[Any]) -> list[str]:
    means = [statistics.mean(scores[name][0] for *_, scores in found) for name in LABELS]
    gaps = [scores["likewise"][0] - scores["cross-validation"][0] for *_, scores in found]
    gap = f"{statistics.mean(gaps):+.2f} ± {interval(gaps):.2f}".replace("0.", ".")
    return [*best(means, True, ".2f"), gap]


def own_rankings(rows: Rows, peers: Rows) -> str:
    """Return what one network can do more, beside cross-validation on the same labels, a row a noise."""
    validated = {tuple(row["setting"].values()): row for row in peers}
    cases = []
    for row in rows:
        setting = dict(row["setting"])
        stage, _ = setting.pop("stage"), setting.pop("outputs")
        known = validated[tuple(setting.values())][stage]
        scores = {name: row["scores"][name][0] for name in OWN}
        scores["cross-validation"] = known["scores"]["cross-validation"][0]
        cases.append((stage, setting["noise"], setting["data"], scores))
    names, body = (*OWN, "cross-validation"), []
    for (stage, noise, data), found in sorted(grouped(cases, lambda c: c[:3]).items()):
        means = [statistics.mean(c[3][name] for c in found) for name in names]
        body.append([stage, noise, SHORT[data], str(len(found)), *best(means, True, ".2f")])
    for stage in (*STAGES, ""):
        rows_of_stage = [found for key, found in grouped(cases, lambda c: c[:3]).items() if stage in key[0]]
        if rows_of_stage:
            means = [
                statistics.mean(statistics.mean(c[3][name] for c in found) for found in rows_of_stage)
                for name in names
            ]
            what = f"**{stage or 'all'}, mean of rows**"
            body.append([what, "", "", str(sum(map(len, rows_of_stage))), *best(means, True, ".3f")])
    return table(["network", "noise", "data", "runs", *names], body)


def areas_of_labels(rows: Rows) -> str:
    body = []
    for stage in STAGES:
        for share in (0.05, 0.1, 0.2, 0.4):
            here = [
                r[stage]["scores"]
                for r in rows
                if (r["setting"]["data"], r["setting"]["noise"], r["setting"]["share"])
                == ("cifar10", "uniform", share)
            ]
            means = [statistics.mean(s[name][1] for s in here) for name in LABELS]
            body.append([stage, f"{share:.0%}", str(len(here)), *best(means, True, ".3f")])
    return table(["network", "noise", "runs", *LABELS], body)


def flags(rows: Rows) -> str:
    body = []
    noises, names = ("none", "uniform", "pair", "instance"), tuple(SHORT)
    groups = grouped(
        rows,
        lambda r: (
            noises.index(r["setting"]["noise"]),
            r["setting"]["share"],
            names.index(r["setting"]["data"]),
            r["setting"]["epochs"],
        ),
    )
    for (noise, share, data, epochs), found in sorted(groups.items()):
        mean = lambda pick, found=found: statistics.mean(pick(r) for r in found)  # noqa: E731
        sure = [r["expected"][1] for r in found if not math.isnan(r["expected"][1])]
        told = [r["errors"] for r in found if not math.isnan(r["errors"][2])]
        ends = [statistics.mean(e[i] for e in told) for i in (2, 1, 3)] if told else []
        inside = sum(low <= truth <= high for truth, low, _, high in told)
        body.append(
            [
                f"{noises[noise]} {share:.0%}" if share else "none",
                SHORT[names[data]],
                str(epochs),
                f"{sum(r['distinct'] for r in found)} of {len(found)}",
                f"{mean(lambda r: r['flags'][0]):.0f}",
                f"{mean(lambda r: r['flags'][1]):.2f}" if share else "",
                f"{statistics.mean(sure):.2f}" if sure else "",
                f"{mean(lambda r: r['flags'][2]):.2f}" if share else "",
                f"{mean(lambda r: r['errors'][0]):.0f}",
                "{:.0f} ({:.0f} to {:.0f})".format(*ends) if told else "",
                f"{inside} of {len(told)}" if told else "cannot tell",
            ]
        )
    head = [
        "noise",
        "data",
        "epochs",
        "stand out",
        "flagged",
        "precision",
        "expected",
        "recall",
        "wrong",
        "estimated",
        "inside",
    ]
    return table(head, body)


def novelty(rows: Rows) -> str:
    names = list(rows[0]["scores"])
    body = []
    key = lambda r: (r["setting"]["data"], r["setting"]["novel"], tuple(r["setting"]["classes"]))  # noqa: E731
    for (data, novel, classes), found in sorted(grouped(rows, key).items()):
        what = SHORT.get(novel, f"classes {' and '.join(map(str, classes))} left out")
        means = [statistics.mean(r["scores"][name][1] for r in found) for name in names]
        body.append([SHORT[data], what, str(len(found)), *best(means, True, ".3f")])
    cases = grouped(rows, key).values()
    means = [
        statistics.mean(statistics.mean(r["scores"][n][1] for r in case) for case in cases) for n in names
    ]
    body.append(["**mean of cases**", "", str(len(rows)), *best(means, True, ".3f")])
    gaps = [
        [statistics.mean(r["scores"]["likewise"][1] - r["scores"][name][1] for r in case) for case in cases]
        for name in names
    ]
    signed = [f"{statistics.mean(g):+.3f} ± {interval(g):.3f}".replace("0.", ".") for g in gaps]
    body.append(["likewise less this, ± over cases", "", str(len(rows)), "", *signed[1:]])
    return table(["trained on", "novel", "runs", *names], body)


def reliability(rows: Rows) -> str:
    classes = [r for r in rows if r["off"]]
    names = list(classes[0]["areas"])
    single = len(names) - 1  # the last is five networks
    body = []
    for (data, share), found in sorted(
        grouped(classes, lambda r: (r["setting"]["data"], r["setting"]["share"])).items()
    ):
        means = [1000 * statistics.mean(r["areas"][name] for r in found) for name in names]
        right = statistics.mean(r["right"] for r in found)
        body.append(
            [SHORT[data], f"{share:.0%}", str(len(found)), f"{right:.1%}", *best(means, False, ".1f", single)]
        )
    return table(["data", "wrong labels", "runs", "right", *names], body)


def of_values(rows: Rows) -> str:
    found = [r for r in rows if not r["off"]]
    names = list(found[0]["areas"])
    means = [1000 * statistics.mean(r["areas"][name] for r in found) for name in names]
    return table(["runs", *names], [[str(len(found)), *best(means, False, ".1f")]])


def calibration(rows: Rows) -> str:
    classes = [r for r in rows if r["off"]]
    names = list(classes[0]["off"])
    body = []
    for (data, share), found in sorted(
        grouped(classes, lambda r: (r["setting"]["data"], r["setting"]["share"])).items()
    ):
        means = [statistics.mean(r["off"][name] for r in found) for name in names]
        body.append([SHORT[data], f"{share:.0%}", *best(means, False, ".3f")])
    return table(["data", "wrong labels", *names], body)


def shift_areas(rows: Rows, part: str) -> dict[tuple[str, str], dict[str, float]]:
    """Return the mean over networks of every score, by data and case."""
    cells: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for row in rows:
        for case, scores in row["areas"].items():
            if case.startswith(part):
                cells[row["setting"]["data"], case.split(": ")[2]].append(scores)
    return {cell: _mean_scores(found) for cell, found in sorted(cells.items())}


def _mean_scores(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.mean(scores[name] for scores in found) for name in found[0]}


def _gap_row(cells: list[dict[str, float]], names: list[str], mine: str) -> list[str]:
    gaps = [[cell[mine] - cell[name] for cell in cells] for name in names]
    return [
        "" if name == mine else f"{statistics.mean(g):+.3f} ± {interval(g):.3f}".replace("0.", ".")
        for name, g in zip(names, gaps, strict=True)
    ]


def _resampled_row(cells: list[dict[str, float]], names: list[str], mine: str) -> list[str]:
    """Return between what the mean differences are in 95 % of 10,000 draws of the cases, with replacement."""
    draws = np.random.default_rng(0).integers(0, len(cells), (10_000, len(cells)))
    shown = []
    for name in names:
        means = np.array([cell[mine] - cell[name] for cell in cells])[draws].mean(1)
        low, high = (f"{v:+.3f}".replace("0.", ".", 1) for v in np.quantile(means, [0.025, 0.975]))
        shown.append("" if name == mine else f"{low} to {high}")
    return shown


def shift_novelty(rows: Rows) -> str:
    cells = shift_areas(rows, "reporting")
    names = list(next(iter(cells.values())))
    body = [
        [SHORT[data], case, *best(list(scores.values()), True, ".2f")]
        for (data, case), scores in cells.items()
    ]
    for part in ("reporting", "choosing"):
        here = list(shift_areas(rows, part).values())
        body.append(
            [
                f"**mean of {len(here)} cases for {part}**",
                "",
                *best(list(_mean_scores(here).values()), True, ".3f"),
            ]
        )
        for mine in names[:2]:
            body.append([f"{mine}, less this, ± over cases", "", *_gap_row(here, names, mine)])
        resampled = _resampled_row(here, names, names[0])
        body.append([f"{names[0]}, less this, 95 % of resampled cases", "", *resampled])
    return table(["trained on", "novel", *names], body)


def shift_trust(rows: Rows) -> str:
    cells: dict[tuple[Any, ...], list[dict[str, float]]] = defaultdict(list)
    for row in rows:
        for case, scores in row["risks"].items():
            if case == "none" or case.startswith("reporting"):
                kind, strength = ("none", "") if case == "none" else case.split(": ")[1:]
                cells[row["setting"]["data"], row["setting"]["share"], kind, strength].append(scores)
    means = {cell: _mean_scores(found) for cell, found in cells.items()}
    names, body = list(next(iter(means.values()))), []
    for (data, share, kind), found in sorted(
        grouped(means, lambda cell: cell[:3]).items(), key=lambda g: (g[0][:2], g[0][2] != "none", g[0][2])
    ):
        scores = _mean_scores([means[cell] for cell in found])
        body.append(
            [SHORT[data], f"{share:.0%}", kind, *best([1000 * v for v in scores.values()], False, ".0f")]
        )
    for data in sorted({cell[0] for cell in means}):
        for share in (0.0, 0.2):
            here = [s for cell, s in means.items() if cell[:2] == (data, share) and cell[2] != "none"]
            shown = best([1000 * v for v in _mean_scores(here).values()], False, ".0f")
            body.append([f"**{SHORT[data]}**", f"{share:.0%}", "**mean of corruptions**", *shown])
    for data in sorted({cell[0] for cell in means}):
        here = [s for cell, s in means.items() if cell[0] == data and cell[2] != "none"]
        worst = [
            max(s[name] / min(s["largest probability"], s["temperature"]) - 1 for s in here) for name in names
        ]
        body.append(
            [
                SHORT[data],
                "",
                "worst cell, against the better of probability and temperature",
                *(f"{v:+.1%}" for v in worst),
            ]
        )
    return table(["data", "wrong labels", "corruption", *names], body)


def aerial(rows: Rows) -> str:
    """Return areas under the ROC curve of aerial patches by labels: the mean over seeds, and the seeds."""
    names, body = list(rows[0]["areas"]["all"]), []
    for share in (0.0, 0.2):
        for part in ("all", "reporting"):
            here = [r["areas"][part] for r in rows if r["setting"]["share"] == share]
            means = best(list(_mean_scores(here).values()), True, ".2f")
            seeds = [", ".join(f"{s[name]:.2f}".replace("0.", ".") for s in here) for name in names]
            what = "five places" if part == "all" else "three for reporting"
            shown = [f"{mean} ({each})" for mean, each in zip(means, seeds, strict=True)]
            body.append([f"{share:.0%}", what, *shown])
    here = [r["areas"]["all"] for r in rows]
    body.append([f"likewise less this, ± over {len(rows)} networks", "", *_gap_row(here, names, "likewise")])
    return table(["wrong labels", "patches", *names], body)


def relabel(rows: Rows) -> str:
    names = list(rows[0]["right"])
    body = []
    key = lambda r: (r["setting"]["data"], r["setting"]["noise"], r["setting"]["share"])  # noqa: E731
    for (data, noise, share), found in sorted(grouped(rows, key).items()):
        means = [statistics.mean(r["right"][name] for r in found) for name in names]
        body.append(
            [SHORT[data], f"{noise} {share:.0%}", str(len(found)), *best(means, True, ".3f", len(names) - 1)]
        )
    for data, found in [*sorted(grouped(rows, lambda r: r["setting"]["data"]).items()), ("all", rows)]:
        added = [[100 * (r["right"][name] - r["right"][names[0]]) for r in found] for name in names[1:]]
        told = [f"{statistics.mean(values):+.1f} ± {interval(values):.1f}" for values in added]
        body.append([SHORT.get(data, "both"), "what it adds, points", str(len(found)), "", *told])
    return table(["data", "noise", "runs", *names], body)


def fit(rows: Rows) -> str:
    gap = lambda r: r["learned"] - r["new"]  # noqa: E731
    proxies: dict[str, Callable[[Any], float]] = {
        "learned − supported": lambda r: r["learned"] - r["supported"],
        "learned": lambda r: r["learned"],
        "−loss": lambda r: -r["loss"],
        "gradient norm": lambda r: r["gradient"],
        "sharpness": lambda r: r["sharpness"],
        "−density (N_S)": lambda r: -r["density"],
        "−label variance (paper)": lambda r: -r["variance"],
    }
    body = []
    for name, proxy in proxies.items():
        per = [
            float(spearmanr([proxy(r) for r in part], [gap(r) for r in part]).statistic)
            for part in grouped(rows, lambda r: (r["setting"]["data"], r["setting"]["seed"])).values()
        ]
        off = statistics.mean(abs(proxy(r) - gap(r)) for r in rows) if name == "learned − supported" else None
        body.append(
            [name, f"{statistics.mean(per):+.2f} ± {interval(per):.2f}", "" if off is None else f"{off:.3f}"]
        )
    middle = statistics.median(gap(r) for r in rows)
    guess = statistics.mean(abs(middle - gap(r)) for r in rows)
    body.append(["always the median gap", "", f"{guess:.3f}"])
    head = [
        f"training data alone, {len(rows)} networks",
        "rank correlation with the gap",
        "mean distance from it",
    ]
    return table(head, body)


def verdicts(rows: Rows) -> str:
    peak: dict[Any, float] = defaultdict(float)
    key = lambda r: (r["setting"]["data"], r["setting"]["share"], r["setting"]["seed"])  # noqa: E731
    for row in rows:
        peak[key(row)] = max(peak[key(row)], row["new"])

    def truth(row: dict[str, Any]) -> str:
        if row["learned"] - row["new"] > 0.15:
            return "overfit"
        return "underfit" if peak[key(row)] - row["new"] > 0.05 else "fit"

    names = ("underfit", "fit", "overfit")
    counts = grouped(rows, lambda r: (truth(r), decide_verdict(r["learned"], r["supported"], math.inf)))
    body = [[f"truly {a}", *(str(len(counts.get((a, b), []))) for b in names)] for a in names]
    return table(["", *(f"said {name}" for name in names)], body)


def main() -> None:
    results = {file.stem: lines(file) for file in sorted(FOLDER.glob("*.jsonl"))}
    made = {
        "labels": labels(results["labels"]),
        "own labels": own_rankings(results["labels_own"], results["labels"]),
        "areas of labels": areas_of_labels(results["labels"]),
        "flags": flags(results["label_flags"]),
        "novelty": novelty(results["novelty"]),
        "reliability": reliability(results["reliability"]),
        "values": of_values(results["reliability"]),
        "calibration": calibration(results["reliability"]),
        "shift novelty": shift_novelty(results["shift"]),
        "shift trust": shift_trust(results["shift"]),
        "aerial": aerial(results["shift_product"]),
        "relabel": relabel(results["relabel"]),
        "fit": fit(results["fit"]),
        "verdicts": verdicts(results["fit"]),
    }
    text = PAGE.read_text(encoding="utf-8")
    for name, content in made.items():
        mark = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(mark, lambda m, c=content: f"{m[1]}{c}\n{m[2]}", text, flags=re.S)
        if count != 1:
            raise SystemExit(f"docs/uses.md has {count} places for the table {name!r}, not one.")
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
