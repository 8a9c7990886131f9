"""Where to run what: the ranks of this machine.

Names are imported when first used: a rank's bootstrap lives in this package and must not pay for
torch before the script asks for it, and a mistyped option is answered without waiting for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.launch.devices import count_gpus
    from shardwise.launch.environment import Attempt, rank_environment
    from shardwise.launch.job import Job
    from shardwise.launch.port import listen
    from shardwise.launch.signals import StopRequest
    from shardwise.launch.supervise import supervise

__all__ = ["Attempt", "Job", "StopRequest", "count_gpus", "listen", "rank_environment", "supervise"]

_HOMES = {
    "Attempt": "shardwise.launch.environment",
    "Job": "shardwise.launch.job",
    "StopRequest": "shardwise.launch.signals",
    "count_gpus": "shardwise.launch.devices",
    "listen": "shardwise.launch.port",
    "rank_environment": "shardwise.launch.environment",
    "supervise": "shardwise.launch.supervise",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise.launch' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
