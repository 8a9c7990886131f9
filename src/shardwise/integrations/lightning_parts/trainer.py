"""The Trainer, or the Fabric, of an unmodified script: its strategy is ours, whichever it names."""

from __future__ import annotations

import os
from typing import Any, ClassVar

_Base: Any = object
_ANOTHER = ("auto", "ddp", "fsdp", "deepspeed", "shardwise", "single_device", "model_parallel")


class TrainerMixin(_Base):
    """In front of Lightning's Trainer, and of its Fabric."""

    strategy_class: ClassVar[Any]

    def __init__(self, *args: Any, strategy: Any = "auto", devices: Any = "auto", **kwargs: Any) -> None:
        """See Lightning. A strategy for training on several devices, by name or as an object, becomes ours; number of
        devices and strategy settings are the launcher's and the plan's."""
        is_ours = isinstance(strategy, self.strategy_class)
        if not is_ours and (not isinstance(strategy, str) or strategy.lower().startswith(_ANOTHER)):
            strategy = self.strategy_class()
        launched = os.environ.get("LOCAL_WORLD_SIZE")
        super().__init__(*args, strategy=strategy, devices=devices if launched is None else int(launched), **kwargs)


def trainer_over(trainer: type, strategy_class: type) -> type:
    """A Trainer class with the mixin in front of it."""
    known = {"__doc__": trainer.__doc__, "__module__": trainer.__module__, "strategy_class": strategy_class}
    return type(trainer.__name__, (TrainerMixin, trainer), known)


def fabric_over(fabric: type, strategy_class: type) -> type:
    """A Fabric class with the same in front of it."""
    return trainer_over(fabric, strategy_class)
