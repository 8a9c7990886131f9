"""Starting ranks: on this machine, or elsewhere (`places/`).

Names are imported when first used: a rank's entry point is in this package and must not import torch before the script
does, and errors in options are reported without waiting for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.system.first_use import imported_when_used

if TYPE_CHECKING:
    from shardwise.launch.elastic.supervise_elastic import supervise as supervise_elastic
    from shardwise.launch.elastic.supervise_elastic import take_over
    from shardwise.launch.environment import Attempt, rank_environment
    from shardwise.launch.job import Job
    from shardwise.launch.port import listen
    from shardwise.launch.signals import StopRequest
    from shardwise.launch.supervision import supervise
    from shardwise.system.devices import count_gpus, device_kind

__all__ = [
    "Attempt",
    "Job",
    "StopRequest",
    "count_gpus",
    "device_kind",
    "listen",
    "rank_environment",
    "supervise",
    "supervise_elastic",
    "take_over",
]

_HOMES = {
    "Attempt": "shardwise.launch.environment",
    "Job": "shardwise.launch.job",
    "StopRequest": "shardwise.launch.signals",
    "count_gpus": "shardwise.system.devices",
    "device_kind": "shardwise.system.devices",
    "listen": "shardwise.launch.port",
    "rank_environment": "shardwise.launch.environment",
    "supervise": "shardwise.launch.supervision",
    "supervise_elastic": "shardwise.launch.elastic.supervise_elastic:supervise",
    "take_over": "shardwise.launch.elastic.supervise_elastic",
}

__getattr__ = imported_when_used(__name__, _HOMES)
