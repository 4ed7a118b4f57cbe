"""What test_distributed starts once: groups of real processes in which one rank differs, ends or is stopped.

Processes are forked from one that has imported everything; no agent watches over them. Each scenario writes
what every rank found, and when.
"""

import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

import likewise as lw
import nets

torch.set_num_threads(1)
N = 12


def case(seed=0, n=N):
    model, x = nets.case(nets.conv, 2, n, seed)
    return model, x, torch.arange(n) % 2


def gram(model, x, y, **options):
    return lw.GramMatrix(model, lw.batches((x, y), size=2), **options)


def attempt(call, **found):
    """Return what a call returned or raised, and how long it took."""
    start = time.monotonic()
    try:
        found["value"] = call().tolist()
    except Exception as error:
        found.update(error=type(error).__name__, text=str(error), rank=getattr(error, "rank", None))
        found["differences"] = getattr(error, "differences", None)
    return {**found, "seconds": time.monotonic() - start}


# Ranks that were given different things; after each, a call with the same things must work.


def weights(rank):
    model, x, y = case()
    with torch.no_grad():
        model[6].weight[0, 0] += 1e-6 * rank
    return lambda: lw.soft_neighbors(gram(model, x, y))


def buffers(rank):
    model, x, y = case()
    model[1].running_mean[1] += 0.1 * rank
    return lambda: lw.soft_neighbors(gram(model, x, y))


def weights_behind_the_version_counter(rank):
    model, x, y = case()
    lw.soft_neighbors(gram(model, x, y))
    model[6].weight.data.mul_(1 + rank)
    return lambda: lw.soft_neighbors(gram(model, x, y))


def data(rank):
    model, x, y = case()
    x[7, 0, 2, 2] += rank
    return lambda: lw.soft_neighbors(gram(model, x, y))


def order_of_data(rank):
    model, x, y = case()
    places = torch.arange(N) if rank == 0 else torch.arange(N).flip(0)
    return lambda: lw.soft_neighbors(gram(model, x[places], y))


def number_of_samples(rank):
    model, x, y = case()
    return lambda: lw.soft_neighbors(gram(model, x[: N - rank], y[: N - rank]))


def data_set_read_by_item(rank):
    model, x, y = case()
    items = [(x[i] + rank, y[i]) for i in range(N)]
    return lambda: lw.soft_neighbors(lw.GramMatrix(model, lw.batches(items, size=2)))


def batch_size(rank):
    model, x, y = case()
    return lambda: lw.soft_neighbors(lw.GramMatrix(model, lw.batches((x, y), size=2 + rank)))


def threshold(rank):
    model, x, y = case()
    return lambda: lw.hard_neighbors(gram(model, x, y), 0.5 + 0.1 * rank)


def kernel(rank):
    model, x, y = case()
    return lambda: gram(model, x, y, kernel=[lw.CORRELATION, lw.INNER_PRODUCT][rank > 0]).row_sums()


def readout(rank):
    model, x, y = case()
    return lambda: lw.soft_neighbors(gram(lw.Network(model, lw.one_output(int(rank > 0))), x, y))


def weights_of_a_product(rank):
    model, x, y = case()
    return lambda: gram(model, x, y).row_sums(torch.linspace(0, 1 + rank, N))


def different_calls(rank):
    model, x, y = case()
    both = [lw.soft_neighbors, lw.uncertainty]
    return lambda: both[rank > 0](gram(model, x, y))


def order_of_calls(rank):
    model, x, y = case()
    both = [lw.soft_neighbors, lambda g: lw.hard_neighbors(g, 0.5)]
    return lambda: both[rank > 0](gram(model, x, y))


def error(rank):
    model, x, y = case()

    def reduce(k):
        if dist.get_rank() == 1:
            raise KeyError("of rank 1")
        return k.sum(1)

    return lambda: gram(model, x, y).over_rows(reduce)


DIFFERENT = [
    weights, buffers, weights_behind_the_version_counter, data, order_of_data, number_of_samples,
    data_set_read_by_item, batch_size, threshold, kernel, readout, weights_of_a_product, different_calls,
    order_of_calls, error,
]  # fmt: skip


def different(rank, note):
    """All of them in one group: it stays usable."""
    model, x, y = case()
    for scenario in DIFFERENT:
        note(scenario.__name__, attempt(scenario(rank)))
    note("same", attempt(lambda: lw.soft_neighbors(gram(model, x, y))))


# Ranks that end or are stopped.


