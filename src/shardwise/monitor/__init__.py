"""Run records, progress, plots, memory figures."""

from shardwise.monitor.memory import PeakOverBaseline, ProcessMemory, process_memory, trim
from shardwise.monitor.plot import plot_loss
from shardwise.monitor.progress import Progress
from shardwise.monitor.record import Record, RunRecord, read_record

__all__ = [
    "PeakOverBaseline",
    "ProcessMemory",
    "Progress",
    "Record",
    "RunRecord",
    "plot_loss",
    "process_memory",
    "read_record",
    "trim",
]
