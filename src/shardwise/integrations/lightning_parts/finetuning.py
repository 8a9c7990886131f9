"""Parameter groups that Lightning's `BaseFinetuning` had added when a checkpoint was written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_METADATA = "internal_optimizer_metadata"
"""The key of the callback's state: for each optimizer its groups, with names of parameters."""


def add_saved_groups(trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
    """Add them to the optimizers of `trainer`, before their states are loaded.

    The callback does so itself in `on_fit_start`, but only if the checkpoint was read before the module was sharded.
    """
    params = dict(module.named_parameters())
    for callback in _callbacks(trainer):
        state = checkpoint.get("callbacks", {}).get(callback.state_key, {})
        for number, groups in state.get(_METADATA, state).items():
            optimizer = trainer.optimizers[number]
            for group in groups[len(optimizer.param_groups) :]:
                optimizer.add_param_group({**group, "params": [params[name] for name in group["params"]]})


def forget_saved_groups(trainer: Any) -> None:
    """The groups are there: `on_fit_start` of a later fit, with another optimizer, must not add them."""
    for callback in _callbacks(trainer):
        callback._restarting = False


def _callbacks(trainer: Any) -> Iterator[Any]:
    """The `BaseFinetuning` of either of Lightning's packages."""
    return (one for one in trainer.callbacks if hasattr(one, f"_{_METADATA}"))
