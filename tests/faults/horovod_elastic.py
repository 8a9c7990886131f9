"""A script of Horovod Elastic, some of whose ranks die. `test_horovod_elastic.py` runs it on real processes.

horovod_elastic.py OUT STEPS NEW SAMPLES FAULT...   It ends after STEPS; with NEW, not before 4 ranks are there.

SAMPLES is `sampler` or `plain`. FAULT is WHAT:RANK:STEP of the first ranks, where WHAT is kill (before a step), half
(in a backward), commit (between saving and notifying), leave (SIGTERM), or mismatch (no rank dies).
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

GLOBAL, SAMPLES = 12, 48
DATA = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(5))


def build() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def loss_of(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return (model(rows) - rows.sum(1, keepdim=True)).square().mean()


def order_of(epoch: int) -> list[int]:
    """The order of Horovod's own sampler, and so of ours."""
    order = list(range(SAMPLES))
    random.Random(7 + epoch).shuffle(order)
    return order


def plain(num_steps: int) -> torch.nn.Module:
    """The model of one uninterrupted process with whole batches."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    per_epoch = SAMPLES // GLOBAL
    for step in range(num_steps):
        place = step % per_epoch * GLOBAL
        optimizer.zero_grad()
        loss_of(model, DATA[order_of(step // per_epoch)[place : place + GLOBAL]]).backward()
        optimizer.step()
    return model


class Job:
    def __init__(self, out: Path, num_steps: int, num_new: int, samples: str, faults: list[str]) -> None:
        self.out, self.num_steps, self.num_new = out, num_steps, num_new
        self.has_sampler = samples == "sampler"
        hvd.init()
        pieces = [fault.split(":") for fault in faults]
        self.member = int(os.environ["SHARDWISE_MEMBER"])
        self.faults = {(what, int(step)) for what, member, step in pieces if int(member) == self.member}
        self.resets = 0
        self.sizes: list[int] = []

    def inject(self, what: str, step: int) -> bool:
        if (what, step) not in self.faults:
            return False
        self.faults.discard((what, step))
        if what == "leave":
            os.kill(os.getpid(), signal.SIGTERM)
        elif what != "mismatch":
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    def run(self) -> None:
        model = build()
        if self.member > 3:
            torch.nn.init.zeros_(model[0].weight)  # a new rank gets the others' weights
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        more: dict[str, Any] = {"step": 0, "epoch": 0}
        if self.has_sampler:
            more["sampler"] = hvd.elastic.ElasticSampler(range(SAMPLES), shuffle=True, seed=7)
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, **more)
        state.register_reset_callbacks([self.note_reset])
        if any(what == "commit" for what, _ in self.faults):
            save = state.save

            def save_and_die() -> None:
                save()
                self.inject("commit", state.step)

            state.save = save_and_die
        hvd.elastic.run(self.train)(state)
        self.finish(state)

    def note_reset(self) -> None:
        self.resets += 1

    def wants_more(self, state: Any) -> bool:
        is_there = hvd.size() >= 4 if self.num_new else True
        return state.step < self.num_steps or not is_there

    def train(self, state: Any) -> None:
        per_epoch = SAMPLES // GLOBAL
        while self.wants_more(state):
            if self.has_sampler:
                for number in range(len(state.sampler) * hvd.size() // GLOBAL):
                    size = GLOBAL // hvd.size()
                    self.step(
                        state,
                        DATA[state.sampler.get_indices(number, size)],
                        lambda n=number, s=size: state.sampler.record_batch(n, s),
                    )
                    if not self.wants_more(state):
                        return
                state.epoch += 1
                state.sampler.set_epoch(state.epoch)
            else:
                place = state.step % per_epoch * GLOBAL
                rows = order_of(state.step // per_epoch)[place : place + GLOBAL]
                self.step(state, DATA[rows][hvd.rank() :: hvd.size()], lambda: None)

    def step(self, state: Any, rows: torch.Tensor, record: Any) -> None:
        self.inject("kill", state.step)
        self.inject("leave", state.step)
        if any(what == "mismatch" and step == state.step for what, step in self.faults) and self.inject(
            "mismatch", state.step
        ):
            hvd.allreduce(torch.ones(1 + hvd.rank()), name="mismatch")
        state.optimizer.zero_grad()
        loss = loss_of(state.model, rows)
        if ("half", state.step) in self.faults:
            next(iter(state.model.parameters())).register_hook(lambda _: self.inject("half", state.step))
        loss.backward()
        state.optimizer.step()
        record()
        state.step += 1
        self.sizes.append(hvd.size())
        time.sleep(0.02)
        state.commit()

    def finish(self, state: Any) -> None:
        twin = plain(state.step)
        for mine, expected in zip(state.model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), expected.detach(), rtol=1e-5, atol=1e-6)
        said = hvd.allgather_object([self.member, hvd.rank(), state.step])
        facts = {"rank": hvd.rank(), "size": hvd.size(), "step": state.step, "resets": self.resets}
        facts |= {"sizes": sorted(set(self.sizes)), "all": said}
        (self.out / f"member-{self.member}").write_text(json.dumps(facts))
        hvd.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    Job(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:]).run()
