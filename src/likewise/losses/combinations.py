"""One random combination of the model's outputs per step: the default readout of terms.

v is uniform on the unit sphere of all d outputs, the same for all samples of a batch, and new at each call. A
term then costs one output, whatever d is.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from likewise.checks import check_type
from likewise.readouts import Outputs, all_outputs, orthonormal_columns


class RandomCombination:
    """Readout vᵀf of all outputs, (n, 1), with one v for as long as it is not drawn again.

    Only a seed is drawn at first: how many outputs there are is known when the model has been called, and by then
    the global generators are those that its evaluation restores.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self._generator = generator
        self._columns: dict[tuple[int, torch.device, torch.dtype], Tensor] = {}
        self._seed = self._draw()

    def __call__(self, outputs: Outputs, labels: Tensor | None = None) -> Tensor:
        """Return vᵀf, (n, 1)."""
        every = all_outputs(outputs)
        return every @ self._column(every)

    def __repr__(self) -> str:
        return "random combination of outputs"  # one name for all draws: traces are kept by it

    def redraw(self) -> None:
        """Draw another v, in the memory of the last: what has been recorded reads it there."""
        self._seed = self._draw()
        for (d, device, dtype), column in self._columns.items():
            new = orthonormal_columns(d, 1, self._seed).to(dtype)
            on_gpu = device.type == "cuda"
            column.copy_(new.pin_memory() if on_gpu else new, non_blocking=on_gpu)

    def _draw(self) -> int:
        device = "cpu" if self._generator is None else self._generator.device
        return int(torch.randint(2**62, (1,), generator=self._generator, device=device))

    def _column(self, every: Tensor) -> Tensor:
        key = (every.shape[1], every.device, every.dtype)
        if key not in self._columns:
            # A new thread has no vmap, trace or inference mode around it: a constant is built there.
            with ThreadPoolExecutor(1) as thread:
                build = thread.submit(lambda: orthonormal_columns(key[0], 1, self._seed).to(*key[1:]))
            self._columns[key] = build.result()
        return self._columns[key]


class RecordedCombinations:
    """The combinations of a recorded term, in the order in which it asks for them."""

    def __init__(self) -> None:
        self._combinations: list[RandomCombination] = []
        self._asked = 0

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let terms read these combinations instead of drawing their own."""
        self._asked = 0
        before = _recorded.set(self)
        try:
            yield
        finally:
            _recorded.reset(before)

    def take(self, generator: torch.Generator | None) -> RandomCombination:
        """Return the next combination; draw it where there is none yet."""
        if self._asked == len(self._combinations):
            self._combinations.append(RandomCombination(generator))
        self._asked += 1
        return self._combinations[self._asked - 1]

    def redraw(self) -> None:
        """Draw all of them again, in place."""
        for combination in self._combinations:
            combination.redraw()


_recorded: ContextVar[RecordedCombinations | None] = ContextVar("recorded_combinations", default=None)


def draw_combination(generator: torch.Generator | None) -> RandomCombination:
    """Return a new random combination; inside a recording, the one that it redraws at each play."""
    if generator is not None:
        check_type("generator", generator, torch.Generator, "a torch.Generator or None")
    recorded = _recorded.get()
    return RandomCombination(generator) if recorded is None else recorded.take(generator)
