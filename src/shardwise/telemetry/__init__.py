"""Counters: what was sent, what is held, what happened when, and where the time went."""

from shardwise.telemetry.ledger import ByteMeter, Ledger
from shardwise.telemetry.step_clock import Lap, StepClock
from shardwise.telemetry.timeline import ON_THE_WAY, STAGES, UNITS, Event, Timeline, hidden_share, write_trace

__all__ = [
    "ON_THE_WAY",
    "STAGES",
    "UNITS",
    "ByteMeter",
    "Event",
    "Lap",
    "Ledger",
    "StepClock",
    "Timeline",
    "hidden_share",
    "write_trace",
]
