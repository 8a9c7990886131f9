"""One rank of a run that `shardwise plan --measure` times: `measured_rank.py TASK`, a JSON file."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

import shardwise as sw
from shardwise.cli.model_file import batch_from, real_model
from shardwise.errors import ConfigError
from shardwise.fit.batch_rows import rows_of, with_rows

NUM_WARM, NUM_TIMED = 2, 5
OPTIMIZERS: Mapping[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "momentum": lambda params: torch.optim.SGD(params, momentum=0.9),
    "lion": sw.optim.Lion,
    "lamb": sw.optim.Lamb,
    "adafactor": sw.optim.Adafactor,
}


def main(path: str) -> None:
    """Train a few steps, and write the median of their seconds, of the slowest rank."""
    task = json.loads(Path(path).read_text(encoding="utf-8"))
    make = OPTIMIZERS.get(task["optimizer"])
    if make is None:
        raise ConfigError(f"--measure cannot make the optimizer {task['optimizer']!r}: {', '.join(OPTIMIZERS)}.")
    torch.manual_seed(0)
    batch = batch_from(task["batch"])
    local = with_rows(batch, task["rows"], rows_of(batch))
    model = real_model(task["model"])
    with sw.shard(model, task["plan"], optimizer=make(model.parameters())) as engine:
        seconds = []
        for number in range(NUM_WARM + NUM_TIMED):
            begun = time.perf_counter()
            engine.train_step(local).item()
            if number >= NUM_WARM:
                seconds.append(time.perf_counter() - begun)
        slowest = max(map(float, engine.world.exchange(str(median(seconds)).encode(), "seconds")))
        if engine.world.rank == 0:
            Path(task["out"]).write_text(json.dumps(slowest), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
