"""One rank of two hosts between which islands are raced against data parallelism: what each learns from the same
tokens, and how long it takes for them where the link is slow. Others' engines take turns with ours.

[Note: from a trained model] As in the papers, islands begin from a model that has been trained: all ranks have trained
it together for some steps, and every engine goes on from there, with the states of AdamW.

[Note: learnt fast, timed slowly] What an engine computes does not depend on the link. So it trains with links that are
not shaped, and is timed for some further steps when they are: as many as have one outer step of everything.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardwise as sw
from benchmarks.figures import write_figures
from benchmarks.fresh import ROOT
from benchmarks.hosts_names import FREE
from benchmarks.hosts_rank import ask_for, counters
from benchmarks.islands_names import BY_OUTER_STEPS, PEERS, POWER_RANK, WHOLE_STEPS
from benchmarks.islands_peers import Peer
from benchmarks.model import GPT, build_model
from benchmarks.sizes import SIZES, Size
from benchmarks.worker import warm_up

SEQ, MICRO_BATCH, LR = 64, 2, 1e-3
VALIDATED = 64
"""Sequences of which the loss is taken."""
_CHECKPOINTS = "checkpoints"


def plan_of(name: str, every: int, before: int = 0) -> dict[str, Any]:
    """Two islands, one on each host; or all ranks as one. In as few outer steps as there are here, momentum that lasts
    for ten of them overshoots: anchors are plain averages. Factors begin some steps after those `before`."""
    if name == "zero1":
        return {"preset": "zero1"}
    if name == "powersgd":
        return {"preset": "ddp", "powersgd": {"rank": POWER_RANK, "start_step": before + WHOLE_STEPS}}
    settings: dict[str, Any] = {"every": every, "optimizer": {"lr": 1.0, "momentum": 0.0}}
    if name == "streaming":
        settings |= {"fragments": 2, "overlap": max(1, every // 10), "mix": 0.5, "wire": "bf16"}
    return {"preset": "zero1", "mesh": {"island": 2, "dp": -1}, "islands": settings}


class Text:
    """The bytes of this repository's pages; the last tenth is for validation."""

    def __init__(self, size: Size) -> None:
        pages = sorted((ROOT / "docs").glob("*.md"))
        whole = torch.frombuffer(bytearray(b"".join(page.read_bytes() for page in pages)), dtype=torch.uint8)
        self._seq = size.seq
        self._train, self._validation = whole[: len(whole) * 9 // 10], whole[len(whole) * 9 // 10 :]

    def batch(self, step: int, place: int, num: int) -> Tensor:
        """The share of `place` of all sequences of a step."""
        return self._some(self._train, MICRO_BATCH * num, step).chunk(num)[place]

    def validation(self) -> Tensor:
        return self._some(self._validation, VALIDATED, 0)

    def _some(self, text: Tensor, num: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(0, len(text) - self._seq - 1, (num,), generator=generator)
        return torch.stack([text[at : at + self._seq + 1] for at in starts.tolist()]).long()


def main() -> None:
    args = _arguments()
    size = replace(SIZES[args.size], seq=SEQ if args.size == "hosts" else SIZES[args.size].seq)
    torch.set_num_threads(1)
    with write_figures(args.out) as figures:
        world = sw.World.join(timeout_seconds=1200)
        warm_up(torch.device("cpu"))
        race = Race(size, Text(size), world, args)
        figures["before"] = race.train_before()
        figures["turns"] = [race.turn(name) for name in args.engines.split(",")]
    dist.barrier()
    world.close()


class Ours:
    """A plan of ours; see `Peer` for what a race asks of it."""

    def __init__(self, plan: dict[str, Any], model: GPT, optimizer: torch.optim.Optimizer, world: sw.World) -> None:
        self.engine = sw.shard(model, plan, optimizer=optimizer, world=world)

    def step(self, tokens: Tensor) -> None:
        self.engine.backward(self.engine(tokens))
        self.engine.step()

    def state(self) -> dict[str, Tensor]:
        return self.engine.state_dict()

    def close(self) -> None:
        self.engine.close()


class Training:
    """Of one engine, step by step. The rate falls to zero as a cosine."""

    def __init__(self, trained: Ours | Peer, optimizer: torch.optim.Optimizer, race: Race, number: int) -> None:
        """`number` steps are behind it."""
        self.trained, self._optimizer, self._race, self._number = trained, optimizer, race, number
        self._place, self.num = dist.get_rank(), dist.get_world_size()

    def step(self) -> None:
        self._number += 1
        args = self._race.args
        done = min(1.0, self._number / (args.before + args.steps))
        for group in self._optimizer.param_groups:
            group["lr"] = LR * min(1.0, self._number / 20) * 0.5 * (1 + math.cos(math.pi * done))
        self.trained.step(self._race.text.batch(self._number, self._place, self.num))


@dataclass
class Race:
    """What all engines have in common."""

    size: Size
    text: Text
    world: sw.World
    args: argparse.Namespace
    first: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Of each parameter after the steps together: its values, and the states of AdamW."""

    def train_before(self) -> float:
        """The loss after the steps that all engines have in common, whose result is saved."""
        model = build_model(self.size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        ours = Ours(plan_of("zero1", self.args.every), model, optimizer, self.world)
        training = Training(ours, optimizer, self, 0)
        for _ in range(self.args.before):
            training.step()
        ours.engine.save(self.args.out / _CHECKPOINTS)
        for name, _ in model.named_parameters():
            found = {what: ours.engine.get(name, what) for what in ("param", "exp_avg", "exp_avg_sq")}
            self.first[name] = {what: tensor for what, tensor in found.items() if tensor is not None}
        loss = self._loss(ours.state())
        ours.close()
        return loss

    def turn(self, name: str) -> dict[str, Any]:
        args = self.args
        ask_for(FREE, args.out)
        training = self._resumed(name)
        for _ in range(args.steps):
            training.step()
        loss = self._loss(training.trained.state())
        num_timed = args.every if name in BY_OUTER_STEPS else min(3, args.every)
        ask_for(args.rate, args.out)
        start, (sent, received) = time.perf_counter(), counters()
        for _ in range(num_timed):
            training.step()
        dist.barrier()
        seconds, after = time.perf_counter() - start, counters()
        ask_for(FREE, args.out)
        training.trained.close()
        tokens = num_timed * training.num * MICRO_BATCH * self.size.seq
        return {
            "engine": name,
            "loss": loss,
            "tokens_per_second": tokens / seconds,
            "step_seconds": seconds / num_timed,
            "link_bytes": max(after[0] - sent, after[1] - received) / num_timed,
        }

    def _resumed(self, name: str) -> Training:
        """An engine that goes on from the steps together."""
        args, model = self.args, build_model(self.size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        if name in PEERS:
            self._set_first(model, optimizer)
            peer = Peer(name, model, optimizer, self.world.local_size, args.every)
            return Training(peer, optimizer, self, args.before)
        ours = Ours(plan_of(name, args.every, args.before), model, optimizer, self.world)
        ours.engine.resume(args.out / _CHECKPOINTS)
        return Training(ours, optimizer, self, args.before)

    def _set_first(self, model: GPT, optimizer: torch.optim.Optimizer) -> None:
        for name, param in model.named_parameters():
            with torch.no_grad():
                param.copy_(self.first[name]["param"])
            moments = {what: self.first[name][what].clone() for what in ("exp_avg", "exp_avg_sq")}
            optimizer.state[param] = {"step": torch.tensor(float(self.args.before)), **moments}

    def _loss(self, state: dict[str, Tensor]) -> float:
        """Of the exported model: with islands, of the one that they have in common."""
        plain: GPT = build_model(self.size)
        plain.load_state_dict(state)
        with torch.no_grad():
            return float(plain(self.text.validation()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", required=True)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--before", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
