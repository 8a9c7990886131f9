"""Counters: what was sent, and what is held."""

from shardwise.telemetry.ledger import ByteMeter, Ledger

__all__ = ["ByteMeter", "Ledger"]
