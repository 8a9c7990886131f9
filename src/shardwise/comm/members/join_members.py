"""From the environment that an elastic launcher sets to the world of a generation.

[Note: abandoned openings] While groups connect, gloo waits for a dead rank until its own timeout, in native code, and
possibly without a socket that could be shut. So a separate thread opens each generation. When the launcher announces
that the generation is over, that thread is abandoned: it finds no peers under these keys, ends with an error at some
point, and touches nothing that the next generation uses.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from shardwise.comm import compat
from shardwise.comm.bootstrap import LATER_SECONDS, MEMBER, Opened, agreed_device, open_groups
from shardwise.comm.members.channels import MemberChannel
from shardwise.comm.members.departure import DEPARTURE
from shardwise.comm.members.launcher_connection import LauncherConnection
from shardwise.comm.members.membership import Opening, StoreMembership
from shardwise.comm.regrouping import W
from shardwise.errors import CommError
from shardwise.system.job_token import Seal
from shardwise.system.process_rank import ProcessRank, attempt_of, process_rank_of

_LEFT_AFTER_SECONDS = 0.1
"""How long an opening that was nearly done may still take. See [Note: abandoned openings]."""


def join_members(
    env: Mapping[str, str],
    begin: Callable[[Opening[W], Opened, StoreMembership[W]], W],
    timeout_seconds: float,
) -> W:
    """Enter the generation that admits this process, and set up its membership for later ones. See `World.join`.

    `begin` makes the world of a generation from what was opened for it, and runs its first exchanges.
    """

    def open_world(opening: Opening[W]) -> W:
        return begin(opening, open_generation(process_rank_of(env), opening, timeout_seconds), membership)

    images = env.get("SHARDWISE_IMAGES", "")
    attempt = attempt_of(env)
    launcher = LauncherConnection(env)
    launcher.watch()
    store = launcher.connect()
    another = launcher.again if launcher.is_followed else None
    membership = StoreMembership(
        MemberChannel(store, attempt, int(env[MEMBER]), Seal.of(env), another),
        open_world,
        folder=Path(images) if images else None,
        first_announcement=int(env.get("SHARDWISE_FIRST_ANNOUNCEMENT", "0")),
        timeout_seconds=timeout_seconds,
        least=int(env.get("SHARDWISE_ELASTIC", "").partition(":")[0] or 1),
        most=int(env.get("SHARDWISE_AUTOSCALE", "0")),
    )
    entered = membership.enter()
    DEPARTURE.follow(membership)
    return entered


def open_generation(process: ProcessRank, opening: Opening[W], timeout_seconds: float) -> Opened:
    """Connect to the other members of a generation. All its members call.

    Raises `CommError` as soon as the generation is over, and torch's `RuntimeError`.
    """
    size = len(opening.members)
    num_local = opening.hosts.count(opening.hosts[opening.rank]) if opening.hosts else size
    process = replace(process, rank=opening.rank, size=size, local_size=num_local)

    def work() -> None:
        try:
            opened: Opened | Exception = _open(process, opening, size, timeout_seconds)
        except (CommError, RuntimeError, OSError, ValueError) as error:
            opened = error
        opening.answers.put(opened)
        if opening.is_over and not isinstance(opened, Exception) and compat.is_of_store(opening.store):
            dist.destroy_process_group()  # no caller takes it

    thread = threading.Thread(target=work, name=f"shardwise-open-{opening.generation}", daemon=True)
    thread.start()
    answer = opening.answers.get()
    if isinstance(answer, Opened) and not opening.is_over:
        return answer
    thread.join(_LEFT_AFTER_SECONDS)
    if isinstance(answer, Exception):
        raise CommError(f"Generation {opening.generation} of the ranks could not be opened: {answer}") from answer
    raise CommError(f"Generation {opening.generation} of the ranks ended before this one had entered it.")


def _open(process: ProcessRank, opening: Opening[W], size: int, timeout_seconds: float) -> Opened:
    timeout = datetime.timedelta(seconds=timeout_seconds + LATER_SECONDS)
    compat.forget_groups()
    device, why = agreed_device(opening.store, opening.rank, size, process)
    transport, beside = open_groups(opening.store, opening.rank, size, timeout, device.device, by_mpi=False)
    return Opened(transport, device, why, beside)
