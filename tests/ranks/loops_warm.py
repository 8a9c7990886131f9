"""Imported once in the server that children are forked from: all actions, and modules that a backward needs."""

from __future__ import annotations

import loops_cells  # noqa: F401
import torch._dynamo  # noqa: F401  # a first backward under hooks imports it, which takes seconds

import shardwise as sw
from shardwise.testing import prepare_operators

sw.shard  # noqa: B018  # imports the engine, which takes as long as five actions
prepare_operators()
