"""Run records and logs, progress, plots, profiles."""

from shardwise.observe.plot import plot_loss
from shardwise.observe.progress import Progress
from shardwise.observe.record import Record, RunRecord, read_record

__all__ = [
    "Progress",
    "Record",
    "RunRecord",
    "plot_loss",
    "read_record",
]
