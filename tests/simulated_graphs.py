"""CUDA graphs on a CPU, for tests: operations are logged with their tensors, and done again into the same memory."""

from contextlib import contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from likewise.engines import chunks


class Log(TorchDispatchMode):
    """Logs every operation with the tensors that it read and returned."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


def shares_memory(tensor, others):
    return any(tensor.untyped_storage()._cdata == other.untyped_storage()._cdata for other in others)


class SimulatedGraph:
    """What a function did, to be done again; memory that it allocated holds nothing before the first replay."""

    def __init__(self, calls):
        self.calls, self.replays = calls, 0
        made = set()
        for _, args, kwargs, result in calls:
            given = [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, torch.Tensor)]
            for tensor in tree_flatten(result)[0]:
                if isinstance(tensor, torch.Tensor) and not shares_memory(tensor, given):
                    made.add(tensor.untyped_storage()._cdata)
                    if tensor.is_floating_point() and tensor.numel():
                        tensor.detach().untyped_storage().fill_(0xFF)  # NaN until it is replayed

    def pool(self):
        return None

    def replay(self):
        self.replays += 1
        with torch.no_grad():
            for func, args, kwargs, result in self.calls:
                again = func(*args, **kwargs)
                given = [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, torch.Tensor)]
                old, new = tree_flatten(result)[0], tree_flatten(again)[0]
                for target, value in zip(old, new, strict=True):
                    if isinstance(target, torch.Tensor) and not shares_memory(target, given):
                        target.detach().copy_(value)


@contextmanager
def simulate_graphs(monkeypatch):
    """Record chunks on a CPU; yields the graphs."""
    graphs = []

    def record(self, function):
        with Log() as log, chunks.recording(0):
            output = function()
        graphs.append(SimulatedGraph(log.calls))
        return graphs[-1], output

    @contextmanager
    def watch():
        yield []

    monkeypatch.setattr(chunks, "_find_obstacle", lambda net: None)
    monkeypatch.setattr(chunks.ChunkGraphs, "_record", record)
    monkeypatch.setattr(chunks.ChunkGraphs, "_on_device", lambda self: nullcontext())
    monkeypatch.setattr(chunks, "_watch_synchronization", watch)
    monkeypatch.setattr(
        chunks, "_limit_launched", lambda events: None
    )  # a CPU computes what is launched at once
    yield graphs
