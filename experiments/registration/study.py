"""The parts of the experiment, each with a name, its settings, and a result that is kept as one JSON file."""

import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import analysis
import law
import nairobi
import numpy as np
import rounds
import tiles
from law import Case
from net import Alignment
from patches import Sites, drawn_noise, shown, sites
from rounds import Models, Settings, Views
from torch import Tensor

KINDS = ("original", "extra noise", "aligned again", "no retraining", "true labels", "longer")
LONGER = 4  # times as many steps in the one round of "longer"
QUERIES = 6  # patches whose neighbors are shown
NEAREST = 6


@dataclass(frozen=True)
class Plan:
    """What is run: how large, how often."""

    settings: Settings
    smaller: Settings  # of the law, where many networks are trained
    kinds: tuple[str, ...]
    laws: tuple[Case, ...]
    draws: int  # networks that differ by their noise only
    scale: int  # of the networks that are analyzed
    patches: int  # whose neighbors are counted
    pairs: int  # of them that are compared one by one


def quick() -> Plan:
    """Return what two cores do in minutes."""
    settings = Settings((8, 4), 32, 8, 16, 800, 32, 3e-3, 15.3, 10.0)
    smaller = Settings((8,), 32, 8, 16, 300, 32, 3e-3, 4.0, 0.0)
    laws = tuple(Case(n, 2.0, warm=True) for n in (200, 800))
    return Plan(
        settings, smaller, ("original", "true labels"), laws, draws=2, scale=4, patches=400, pairs=240
    )


def repeated() -> Plan:
    """Return the same with every ablation, and with augmented copies."""
    copies = [Case(100, 2.0, copies, fresh, True) for copies in (2, 4, 8) for fresh in (False, True)]
    return replace(quick(), kinds=KINDS, laws=(Case(100, 2.0, warm=True), *copies))


def full() -> Plan:
    """Return what one GPU does in minutes."""
    settings = Settings((8, 4, 2), 40, 32, 256, 800, 128, 1e-3, 15.3, 10.0)
    smaller = Settings((8,), 32, 16, 32, 600, 64, 2e-3, 4.0, 0.0)
    cases = [Case(n, 2.0) for n in (128, 256, 512)] + [Case(1024, s) for s in (0.5, 1.0, 2.0, 4.0)]
    cases += [case._replace(warm=True) for case in cases]
    cases += [Case(256, 2.0, copies, fresh) for copies in (2, 4, 8) for fresh in (False, True)]
    return Plan(settings, smaller, KINDS, tuple(cases), draws=2, scale=4, patches=3045, pairs=500)


