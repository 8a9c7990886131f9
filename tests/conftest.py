"""Settings that every test shares."""

from __future__ import annotations

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("busy", deadline=None)  # a machine that does other things must not fail a test
settings.load_profile("busy")
