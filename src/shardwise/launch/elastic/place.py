"""What an elastic launcher has to run a job with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from shardwise.launch.elastic.images import Images
from shardwise.launch.folder import Folder
from shardwise.launch.job import Elastic, Job
from shardwise.launch.signals import SignalLog


@dataclass
class Place:
    """What a launcher has for its ranks."""

    job: Job
    elastic: Elastic
    store: Store
    port: int
    run_id: str
    folder: Folder
    images: Images
    signals: SignalLog
    on_cpu: bool
    bound: list[dict[str, str]]
    say: Callable[[str], None]
