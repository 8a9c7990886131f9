"""Counters: what was sent, what is held, and what happened when."""

from shardwise.telemetry.ledger import ByteMeter, Ledger
from shardwise.telemetry.timeline import ON_THE_WAY, STAGES, UNITS, Event, Timeline, hidden_share, write_trace

__all__ = ["ON_THE_WAY", "STAGES", "UNITS", "ByteMeter", "Event", "Ledger", "Timeline", "hidden_share", "write_trace"]
