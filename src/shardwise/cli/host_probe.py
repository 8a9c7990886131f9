"""What one host says of itself, as JSON: run there by `shardwise doctor --hosts`. Needs no torch."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
from importlib import metadata

VERSIONS = ("torch", "numpy", "safetensors")


def facts(folders: list[str]) -> dict[str, object]:
    """Versions of what has to be the same everywhere, and which of `folders` can be written."""
    here = {"python": platform.python_version()}
    for name in ("shardwise", *VERSIONS):
        try:
            here[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            here[name] = "missing"
    writable = {folder: os.path.isdir(folder) and os.access(folder, os.W_OK) for folder in folders}
    return {"host": socket.gethostname(), "versions": here, "folders": writable, "cores": os.cpu_count() or 1}


if __name__ == "__main__":
    print(json.dumps(facts(sys.argv[1:])))
