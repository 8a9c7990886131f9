"""Run by `test_elastic_hosts.py` on hosts: ranks that add numbers up until the file `enough` is there, and note what
they see of the others in `member-N`."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import torch

import shardwise as sw
from shardwise.comm import Group
from shardwise.errors import CommError, TurnedAwayError


def main() -> None:
    world = sw.World.join(timeout_seconds=60, patience_seconds=20)
    membership = world.membership
    assert membership is not None
    step = 0
    if membership.arrival is not None:
        step = max(json.loads(one)["step"] for one in membership.arrival.reports if one)

    def note(what: str, **more: object) -> None:
        facts = {"what": what, "host": socket.gethostname(), "member": membership.member, "pid": os.getpid()}
        facts |= {"rank": world.rank, "members": world.members, "hosts": world.hosts, "step": step}
        facts |= {"generation": world.generation}
        facts |= {"local_size": world.local_size, "ranks_of_host": world.ranks_of_host, "time": time.time()}
        facts |= {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        with Path(f"member-{membership.member}").open("a") as stream:
            stream.write(json.dumps({**facts, "folder": str(membership.folder), **more}) + "\n")

    note("joined", is_newcomer=world.is_newcomer)
    while True:
        try:
            everybody = Group("world", tuple(range(world.size)), world.rank)
            own = torch.full((64 * world.size,), float(membership.member + 1)) * (step + 1)
            total = torch.empty_like(own)
            collectives = world.collectives(torch.device("cpu"))
            collectives.all_reduce(total, own, everybody, torch.float32, "numbers").wait()
            assert (total == (step + 1) * sum(member + 1 for member in world.members)).all()
            wanted = world.any_rank(membership.changes_wanted())
            is_enough = world.any_rank(Path("enough").exists())
            if not wanted:
                step += 1
                membership.step = step
            if is_enough and not wanted:
                break
            if not wanted:
                time.sleep(0.01)
                continue
        except CommError as error:
            note("fault", text=str(error))
        try:
            found = membership.regroup(world, json.dumps({"step": step}).encode())
        except TurnedAwayError as error:
            note("left", has_asked=error.has_asked)
            raise
        world = found.world
        step = max(json.loads(one)["step"] for one in found.reports if one)
        note("regrouped", lost=found.lost, origins=found.origins)
    note("done")
    world.close()


if __name__ == "__main__":
    if sys.argv[1:] == ["fails"] and socket.gethostname() == "two":
        raise OSError(28, "No space left on device")
    main()
