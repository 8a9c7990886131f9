"""Trainer and Fabric of an unmodified script, with our strategy instead of the script's."""

from __future__ import annotations

import os
from typing import Any, ClassVar

_Base: Any = object
_REPLACED = ("auto", "ddp", "fsdp", "deepspeed", "shardwise", "single_device", "model_parallel")


class TrainerMixin(_Base):
    """A mixin for Lightning's Trainer and Fabric."""

    strategy_class: ClassVar[Any]

    def __init__(self, *args: Any, strategy: Any = "auto", devices: Any = "auto", **kwargs: Any) -> None:
        """See Lightning. Any strategy for several devices is replaced by ours. The launcher sets the number of devices,
        and the plan replaces strategy settings."""
        is_ours = isinstance(strategy, self.strategy_class)
        if not is_ours and (not isinstance(strategy, str) or strategy.lower().startswith(_REPLACED)):
            strategy = self.strategy_class()
        launched = os.environ.get("LOCAL_WORLD_SIZE")
        super().__init__(*args, strategy=strategy, devices=devices if launched is None else int(launched), **kwargs)


def trainer_over(trainer: type, strategy_class: type) -> type:
    """A subclass of a Trainer class, or of Fabric, with the mixin."""
    known = {"__doc__": trainer.__doc__, "__module__": trainer.__module__, "strategy_class": strategy_class}
    return type(trainer.__name__, (TrainerMixin, trainer), known)
