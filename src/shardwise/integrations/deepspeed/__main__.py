"""`python -m shardwise.integrations.deepspeed script.py ...` runs an unmodified DeepSpeed script with shardwise.

`shardwise launch --as-deepspeed script.py ...` does so on every rank. The script may import DeepSpeed, or give a
DeepSpeed config to Transformers' `TrainingArguments` or to Accelerate; without a config it is trained as under DDP.
"""

from __future__ import annotations

import os
import sys

from shardwise.integrations.deepspeed.distribution import register_distribution
from shardwise.integrations.deepspeed.facade import VERSION, install
from shardwise.integrations.takeover import Takeover
from shardwise.launch.run_script import run_script

_LOCAL_RANK = "--local-rank"
"""Gives the script `--local_rank=N`, as DeepSpeed's launcher does."""


def main() -> None:
    """Run the script on the command line with shardwise in place of DeepSpeed."""
    words = sys.argv[1:]
    has_rank = words[:1] == [_LOCAL_RANK]
    words = words[has_rank:]
    if not words or words == ["-m"]:
        sys.exit("usage: python -m shardwise.integrations.deepspeed [--local-rank] [-m] script.py [its arguments]")
    if has_rank:  # before the script's own arguments
        position = 1 + (words[0] == "-m")
        words.insert(position, f"--local_rank={os.environ.get('LOCAL_RANK', '0')}")
    install()
    register_distribution(VERSION)
    Takeover("ddp", as_deepspeed=True).install()
    run_script(words)


if __name__ == "__main__":
    main()
