"""What is raced over one slow link. No torch here: whoever only reads results need not wait for it."""

from __future__ import annotations

OURS = ("zero1", "islands", "streaming", "powersgd")
TORCHFT = "torchft-diloco"
PEERS = ("torch-ddp", "torch-powersgd", TORCHFT)
BY_OUTER_STEPS = ("islands", "streaming", TORCHFT)
"""Engines that send something once in many steps."""
POWER_RANK, WHOLE_STEPS = 2, 2
"""Of factors, and the steps before them: torch's hook has two at least."""
