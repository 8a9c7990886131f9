"""`python -m shardwise.integrations.deepspeed script.py ...`: an unmodified script of DeepSpeed, on shardwise.

`shardwise launch --as-deepspeed script.py ...` runs it on every rank. A script may import DeepSpeed itself, or give a
DeepSpeed config to Transformers' `TrainingArguments` or to Accelerate; without any it is trained as under DDP.
"""

from __future__ import annotations

import os
import sys

from shardwise.integrations.deepspeed.distribution import present
from shardwise.integrations.deepspeed.facade import VERSION, install
from shardwise.integrations.scripts import run_script
from shardwise.integrations.takeover import Takeover

_LOCAL_RANK = "--local-rank"
"""Gives the script `--local_rank=N`, as DeepSpeed's launcher does."""


def main() -> None:
    """Run the script named on the command line with shardwise in the place of DeepSpeed."""
    words = sys.argv[1:]
    has_rank = words[:1] == [_LOCAL_RANK]
    words = words[has_rank:]
    if not words or words == ["-m"]:
        sys.exit("usage: python -m shardwise.integrations.deepspeed [--local-rank] [-m] script.py [its arguments]")
    if has_rank:  # in front of the script's own arguments
        behind = 1 + (words[0] == "-m")
        words.insert(behind, f"--local_rank={os.environ.get('LOCAL_RANK', '0')}")
    install()
    present(VERSION)
    Takeover("ddp", as_deepspeed=True).install()
    run_script(words)


if __name__ == "__main__":
    main()
