"""Run by `test_full_disk_of_run.py`: full_disk_rank.py FOLDER before|later, on a small file system.

Two ranks train; the disk is full before the first step, or in steps 5 to 8. Prints what was found, as JSON.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ShardwiseError
from shardwise.observe import read_record
from shardwise.testing import run_ranks

MANY = {f"value{number}": float(number) for number in range(400)}
"""Lines longer than what may be left of a file's last page."""


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def fill(path: Path) -> None:
    """Until not a byte is left."""
    with path.open("ab", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            try:
                while file.write(b"0" * size) == size:
                    pass
            except OSError:
                continue


def main(folder: Path, first: str) -> None:
    kept, filler, run = Kept(), folder / "filler", folder / "run"
    logging.getLogger("shardwise").addHandler(kept)
    models = [nn.Linear(8, 8) for _ in range(2)]
    run.mkdir()
    if first == "before":
        fill(filler)

    def rank(world: sw.World) -> int:
        model = models[world.rank]
        plan = {"preset": "zero1", "run": str(run), "trackers": {"jsonl": {}, "csv": {}}}
        with sw.shard(model, plan, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), world=world) as engine:
            for step in range(1, 13):
                if first == "later" and world.rank == 0 and step == 5:
                    fill(filler)
                if first == "later" and world.rank == 0 and step == 9:
                    filler.unlink()
                loss = engine(torch.ones(2, 8)).square().mean()
                engine.backward(loss)
                engine.step()
                engine.log({"loss": loss.item(), **MANY})
            return engine.num_steps

    num_steps = run_ranks(2, rank)
    found: dict[str, object] = {"num_steps": num_steps, "warnings": kept.texts, "steps": [], "damaged": 0}
    try:
        record = read_record(run / "record.jsonl")
        found |= {"steps": [step for step, _ in record.column("loss")], "damaged": record.num_damaged}
    except ShardwiseError:
        pass  # there is none
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
