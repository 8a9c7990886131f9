"""`python -m shardwise.integrations.run --plan PLAN [-m] script args...`: an unmodified script over our engine.

What `shardwise launch --shardwise PLAN` runs on every rank; under `torchrun -m shardwise.integrations.run` it is the
same. The script's own arguments are left as they are.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from shardwise.errors import ShardwiseError
from shardwise.integrations.scripts import run_script
from shardwise.integrations.takeover import Takeover
from shardwise.places import place_of

USAGE = "usage: python -m shardwise.integrations.run --plan PLAN [-m] script [arguments]"


def main(arguments: Sequence[str]) -> None:
    """Run the script; `SystemExit` with 2 for a command line or a plan that is none."""
    words = list(arguments)
    if len(words) < 3 or words[0] != "--plan":
        raise SystemExit(USAGE)
    plan, command = words[1], words[2:]
    try:
        takeover = Takeover(json.loads(plan) if plan.startswith("{") else plan)
    except ShardwiseError as error:
        print(f"shardwise: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    takeover.install()
    run_script(command)
    if not takeover.is_used and not place_of(os.environ).rank:
        print(
            f"shardwise: the script made no Trainer of transformers and no Accelerator, and no Trainer of Lightning, "
            f"so {plan} was given to nobody. In a plain loop call "
            f"engine = sw.shard(model, {plan!r}, optimizer=optimizer).",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
