"""`python -m shardwise.integrations.horovod script.py ...`: an unmodified script of Horovod, on shardwise.

`shardwise launch --as-horovod script.py ...` runs it on every rank.
"""

from __future__ import annotations

import sys

from shardwise.integrations.horovod.facade import install
from shardwise.integrations.scripts import run_script


def main() -> None:
    """Run the script named on the command line with shardwise in the place of Horovod."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m shardwise.integrations.horovod [-m] script.py [its arguments]")
    install()
    run_script(sys.argv[1:])


if __name__ == "__main__":
    main()
