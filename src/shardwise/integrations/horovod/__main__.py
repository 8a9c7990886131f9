"""`python -m shardwise.integrations.horovod script.py ...` runs an unmodified Horovod script with shardwise.

`shardwise launch --as-horovod script.py ...` does so on every rank.
"""

from __future__ import annotations

import sys

from shardwise.integrations.horovod.import_hook import install
from shardwise.integrations.scripts import run_script


def main() -> None:
    """Run the script on the command line with shardwise in place of Horovod."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m shardwise.integrations.horovod [-m] script.py [its arguments]")
    install()
    run_script(sys.argv[1:])


if __name__ == "__main__":
    main()