class Study:
    """The data, read when first needed, and the parts by name."""

    def __init__(self, plan: Plan, data: Path, device: str, seeds: list[int], seconds: float) -> None:
        self.plan, self.data, self.device, self.seconds = plan, data, device, seconds
        self.regions = cache(lambda: tiles.regions(data))
        self.sites = cache(self._sites)
        self.parts = {
            f"rounds-{kind}-{s}".replace(" ", "-"): (self.rounds, (kind, s))
            for kind in plan.kinds
            for s in seeds
        }
        self.parts |= {f"looks-{s}": (self.looks, (s,)) for s in seeds}
        self.original = cache(lambda seed: self._chain("original", seed))
        self.first, self.start = cache(self._first), cache(self._start)
        self.weights = cache(self._weights)
        for c in plan.laws:
            start, noise = "warm" if c.warm else "cold", "fresh" if c.fresh else "same"
            name = f"law-{start}-{c.n}-{c.sigma:g}-{c.copies}-{noise}"
            self.parts |= {f"{name}-{s}": (self.law, (c, s)) for s in seeds}

    def result(self, name: str) -> dict[str, Any]:
        """Return the result of one part, with what it was made from."""
        part, arguments = self.parts[name]
        start = time.perf_counter()
        found = part(*arguments)
        seconds = time.perf_counter() - start
        limit = self.seconds if math.isfinite(self.seconds) else None  # seconds for each network
        made = {"plan": asdict(self.plan), "limit": limit, "device": self.device, "seconds": seconds}
        return {"part": name, **made, **found}

    def views(self, role: str) -> Views:
        """Return the buildings of a role at each scale."""
        return {
            scale: self.sites(role, scale, self.plan.settings.size) for scale in self.plan.settings.scales
        }

    def rounds(self, kind: str, seed: int) -> dict[str, Any]:
        """Return errors before and after each round; of the paper's own way also Nairobi."""
        lacking, networks = self.original(seed) if kind == "original" else self._chain(kind, seed)
        if kind in ("original", "extra noise"):
            best = rounds.best_chain(self.plan.settings, lacking["train"][0])
            lacking = {**lacking, "best possible": best}
        errors = {role: [_summary(a, values[0]) for a in values] for role, values in lacking.items()}
        found: dict[str, Any] = {"kind": kind, "seed": seed, "errors": errors}
        found["seen"] = [{scale: model.seen for scale, model in models.items()} for models in networks]
        if kind == "original":
            found["parameters"] = sum(p.numel() for p in networks[0][self.plan.scale].parameters())
            found["nairobi"] = nairobi.found(self.regions(), self.views("nairobi"), networks[-1])
        return found

    def looks(self, seed: int) -> dict[str, Any]:
        """Return what the networks of each round are like, in the paper's own way."""
        lacking, networks = self.original(seed)
        told = lacking["train"]
        return {
            "seed": seed,
            "looks": [self._look(models, told[turn]) for turn, models in enumerate(networks)],
        }

    def _chain(self, kind: str, seed: int) -> tuple[dict[str, list[Tensor]], list[Models]]:
        apart = {role: self.views(role) for role in ("validation", "held-out")}
        settings, train = self.plan.settings, self.views("train")
        if kind == "longer":
            settings = replace(settings, steps=LONGER * settings.steps, rounds=1)
        first = self.first(seed) if kind in ("original", "no retraining", "aligned again") else None
        return rounds.chain(kind, train, settings, seed, apart, self.seconds, first)

    def law(self, case: Case, seed: int) -> dict[str, Any]:
        """Return noise left and predicted for one case."""
        settings = self.plan.smaller
        train, beside = (
            self.sites(role, settings.scales[0], settings.size) for role in ("train", "validation")
        )
        start = self.start(seed) if case.warm else None
        return law.measured(train, beside, case, settings, seed, self.plan.draws, self.seconds, start)

    def _first(self, seed: int) -> Models:
        settings, train = self.plan.settings, self.views("train")
        lacking = drawn_noise(len(train[settings.scales[0]]), settings.sigma, 1000 * seed)
        return rounds.trained_all(train, lacking, settings, seed, 0, self.seconds)

    def _start(self, seed: int) -> Alignment:
        """Return a network that knows the task, from annotations with a noise of its own."""
        settings = self.plan.smaller
        train = self.sites("train", settings.scales[0], settings.size)
        lacking = drawn_noise(len(train), settings.sigma, 1000 * seed + 500)
        longer = replace(settings, steps=3 * settings.steps)
        return rounds.trained(train, lacking, longer, seed, self.seconds)

    def _look(self, models: Models, lacking: Tensor) -> dict[str, Any]:
        plan, model = self.plan, models[self.plan.scale]
        of = self.views("train")[plan.scale]
        which, poses = analysis.drawn_sample(of, plan.patches)
        patches, queries = shown(of.take(which), lacking[which], poses), chosen(which[: plan.pairs], of)
        found = {"density": analysis.density(model, patches), "queries": queries}
        found["lacking"] = lacking[which[: plan.pairs]].double().numpy().round(1).tolist()
        found["answers"] = {
            s: analysis.answers(m, self.views("train")[s], lacking) for s, m in models.items()
        }
        found["among all"] = analysis.among_all(model, patches)
        patches = patches.take(slice(0, plan.pairs))
        found["histograms"] = analysis.histograms(model, patches, queries)
        found["denoising"] = analysis.self_denoising(model, patches, plan.scale)
        found["neighbors"] = analysis.neighborhoods(model, patches, queries, NEAREST + 1)
        found["rotations"] = analysis.rotations(model, patches, min(plan.pairs, 400))
        weights = self.weights()
        if weights is not None:
            found["neighbors"]["perceptual"] = analysis.perceived(patches, queries, NEAREST + 1, weights)
        return found

    def _weights(self) -> Path | None:
        """Return the file of SqueezeNet's weights; if there is none, say so."""
        file = self.data / "pretrained" / "squeezenet1_1_imagenet_onnxzoo.npz"
        if file.exists():
            return file
        lacks = f"{self.data} has no pretrained/{file.name}: results go without the perceptual similarity."
        print(f"{lacks} To have it, put the file there and remove looks-*.json.", file=sys.stderr)
        return None

    def _sites(self, role: str, scale: int, size: int) -> Sites:
        return sites(self.regions(), role, scale, size).to(self.device)


def chosen(which: Tensor, of: Sites) -> list[int]:
    """Return patches to look at: the first few of Banepa, whose images may be shown."""
    here = [i for i, site in enumerate(which.tolist()) if of.place[site] == "banepa"]
    return here[:QUERIES]


def _summary(lacking: Tensor, first: Tensor) -> dict[str, Any]:
    """Return the distribution of errors and how much of the first displacement is left, along itself."""
    error = lacking.norm(dim=1).double().cpu().numpy()
    left = float((lacking * first).sum() / first.square().sum())
    quantiles = np.quantile(error, np.linspace(0, 1, 101)).round(2).tolist()
    return {
        "median": float(np.median(error)),
        "mean": float(error.mean()),
        "left": left,
        "quantiles": quantiles,
    }
