"""What test_sharding starts by torchrun: a model that FSDP2 has sharded, gathered and compared with the whole one."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import likewise as lw


def network():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 3)
    )
    model[5].bias.requires_grad_(False)
    model.register_buffer("shift", torch.ones(3))
    return model


def sharded(mesh):
    model = network()
    for module in model:
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def values(model, x, y, folder):
    gram = lw.GramMatrix(lw.Network(model, lw.all_outputs), lw.batches((x, y), size=8))
    index = lw.build_index(
        model, (x, y), folder, width=64, dtype="float32", shard_rows=8, readout=lw.all_outputs
    )
    return {
        "neighbors": lw.soft_neighbors(gram),
        "dense": gram.dense(),
        "product": gram @ torch.linspace(-1, 1, len(x)),
        "index": index.sketches(),
        "nearest": index.nearest(x[:3], 5).similarities,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, mesh = Path(sys.argv[1]), init_device_mesh("cpu", (dist.get_world_size(),))
    chance = torch.Generator().manual_seed(1)
    x, y = torch.randn(30, 6, generator=chance), torch.randint(3, (30,), generator=chance)
    model = sharded(mesh)
    found = {}
    try:
        lw.GramMatrix(model, x).dense()
    except ValueError as error:
        found["refused"] = str(error)
    before = {name: value.to_local().clone() for name, value in model.named_parameters()}
    copied = lw.gather_model(model)
    expected, result = values(network(), x, y, folder / "whole"), values(copied, x, y, folder / "gathered")
    found |= {name: float((result[name] - expected[name]).abs().max()) for name in expected}
    after = {name: value.to_local() for name, value in model.named_parameters()}
    found["untouched"] = all(torch.equal(before[name], after[name]) for name in before)
    found["outputs"] = float((model(x) - copied(x)).abs().max())
    again = lw.gather_model(model)  # now that the root's parameters stay gathered
    found["again"] = float((again(x) - copied(x)).abs().max())
    found["class"] = type(copied).__name__
    found["frozen"] = [name for name, p in copied.named_parameters() if not p.requires_grad]
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
