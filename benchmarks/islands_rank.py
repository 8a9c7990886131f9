"""One rank of two hosts between which islands are raced against data parallelism: what each learns from the same
tokens, and how long it takes for them where the link is slow.

[Note: from a trained model] As in the papers, islands begin from a model that has been trained: all ranks have trained
it together for some steps, and every engine resumes from the same checkpoint.

[Note: learnt fast, timed slowly] What an engine computes does not depend on the link. So it trains with links that are
not shaped, and is timed for some further steps when they are: as many as have one outer step of everything.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
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
from benchmarks.model import GPT, build_model
from benchmarks.sizes import SIZES, Size
from benchmarks.worker import warm_up

SEQ, MICRO_BATCH, LR = 64, 2, 1e-3
VALIDATED = 64
"""Sequences of which the loss is taken."""
_CHECKPOINTS = "checkpoints"


def plan_of(name: str, every: int) -> dict[str, Any]:
    """Two islands, one on each host; or all ranks as one. In as few outer steps as there are here, momentum that lasts
    for ten of them overshoots: anchors are plain averages."""
    if name == "zero1":
        return {"preset": "zero1"}
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
        text = Text(size)
        figures["before"] = _train_before(size, text, world, args)
        figures["turns"] = [_turn(name, size, text, world, args) for name in args.engines.split(",")]
    dist.barrier()
    world.close()


class Training:
    """Of one engine, which begins as new, or where `_train_before` has ended."""

    def __init__(self, plan: dict[str, Any], size: Size, text: Text, world: sw.World, args: argparse.Namespace) -> None:
        model = build_model(size)
        self._text, self._args = text, args
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        self.engine = sw.shard(model, plan, optimizer=self._optimizer, world=world)
        self.place, self.num = self.engine.data_ranks

    def step(self) -> None:
        """The next one. The rate falls to zero as a cosine, over the steps of `_train_before` and those after."""
        number, last = self.engine.num_steps + 1, self._args.before + self._args.steps
        done = min(1.0, number / last)
        for group in self._optimizer.param_groups:
            group["lr"] = LR * min(1.0, number / 20) * 0.5 * (1 + math.cos(math.pi * done))
        self.engine.backward(self.engine(self._text.batch(number, self.place, self.num)))
        self.engine.step()


def _train_before(size: Size, text: Text, world: sw.World, args: argparse.Namespace) -> float:
    """The loss after the steps that all engines have in common, which are saved."""
    training = Training(plan_of("zero1", args.every), size, text, world, args)
    with training.engine as engine:
        for _ in range(args.before):
            training.step()
        engine.save(args.out / _CHECKPOINTS)
        return _loss(size, engine.state_dict(), text)


def _turn(name: str, size: Size, text: Text, world: sw.World, args: argparse.Namespace) -> dict[str, Any]:
    ask_for(FREE, args.out)
    training = Training(plan_of(name, args.every), size, text, world, args)
    with training.engine as engine:
        engine.resume(args.out / _CHECKPOINTS)
        for _ in range(args.steps):
            training.step()
        loss = _loss(size, engine.state_dict(), text)
        num_timed = args.every if name != "zero1" else min(3, args.every)
        ask_for(args.rate, args.out)
        start, (sent, received) = time.perf_counter(), counters()
        for _ in range(num_timed):
            training.step()
        dist.barrier()
        seconds, after = time.perf_counter() - start, counters()
    tokens = num_timed * training.num * MICRO_BATCH * size.seq
    return {
        "engine": name,
        "loss": loss,
        "tokens_per_second": tokens / seconds,
        "step_seconds": seconds / num_timed,
        "link_bytes": max(after[0] - sent, after[1] - received) / num_timed,
    }


def _loss(size: Size, state: dict[str, Tensor], text: Text) -> float:
    """Of the exported model: with islands, of the one that they have in common."""
    plain: GPT = build_model(size)
    plain.load_state_dict(state)
    with torch.no_grad():
        return float(plain(text.validation()))


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
