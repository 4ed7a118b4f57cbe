"""Sharing work among processes: the only place of torch.distributed.

Both functions give every process the same result as one process would get. Started by torchrun (or anything
else that initializes a process group) they share the work; otherwise they are plain loops. All ranks must
make the same calls in the same order with the same weights, data and options: before each pass they compare
fingerprints, and a difference is refused on every rank. An error in one is raised in all.
"""

import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from likewise.fingerprint import Close, Entries, Entry, Fingerprint, differing
from likewise.liveness import Channel, RankLostError, limits, listen
from likewise.progress import track
from likewise.torch_state import exclusive

Clock = Callable[[], float]  # anything that grows as work is done: seconds, operations


class Pass(NamedTuple):
    """A completed pass over data, and its cost by the clock."""

    what: str
    cost: float


# For each thread: the running clocks, and whether a pass is in progress.
_records: ContextVar[tuple[tuple[Clock, list[Pass]], ...]] = ContextVar("records", default=())
_inside: ContextVar[bool] = ContextVar("inside a pass", default=False)
_alone: ContextVar[bool] = ContextVar("working alone", default=False)
_as_one: ContextVar[bool] = ContextVar("dividing as one process", default=False)
_part: ContextVar[tuple[str, int, int] | None] = ContextVar("part of a pass", default=None)


@contextmanager
def record_passes(clock: Clock) -> Iterator[list[Pass]]:
    """Collect the passes made inside, each with its cost."""
    passes: list[Pass] = []
    before = _records.set((*_records.get(), (clock, passes)))
    try:
        yield passes
    finally:
        _records.reset(before)


class RemoteError(RuntimeError):
    """Another rank raised an error, whose type and text are quoted.

    Attributes:
        rank: Which rank.
        kind: The error's type, as module and name.

    Example:
        >>> import likewise as lw
        >>> lw.RemoteError(1, "builtins.ValueError", "no data").rank
        1

    """

    def __init__(self, rank: int, kind: str, message: str) -> None:
        super().__init__(f"Rank {rank} failed: {kind.rpartition('.')[2]}: {message}")
        self.rank, self.kind = rank, kind


