"""Engines of one job that take turns: ratios of neighbours in time, whatever else the machine does."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from benchmarks.schedule import interleaved

NUM_WARM = 4
"""Steps that are not timed; after them losses are compared, before rounding has grown."""


class Trainer(NamedTuple):
    """One engine's step in two parts, which all ranks call: forward and backward of a batch, and the update."""

    passes: Callable[[], Tensor]
    update: Callable[[], object]


class Turn(NamedTuple):
    """What one engine took in one round: seconds of a step, of its forward and backward alone, and of the processor
    for a step; and its loss after the first few steps."""

    engine: str
    round: int
    step_seconds: float
    passes_seconds: float
    cpu_seconds: float
    loss: float


def take_turns(trainers: Mapping[str, Trainer], num_rounds: int, num_steps: int) -> list[Turn]:
    """The median step of each turn; after some that are not timed."""
    losses = {name: _warmed(trainer) for name, trainer in trainers.items()}
    turns = interleaved(list(trainers), num_rounds)
    return [Turn(name, number, *_timed(trainers[name], num_steps), losses[name]) for number, name in turns]


def _warmed(trainer: Trainer) -> float:
    for _ in range(NUM_WARM):
        loss = trainer.passes()
        trainer.update()
    return loss.item()


def _timed(trainer: Trainer, num_steps: int) -> tuple[float, float, float]:
    steps, passes = [], []
    cpu_before = time.process_time()
    for _ in range(num_steps):
        dist.barrier()
        start = time.perf_counter()
        trainer.passes()
        middle = time.perf_counter()
        trainer.update()
        dist.barrier()
        steps.append(time.perf_counter() - start)
        passes.append(middle - start)
    return median(steps), median(passes), (time.process_time() - cpu_before) / num_steps


# -- what the turns of all ranks come to. Pure ------------------------------------------------------------


class Standing(NamedTuple):
    """One engine over all rounds: medians, and the medians of the ratios to others in the same round, by their names:
    of steps, and of the processor's time, which shows work that others do on the machine less."""

    engine: str
    step_seconds: float
    passes_seconds: float
    cpu_seconds: float
    over: dict[str, float]
    cpu_over: dict[str, float]
    loss: float


def standings(ranks: Sequence[Sequence[Sequence[Any]]], over: Sequence[str]) -> list[Standing]:
    """`ranks` are the turns of each rank, in one order. Of each turn the slower rank counts; of losses the last's."""
    turns = [_slowest([Turn(*one) for one in own]) for own in zip(*ranks, strict=True)]
    by_round = {(turn.engine, turn.round): turn for turn in turns}
    others = [other for other in over if (other, 0) in by_round]
    rows = []
    for engine in dict.fromkeys(turn.engine for turn in turns):
        own = [turn for turn in turns if turn.engine == engine]
        pairs = {other: [(turn, by_round[other, turn.round]) for turn in own] for other in others}
        rows.append(
            Standing(
                engine,
                median(turn.step_seconds for turn in own),
                median(turn.passes_seconds for turn in own),
                median(turn.cpu_seconds for turn in own),
                {name: median(a.step_seconds / b.step_seconds for a, b in each) for name, each in pairs.items()},
                {name: median(a.cpu_seconds / b.cpu_seconds for a, b in each) for name, each in pairs.items()},
                own[-1].loss,
            )
        )
    return rows


def _slowest(ranks: Sequence[Turn]) -> Turn:
    """One turn of all ranks; the last has the loss."""
    return ranks[-1]._replace(
        step_seconds=max(turn.step_seconds for turn in ranks),
        passes_seconds=max(turn.passes_seconds for turn in ranks),
        cpu_seconds=max(turn.cpu_seconds for turn in ranks),
    )
