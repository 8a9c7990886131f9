"""`python -m shardwise.integrations.deepspeed script.py ...`: an unmodified script of DeepSpeed, on shardwise.

`shardwise launch --as-deepspeed script.py ...` runs it on every rank.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from shardwise.integrations.deepspeed.facade import install


def main() -> None:
    """Run the script named on the command line with shardwise in the place of DeepSpeed."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m shardwise.integrations.deepspeed [-m] script.py [its arguments]")
    install()
    is_module, script = sys.argv[1] == "-m", sys.argv[2 if sys.argv[1] == "-m" else 1]
    del sys.argv[: 2 if is_module else 1]
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
