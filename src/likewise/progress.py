"""Progress: a bar on a terminal, a line every ten seconds in a log, a line for each step of a command."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from tqdm import tqdm

show_progress: ContextVar[bool] = ContextVar("show_progress", default=True)
write_line: ContextVar[Callable[[str], None] | None] = ContextVar(
    "write_line", default=None
)  # set by a command
# What would take less time, shown where much is left.
advice: ContextVar[str] = ContextVar("advice", default="")
EVERY = 10.0  # seconds between lines in a log
LONG = 60.0  # seconds left
DELAY = 0.5  # seconds before a bar is shown


def announce(step: str) -> None:
    """Print the next step if a command is running; library calls stay silent."""
    write = write_line.get()
    if write is not None and show_progress.get():
        write(step)


def track(spans: Sequence[range], what: str, clock: Callable[[], float] = time.monotonic) -> Iterator[range]:
    """Yield the batches of a pass, and show its progress and the time left.

    Args:
        spans: Sample positions of each batch.
        what: What the pass does, shown with the progress.
        clock: Returns seconds.

    """
    total = sum(map(len, spans))
    if not show_progress.get():
        yield from spans
    elif sys.stderr is not None and sys.stderr.isatty():
        with tqdm(total=total, desc=what, unit=" samples", delay=DELAY, leave=False) as bar:
            for span in spans:
                yield span
                bar.update(len(span))
                if advice.get():
                    rate = bar.format_dict["rate"]
                    is_long = rate and (total - bar.n) / rate > LONG
                    bar.set_postfix_str(advice.get() if is_long else "", refresh=False)
    else:
        begun = last = clock()
        done = 0
        for span in spans:
            yield span
            done, now = done + len(span), clock()
            if now - last >= EVERY and done < total:
                last = now
                left = (now - begun) * (total / done - 1)
                faster = f" ({advice.get()})" if advice.get() and left > LONG else ""
                _write(f"{what}: {done:,} of {total:,} samples, about {describe_duration(left)} left{faster}")


@contextmanager
def advising(text: str) -> Iterator[None]:
    """Show what would take less time with the progress of what takes long inside; commands have their own options."""
    token = advice.set("" if write_line.get() is not None else text)
    try:
        yield
    finally:
        advice.reset(token)


def _write(line: str) -> None:
    write = write_line.get()
    if write is not None:
        write(line)
    elif sys.stderr is not None:
        sys.stderr.write(f"likewise: {line}\n")


def describe_duration(seconds: float) -> str:
    """Format seconds in a fitting unit."""
    if seconds < 99.5:  # more would round to 1e+02
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
