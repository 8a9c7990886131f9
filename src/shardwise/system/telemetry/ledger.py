"""Counters that their owner passes to those who count; nothing here is a module variable.

A `defaultdict` takes half the time of a `Counter`, and these count several times per unit and step.
"""

from __future__ import annotations

from collections import defaultdict


class Ledger:
    """How often each collective ran on each axis, and how many bytes this rank sent for it."""

    def __init__(self) -> None:
        self.calls: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.sent_bytes: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.crossed_bytes: defaultdict[tuple[str, str], int] = defaultdict(int)
        """Bytes that this rank itself has sent towards other hosts, its own or those it carries for neighbours."""

    def called(self, verb: str, axis: str) -> None:
        self.calls[verb, axis] += 1

    def sent(self, verb: str, axis: str, num_bytes: int) -> None:
        self.sent_bytes[verb, axis] += num_bytes

    def crossed(self, verb: str, axis: str, num_bytes: int) -> None:
        self.crossed_bytes[verb, axis] += num_bytes

    def clear(self) -> None:
        self.calls.clear()
        self.sent_bytes.clear()
        self.crossed_bytes.clear()


class ByteMeter:
    """Bytes held now and at the peak, by kind: `param`, `grad`, `optim`, `working`. Bytes on other tiers than the
    device are counted separately, by meters of their own (`on`)."""

    def __init__(self) -> None:
        self._below: dict[str, ByteMeter] = {}
        self.now: defaultdict[str, int] = defaultdict(int)
        self.peak: defaultdict[str, int] = defaultdict(int)
        self.peak_total = 0
        self._total = 0

    def on(self, tier: str) -> ByteMeter:
        """The meter of `tier`."""
        return self if tier == "device" else self._below.setdefault(tier, ByteMeter())

    def hold(self, kind: str, num_bytes: int) -> None:
        held = self.now[kind] = self.now[kind] + num_bytes
        total = self._total = self._total + num_bytes
        if held > self.peak[kind]:
            self.peak[kind] = held
        if total > self.peak_total:
            self.peak_total = total

    def drop(self, kind: str, num_bytes: int) -> None:
        self.now[kind] -= num_bytes
        self._total -= num_bytes

    def reset_peak(self) -> None:
        self.peak = self.now.copy()
        self.peak_total = self._total
        for below in self._below.values():
            below.reset_peak()
