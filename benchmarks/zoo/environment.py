"""An environment for the benchmark alone: timm, torchvision and peft beside the project's own packages.

torchvision comes without its compiled part, which is made for one build of torch; models do not need it,
except for detection. The project itself must not depend on it.
"""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import torch

PACKAGES = ("torchvision==0.28", "timm==1.0.30", "peft==0.21.2")
COMPILED = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_libraries: list[torch.library.Library] = []  # their operators go when they do


def setup_environment(folder: Path) -> Path:
    """Return the interpreter of a new environment in `folder`, with this one's packages and PACKAGES."""
    venv.create(folder, with_pip=False, clear=True)
    python = folder / "bin" / "python"
    sites = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    own = sysconfig.get_path("purelib")
    (sites / "project.pth").write_text(f"import site; site.addsitedir({own!r})\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", *PACKAGES], check=True)
    for compiled in (sites / "torchvision").glob("*.so"):
        compiled.unlink()
    return python


def declare_compiled_operators() -> None:
    """Declare the operators that torchvision expects of its compiled part when it is imported."""
    if not _libraries:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}{COMPILED}")
        _libraries.append(library)
