"""Run by `test_members.py` on real processes: ranks that add numbers up, and some of which die.

elastic_rank.py OUT STEPS NEW FAULT...     OUT: a folder; it ends after STEPS, with so many NEW members

FAULT is WHAT:MEMBER:STEP, where WHAT is kill, stop, leave, raise, exit, or regroup (dies when it is about to meet the
others again after STEP); or opening:MEMBER:GENERATION.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

import shardwise as sw
from shardwise.comm import Group
from shardwise.comm.members.membership import Opening
from shardwise.comm.regrouping import Membership, Regrouped
from shardwise.errors import CommError, TurnedAwayError

NUMEL = 4096


class Rank:
    def __init__(self, out: Path, num_steps: int, num_new: int, faults: list[str]) -> None:
        self.out = out
        self.num_steps = num_steps
        self.num_new = num_new
        pieces = [fault.split(":") for fault in faults]
        self.faults = {(what, int(member), int(step)) for what, member, step in pieces}
        began = time.time()
        self.world = sw.World.join(float(os.environ.get("TIMEOUT_SECONDS", "300")), patience_seconds=1)
        found = self.world.membership
        assert found is not None
        self.membership: Membership = found
        self.step = 0
        if found.arrival is not None:
            self.follow(found.arrival, began)
        folder = str(found.folder)
        self.note(
            "joined", folder=folder, pid=os.getpid(), seconds=time.time() - began, is_newcomer=self.world.is_newcomer
        )

    def note(self, what: str, **more: object) -> None:
        facts = {"what": what, "time": time.time(), "member": self.membership.member, "step": self.step, **more}
        facts |= {"rank": self.world.rank, "members": self.world.members, "generation": self.world.generation}
        with (self.out / f"member-{self.membership.member}").open("a") as stream:
            stream.write(json.dumps(facts) + "\n")

    def run(self) -> None:
        while self.step < self.num_steps or sum(member >= 4 for member in self.world.members) < self.num_new:
            self.befall()
            try:
                is_wanted = self.add_up()
            except CommError as error:
                self.note("fault", text=str(error), kind=getattr(error, "kind", ""))
                self.regroup()
                continue
            self.step += 1
            self.membership.step = self.step
            if is_wanted:
                self.regroup()
        self.world.close()

    def add_up(self) -> bool:
        """One step: the sum of all members' numbers is what it should be. Whether changes are wanted."""
        world = self.world
        everybody = Group("world", tuple(range(world.size)), world.rank)
        own = torch.full((NUMEL * world.size,), float(self.membership.member + 1)) * (self.step + 1)
        total = torch.empty_like(own)
        collectives = world.collectives(torch.device("cpu"))
        collectives.all_reduce(total, own, everybody, torch.float32, "numbers").wait()
        expected = (self.step + 1) * sum(member + 1 for member in world.members)
        assert (total == expected).all(), (total, expected)
        return world.any_rank(self.membership.changes_wanted())

    def regroup(self) -> None:
        began = time.time()
        if self.is_due("regroup"):
            os.kill(os.getpid(), signal.SIGKILL)
        self.follow(self.membership.regroup(self.world, str(self.step).encode()), began)

    def follow(self, found: Regrouped, began: float) -> None:
        self.world = found.world
        self.step = max(int(one) for one in found.reports if one)
        self.note("regrouped", seconds=time.time() - began, origins=found.origins, lost=found.lost)

    def is_due(self, what: str) -> bool:
        return (what, self.membership.member, self.step) in self.faults

    def befall(self) -> None:
        if self.is_due("kill"):
            self.note("dies")
            os.kill(os.getpid(), signal.SIGKILL)
        if self.is_due("stop"):
            self.note("stops")
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.is_due("raise"):
            raise ValueError("a bad batch")
        if self.is_due("exit"):
            sys.exit(7)
        if self.is_due("leave"):
            self.membership.leave()
        time.sleep(0.005)


def dies_while_opening(faults: list[str]) -> None:
    """A member dies between two steps of the meeting itself: `opening:MEMBER:GENERATION`."""
    due = {tuple(map(int, fault.split(":")[1:])) for fault in faults if fault.startswith("opening:")}
    init = torch.distributed.init_process_group
    me = int(os.environ["SHARDWISE_MEMBER"])

    def and_die(*args: object, store: object, **kwargs: object) -> None:
        for member, generation in due:
            if member == me and generations[-1] == generation:
                os.kill(os.getpid(), signal.SIGKILL)
        init(*args, store=store, **kwargs)

    generations: list[int] = []
    post_init = Opening.__init__

    def noted(self: Opening, generation: int, *args: object) -> None:
        generations.append(generation)
        post_init(self, generation, *args)

    Opening.__init__ = noted
    torch.distributed.init_process_group = and_die


def main(out: Path, num_steps: int, num_new: int, faults: list[str]) -> int:
    torch.set_num_threads(1)
    dies_while_opening(faults)
    rank = Rank(out, num_steps, num_new, [fault for fault in faults if not fault.startswith("opening:")])
    try:
        rank.run()
    except TurnedAwayError as error:
        rank.note("turned away", text=str(error), has_asked=error.has_asked)
        return 0
    rank.note("done", threads=threading.active_count())
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
