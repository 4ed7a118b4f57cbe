"""What test_distributed starts by torchrun: computes and writes what each process found."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import likewise as lw
import nets
from test_distributed import few_rows, queries, ragged, results, sketched


def error():
    """A NaN in the batch of the second process alone."""
    model, x = nets.case(nets.mlp, 1, 8)
    x[5] = torch.nan
    try:
        lw.soft_neighbors(lw.GramMatrix(model, lw.batches(x, size=4)))
    except (ValueError, RuntimeError) as problem:
        return {"error": torch.zeros(()), "text": str(problem)}
    return {}


def difference():
    """Weights that differ between the processes."""
    model, x = nets.case(nets.mlp, 1, 8, seed=dist.get_rank())
    try:
        lw.soft_neighbors(lw.GramMatrix(model, lw.batches(x, size=4)))
    except lw.RankMismatchError as problem:
        return {"difference": str(problem)}
    return {}


def errors():
    """One after the other: a group stays usable after an error."""
    return {**error(), **difference()}


torch.set_num_threads(1)
dist.init_process_group("gloo")
uses = {
    "results": results,
    "errors": errors,
    "few": few_rows,
    "sketched": sketched,
    "ragged": ragged,
    "queries": queries,
}
found = uses[sys.argv[1]]()
plain = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in found.items()}
(Path(sys.argv[2]) / f"{dist.get_rank()}.json").write_text(json.dumps(plain))
dist.barrier()
os._exit(0)  # gloo's threads sometimes abort while the interpreter shuts down