def is_error(error: BaseException, kind: type[BaseException]) -> bool:
    """Whether an error is of a kind, on this rank or on the one that raised it."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    return isinstance(error, kind) or (isinstance(error, RemoteError) and error.kind == name)


class RankMismatchError(RuntimeError):
    """Ranks were given different weights, data or options, or are at different calls.

    Attributes:
        differences: What differs, by kind ("calls", "weights", "data", "options"), then by name: a number for
            each rank, equal where ranks agree.

    Example:
        >>> import likewise as lw
        >>> lw.RankMismatchError("weights differ", {"weights": {"fc.bias": [0, 1]}}).differences["weights"]
        {'fc.bias': [0, 1]}

    """

    def __init__(self, message: str, differences: dict[str, dict[str, list[int]]]) -> None:
        super().__init__(message)
        self.differences = differences


def world_size() -> int:
    """Return the number of processes that share the work."""
    return dist.get_world_size() if _has_group() else 1


@contextmanager
def process_group(device: torch.device | None = None, attempt: str = "0") -> Iterator[None]:
    """Join the processes that a launcher such as torchrun has started, for the time inside.

    Addresses and numbers come from the variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. A group that is there
    is used as it is.

    Args:
        device: A GPU that this process has to itself: nccl adds up what is on it, gloo the rest. None: gloo alone.
        attempt: Which start of the processes this is, where a launcher starts them again: addresses that those before
            left in the store of the launcher are not read.

    """
    if dist.is_initialized():
        yield
        return
    store, own_rank, size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"likewise/attempt/{attempt}", store)
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device is None else "cpu:gloo,cuda:nccl",
        store=store,
        rank=own_rank,
        world_size=size,
        device_id=device,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def rank() -> int:
    """Return the number of this process among those that share the work, 0 where it is alone."""
    return dist.get_rank() if _has_group() else 0


def _has_group() -> bool:
    return not _alone.get() and dist.is_available() and dist.is_initialized()


@contextmanager
def alone() -> Iterator[None]:
    """Share nothing inside: passes are plain loops, also where a launcher has started several processes."""
    tokens = _alone.set(True), _inside.set(False)
    try:
        yield
    finally:
        _alone.reset(tokens[0])
        _inside.reset(tokens[1])


@contextmanager
def as_one_process() -> Iterator[None]:
    """Let ranks share strips of the height that one process would choose, so that results have the same bits."""
    token = _as_one.set(True)
    try:
        yield
    finally:
        _as_one.reset(token)


@contextmanager
def only_part(what: str, i: int, n: int) -> Iterator[None]:
    """Let passes of this name do part i of n, from 1, of their batches or strips; rows of the others stay zero."""
    token = _part.set((what, i, n))
    try:
        yield
    finally:
        _part.reset(token)


def _take_part(spans: list[range], what: str) -> list[range]:
    """Return the spans that this process is asked to do, all if it was not asked for a part."""
    part = _part.get()
    if part is None or part[0] != what:
        return spans
    _, i, n = part
    if len(spans) < n:
        raise ValueError(f"There are {len(spans)} strips of {what} to share: ask for at most as many parts.")
    return spans[i - 1 :: n]


def own_share(spans: list[range], what: str) -> list[range]:
    """Return the spans of a pass of this name for which `join_results` will call its function here, in order."""
    return _take_part(spans, what)[rank() :: world_size()]


def shares() -> int:
    """Return for how many processes rows are divided into strips."""
    return 1 if _as_one.get() else world_size()


def on_first_rank(function: Callable[[], Any], what: str) -> Any:
    """Return function(), called on rank 0 alone while the others wait; what it raises is raised on all.

    Args:
        function: Returns what JSON can hold.
        what: What is done, for messages.

    """
    if world_size() == 1:
        return function()
    team, answer = _Ranks(what), None
    if dist.get_rank() == 0:
        try:
            with alone():
                answer = function()
        except BaseException as problem:
            team.report(problem)
            raise
    return team.exchange({"answer": answer})[0]["answer"]


def smallest(value: int, what: str) -> int:
    """Return the smallest of the numbers that ranks give, on all of them."""
    if world_size() == 1:
        return value
    return min(one["value"] for one in _Ranks(what).exchange({"value": value}))


def join_results(
    function: Callable[[range], Any],
    spans: list[range],
    what: str,
    about: Any = None,
    finish: Callable[[], None] | None = None,
) -> Any:
    """Return function(span) concatenated along dimension 0, with one row for each position of the span.

    Results are written straight to their rows: small tensors among large temporary ones would fragment the
    heap, and memory would grow.

    Args:
        function: Returns a tensor, or a tuple of tensors.
        spans: The batches.
        what: What the pass is called in messages.
        about: What else has to be the same on all ranks, such as the network and the data.
        finish: Called at the end on each rank; what it raises is raised on all.

    """
    n = spans[-1].stop

    def work(share: Iterator[range]) -> Any:
        joined: Any = None

        def place(where: Tensor, part: Tensor) -> None:
            where[span.start : span.stop] = part

        for span in share:
            parts = function(span)
            for part in parts if isinstance(parts, tuple) else (parts,):
                if not isinstance(part, Tensor) or part.dim() == 0 or len(part) != len(span):
                    found = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
                    raise ValueError(
                        f"A row for each of {len(span)} samples was expected, found {found}: a reduction "
                        "keeps the rows, as k.sum(1) does."
                    )
            if joined is None:
                joined = tree_map(lambda part: part.new_zeros(n, *part.shape[1:]), parts)
            tree_map(place, joined, parts)
        return joined

    return _shared(work, function, spans, what, about, finish)


def sum_results(
    function: Callable[[range], Tensor],
    spans: list[range],
    what: str,
    about: Any = None,
    finish: Callable[[], None] | None = None,
) -> Tensor:
    """Return Σ function(span), tensors of the same shape; arguments as for `join_results`."""

    def work(share: Iterator[range]) -> Tensor | None:
        total: Tensor | None = None
        for span in share:
            term = function(span)
            total = term if total is None else total.add_(term)
        return total

    return _shared(work, function, spans, what, about, finish)


def _shared(
    work: Callable[[Iterator[range]], Any],
    function: Callable[[range], Any],
    spans: list[range],
    what: str,
    about: Any,
    finish: Callable[[], None] | None,
) -> Any:
    """Return the sum over ranks of `work` on each rank's share of the spans."""
    spans = _take_part(spans, what)
    if _inside.get():
        raise RuntimeError("A pass over the data was asked for inside another: take it before.")
    token = _inside.set(True)
    try:
        with exclusive if world_size() > 1 else nullcontext():
            team: _Team = _Ranks(what) if world_size() > 1 else _Alone(what)
            team.agree(function, spans, about)
            try:
                with _time_pass(what):  # without `finish`, which does not grow with the number of samples
                    result = work(team.share(spans))
                if finish is not None:
                    finish()
            except BaseException as problem:
                team.report(problem)
                raise
            return team.total(result)
    finally:
        _inside.reset(token)


