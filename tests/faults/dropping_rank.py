"""Run by `test_lost_dropout.py`: a model with dropout, whose ranks note what they drop in each step.

dropping_rank.py AXIS OUT END [VICTIM POINT [joins]]     AXIS: tp, pp, sp or ep, of meshes of two ranks; OUT: a folder

It trains until END steps have been taken. If there is a checkpoint in OUT, it goes on from there, with the random
numbers that are noted beside it. The rank VICTIM is killed in step 2, counted from 0: in its forward, its backward, or
before the update. If another one `joins`, the others wait for it after the step that they repeat.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import shardwise as sw

sys.path.insert(0, str(Path(__file__).parents[2]))  # a script's own folder is there, not that of the tests

from tests.models import VOCAB, Gpt, Mixture
from tests.patience import wait_until
from tests.ranks.split_models import TENSOR, Transformer, tokens

Tensor = torch.Tensor
ROWS, NUM_STEPS, LOST_AT = 4, 5, 2
STYLES = {name.replace("down", "down.1"): style for name, style in TENSOR["plan"].items()}
PLANS: dict[str, dict[str, Any]] = {
    "tp": {"tensor": {**TENSOR, "plan": STYLES}},
    "pp": {"accumulate": 2},
    "sp": {"sequence": {"attention": "ulysses"}},
    "ep": {},
}
MODELS: dict[str, Callable[[], nn.Module]] = {"tp": Transformer, "pp": Transformer, "sp": Gpt, "ep": Mixture}


def with_dropout(model: nn.Module) -> nn.Module:
    """In each block outside of what `tp` splits, and inside."""
    blocks = model.blocks
    assert isinstance(blocks, nn.ModuleList)
    for block in blocks:
        block.norm1 = nn.Sequential(block.norm1, nn.Dropout(0.3))
        if isinstance(getattr(block, "down", None), nn.Linear):
            block.down = nn.Sequential(nn.Dropout(0.4), block.down)
    return model


class Training:
    def __init__(self, axis: str, world: sw.World, victim: int, point: str) -> None:
        self.axis = axis
        torch.manual_seed(3)
        model = with_dropout(MODELS[axis]())
        torch.manual_seed(100 + world.rank)  # dropout of each data rank is its own
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        mesh = {"dp": world.size // 2, axis: 2}
        plan = {"preset": "zero1", "mesh": mesh, **PLANS[axis]}
        self.engine = sw.shard(model, plan, optimizer=optimizer, world=world)
        self.point = point if world.rank == victim else ""
        self.masks: list[list[int]] = []
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.register_forward_hook(self._dropped)

    def _dropped(self, _: nn.Module, __: Any, out: Tensor) -> None:
        self.masks.append((out == 0).flatten().int().tolist())
        if len(self.masks) == 2 and self.engine.num_steps == LOST_AT:
            self.befall("forward")
            if out.requires_grad:
                out.register_hook(lambda _: self.befall("backward"))

    def befall(self, point: str) -> None:
        if point == self.point and self.engine.num_steps == LOST_AT:
            os.kill(os.getpid(), signal.SIGKILL)

    def take_step(self, step: int) -> float:
        engine, axis = self.engine, self.axis
        place, num = engine.data_ranks
        if axis == "sp":
            ids = _numbers(step, ROWS, 17).tensor_split(num)[place]
            positions = torch.arange(16).expand(len(ids), -1)
            whole = {"input_ids": ids[:, :-1], "position_ids": positions, "labels": ids[:, 1:]}
            batch = engine.split_sequence(whole)
            logits = engine.module(batch["input_ids"], batch["position_ids"])
            labels = batch["labels"].flatten()
            losses = functional.cross_entropy(logits.flatten(0, 1), labels, reduction="none")
            loss = engine.mean_over_tokens(losses, labels >= 0)
        elif axis == "ep":
            ids = _numbers(step, 2 * ROWS, 7).tensor_split(num)[place]
            loss = engine.module(ids[:, :-1], ids[:, 1:])
        elif axis == "pp":
            batch = _batch(step, place, num)
            engine.weigh(len(batch), ROWS)  # so that the loop passes it again, divided anew
            loss = engine.forward_backward(batch)
            self.befall("step")
            engine.step()
            return engine.mean(loss.item())
        else:
            loss = engine.module(_batch(step, place, num))
        engine.backward(loss)
        self.befall("step")
        engine.step()
        return engine.mean(loss.item())


def _numbers(step: int, *shape: int) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(step))


def _batch(step: int, place: int, num: int) -> Tensor:
    return tokens(step, ROWS).tensor_split(num)[place]


def await_newcomer(engine: sw.Engine) -> None:
    """Until one asks to join; all ranks know of that one step later."""
    membership = engine.world.membership
    assert membership is not None
    wait_until(membership.changes_wanted)


def main(axis: str, out: Path, end: int, victim: int, point: str, *, joins: bool) -> None:
    torch.set_num_threads(1)
    world = sw.World.join()
    training = Training(axis, world, victim, point)
    engine, first = training.engine, "new" if world.is_newcomer else world.rank
    if engine.resume(out / "checkpoint") is not None and not world.is_newcomer:
        states = json.loads((out / "generators.json").read_text())
        torch.set_rng_state(torch.tensor(states[world.rank], dtype=torch.uint8))
    found: dict[int, dict[str, Any]] = {}
    while engine.num_steps < end:
        if joins and engine.num_steps == LOST_AT + 1 and engine.world.size == 2:
            await_newcomer(engine)
        step, void = engine.num_steps, engine.num_void
        training.masks.clear()
        loss = training.take_step(step)
        if engine.num_void == void:
            found[step] = {"loss": loss, "masks": list(training.masks), "size": engine.world.size}
            found[step] |= {"rank": engine.world.rank, "data_rank": engine.data_ranks}
            found[step]["generator"] = torch.get_rng_state().tolist()
    told = {"steps": found, "generator": torch.get_rng_state().tolist()}
    (out / f"told-{first}.json").write_text(json.dumps(told))
    if not point:
        engine.save(out / "checkpoint")
    engine.close()
    world.close()


if __name__ == "__main__":
    _, axis, out, end, *fault = sys.argv
    victim, point = (int(fault[0]), fault[1]) if fault else (-1, "")
    main(axis, Path(out), int(end), victim, point, joins="joins" in fault)
