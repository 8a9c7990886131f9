"""`python -m shardwise.integrations.run --plan PLAN [-m] script args...`: runs an unmodified script on our engine.

`shardwise launch --shardwise PLAN` runs this on every rank; `torchrun -m shardwise.integrations.run` works too. The
script's own arguments are not changed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from shardwise.errors import ShardwiseError
from shardwise.integrations.takeover import Takeover
from shardwise.launch.run_script import run_script
from shardwise.system.printable import printable
from shardwise.system.process_rank import process_rank_of

USAGE = "usage: python -m shardwise.integrations.run --plan PLAN [-m] script [arguments]"


def main(arguments: Sequence[str]) -> None:
    """Run the script. Raises `SystemExit` for an invalid command line, and with code 2 for an invalid plan."""
    words = list(arguments)
    if len(words) < 3 or words[0] != "--plan":
        raise SystemExit(USAGE)
    plan, command = words[1], words[2:]
    try:
        takeover = Takeover(plan)
    except ShardwiseError as error:
        print(f"shardwise: {printable(str(error))}", file=sys.stderr)
        raise SystemExit(2) from None
    takeover.install()
    run_script(command)
    if not takeover.is_used and not process_rank_of(os.environ).rank:
        why = (
            f"shardwise: the script created no Trainer of transformers or Lightning, and no Accelerator, so the plan "
            f"{plan} had no effect. In a plain loop call engine = sw.shard(model, {plan!r}, optimizer=optimizer)."
        )
        print(printable(why), file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