@contextmanager
def _time_pass(what: str) -> Iterator[None]:
    records = _records.get()
    starts = [clock() for clock, _ in records]
    yield
    for (clock, passes), start in zip(records, starts, strict=True):
        passes.append(Pass(what, clock() - start))


class _Team(Protocol):
    """The processes that share a pass."""

    def agree(self, function: Callable[[range], Any], spans: list[range], about: Any) -> None:
        """Raise if ranks were given different weights, data or options."""

    def share(self, spans: list[range]) -> Iterator[range]:
        """Yield this rank's spans, and show progress on the first rank."""

    def report(self, problem: BaseException) -> None:
        """Send an error to the other ranks."""

    def total(self, result: Any) -> Any:
        """Return the sum of the results of all ranks; places that another rank filled are zero here."""


class _Alone:
    """One process."""

    def __init__(self, what: str) -> None:
        self._what = what

    def agree(self, function: Callable[[range], Any], spans: list[range], about: Any) -> None:
        pass

    def share(self, spans: list[range]) -> Iterator[range]:
        yield from track(spans, self._what)

    def report(self, problem: BaseException) -> None:
        pass

    def total(self, result: Any) -> Any:
        return result


class _Ranks:
    """The ranks of the default process group, at one pass."""

    def __init__(self, what: str) -> None:
        self._what = f'the pass "{what}"'
        self._name = what
        self._link = _link(self._what)
        self._link.passes += 1
        self._channel = self._link.channel

    def agree(self, function: Callable[[range], Any], spans: list[range], about: Any) -> None:
        call, arguments = _public_call()
        try:
            given = _fingerprint(call, arguments, function, spans, about)
        except BaseException as problem:
            self.report(problem)
            raise
        at = f"{call} ({self._what}, number {self._link.passes} of this rank)"
        everyone = self.exchange({"at": at, **_condense(given.entries)}, patient=False)
        if all(_same(everyone[0], other) for other in everyone):
            return
        full = self.exchange({"at": at, "entries": given.entries})
        _refuse([one["at"] for one in full], [_parse_entries(one["entries"]) for one in full])

    def share(self, spans: list[range]) -> Iterator[range]:
        here = dist.get_rank()
        mine = spans[here :: world_size()]
        for span in mine if here > 0 else track(mine, self._name):
            self._channel.check(self._what)
            yield span

    def report(self, problem: BaseException) -> None:
        if not isinstance(problem, Exception):  # Ctrl-C: nobody is to finish first
            self._channel.fail(f"Rank {dist.get_rank()} was interrupted in {self._what}.", dist.get_rank())
        elif not isinstance(problem, RankLostError):
            kind = f"{type(problem).__module__}.{type(problem).__qualname__}"
            with suppress(RankLostError):  # this rank's own error is the one to raise
                self._channel.exchange({"error": [kind, str(problem)]}, self._what, patient=True)

    def total(self, result: Any) -> Any:
        mine = None
        if result is not None:
            parts = result if isinstance(result, tuple) else (result,)
            mine = [[list(t.shape), str(t.dtype).rpartition(".")[2], t.device.type] for t in parts]
        everyone = self.exchange({"shapes": mine, "tuple": isinstance(result, tuple)})
        known = [one for one in everyone if one["shapes"] is not None]
        shapes = [[part[:2] for part in one["shapes"]] for one in known]
        if any(shape != shapes[0] for shape in shapes):
            found = "; ".join(f"rank {rank}: {one['shapes']}" for rank, one in enumerate(everyone))
            raise ValueError(f"Results have different shapes or types on different ranks ({found}).")
        if result is None:
            zeros = tuple(
                torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
                for shape, dtype, device in known[0]["shapes"]
            )
            result = zeros if known[0]["tuple"] else zeros[0]
        return tree_map(self._sum, result)

    def exchange(self, message: Any, patient: bool = True) -> list[Any]:
        """Return the messages of all ranks, or raise the first error among them."""
        everyone = self._channel.exchange(message, self._what, patient)
        for rank, message in enumerate(everyone):
            if "error" in message:
                raise RemoteError(rank, *message["error"])
        return everyone

    def _sum(self, tensor: Tensor) -> Tensor:
        shared = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
        work = dist.all_reduce(shared, async_op=True)
        assert work is not None
        _wait(work, self._channel, self._what)
        return shared.to(tensor.dtype)


