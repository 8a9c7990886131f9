"""A progress line: kept up to date on a terminal, elsewhere printed at intervals."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardwise.system.units import format_bytes, format_count, format_seconds

REFRESH_SECONDS = 0.1
PACE_STEPS = 20


class Pace:
    """Tokens per second and seconds per step over the last few steps."""

    def __init__(self, clock: Callable[[], float], steps: int = PACE_STEPS) -> None:
        self._clock = clock
        self._marks: deque[tuple[float, int]] = deque([(clock(), 0)], maxlen=steps + 1)

    def step(self, tokens: int) -> None:
        """Count one more step, with `tokens`."""
        self._marks.append((self._clock(), tokens))

    @property
    def seconds_per_step(self) -> float:
        return (self._marks[-1][0] - self._marks[0][0]) / max(1, len(self._marks) - 1)

    @property
    def tokens_per_second(self) -> float:
        seconds = self._marks[-1][0] - self._marks[0][0]
        tokens = sum(mark[1] for mark in list(self._marks)[1:])
        return tokens / seconds if seconds > 0 else 0.0


class Progress:
    """The progress line of one run. Create it on one rank only, and use it in a `with`.

        with Progress(total=400, done=resumed.step) as progress:
            progress.update(step, loss=1.93, tokens=2048, memory_bytes=process_memory().now_bytes)

    `total` and `done` count steps. When the context ends, also by Ctrl-C, the last state of the line stays on the
    screen and the terminal is restored. On anything but a terminal a line is printed every `every_seconds`, and for the
    last step. There is no thread: nothing is drawn between two updates.
    """

    def __init__(
        self,
        total: int,
        done: int = 0,
        *,
        every_seconds: float = 5.0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = total
        self.step = done
        self._console = console or Console(highlight=False)
        self._clock = clock
        self._pace = Pace(clock)
        self._figures: list[str] = []
        self._every_seconds = REFRESH_SECONDS if self._console.is_terminal else every_seconds
        self._shown_at = clock()
        self._live = Live(console=self._console, auto_refresh=False)

    def update(self, step: int, *, loss: float, tokens: int, memory_bytes: int) -> None:
        """Show that `step` steps are done; the last one had this `loss` (nats) and `tokens` tokens on all ranks."""
        self.step = step
        self._pace.step(tokens)
        self._figures = [
            f"loss {loss:.3f}",
            f"{format_count(self._pace.tokens_per_second)} tokens/s",
            f"{format_bytes(memory_bytes)} a rank",
            f"{format_seconds(self._seconds_left)} left" if step < self.total else "done",
        ]
        now = self._clock()
        if now - self._shown_at >= self._every_seconds or step == self.total:
            self._shown_at = now
            self._show()

    def note(self, text: str) -> None:
        """Print a line above the progress line."""
        self._console.print(Text(text), soft_wrap=True)

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.update(self._line(), refresh=True)
            self._live.stop()

    @property
    def _seconds_left(self) -> float:
        return (self.total - self.step) * self._pace.seconds_per_step

    def _show(self) -> None:
        if self._console.is_terminal:
            self._live.update(self._line(), refresh=True)
        else:
            self._console.print(Text("  ".join([f"step {self.step}/{self.total}", *self._figures])), soft_wrap=True)

    def _line(self) -> Table:
        line = Table.grid(padding=(0, 2))
        line.add_row(
            Text(f"step {self.step}/{self.total}", style="bold"),
            ProgressBar(total=self.total, completed=self.step, width=24),
            *(Text(figure, no_wrap=True) for figure in self._figures),
        )
        return line
