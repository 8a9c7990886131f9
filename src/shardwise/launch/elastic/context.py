"""Everything an elastic launcher needs to run a job."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.comm.compat import Store
from shardwise.launch.elastic.scaling import Scaling
from shardwise.launch.elastic.slots import Slots
from shardwise.launch.elastic.succession import Successor
from shardwise.launch.elastic.workers import Workers
from shardwise.launch.job import Elastic, Job
from shardwise.launch.log_folder import Folder
from shardwise.launch.signals import SignalLog


@dataclass
class Context:
    """The job, its store, folders, processes and slots."""

    job: Job
    elastic: Elastic
    store: Store
    address: str
    port: int
    run_id: str
    folder: Folder
    workers: Workers
    slots: Slots
    signals: SignalLog
    say: Callable[[str], None]
    token: str = ""
    """By which ranks know each other; `""` is a new one."""
    succession: Successor | None = None
    """How another launcher can take over; `None` where none does."""
    scaling: Scaling | None = None
    """With `--autoscale`."""
    clock: Callable[[], float] = time.monotonic
    """In seconds; goes on where a launcher on another host has stopped."""
