"""What the engine tells while it works."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Protocol


class Progress(Protocol):
    """Told what the engine is doing. Every method may be called from the thread that generates."""

    def phase(self, name: str, total: int) -> None: ...

    def job(self, number: int, count: int) -> None:
        """Within denoise and decode, whose `total` is that of all jobs: which of them is at work, from 1."""

    def advance(self, done: int) -> None: ...

    def warn(self, sentence: str) -> None:
        """What the user should know although the work goes on."""


class Silent:
    """Progress that nobody sees."""

    def phase(self, name: str, total: int) -> None:
        pass

    def job(self, number: int, count: int) -> None:
        pass

    def advance(self, done: int) -> None:
        pass

    def warn(self, sentence: str) -> None:
        pass


@contextlib.contextmanager
def phase(name: str, total: int, timings: dict[str, float], progress: Progress) -> Iterator[Callable[[int], None]]:
    """Time a phase and report it; gives the function that says how much of `total` is done."""
    progress.phase(name, total)
    start = time.perf_counter()
    yield progress.advance
    progress.advance(total)
    timings[name] = round(time.perf_counter() - start, 3)


def after(start: int, advance: Callable[[int], None]) -> Callable[[int], None]:
    """`advance` for one job, when `start` of the phase's total is that of jobs before it."""
    return lambda done: advance(start + done)
