"""The processes that a launcher such as torchrun started, read from its environment variables."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from likewise.runs.settings import Settings


def own_rank() -> int:
    """Return the rank of this process; 0 if it is alone."""
    return int(os.environ.get("RANK", "0"))


def rank_count() -> int:
    """Return the number of processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def on_own_device(settings: Settings) -> Settings:
    """Return settings with the GPU of this process, if a launcher started several processes per machine."""
    if settings.device != "cuda" or "LOCAL_RANK" not in os.environ:
        return settings
    import torch

    number = int(os.environ["LOCAL_RANK"]) % max(1, torch.cuda.device_count())
    return settings.model_copy(update={"device": f"cuda:{number}"})


@contextmanager
def joined_processes(device: str) -> Iterator[None]:
    """Join the launched processes inside the block: by nccl if each has its own GPU, otherwise by gloo."""
    if rank_count() == 1:
        yield
        return
    from likewise.distributed import process_group

    with process_group(_own_gpu(device), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        yield


def _own_gpu(device: str) -> Any:
    if not device.startswith("cuda"):
        return None
    import torch

    here = int(os.environ.get("LOCAL_WORLD_SIZE", str(rank_count())))
    return torch.device(device) if here <= torch.cuda.device_count() else None
