"""Progress bar of `LLM.generate`: prompts done, tokens per second, running and waiting."""

import time
from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from headrace._core import Scheduler
from headrace.step_loop import Handle

_REFRESH_S = 0.1


class Progress:
    """A bar on standard error; with `enabled` false it does nothing and prints nothing."""

    def __init__(self, total: int, scheduler: Scheduler, *, enabled: bool) -> None:
        self._scheduler = scheduler
        self._bar: RichProgress | None = None
        self._next_update = 0.0
        if enabled:
            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rates]}"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("generate", total=total, rates="")
            self._start = time.monotonic()
            self._tokens_before = scheduler.stats()["generated_tokens"]

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, handles: Sequence[Handle]) -> None:
        """Show the state of these requests; cheap when called too often."""
        now = time.monotonic()
        done = all(handle.future.done() for handle in handles) if self._bar is not None else False
        if self._bar is None or (now < self._next_update and not done):
            return
        self._next_update = now + _REFRESH_S
        stats = self._scheduler.stats()
        tokens = stats["generated_tokens"] - self._tokens_before
        rate = tokens / max(now - self._start, 1e-9)
        self._bar.update(
            self._task,
            completed=sum(handle.future.done() for handle in handles),
            rates=f"{rate:,.1f} tok/s, {stats['running']} running, {stats['waiting']} waiting",
        )
