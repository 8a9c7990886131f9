"""Run by `test_campaign.py` on real processes: a long training whose sums are whole, with reads, saves and means.

campaign_rank.py OUT PLAN LOOP STEPS     OUT: a folder; PLAN: a preset or JSON; LOOP: engine, plain or train_step

Each member writes what it does into OUT: `pid-N` before it joins, `rank-N` when it is about to take a step in a
generation, `saving-N` while it saves, and a line of `steps-N.jsonl` for each step. The file `allowed` has the step
before which all wait for whoever kills them, unless somebody is about to join.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import shardwise as sw

sys.path.insert(0, str(Path(__file__).parents[2]))  # a script's own folder is there, not that of the tests

from tests.faults.exact_training import Model, loader, loss_of, optimizer_of

SAVE_EVERY, READ_EVERY, NUM_KEPT = 10, 7, 3
FOREVER = 10**9
Tensor = torch.Tensor


class Trained:
    """One member's training."""

    def __init__(self, out: Path, plan: str, loop: str, num_steps: int) -> None:
        self.out, self.loop, self.num_steps = out, loop, num_steps
        self.world = sw.World.join(timeout_seconds=20)
        assert self.world.membership is not None
        self.membership = self.world.membership
        self.member = self.membership.member
        self.model = Model()
        self.optimizer = optimizer_of(self.model)
        plain = json.loads(plan) if plan.startswith("{") else plan
        self.engine = sw.shard(self.model, plain, optimizer=self.optimizer, world=self.world)
        self.engine.resume(out / "checkpoints")
        self.generation = -1

    def run(self) -> None:
        engine = self.engine
        state: dict[str, Tensor] = {}
        with loader(engine.data_ranks, 1) as batches:
            while not state:
                while engine.num_steps < self.num_steps:
                    for batch in batches:
                        self.wait()
                        self.take(batch)
                        if engine.num_steps >= self.num_steps:
                            break
                found = engine.state_dict()
                engine.wait_for_save()  # a rank that is lost now may not have finished its file
                state = found if engine.num_steps >= self.num_steps else {}
        torch.save(state, self.out / f"state-{self.member}")
        engine.close()

    def wait(self) -> None:
        """Until this step is allowed, or others are waited for or gone, which only a step finds."""
        if self.generation != self.engine.world.generation:
            self.generation = self.engine.world.generation
            self.publish("rank", f"{self.engine.world.rank} {self.generation}")
        allowed = self.out / "allowed"
        while self.engine.num_steps >= int(allowed.read_text()):
            if self.membership.changes_wanted() or self.engine.world.fault is not None:
                break
            time.sleep(0.005)

    def take(self, batch: dict[str, Tensor]) -> None:
        engine, before, void = self.engine, self.engine.num_steps, self.engine.num_void
        place, num = engine.data_ranks  # among whom the batch was divided: one may be lost in the update, and it counts
        loss = self.stepped(batch)
        if engine.num_steps == before or engine.num_void > void:  # one that was a spare is where the others are
            return
        samples = batch["index"].tolist()
        line: dict[str, Any] = {"step": before, "generation": engine.world.generation, "samples": samples, "loss": loss}
        self.note({**line, "place": place, "ranks": num})
        self.publish("taken", str(before))
        self.note({"step": before, "mean": engine.mean(loss)})
        if engine.num_steps % READ_EVERY == 0:
            self.note({"step": before, "read": self.read(is_whole=engine.num_steps % 2 == 0)})
        if engine.num_steps % SAVE_EVERY == 0:
            self.save()

    def stepped(self, batch: dict[str, Tensor]) -> float:
        engine, weight = self.engine, batch["weight"]
        if self.loop == "train_step":
            inputs = {"index": batch["index"], "x": batch["x"]}
            return engine.train_step(inputs, weight, loss_fn=loss_of).item()
        loss = loss_of(self.model(batch["index"], batch["x"]), weight)
        if self.loop == "engine":
            engine.backward(loss)
            engine.step()
        else:
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            self.optimizer.step()
        return loss.item()

    def read(self, *, is_whole: bool) -> float:
        """The sum of what counts samples, between steps."""
        whole = self.engine.state_dict()["seen.weight"] if is_whole else self.engine.get("seen.weight")
        assert whole is not None
        return whole.double().sum().item()

    def save(self) -> None:
        engine = self.engine
        saving = self.out / f"saving-{self.member}"
        saving.touch()
        waits = engine.num_steps % (2 * SAVE_EVERY) == 0
        engine.save(self.out / "checkpoints", wait=waits, keep=sw.Keep(last=NUM_KEPT), state={"of": engine.num_steps})
        saving.unlink()

    def note(self, line: dict[str, Any]) -> None:
        with (self.out / f"steps-{self.member}.jsonl").open("a") as stream:
            stream.write(json.dumps(line) + "\n")

    def publish(self, what: str, text: str) -> None:
        draft = self.out / f".{what}-{self.member}"
        draft.write_text(text)
        draft.rename(self.out / f"{what}-{self.member}")


def main(out: Path, plan: str, loop: str, num_steps: int) -> None:
    logging.basicConfig(level="WARNING")
    faulthandler.register(signal.SIGUSR1, file=(out / f"stacks-{os.environ['SHARDWISE_MEMBER']}").open("w"))
    torch.set_num_threads(1)
    (out / f"memory-{os.environ['SHARDWISE_MEMBER']}").write_text(os.environ["SHARDWISE_IMAGES"])
    draft = out / f".pid-{os.environ['SHARDWISE_MEMBER']}"
    draft.write_text(str(os.getpid()))
    draft.rename(draft.with_name(draft.name[1:]))
    Trained(out, plan, loop, num_steps).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
