"""One rank of a part: `python -m benchmarks.device.on_ranks PART`, started by the launcher, one for each GPU."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.device import codes, fp8, gaps, larger, memory, offload, several_gpus, speed
from benchmarks.device.rows import Rows
from shardwise import World

PARTS: dict[str, Callable[[Rows], None]] = {
    "several_gpus": several_gpus.run,
    "memory": memory.run,
    "speed": speed.run,
    "offload": offload.run,
    "larger": larger.run,
    "gaps": gaps.run,
    "fp8": fp8.run,
    "codes": codes.run,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    with World.join() as world:
        device = world.device if args.device != "cpu" else torch.device("cpu")
        PARTS[args.part](Rows(args.out, device, args.seconds, world))


if __name__ == "__main__":
    main()
