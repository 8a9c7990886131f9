"""What the job tells: progress, curve, and at the end a table. Rank 0 speaks for all. The engine keeps the record."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import shardwise as sw
from shardwise.observe import Progress, plot_loss
from shardwise.system.process_memory import process_memory
from shardwise.system.units import format_bytes

if TYPE_CHECKING:
    from shardwise.sharded.engine_report import MemoryReport

KINDS = {
    "param": "parameters",
    "grad": "gradients",
    "optim": "optimizer states",
    "working": "at work in a step",
}


class Report:
    """Use it in a `with`. Every rank may call everything; ranks other than 0 stay silent.

    In an elastic job another rank is 0 once that one is lost, so it is asked each time.
    """

    def __init__(self, folder: Path, engine: sw.Engine, *, total: int, resumed_step: int | None) -> None:
        self.folder = folder
        self._engine = engine
        self._console = Console(highlight=False, quiet=not self._speaks)
        self._progress = Progress(total, resumed_step or 0, console=self._console)

    @property
    def _speaks(self) -> bool:
        return self._engine.world.rank == 0

    @property
    def _files(self) -> tuple[Path, Path]:
        return self.folder / "record.jsonl", self.folder / "loss.png"

    def __enter__(self) -> Report:
        self._progress.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.__exit__()

    def note(self, text: str) -> None:
        self._progress.note(text)

    def step(self, step: int, *, loss: float, batch_tokens: int) -> None:
        """`step` steps are done; `loss` and `batch_tokens` are those of the last one, over all ranks."""
        self._console.quiet = not self._speaks
        self._progress.update(step, loss=loss, tokens=batch_tokens, memory_bytes=process_memory().now_bytes)

    def validation(self, step: int, loss: float) -> None:
        self.note(f"step {step}: validation loss {loss:.3f}")

    def curve(self, bigram: float) -> None:
        """Draw the loss curve beside that of a bigram model; without matplotlib, say what is missing."""
        if not self._speaks:
            return
        try:
            self.note(f"loss curve: {plot_loss(*self._files, {'a bigram model': bigram})}")
        except sw.ShardwiseError as missing:
            self.note(str(missing))

    def sample(self, text: bytes) -> None:
        """What the model wrote; bytes that are no text are shown as dots, lest they command the terminal."""
        letters = text.decode("utf-8", errors="replace")
        shown = "".join(letter if letter.isprintable() or letter == "\n" else "·" for letter in letters)
        self._console.print(Panel(Text(shown), title="a sample", title_align="left", border_style="dim"))

    def memory(self, memory: MemoryReport) -> None:
        """The memory that the plan promised, the measured memory, and the memory without sharding."""
        table = Table(title="Memory per rank", title_justify="left", title_style="bold")
        table.add_column()
        for name in ("promised by the plan", "measured", "if replicated"):
            table.add_column(name, justify="right")
        for kind, label in KINDS.items():
            columns = (memory.promised, memory.measured, memory.replicated)
            table.add_row(label, *(format_bytes(column.get(kind, 0)) for column in columns))
        table.add_section()
        totals = (memory.promised_total, memory.measured_total, memory.replicated_total)
        table.add_row("in all", *(format_bytes(total) for total in totals), style="bold")
        self._console.print(table)
        peak = format_bytes(process_memory().peak_bytes)
        self.note(f"The whole process, with Python, torch and activations: {peak} at most.")
