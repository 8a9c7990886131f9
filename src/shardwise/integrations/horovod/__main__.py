"""`python -m shardwise.integrations.horovod script.py ...` runs an unmodified Horovod script with shardwise.

`shardwise launch --as-horovod script.py ...` does so on every rank.
"""

from __future__ import annotations

import os
import sys

from shardwise.integrations.horovod.import_hook import install
from shardwise.launch.run_script import run_script
from shardwise.system.process_rank import process_rank_of


def main() -> None:
    """Run the script on the command line with shardwise in place of Horovod."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m shardwise.integrations.horovod [-m] script.py [its arguments]")
    install()
    process = process_rank_of(os.environ)
    known = {
        "RANK": process.rank,
        "SIZE": process.size,
        "LOCAL_RANK": process.local_rank,
        "LOCAL_SIZE": process.local_size,
    }
    os.environ |= {f"HOROVOD_{name}": str(value) for name, value in known.items() if value is not None}
    run_script(sys.argv[1:])


if __name__ == "__main__":
    main()