def ends_inside(rank, note):
    model, x, y = case()

    def reduce(k):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return k.sum(1)

    note("", attempt(lambda: gram(model, x, y, max_memory=2**20).over_rows(reduce), at=time.time()))


def ends_before_the_first_pass(rank, note):
    model, x, y = case()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    note("", attempt(lambda: lw.soft_neighbors(gram(model, x, y))))


def rank_0_ends_before_the_first_pass(rank, note):
    model, x, y = case()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    note("", attempt(lambda: lw.soft_neighbors(gram(model, x, y))))


def rank_0_ends_between_passes(rank, note):
    model, x, y = case()
    lw.soft_neighbors(gram(model, x, y))
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    note("", attempt(lambda: lw.soft_neighbors(gram(model, x, y))))


def leaves_without_the_call(rank, note):
    model, x, y = case()
    lw.soft_neighbors(gram(model, x, y))
    if rank != 1:
        note("", attempt(lambda: lw.soft_neighbors(gram(model, x, y))))


def is_stopped(rank, note):
    model, x, y = case()
    lw.soft_neighbors(gram(model, x, y))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with lw.rank_timeout(silent=2):
        note("", attempt(lambda: lw.soft_neighbors(gram(model, x, y))))


def rank_0_is_stopped(rank, note):
    model, x, y = case()
    lw.soft_neighbors(gram(model, x, y))
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    with lw.rank_timeout(silent=2):
        note("", attempt(lambda: lw.soft_neighbors(gram(model, x, y))))


def is_stopped_before_the_first_pass(rank, note):
    model, x, y = case()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with lw.rank_timeout(absent=2):
        note("", attempt(lambda: lw.soft_neighbors(gram(model, x, y))))


def comes_late(rank, note):
    """Slow, but alive: the others wait, also beyond the limit of silence."""
    model, x, y = case()
    lw.soft_neighbors(gram(model, x, y))
    with lw.rank_timeout(silent=2):
        time.sleep(3 if rank == 1 else 0)
        note("", attempt(lambda: lw.soft_neighbors(gram(model, x, y))))


def waits_elsewhere(rank, note):
    model, x, y = case()
    lw.soft_neighbors(gram(model, x, y))
    if rank == 1:
        time.sleep(3)
        return
    with lw.rank_timeout(absent=2):
        note("", attempt(lambda: lw.soft_neighbors(gram(model, x, y))))


LOST = [
    ends_inside, ends_before_the_first_pass, rank_0_ends_before_the_first_pass, rank_0_ends_between_passes,
    leaves_without_the_call,
    is_stopped, rank_0_is_stopped, is_stopped_before_the_first_pass, waits_elsewhere, comes_late,
]  # fmt: skip


def wait_for_all(path, rank, size):
    """Wait until every rank has joined: one that ends before would break the others' joining, not their work."""
    path.with_name(f"{path.name}-{rank}.joined").touch()
    while not all(path.with_name(f"{path.name}-{other}.joined").exists() for other in range(size)):
        time.sleep(0.01)


def start(scenario, size, folder):
    """Fork the ranks of one scenario; return their process ids."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            try:
                dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
                wait_for_all(folder / scenario.__name__, rank, size)
                found = {}
                scenario(rank, lambda name, result, found=found: found.update({name: result}))
                (folder / f"{scenario.__name__}-{rank}.json").write_text(json.dumps(found))
            except BaseException:
                (folder / f"{scenario.__name__}-{rank}.json").write_text(
                    json.dumps({"": {"error": "unexpected", "text": traceback.format_exc()}})
                )
            os._exit(0)
        children.append(child)
    return children


def wait(children, seconds):
    """Wait for processes that are not stopped; end all that are left and return how many."""
    deadline, left, stopped = time.monotonic() + seconds, set(children), set()
    while left - stopped and time.monotonic() < deadline:
        for child in list(left):
            found, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
            if found and os.WIFSTOPPED(status):
                stopped.add(child)
            elif found:
                left.discard(child)
        time.sleep(0.05)
    for child in left:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return len(left)


if __name__ == "__main__":
    folder, wanted = Path(sys.argv[1]), sys.argv[2:]
    lw.soft_neighbors(gram(*case()))  # what is set up at the first call is set up before the fork
    chosen = [scenario for scenario in [different, *LOST] if not wanted or scenario.__name__ in wanted]
    for i in range(0, len(chosen), 3):  # a few at a time: most of it is waiting
        groups = [start(scenario, 3, folder) for scenario in chosen[i : i + 3]]
        for group in groups:
            wait(group, 60)
