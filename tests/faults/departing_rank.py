"""Run by `test_departure.py` on real processes: ranks of an elastic job that are asked to leave, or that raise.

departing_rank.py WHAT: `leave`, `leave-plain` (without a StopRequest), `leave-two`, `leave-all` (so many ranks at once
that the job cannot continue), `end` (the launcher is asked), `code` (all raise at one step), `data` (whoever has the
last place raises at one step)
"""

from __future__ import annotations

import os
import signal
import sys
import time

import shardwise as sw
from shardwise.comm.regrouping import Membership
from shardwise.errors import CommError, TurnedAwayError
from shardwise.launch import StopRequest

STEPS = 12
LEAVING = {"leave-two": (1, 2), "leave-all": (0, 1, 2)}


def befall(what: str, world: sw.World, member: int, step: int) -> None:
    if what.startswith("leave") and member in LEAVING.get(what, (1,)) and step == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    if what == "end" and (world.rank, step) == (0, 3):
        os.kill(os.getppid(), signal.SIGTERM)
    if what == "code" and step == 3:
        raise KeyError("labels")
    if what == "data" and step == 3 and world.rank == world.size - 1:
        raise ValueError("no number")


def main(what: str) -> None:
    stop = StopRequest()
    if what != "leave-plain":
        stop.install()
    world = sw.World.join(timeout_seconds=20, patience_seconds=2)
    found = world.membership
    assert found is not None
    membership: Membership = found
    step = 0
    while step < STEPS:
        befall(what, world, membership.member, step)
        try:
            if world.any_rank(membership.changes_wanted()):
                world = membership.regroup(world, b"").world
            if world.any_rank(stop.requested):
                print(f"saved after {step}")
                break
        except TurnedAwayError:
            raise
        except CommError:
            world = membership.regroup(world, b"").world
            continue
        step += 1
        membership.step = step
        time.sleep(0.02)
    world.close()
    print(f"done after {step}")


if __name__ == "__main__":
    main(sys.argv[1])
