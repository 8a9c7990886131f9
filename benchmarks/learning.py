"""What fewer bits cost in what is learnt: a GPT of bytes trains with fp8 layers or narrow wires, and beside it without
them, from the same seed, so from the same values and with the same batches.

[Note: pairs] Seeds differ by more than recipes do, so each run is compared with the plain one of its own seed, and the
mean over seeds of these differences has a confidence interval (Student's t). What is left is chance: a last bit moves
two runs apart as well. `nudged` shows how far, the plain run from values that differ by 0.01 %. To keep it small, the
rate falls to zero, the weights of the last checkpoints are averaged, and the loss is that of text which no step has
seen, the same for all.

Runs are lines of a file. A command that is repeated leaves out the runs which the file has, so it goes on where it was
cut off, or adds seeds. They are in one process, with one thread for each rank.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import shardwise as sw
from benchmarks import fresh
from benchmarks.fresh import ROOT
from benchmarks.learning_course import RATE, ROWS, SEQ, Text, averaged, first_model, is_checkpoint, rate_of
from benchmarks.model import GPT
from benchmarks.show import show_figures
from shardwise.optim import OneBitAdam, OneBitLamb, ZeroOneAdam
from shardwise.testing import run_ranks

STEPS, WIDTH, NUM_SEEDS = 1000, 128, 3
FACTORS, FACTORS_START = (1, 2, 4, 8, 16), 100
"""Ranks of factors, and the step from which on gradients are sent so: torch advises a tenth of
all, and not to begin while the rate still rises."""
FP8_BAR, WIRE_BAR = 0.0025, 0.01
_BETAS, _NEVER = (0.9, 0.99), 10**9
"""Of optimizers without bias corrections: with these the first steps are no longer than later ones."""
_MOST_SECONDS = 3600.0
"""Of a run."""

Line = dict[str, Any]
MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def adamw(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=RATE)


def onebit_adam(params: list[torch.nn.Parameter], freeze_step: int = STEPS // 5) -> torch.optim.Optimizer:
    return OneBitAdam(params, lr=RATE, betas=_BETAS, freeze_step=freeze_step)


def zero_one_adam(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return ZeroOneAdam(params, lr=RATE, betas=_BETAS, var_freeze_step=STEPS // 5)


def onebit_lamb(params: list[torch.nn.Parameter], freeze_step: int = STEPS // 5) -> torch.optim.Optimizer:
    """Its rate is the share of a matrix's norm that a step changes."""
    return OneBitLamb(params, lr=10 * RATE, betas=_BETAS, freeze_step=freeze_step)


@dataclass(frozen=True)
class Variant:
    """What one run trains with, the variant that it is compared with, and by how much its loss may differ from that."""

    plan: dict[str, Any] = field(default_factory=dict)
    beside: str = ""
    bar: float | None = None
    num_ranks: int = 1
    optimizer: MakeOptimizer = adamw
    nudge: float = 0.0
    hook_factors: int = 0
    """The rank of factors, where torch's DDP and its PowerSGD hook train instead."""
    together: float = 0.0
    """The share of all steps in which ranks train as with `zero1` before they follow `plan`."""

    def phases(self, steps: int) -> Iterator[tuple[dict[str, Any], range]]:
        """Plans, each with the numbers of its steps, of which the first is 1."""
        first = int(self.together * steps)
        if first:
            yield {"preset": "zero1"}, range(1, first + 1)
        yield {"preset": "zero1", **self.plan}, range(first + 1, steps + 1)


def _fp8(recipe: str) -> Variant:
    """The layers that `skip: [auto]` leaves out of a larger model: the first and the last one."""
    fp8 = {"recipe": recipe, "skip": ["blocks.0.qkv", "head"]}
    return Variant({"precision": "bf16", "fp8": fp8}, "bf16", FP8_BAR)


