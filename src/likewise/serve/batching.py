"""Answer waiting questions in batches: one pass over the index serves all of them."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

MOST_TOGETHER = 32
MOST_WAITING = 256


class BusyError(RuntimeError):
    """Too many questions are waiting."""


class _Waiting(NamedTuple):
    value: Any
    answer: "asyncio.Future[Any]"


class Batcher:
    """Answers questions in a separate thread, in batches of all that are waiting.

    Args:
        answer: Returns an answer for each question of a batch; called in one thread at a time.

    """

    def __init__(self, answer: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        self._answer = answer
        self._waiting: asyncio.Queue[_Waiting] = asyncio.Queue(MOST_WAITING)
        self._task: asyncio.Task[None] | None = None

    async def ask(self, value: Any) -> Any:
        """Return the answer to a question.

        Raises:
            BusyError: Too many questions are waiting.

        """
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        waiting = _Waiting(value, asyncio.get_running_loop().create_future())
        try:
            self._waiting.put_nowait(waiting)
        except asyncio.QueueFull:
            raise BusyError(f"{MOST_WAITING} questions are waiting: try again in a few seconds.") from None
        return await waiting.answer

    def stop(self) -> None:
        """Stop answering questions."""
        if self._task is not None:
            self._task.cancel()

    async def _work(self) -> None:
        while True:
            together = [await self._waiting.get()]
            while len(together) < MOST_TOGETHER and not self._waiting.empty():
                together.append(self._waiting.get_nowait())
            if not await self._settle(together) and len(together) > 1:
                for one in together:  # one faulty question must not fail the others
                    await self._settle([one])

    async def _settle(self, together: list[_Waiting]) -> bool:
        """Answer a batch; return False if a batch of several failed, without answering any."""
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
