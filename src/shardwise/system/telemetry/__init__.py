"""Counters: bytes sent, bytes held, events in time, and how steps spend their time."""

from shardwise.system.telemetry.ledger import ByteMeter, Ledger
from shardwise.system.telemetry.step_clock import BETWEEN, DISK, LOADER, OTHER, Lap, StepClock
from shardwise.system.telemetry.timeline import (
    ON_THE_WAY,
    STAGES,
    UNITS,
    Event,
    Timeline,
    hidden_share,
    trace_of,
    write_trace,
)

__all__ = [
    "BETWEEN",
    "DISK",
    "LOADER",
    "ON_THE_WAY",
    "OTHER",
    "STAGES",
    "UNITS",
    "ByteMeter",
    "Event",
    "Lap",
    "Ledger",
    "StepClock",
    "Timeline",
    "hidden_share",
    "trace_of",
    "write_trace",
]
