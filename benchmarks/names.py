"""The engines' names, and which of them do the same thing. No torch here."""

from __future__ import annotations

REFERENCE = "reference"
"""One process that trains on all ranks' micro-batches at once: what every engine's loss must agree with."""

SINGLE = "single"

APART = "apart"
"""As many plain processes as there are ranks, none of which hears from another: what the cores cost each other."""

COUNTERPARTS = {
    "shardwise-ddp": ("ddp",),
    "shardwise-zero1": ("deepspeed-1",),
    "shardwise-zero2": ("deepspeed-2",),
    "shardwise-zero3": ("fsdp2", "deepspeed-3"),
}

ENGINE_NAMES = (SINGLE, APART, *(name for ours, peers in COUNTERPARTS.items() for name in (*peers, ours)))
ALONE = frozenset({REFERENCE, SINGLE})
OF_ONE_BATCH = frozenset({SINGLE, APART})
"""Their losses are not those of all ranks' batches."""


def is_ours(engine: str) -> bool:
    return engine.startswith("shardwise")


def needs(engine: str) -> str:
    """The module that `engine` cannot run without."""
    return "deepspeed" if engine.startswith("deepspeed") else "torch"
