"""Small messages among ranks over TCP, and which of them are alive.

Rank 0 is the hub, every other rank holds one connection to it. A process that ends, however, closes its
connection at once, whatever it was doing; one that is stopped falls silent. A thread on each rank sends a
sign of life every half second and listens, so that all ranks know while they wait. Messages are JSON and
nothing in them is executed; connections are accepted with a token that only the ranks know.
"""

import hmac
import json
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, NamedTuple

INTERVAL = 0.5  # seconds between signs of life
GRACE = 1.0  # seconds in which what a rank sent before it ended may still arrive
LARGEST = 1 << 26  # bytes of a message


class RankTimeout(NamedTuple):
    """How long ranks wait for each other, in seconds."""

    silent: float = 60.0  # for a rank that gives no sign of life
    absent: float = 1800.0  # for a rank that is alive, but does not come to the same pass


class rank_timeout:
    """Set how long the ranks of a distributed run wait for each other inside the `with` block.

    A rank whose process ended is noticed at once and needs no time limit.

    Args:
        silent: Seconds without a sign of life (stopped, machine lost) until the other ranks give up.
        absent: Seconds to wait for a rank that is alive but does not make the same call, for example because
            it waits in a collective operation of your own.

    Example:
        >>> import likewise as lw
        >>> with lw.rank_timeout(silent=20):
        ...     pass  # statistics

    """

    def __init__(self, *, silent: float = RankTimeout().silent, absent: float = RankTimeout().absent) -> None:
        for name, value in (("silent", silent), ("absent", absent)):
            if not value >= 2:
                raise ValueError(f"{name} is a number of seconds, 2 or more, found {value!r}.")
        self._limits = RankTimeout(float(silent), float(absent))

    def __enter__(self) -> None:
        self._before = _limits.set(self._limits)

    def __exit__(self, *_: object) -> None:
        _limits.reset(self._before)


DEFAULTS = RankTimeout()
_limits: ContextVar[RankTimeout] = ContextVar("rank timeout", default=DEFAULTS)


