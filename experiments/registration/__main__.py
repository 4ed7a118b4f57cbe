"""Learning to align maps from wrong maps: the paper's motivating problem (sec. 1 and 6), end to end.

A network learns to move building outlines onto aerial images from outlines that are off by 18 pixels in the
median, aligns those very outlines, and learns again from the result. Then `likewise` says what each network
takes for similar, and how much noise its training averaged out; the truth, hidden until then, says how far
that holds.

    python experiments/registration --quick --data DIR      under ten minutes on two cores
    python experiments/registration --data DIR      three repeats and all ablations, about an hour of one core
    python experiments/registration --full --data DIR --device cuda      networks of 2.1 million parameters
    python experiments/registration --draw --data DIR      figures again from the results

DIR (or $LIKEWISE_DATA) holds aerial-5aoi/, aerial-banepa/ and, for the perceptual similarity, pretrained/.
Every part is kept as a JSON file of its own under --out: what was stopped goes on, and parts can be shared
among processes by `--only 'rounds-*-0'`. Results of other settings are made anew, as are those made under
--minutes where there are more now. Where they go if nothing is said: out/registration-quick,
experiments/results/registration/small, or, of --full, the folder above it.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))

import torch
from study import Plan, Study, full, quick, repeated
from tiles import folder
from tqdm import tqdm


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true")
    size.add_argument("--full", action="store_true")
    parser.add_argument("--draw", action="store_true", help="draw figures again, train nothing")
    parser.add_argument("--data", type=Path, default=None, help="the folder with the aerial tiles")
    parser.add_argument("--out", type=Path, default=None, help="where results and figures go")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--seed", type=int, nargs="+", default=None, help="one repeat each; 0 if quick, else 0 1 2"
    )
    parser.add_argument(
        "--minutes", type=minutes, default=math.inf, help="at most so long for each network; any if not given"
    )
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of the parts to run, no figures")
    return parser.parse_args()


def minutes(text: str) -> float:
    """Return a time to train; refuse none at all."""
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"it must be above 0, not {text}")
    return float(text)


def read(file: Path) -> dict[str, Any]:
    """Return one result."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("plan"), dict):
        raise SystemExit(
            f"{file} is no result of this experiment: it has no plan. Move it away, or say --out."
        )
    return found


def results(out: Path) -> dict[str, dict[str, Any]]:
    """Return every result in a folder by name."""
    return {p.stem: read(p) for p in sorted(out.glob("*-[0-9]*.json"))}


def known(file: Path, plan: Plan, seconds: float = math.inf) -> bool:
    """Return whether there is a result of the same settings, whose networks might train as long as now."""
    if not file.exists():
        return False
    keys = {"law": ["smaller", "draws"], "looks": ["settings", "scale", "patches", "pairs"]}
    now, then = json.loads(json.dumps(asdict(plan))), read(file)
    mattering = keys.get(file.stem.split("-")[0], ["settings"])
    same = all(agree(then["plan"][key], now[key]) for key in mattering if key in then["plan"])
    return same and (then.get("limit") or math.inf) >= seconds


def agree(then: Any, now: Any) -> bool:
    """Return whether what was set is set so now; what was no setting then is not compared."""
    if isinstance(then, dict):
        return all(key in now and agree(value, now[key]) for key, value in then.items())
    return then == now


def wanted(parts: Iterable[str], patterns: list[str]) -> list[str]:
    """Return the parts of these patterns, each of which must be of some part."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in parts):
            raise SystemExit(f"There is no part {pattern!r}; there are: {', '.join(parts)}.")
    return [name for name in parts if any(fnmatchcase(name, pattern) for pattern in patterns)]


def run(study: Study, names: list[str], out: Path) -> None:
    """Make the results that are not known."""
    out.mkdir(parents=True, exist_ok=True)
    for name in tqdm(names, disable=None):
        file = out / f"{name}.json"
        if not known(file, study.plan, study.seconds):  # a run that was stopped goes on
            text = json.dumps(study.result(name))
            file.with_suffix(".partial").write_text(text, encoding="utf-8")
            file.with_suffix(".partial").rename(file)


def draw(study: Study, out: Path) -> None:
    """Draw and print what is in a folder."""
    import figures

    found = results(out)
    figures.drawn(found, study, out)
    figures.told(found)
    print(f"results and figures: {out}")


def main() -> None:
    given = options()
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # for what is measured; training is in bfloat16 on a GPU
    plan = full() if given.full else quick() if given.quick else repeated()
    kept = Path("experiments/results/registration")
    out = given.out or (
        Path("out/registration-quick") if given.quick else kept if given.full else kept / "small"
    )
    if given.draw and not results(out):
        size = " --quick" if given.quick else " --full" if given.full else ""
        where = f" --out {given.out}" if given.out else ""
        made = f"python experiments/registration{size} --data DIR{where}"
        raise SystemExit(f"There are no results in {out} to draw; this makes them: {made}")
    seeds = given.seed or ([0] if given.quick else [0, 1, 2])
    study = Study(plan, folder(given.data), given.device, seeds, 60 * given.minutes)
    if not given.draw:
        run(study, wanted(study.parts, given.only), out)
    if given.draw or given.only == ["*"]:
        draw(study, out)


if __name__ == "__main__":
    main()