_wired = partial(Variant, beside="fp32", bar=WIRE_BAR, num_ranks=2)
_ISLANDS = {"every": 20, "optimizer": {"lr": 1.0, "momentum": 0.0}}
VARIANTS = {
    "bf16": Variant({"precision": "bf16"}),
    "nudged": Variant({"precision": "bf16"}, "bf16", nudge=1e-4),
    **{name: _fp8(name) for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")},
    "fp32": Variant(num_ranks=2),
    "int8": _wired({"preset": "zero3", "wire": {"param": "int8", "grad": "int8"}}),
    "int8+int4": _wired({"preset": "zero3", "wire": {"param": "int8", "grad": "int4"}}),
    "fp8-wire": _wired({"preset": "zero3", "wire": {"param": "fp8"}}),
    **{
        f"powersgd-{rank}": _wired({"preset": "ddp", "powersgd": {"rank": rank, "start_step": FACTORS_START}})
        for rank in FACTORS
    },
    **{f"torch-powersgd-{rank}": Variant(beside="fp32", num_ranks=2, hook_factors=rank) for rank in FACTORS},
    "adam": Variant({"preset": "ddp"}, num_ranks=2, optimizer=partial(onebit_adam, freeze_step=_NEVER)),
    "onebit-adam": _wired({"preset": "ddp"}, beside="adam", optimizer=onebit_adam),
    "zero-one-adam": _wired({"preset": "ddp"}, beside="adam", optimizer=zero_one_adam),
    "lamb": Variant({"preset": "ddp"}, num_ranks=2, optimizer=partial(onebit_lamb, freeze_step=_NEVER)),
    "onebit-lamb": _wired({"preset": "ddp"}, beside="lamb", optimizer=onebit_lamb),
    "islands": _wired({"mesh": {"island": 2, "dp": -1}, "islands": _ISLANDS}, together=0.5),
}


def main(args: argparse.Namespace, console: Console) -> int:
    """0; 1 if a variant is shown to learn less than it should."""
    num_seeds, steps = (1, 20) if args.quick else (args.seeds or NUM_SEEDS, args.steps or STEPS)
    asked = args.variants or tuple(VARIANTS)
    needed = dict.fromkeys(name for each in asked for name in (VARIANTS[each].beside, each) if name)
    text, file = Text.of_the_library(args.text), args.out / "learning.jsonl"
    settings = {"steps": steps, "width": args.width or WIDTH, "rows": ROWS, "seq": SEQ, "text": text.checksum}
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for seed in range(num_seeds):
        there = {(line["seed"], line["variant"]) for line in lines_of(file, settings)}
        for name in needed:
            if (seed, name) not in there:
                run = train(VARIANTS[name], text, seed, settings, args.text)
                line = {"variant": name, "seed": seed, **settings, **run}
                with file.open("a") as out:
                    out.write(json.dumps(line) + "\n")
                console.print(f"{name}, seed {seed}: {line['loss']:.4f}", markup=False)
    pairs = [pairs_of(name, lines_of(file, settings)) for name in needed if VARIANTS[name].beside]
    show([each for each in pairs if each.shares], settings, console)
    console.print(f"\n{file}", markup=False)
    return 1 if any(each.verdict == "no" for each in pairs) and not args.quick else 0


# -- one run -------------------------------------------------------------------------------------------------


def train(variant: Variant, text: Text, seed: int, settings: Mapping[str, int], root: Path = ROOT) -> Line:
    """The losses of one run, and what it took. Whole batches are divided among ranks, which are threads; those of
    torch's DDP are processes, which read the text of `root`."""
    start, cpu = time.perf_counter(), time.process_time()
    if variant.hook_factors:
        line: Line = _hooked(variant, seed, settings, root)
        return {**line, "seconds": time.perf_counter() - start}
    width = settings["width"]
    first = {name: value.clone() for name, value in first_model(seed, width).state_dict().items()}
    if variant.nudge:
        first = {name: value * (1 + variant.nudge * torch.randn(value.shape)) for name, value in first.items()}
    models = [first_model(seed, width) for _ in range(variant.num_ranks)]
    for model in models:
        model.load_state_dict(first)
    hosts = [f"host-{rank}" for rank in range(variant.num_ranks)]
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as folder:
        run = Run(variant, models, text, seed, settings["steps"], Path(folder))
        losses = run_ranks(variant.num_ranks, run.on_rank, hosts=hosts, timeout_seconds=_MOST_SECONDS)[0]
    return {**losses, "seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}


def _hooked(variant: Variant, seed: int, settings: Mapping[str, int], root: Path) -> Line:
    given = {"factors": variant.hook_factors, "start": FACTORS_START, "seed": seed, "text": root}
    given |= {name: settings[name] for name in ("width", "steps")}
    arguments = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    every = fresh.run_ranks(
        "benchmarks.learning_rank", arguments, num_ranks=variant.num_ranks, timeout_seconds=_MOST_SECONDS
    )
    return {**every[0], "cpu_seconds": sum(one["cpu_seconds"] for one in every)}


@dataclass(frozen=True)
class Run:
    """What the ranks of one run have in common; `models` has one for each."""

    variant: Variant
    models: Sequence[GPT]
    text: Text
    seed: int
    steps: int
    folder: Path
    """For the checkpoint from one phase to the next."""

    def on_rank(self, world: sw.World) -> dict[str, float]:
        """The loss of the averaged model on unseen text, and the mean loss of the last fifth of all steps."""
        model, numbers = self.models[world.rank], torch.Generator().manual_seed(self.seed)
        losses: list[float] = []
        checkpoints: list[dict[str, Tensor]] = []
        for plan, steps in self.variant.phases(self.steps):
            optimizer = self.variant.optimizer(list(model.parameters()))
            with sw.shard(model, plan, optimizer=optimizer, world=world) as engine:
                if steps[0] > 1:
                    engine.resume(self.folder)
                for number in steps:
                    losses.append(self._step(engine, optimizer, number, numbers))
                    if is_checkpoint(number, self.steps):
                        checkpoints.append(engine.state_dict())
                if steps[-1] < self.steps:
                    engine.save(self.folder)
                else:
                    engine.load_state_dict(averaged(checkpoints))
                    place, num = world.rank, world.size
                    unseen = engine.mean(self.text.unseen_loss(engine, place, num))
                    trained = engine.mean(mean(losses[-self.steps // 5 :]))
        return {"loss": unseen, "loss_in_training": trained}

    def _step(
        self, engine: sw.Engine, optimizer: torch.optim.Optimizer, number: int, numbers: torch.Generator
    ) -> float:
        for group in optimizer.param_groups:
            group["lr"] = rate_of(number, self.steps, optimizer.defaults["lr"])
        loss = engine(self.text.batch(numbers, ROWS).chunk(engine.world.size)[engine.world.rank])
        engine.backward(loss)
        engine.step()
        return float(loss.detach())


# -- what runs say together ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pairs:
    """A variant and the plain one in pairs of equal seeds. Each number is a share of the plain loss."""

    name: str
    shares: tuple[float, ...]
    """By how much more the variant's loss is, by seed."""
    seeds_apart: float
    """The standard deviation of the plain loss between seeds."""
    bar: float | None

    @property
    def mean(self) -> float:
        return mean(self.shares)

    @property
    def margin(self) -> float:
        """Half of the 95 % confidence interval of the mean."""
        num = len(self.shares)
        return _student(num - 1) * stdev(self.shares) / math.sqrt(num) if num > 1 else math.inf

    @property
    def verdict(self) -> str:
        """Whether the mean is within the bar: the whole interval, none of it, or part of it."""
        if self.bar is None or not self.shares:
            return ""
        if abs(self.mean) + self.margin <= self.bar:
            return "yes"
        return "no" if abs(self.mean) - self.margin > self.bar else "undecided"


_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10)
"""Of Student's t with 1, 2, ... degrees of freedom, what 95 % of all values are within."""


def _student(degrees: int) -> float:
    return _STUDENT[min(degrees, len(_STUDENT)) - 1]


def lines_of(file: Path, settings: Mapping[str, int]) -> list[Line]:
    """The runs that `file` has with these settings."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in lines if settings.items() <= line.items()]


def pairs_of(name: str, lines: Sequence[Line]) -> Pairs:
    variant = VARIANTS[name]
    plain = {line["seed"]: line["loss"] for line in lines if line["variant"] == variant.beside}
    own = {line["seed"]: line["loss"] for line in lines if line["variant"] == name}
    shares = tuple(own[seed] / plain[seed] - 1 for seed in sorted(own.keys() & plain.keys()))
    apart = stdev(plain.values()) / mean(plain.values()) if len(plain) > 1 else math.nan
    return Pairs(name, shares, apart, variant.bar)


def show(pairs: Sequence[Pairs], settings: Mapping[str, int], console: Console) -> None:
    columns = ["", "beside", "pairs", "loss", "deviation of seeds", "in these", "bar", "within the bar"]
    title = f"width {settings['width']}, {settings['steps']} steps: loss on unseen text, beside the same seed's"
    show_figures(title, columns, list(_cells(pairs)), console)


def _cells(pairs: Sequence[Pairs]) -> Iterator[list[str]]:
    for each in pairs:
        margin = f" ± {each.margin:.2%}" if math.isfinite(each.margin) else ""
        known = not math.isnan(each.seeds_apart)
        yield [
            each.name,
            VARIANTS[each.name].beside,
            str(len(each.shares)),
            f"{each.mean:+.2%}{margin}",
            f"{each.seeds_apart:.2%}" if known else "",
            f"{each.mean / each.seeds_apart:+.2f}" if known else "",
            f"{each.bar:.2%}" if each.bar is not None else "",
            each.verdict,
        ]