class _Link:
    """The channel of a process group, and how many passes were made in it."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.passes = channel, 0


_links: WeakKeyDictionary[Any, _Link] = WeakKeyDictionary()  # by process group
_numbers = count()  # of the channels that were opened


def _link(what: str) -> _Link:
    group = dist.group.WORLD
    if group not in _links:
        _links[group] = _Link(_open_channel(what))
    return _links[group]


def _open_channel(what: str) -> Channel:
    """Connect to the other ranks; the store of the process group tells where.

    With gloo, a barrier runs in parallel: it fails immediately if a rank has ended before it could connect.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    key = f"likewise/channel/{next(_numbers)}"
    listener = listen() if rank == 0 else None
    if listener is not None:
        store.set(key, listener.address())
    barrier = dist.barrier(async_op=True) if dist.get_backend() == "gloo" else None
    channel = Channel(rank, size, listener or _address(store, key, barrier, what))
    if barrier is not None:
        _pass_barrier(barrier, channel, what)
    return channel


def _pass_barrier(barrier: Any, channel: Channel, what: str) -> None:
    """Wait until every rank has arrived; raise RankLostError if one has ended or times out."""
    start = time.monotonic()
    while not barrier.is_completed():
        channel.check(what)
        if time.monotonic() - start > limits().absent:
            raise _lost_early(channel.absent(), _not_come(what), channel)
        time.sleep(0.001)
    try:
        barrier.wait()
    except RuntimeError as problem:
        deadline = time.monotonic() + (1 if dist.get_rank() == 0 else 3)  # rank 0 knows who has come
        while time.monotonic() < deadline:
            channel.check(what)
            time.sleep(0.05)
        raise _lost_early(channel.absent(), _ended(what), channel) from problem


def _address(store: Any, key: str, barrier: Any, what: str) -> str:
    """Return where rank 0 listens, as soon as it does."""
    address: Future[str] = Future()

    def read() -> None:  # in a thread: if rank 0 has the store and is stopped, this returns late
        try:
            store.wait([key], timedelta(seconds=limits_here.absent))
            address.set_result(store.get(key).decode())
        except dist.DistError as problem:
            address.set_exception(problem)

    limits_here, deadline = limits(), time.monotonic() + limits().absent
    threading.Thread(target=read, name="likewise address", daemon=True).start()
    failed = False
    while not address.done():
        if time.monotonic() > deadline:
            raise _lost_early([] if failed else [0], _ended(what) if failed else _not_come(what))
        if not failed and barrier is not None and barrier.is_completed() and barrier.exception() is not None:
            failed, deadline = True, time.monotonic() + 2  # rank 0, if it lives, knows who has come
        time.sleep(0.01)
    try:
        return address.result()
    except dist.DistNetworkError as problem:  # rank 0 has the store, unless a launcher does
        raise _lost_early([0], _ended(what)) from problem
    except dist.DistStoreError as problem:
        raise _lost_early([0], _not_come(what)) from problem


def _ended(what: str) -> str:
    return (
        f"ended before it came to {what}, its first one. The others cannot go on: see its output, and start "
        "all ranks again."
    )


def _not_come(what: str) -> str:
    return (
        f"has not come to {what}, its first one, for {limits().absent:g} s. {ADVICE['calls']} "
        "likewise.rank_timeout(absent=...) sets the limit."
    )


def _lost_early(absent: list[int], why: str, channel: Channel | None = None) -> RankLostError:
    """Return the error of a rank that never connected, known or not, and tell all others."""
    who = f"Rank {absent[0]}" if len(absent) == 1 else f"One of {_ranks(absent)}" if absent else "A rank"
    lost = RankLostError(f"{who} {why}", absent[0] if len(absent) == 1 else -1)
    if channel is not None:
        channel.fail(str(lost), lost.rank)
    return lost


