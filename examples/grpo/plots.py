"""Three curves of a run: what the policy gets, how far it goes from where it began, how far the sampler is from it."""

from __future__ import annotations

from pathlib import Path

from shardwise.errors import ShardwiseError
from shardwise.observe import Record, read_record

PANELS = (
    ("reward", (("reward", "step", "letters in their place"), ("all_right", "step", "whole words")), "linear"),
    ("KL from the first policy (nats a token)", (("kl", "step", ""),), "linear"),
    ("KL from the sampler (nats a token)", (("kl", "mismatch", ""),), "log"),
)
"""Titles, with the name and kind of the values in the record and their labels, and scales."""


def draw(record_path: Path, png_path: Path) -> Path:
    """Raises `ShardwiseError` without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ShardwiseError("To draw the curves, matplotlib is needed: pip install shardwise[plot]") from error
    record: Record = read_record(record_path)
    figure = Figure(figsize=(13, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, curves, scale) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        for name, kind, label in curves:
            points = record.column(name, kind)
            axes.plot([step for step, _ in points], [value for _, value in points], label=label, linewidth=1.2)
        axes.set_title(title, loc="left")
        axes.set_xlabel("step")
        axes.set_yscale(scale)
        axes.grid(color="#e5e7eb")
        if len(curves) > 1:
            axes.legend(frameon=False)
    figure.savefig(png_path)
    return png_path
