"""One rank of `integrations`: a script of some library, in its own form or on our engine; and the plain loop."""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from benchmarks.engines import adamw
from benchmarks.llama import LlamaSize, transformers_config
from benchmarks.worker import warm_up
from shardwise.system.process_memory import PeakOverBaseline

SIZES = {
    "tiny": LlamaSize.of_width(num_blocks=2, dim=128, seq=32, batch=1),
    "small": LlamaSize.of_width(num_blocks=6, dim=512, seq=64, batch=2, vocab=4096),
}
NUM_WARM = 3
CLIP = 1.0
SYSTEMS = {
    "plain": "benchmarks.integrations_rank",
    "trainer": "benchmarks.integrations_huggingface",
    "accelerate": "benchmarks.integrations_huggingface",
    "lightning": "benchmarks.integrations_lightning",
    "deepspeed": "benchmarks.integrations_deepspeed",
}
"""Where the function of each system is, by its name in `FORMS`: `form(ours, sharding, script)`."""
Rows = list[dict[str, Tensor]]


class Script:
    """What all forms have in common: a model, rows of tokens, the clock. A form calls `tick` after each step."""

    def __init__(self, size: LlamaSize, num_steps: int) -> None:
        self.size = size
        self.num_steps = NUM_WARM + num_steps
        self._ends: list[float] = []
        self._cpu: list[float] = []
        self.losses: list[float] = []

    def model(self) -> nn.Module:
        """The same on every rank."""
        from transformers import LlamaForCausalLM

        torch.manual_seed(0)
        return LlamaForCausalLM(transformers_config(self.size))

    def rows(self, num_ranks: int) -> Rows:
        """Of all ranks, for all steps."""
        draw = torch.Generator().manual_seed(1)
        count = self.size.batch * num_ranks * self.num_steps
        ids = torch.randint(0, self.size.vocab, (count, self.size.seq), generator=draw)
        return [{"input_ids": row, "labels": row} for row in ids]

    def batches(self, rank: int, num_ranks: int) -> Iterator[dict[str, Tensor]]:
        """This rank's, dealt as samplers of torch do."""
        own = self.rows(num_ranks)[rank::num_ranks]
        for start in range(0, len(own), self.size.batch):
            taken = own[start : start + self.size.batch]
            yield {name: torch.stack([row[name] for row in taken]) for name in taken[0]}

    def tick(self) -> None:
        """A step is over."""
        self._ends.append(time.perf_counter())
        self._cpu.append(time.process_time())

    def figures(self) -> dict[str, float]:
        """Of the steps after the first few; the mean of all losses that were told."""
        ends, cpu = self._ends[NUM_WARM - 1 :], self._cpu[NUM_WARM - 1 :]
        return {
            "step_seconds": median(after - before for before, after in itertools.pairwise(ends)),
            "cpu_seconds": (cpu[-1] - cpu[0]) / (len(cpu) - 1),
            "loss": sum(self.losses) / len(self.losses),
        }


def measured(system: str, form: str, sharding: str, size: str, num_steps: int) -> Mapping[str, Any]:
    """Run one form; this rank's figures."""
    torch.set_num_threads(1)
    warm_up(torch.device("cpu"))
    script = Script(SIZES[size], num_steps)
    run: Callable[[bool, str, Script], None] = importlib.import_module(SYSTEMS[system]).FORMS[system]
    with PeakOverBaseline() as memory:
        run(form != "peer", sharding, script)
    return {**script.figures(), "peak_bytes": memory.peak_bytes}


def plain(ours: bool, sharding: str, script: Script) -> None:
    """Our engine in a loop of one's own."""
    assert ours
    with sw.World.join() as world:
        model = script.model()
        engine = sw.shard(model, sharding, optimizer=adamw(model), world=world)
        for batch in script.batches(world.rank, world.size):
            loss = model(**batch).loss
            engine.backward(loss)
            engine.clip_grad_norm_(CLIP)
            engine.step()
            script.losses.append(engine.mean(loss.item()))
            script.tick()


FORMS = {"plain": plain}
