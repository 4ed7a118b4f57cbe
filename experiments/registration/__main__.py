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
among processes by `--only 'rounds-*-0'`. Results of other settings are made anew. Where they go if nothing is
said: out/registration-quick, experiments/results/registration/small, or, of --full, the folder above it.
"""

import argparse
import copy
import json
import math
import sys
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

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
    parser.add_argument("--minutes", type=float, default=math.inf, help="at most so long for each network")
    parser.add_argument("--keep", action="store_true", help="keep the networks that are looked at")
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of the parts to run")
    return parser.parse_args()


def results(out: Path) -> dict[str, dict[str, Any]]:
    """Return every result in a folder by name."""
    return {p.stem: json.loads(p.read_text(encoding="utf-8")) for p in sorted(out.glob("*-[0-9]*.json"))}


def known(file: Path, plan: Plan) -> bool:
    """Return whether there is a result that was made with the same settings."""
    if not file.exists():
        return False
    keys = {"law": ["smaller", "draws"], "looks": ["settings", "scale", "patches", "pairs"]}
    now = json.loads(json.dumps(asdict(plan)))
    then = json.loads(file.read_text(encoding="utf-8"))["plan"]
    return all(now[key] == then[key] for key in keys.get(file.stem.split("-")[0], ["settings"]))


def main() -> None:
    given = options()
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # for what is measured; training is in bfloat16 on a GPU
    plan = full() if given.full else quick() if given.quick else repeated()
    kept = Path("experiments/results/registration")
    out = given.out or (
        Path("out/registration-quick") if given.quick else kept if given.full else kept / "small"
    )
    out.mkdir(parents=True, exist_ok=True)
    seeds = given.seed or ([0] if given.quick else [0, 1, 2])
    study = Study(plan, folder(given.data), given.device, seeds, 60 * given.minutes)
    wanted = [n for n in study.parts if any(fnmatchcase(n, pattern) for pattern in given.only)]
    for name in [] if given.draw else tqdm(wanted, disable=None):
        file = out / f"{name}.json"
        if not known(file, plan):  # a run that was stopped goes on
            text = json.dumps(study.result(name))
            file.with_suffix(".partial").write_text(text, encoding="utf-8")
            file.with_suffix(".partial").rename(file)
            if given.keep and name.startswith("rounds-original"):
                _, networks = study.chain("original", int(name.split("-")[-1]))
                states = [models[plan.scale].half().state_dict() for models in copy.deepcopy(networks)]
                torch.save(states, out / f"{name}.pt")
    if given.only == ["*"]:
        import figures

        found = results(out)
        figures.drawn(found, study, out)
        figures.told(found)
        print(f"results and figures: {out}")


if __name__ == "__main__":
    main()