def _wait(work: Any, channel: Channel, what: str) -> None:
    """Wait for a collective operation, or raise RankLostError if a rank is lost meanwhile."""
    channel.wait_for(work.is_completed, what)
    try:
        work.wait()
    except RuntimeError:
        deadline = time.monotonic() + 3  # which rank it was is known soon
        while time.monotonic() < deadline:
            channel.check(what)
            time.sleep(0.05)
        raise


def _public_call() -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of the outermost function of this package that is being called."""
    frame, outer = sys._getframe(1), sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] == __name__.partition(".")[0]:
            outer = frame
        frame = frame.f_back  # type: ignore[assignment]
    code = outer.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return code.co_qualname, {name: outer.f_locals[name] for name in names if name in outer.f_locals}


def _fingerprint(
    call: str, arguments: dict[str, Any], function: Callable[[range], Any], spans: list[range], about: Any
) -> Fingerprint:
    fingerprint = Fingerprint()
    fingerprint.add("about", about)
    for name, value in arguments.items():
        fingerprint.add(name, value)
    fingerprint.add("function", function)
    bounds = json.dumps([(span.start, span.stop) for span in spans])
    digest = hashlib.sha256(bounds.encode()).hexdigest()[:8]
    fingerprint.put("options", "batches", f"{len(spans)} to sample {spans[-1].stop}, {digest}")
    return fingerprint


def _condense(entries: Entries) -> dict[str, Any]:
    """Return a digest of the entries compared exactly, and all entries compared within a tolerance."""
    exact = [(k, n, e) for k, named in entries.items() for n, e in named.items() if not isinstance(e, Close)]
    close = {f"{k}/{n}": e for k, named in entries.items() for n, e in named.items() if isinstance(e, Close)}
    return {"exact": hashlib.sha256(json.dumps(exact).encode()).hexdigest(), "close": close}


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    close = ({name: Close(*entry) for name, entry in one["close"].items()} for one in (a, b))
    return a["at"] == b["at"] and a["exact"] == b["exact"] and not differing(close)


def _parse_entries(entries: Mapping[str, Any]) -> Entries:
    def parse(entry: Any) -> Entry:
        return entry if isinstance(entry, str) else Close(*entry)

    return {kind: {name: parse(e) for name, e in named.items()} for kind, named in entries.items()}


ADVICE = {
    "calls": "Every rank has to make every call, in the same order.",
    "weights": (
        "Load the same weights on all ranks, or copy those of rank 0: for tensor in "
        "model.state_dict().values(): torch.distributed.broadcast(tensor, 0). After training with "
        "DistributedDataParallel the buffers of BatchNorm differ."
    ),
    "data": "Give every rank the whole data set in the same order: no DistributedSampler, no own seed.",
    "options": "Give every rank the same arguments.",
}


def _refuse(at: list[str], entries: list[Entries]) -> None:
    """Raise RankMismatchError, the same on every rank."""
    if len(set(at)) > 1:
        groups = [sorted(set(at), key=at.index).index(one) for one in at]
        calls = "; ".join(f"rank {rank} at {one}" for rank, one in list(enumerate(at))[:8])
        message = f"Ranks are at different calls: {calls}. {ADVICE['calls']}"
        raise RankMismatchError(message, {"calls": {"at": groups}})
    kinds = [kind for kind in ADVICE if any(kind in one for one in entries)]
    differences = {kind: differing([one.get(kind, {}) for one in entries]) for kind in kinds}
    differences = {kind: names for kind, names in differences.items() if names}
    parts = [
        f"{kind} ({_named(names)}): {_who(names)}. {ADVICE[kind]}" for kind, names in differences.items()
    ]
    raise RankMismatchError(
        f"Ranks were given different {' and '.join(differences)}, so that their sum would be a mixture: "
        f"{' '.join(parts)} Found at {at[0]}.",
        differences,
    )


def _named(names: Mapping[str, Any]) -> str:
    shown = ", ".join(list(names)[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def _who(names: Mapping[str, list[int]]) -> str:
    """Return which ranks differ from which."""
    signatures = list(zip(*names.values(), strict=True))
    groups: dict[Any, list[int]] = {}
    for rank, signature in enumerate(signatures):
        groups.setdefault(signature, []).append(rank)
    most, *others = sorted(groups.values(), key=len, reverse=True)
    odd = sorted(rank for group in others for rank in group)
    return f"{_ranks(odd)} against {_ranks(most)}"


def _ranks(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
