"""A process that samples from the newest weights of the job, in bf16, and leaves batches for it. It has no ranks.

    python examples/grpo/sampler.py WEIGHTS SAMPLES --prompts 16 --group 16 --seed 0

`grpo.py` starts it. For batch N it needs the weights after step N - 2 or N - 1: while the job trains on one batch, the
next one is sampled, so its weights are at most one step behind.
"""

from __future__ import annotations

import argparse
import os
from itertools import count
from pathlib import Path

import torch
from safetensors.torch import save_file

import shardwise as sw
from policy import Policy, answers, prompts
from shardwise.checkpoint.published import Published

READER = "sampler"
POLL_SECONDS = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, help="the folder in which the job publishes")
    parser.add_argument("samples", type=Path, help="the folder for batches")
    for name in ("prompts", "group", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    parent = os.getppid()
    draw = torch.Generator().manual_seed(args.seed)
    policy, version = Policy(), -1
    for number in count(1):
        while (found := newer(args.weights, version)) is None and version < number - 2:
            if os.getppid() != parent:
                return  # the job is over
        if found is not None:
            policy.load_state_dict(found.tensors(), assign=True)  # mapped: nothing is copied
            found.acknowledge(READER)
            version = found.version
        asked = prompts(args.prompts, draw).repeat_interleave(args.group, 0)
        rows, log_probs = answers(policy, asked, draw)
        write(args.samples, number, {"rows": rows, "log_probs": log_probs, "version": torch.tensor(version)})


def newer(weights: Path, version: int) -> Published | None:
    wait = 0.0 if version >= 0 else POLL_SECONDS
    return sw.published(weights, after=version, reader=READER, timeout=wait)


def write(folder: Path, number: int, batch: dict[str, torch.Tensor]) -> None:
    """It appears under its name when it is whole. The last but two has been trained on by all ranks."""
    draft = folder / f".batch-{number:08d}"
    save_file(batch, draft)
    draft.rename(batch_path(folder, number))
    batch_path(folder, number - 3).unlink(missing_ok=True)


def batch_path(folder: Path, number: int) -> Path:
    return folder / f"batch-{number:08d}.safetensors"


if __name__ == "__main__":
    main()
