"""The whole configuration: strict, and every value remembers where it came from."""

from shardwise.config.schema import PlaceEdit, Plan, Rows, Wire

__all__ = ["PlaceEdit", "Plan", "Rows", "Wire"]