class RankLostError(RuntimeError):
    """A rank ended, fell silent or does not come: the others cannot go on.

    Attributes:
        rank: Which rank.

    Example:
        >>> import likewise as lw
        >>> lw.RankLostError("rank 1 ended", 1).rank
        1

    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class Listener(NamedTuple):
    """Where the hub listens."""

    server: socket.socket
    token: str

    def address(self) -> str:
        """Return what another rank needs to connect, as text."""
        names = [socket.gethostname(), *_own_addresses(), "127.0.0.1"]
        port = self.server.getsockname()[1]
        return json.dumps({"hosts": list(dict.fromkeys(names)), "port": port, "token": self.token})


def limits() -> RankTimeout:
    """Return how long ranks wait for each other here."""
    return _limits.get()


def listen() -> Listener:
    """Return a listener of the hub, on any free port."""
    return Listener(socket.create_server(("", 0), backlog=1024), secrets.token_hex(16))


class Channel:
    """Messages among ranks: `exchange` gives every rank what all of them said.

    Args:
        rank: Of this process.
        size: How many ranks there are.
        at: The listener on rank 0, its address as text on the others.

    """

    def __init__(self, rank: int, size: int, at: Listener | str) -> None:
        self._rank, self._size, self._sequence = rank, size, 0
        self._changed = threading.Condition()
        self._peers: dict[int, _Connection] = {}
        self._said: dict[int, dict[int, Any]] = {}  # of each exchange, by rank; on the hub
        self._answers: dict[int, list[Any]] = {}  # of each exchange; on the others
        self._ended: dict[int, float] = {}  # since when, by rank
        self._quiet = [0.0] * size  # seconds without a sign of life, in which this process was awake
        self._heard_absent: list[int] = []  # who has not connected, or not come to the exchange: of the hub
        self._heard_missing: list[int] = []
        self._failure: tuple[str, int] | None = None
        self._closed = False
        self._selector = selectors.DefaultSelector()
        if isinstance(at, Listener):
            self._token = at.token
            at.server.setblocking(False)
            self._server: socket.socket | None = at.server
            self._selector.register(at.server, selectors.EVENT_READ, None)
        else:
            self._server = None
            self._adopt(0, _connect(json.loads(at), rank))
        threading.Thread(target=self._listen, name="likewise ranks", daemon=True).start()

    def exchange(self, message: Any, what: str, patient: bool = False) -> list[Any]:
        """Return the messages of all ranks, in order; every rank has to call it.

        Args:
            message: Anything that JSON can hold.
            what: The pass that ranks are waited for at, for error messages.
            patient: Wait for ranks that are alive as long as they take, for they are known to be at work.

        Raises:
            RankLost: A rank ended, is silent or does not come.

        """
        self._sequence += 1
        finished = False
        try:
            answer = (
                self._gather(message, what, patient) if self._rank == 0 else self._ask(message, what, patient)
            )
            finished = True
            return answer
        finally:
            if not finished:  # interrupted: this rank and the others are no longer in step
                self.fail(f"Rank {self._rank} left {what} with an error.", self._rank)

    def absent(self) -> list[int]:
        """Return the ranks that have not connected, as far as this one has heard."""
        with self._changed:
            return self._not_connected() if self._rank == 0 else self._heard_absent

    def _not_connected(self) -> list[int]:
        return [rank for rank in range(1, self._size) if rank not in self._peers]

    def wait_for(self, ready: Callable[[], bool], what: str, pause: float = 0.0) -> None:
        """Wait until `ready`, or raise if a rank is lost; for work that other ranks take part in."""
        while not ready():
            self.check(what)
            time.sleep(pause)
            pause = min(0.01, 2 * pause + 1e-5)

    def check(self, what: str, waited: float = 0.0) -> None:
        """Raise RankLost if the others cannot go on; `waited`: seconds in which nothing has come."""
        with self._changed:
            failure = self._failure or self._lost(what, waited, _limits.get())
        if failure is not None:
            self.fail(*failure)
            raise RankLostError(*failure)

    def close(self) -> None:
        """Stop listening and end all connections."""
        with self._changed:
            self._closed = True

    def _lost(self, what: str, waited: float, limits: RankTimeout) -> tuple[str, int] | None:
        for rank, since in self._ended.items():
            if time.monotonic() - since > GRACE:
                return (
                    f"Rank {rank} ended before {what} was finished (killed, out of memory, an error, or its "
                    "script was through without this call). The others cannot go on: see its output, and "
                    "start all ranks again.",
                    rank,
                )
        silent = max(range(self._size), key=self._quiet.__getitem__)
        if self._quiet[silent] > limits.silent:
            return (
                f"Rank {silent} has given no sign of life for {limits.silent:g} s in {what}: it is stopped, "
                "or its machine is lost. Start all ranks again; likewise.rank_timeout(silent=...) sets the "
                "limit.",
                silent,
            )
        missing = self._missing()
        if waited > limits.absent and missing:
            return (
                f"Rank {missing[0]} is alive but has not come to {what} for {limits.absent:g} s: every rank "
                "has to make every call, in the same order. likewise.rank_timeout(absent=...) sets the "
                "limit.",
                missing[0],
            )
        return None

    def _missing(self) -> list[int]:
        """Return the ranks that have not come to the present exchange, as far as this one has heard."""
        if self._rank > 0:
            return self._heard_missing
        said = self._said.get(max(self._said, default=0), {})
        return [rank for rank in range(self._size) if rank not in said]

    def _gather(self, message: Any, what: str, patient: bool) -> list[Any]:
        with self._changed:
            said = self._said.setdefault(self._sequence, {})
            said[0] = message
        self._await(lambda: len(said) == self._size, what, patient)
        answer = [said[rank] for rank in range(self._size)]
        del self._said[self._sequence]
        frame = {"all": self._sequence, "messages": answer}
        for peer in list(self._peers.values()):
            peer.send(frame)
        return answer

    def _ask(self, message: Any, what: str, patient: bool) -> list[Any]:
        self._peers[0].send({"put": self._sequence, "message": message})
        self._await(lambda: self._sequence in self._answers, what, patient)
        return self._answers.pop(self._sequence)

    def _await(self, ready: Callable[[], bool], what: str, patient: bool) -> None:
        start = time.monotonic()
        while True:
            with self._changed:
                if ready():
                    return
                self._changed.wait(0.1)
                if ready():
                    return
            self.check(what, 0.0 if patient else time.monotonic() - start)

    def fail(self, message: str, rank: int) -> None:
        """Tell all ranks, once, that nothing can go on: each raises RankLost where it waits."""
        with self._changed:
            if self._failure is not None:
                return
            self._failure = message, rank
            self._changed.notify_all()
            peers = list(self._peers.values())
        for peer in peers:
            peer.send({"failed": message, "rank": rank})

    # The thread that listens.

    def _listen(self) -> None:
        last = time.monotonic()
        while not self._closed:
            for key, _ in self._selector.select(max(0.0, last + INTERVAL - time.monotonic())):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            if time.monotonic() - last >= INTERVAL:
                last = time.monotonic()
                self._beat()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _beat(self) -> None:
        with self._changed:
            # Counted in beats of this process: while it is itself stopped, nobody else becomes silent.
            for rank in self._peers if self._rank == 0 else [0]:
                self._quiet[rank] += INTERVAL
            frame = self._news() if self._rank == 0 else {"alive": True}
            peers = [peer for rank, peer in self._peers.items() if rank not in self._ended]
        for peer in peers:
            peer.send(frame)

    def _news(self) -> dict[str, Any]:
        """Return what the hub knows of all ranks."""
        return {
            "quiet": self._quiet,
            "ended": list(self._ended),
            "absent": self._not_connected(),
            "missing": self._missing(),
        }

    def _accept(self) -> None:
        assert self._server is not None
        connected, _ = self._server.accept()
        self._selector.register(connected, selectors.EVENT_READ, _Connection(connected, None))

    def _adopt(self, rank: int, connected: socket.socket) -> None:
        peer = self._peers[rank] = _Connection(connected, rank)
        self._selector.register(connected, selectors.EVENT_READ, peer)

    def _read(self, peer: "_Connection") -> None:
        frames = peer.receive()
        for frame in frames or ():
            if peer.rank is None:
                self._welcome(peer, frame)
            else:
                self._handle(peer, frame)
        if frames is None or (peer.rank is None and peer.refused):
            self._selector.unregister(peer.socket)
            peer.socket.close()
            if peer.rank is not None:
                self._note_end(peer.rank)

    def _welcome(self, peer: "_Connection", frame: Any) -> None:
        """Take in a rank that knows the token."""
        given = str(frame.get("token")) if isinstance(frame, dict) else ""
        if not hmac.compare_digest(given, self._token):
            peer.refused = True
            return
        with self._changed:
            peer.rank = int(frame["hello"])
            self._peers[peer.rank] = peer
            failure = self._failure
            self._changed.notify_all()
        if failure is not None:  # it came too late
            peer.send({"failed": failure[0], "rank": failure[1]})

    def _handle(self, peer: "_Connection", frame: Any) -> None:
        relay: list[_Connection] = []
        with self._changed:
            assert peer.rank is not None
            self._quiet[peer.rank] = 0.0
            if "put" in frame:
                self._said.setdefault(frame["put"], {})[peer.rank] = frame["message"]
            elif "all" in frame:
                self._answers[frame["all"]] = frame["messages"]
            elif "quiet" in frame:
                self._quiet = [0.0, *frame["quiet"][1:]]
                self._quiet[self._rank] = 0.0
                self._heard_absent, self._heard_missing = frame["absent"], frame["missing"]
                for rank in frame["ended"]:
                    self._ended.setdefault(rank, time.monotonic())
            elif "failed" in frame and self._failure is None:
                self._failure = frame["failed"], frame["rank"]
                relay = [other for other in self._peers.values() if other is not peer]
            self._changed.notify_all()
        for other in relay:
            other.send(frame)

    def _note_end(self, rank: int) -> None:
        with self._changed:
            self._ended.setdefault(rank, time.monotonic())
            self._changed.notify_all()
        if self._rank == 0:
            self._beat()  # the others learn at once


class _Connection:
    """A socket that frames are sent to, from several threads, and received from."""

    def __init__(self, connected: socket.socket, rank: int | None) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.settimeout(10)  # a peer that is stopped reads nothing; frames are small
        self.socket, self.rank, self.refused = connected, rank, False
        self._sending, self._received = threading.Lock(), b""
        self._broken = False

    def send(self, frame: Any) -> None:
        """Send a frame; that a peer is gone or stopped is noticed where it is read from."""
        data = json.dumps(frame).encode()
        with self._sending:
            if self._broken:
                return
            try:
                self.socket.sendall(struct.pack(">I", len(data)) + data)
            except OSError:
                self._broken = True

    def receive(self) -> list[Any] | None:
        """Return the frames that have arrived, None at the end of the connection."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            return None
        if not data:
            return None
        self._received += data
        frames = []
        while len(self._received) >= 4:
            (size,) = struct.unpack(">I", self._received[:4])
            if size > LARGEST:
                return None
            if len(self._received) < 4 + size:
                break
            frames.append(json.loads(self._received[4 : 4 + size]))
            self._received = self._received[4 + size :]
        return frames


def _connect(address: dict[str, Any], rank: int) -> socket.socket:
    """Return a connection to the hub, at the first of its addresses that answers."""
    problems = []
    for host in address["hosts"]:
        try:
            connected = socket.create_connection((host, address["port"]), timeout=5)
        except OSError as problem:
            problems.append(f"{host}: {problem}")
            continue
        data = json.dumps({"hello": rank, "token": address["token"]}).encode()
        connected.sendall(struct.pack(">I", len(data)) + data)
        return connected
    raise RankLostError(
        f"Rank {rank} cannot connect to rank 0 at port {address['port']} ({'; '.join(problems)}): ranks need "
        "TCP connections to each other, as for gloo.",
        0,
    )


def _own_addresses() -> list[str]:
    """Return this machine's addresses by its name and by its default route."""
    found = []
    with suppress(OSError):  # a machine whose name does not resolve has other addresses
        found = [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # reserved for documentation: nothing is sent
        found.append(probe.getsockname()[0])
    return [name for name in dict.fromkeys(found) if not name.startswith("127.")]
