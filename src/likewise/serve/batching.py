"""Questions that wait are answered together: one pass over the index serves them all."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

MOST_TOGETHER = 32
MOST_WAITING = 256


class BusyError(RuntimeError):
    """Too many questions wait."""


class _Waiting(NamedTuple):
    value: Any
    answer: "asyncio.Future[Any]"


class Batcher:
    """Answers questions in a thread of its own, as many at once as wait.

    Args:
        answer: Returns an answer for each of several questions; called in one thread at a time.

    """

    def __init__(self, answer: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        self._answer = answer
        self._waiting: asyncio.Queue[_Waiting] = asyncio.Queue(MOST_WAITING)
        self._task: asyncio.Task[None] | None = None

    async def ask(self, value: Any) -> Any:
        """Return the answer to a question.

        Raises:
            BusyError: Too many others wait.

        """
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        waiting = _Waiting(value, asyncio.get_running_loop().create_future())
        try:
            self._waiting.put_nowait(waiting)
        except asyncio.QueueFull:
            raise BusyError(f"{MOST_WAITING} questions wait already: try again in a few seconds.") from None
        return await waiting.answer

    def stop(self) -> None:
        """Answer no more questions."""
        if self._task is not None:
            self._task.cancel()

    async def _work(self) -> None:
        while True:
            together = [await self._waiting.get()]
            while len(together) < MOST_TOGETHER and not self._waiting.empty():
                together.append(self._waiting.get_nowait())
            if not await self._settle(together) and len(together) > 1:
                for one in together:  # what one of them did wrong is not the others' fault
                    await self._settle([one])

    async def _settle(self, together: list[_Waiting]) -> bool:
        """Answer questions; return False if several failed and nobody was told."""
        alive = [one for one in together if not one.answer.done()]
        try:
            answers = await asyncio.to_thread(self._answer, [one.value for one in alive])
        except Exception as error:
            if len(together) > 1:
                return False
            for one in alive:
                one.answer.set_exception(error)
            return True
        for one, answer in zip(alive, answers, strict=True):
            if not one.answer.done():
                one.answer.set_result(answer)
        return True
