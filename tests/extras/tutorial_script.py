"""Runs the script that is named, as a rank does."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torchvision_operators  # noqa: F401  # transformers imports torchvision where there is one

sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
