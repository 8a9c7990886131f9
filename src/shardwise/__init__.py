"""shardwise: train PyTorch models that do not fit.

A training step is a table turned into a list. `shard` takes a model, a plan and an optimizer, and
runs the training step with every tensor where the plan says.

Names are imported when first used, so that `import shardwise` costs nothing and the command line
answers at once.
"""

from __future__ import annotations

import gc
import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from shardwise.version import __version__

if TYPE_CHECKING:
    from shardwise import data, optim
    from shardwise.checkpoint import Keep
    from shardwise.checkpoint.formats import convert, inspect
    from shardwise.checkpoint.published import published, unpublish, versions_in_use
    from shardwise.comm import World
    from shardwise.engine import Engine, choose_plan, shard
    from shardwise.errors import ShardwiseError
    from shardwise.inference import load_for_inference
    from shardwise.init import deferred_init
    from shardwise.observe.layer_outputs import layer_outputs
    from shardwise.parallel import experts, tensor
    from shardwise.parallel.chunked_logits import chunked_cross_entropy, chunked_log_probs
    from shardwise.plan import Plan, load_plan
    from shardwise.plan.mesh import Mesh

__all__ = [
    "Engine",
    "Keep",
    "Mesh",
    "Plan",
    "ShardwiseError",
    "World",
    "__version__",
    "choose_plan",
    "chunked_cross_entropy",
    "chunked_log_probs",
    "convert",
    "data",
    "deferred_init",
    "experts",
    "inspect",
    "layer_outputs",
    "load_for_inference",
    "load_plan",
    "optim",
    "published",
    "shard",
    "tensor",
    "unpublish",
    "versions_in_use",
]

_HOMES = {
    "Engine": "shardwise.engine",
    "Keep": "shardwise.checkpoint",
    "Mesh": "shardwise.plan.mesh",
    "Plan": "shardwise.plan",
    "ShardwiseError": "shardwise.errors",
    "World": "shardwise.comm",
    "choose_plan": "shardwise.engine",
    "chunked_cross_entropy": "shardwise.parallel.chunked_logits",
    "chunked_log_probs": "shardwise.parallel.chunked_logits",
    "convert": "shardwise.checkpoint.formats",
    "deferred_init": "shardwise.init",
    "inspect": "shardwise.checkpoint.formats",
    "layer_outputs": "shardwise.observe.layer_outputs",
    "load_for_inference": "shardwise.inference",
    "load_plan": "shardwise.plan",
    "published": "shardwise.checkpoint.published",
    "shard": "shardwise.engine",
    "unpublish": "shardwise.checkpoint.published",
    "versions_in_use": "shardwise.checkpoint.published",
}

_PACKAGES = {
    "data": "shardwise.data",
    "experts": "shardwise.parallel.experts",
    "optim": "shardwise.optim",
    "tensor": "shardwise.parallel.tensor",
}


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return _imported(_PACKAGES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    return getattr(_imported(_HOMES[name]), name)


def _imported(name: str) -> ModuleType:
    """Without looking for garbage meanwhile: an import makes next to none, and to go through all of torch's objects for
    it took a quarter of the time."""
    if not gc.isenabled():
        return importlib.import_module(name)
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.enable()
