"""`deepspeed.DeepSpeedHybridEngine`: an engine that trains, and generates with the weights of the last step."""

from __future__ import annotations

from typing import Any

from shardwise.errors import StateError
from shardwise.integrations.deepspeed.engine import DeepSpeedEngine
from shardwise.integrations.deepspeed.generation import Generation, bytes_to_keep


class DeepSpeedHybridEngine(DeepSpeedEngine):
    """What `initialize` returns for a config with `hybrid_engine: {enabled: true}`.

    `generate`, of the engine and of its module, computes what the plain model would, by the model's own code and with
    its own cache, for every model, ZeRO stage and adapter. All ranks call it; prompts and numbers of tokens may differ
    from rank to rank.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        Generation.install(self.shardwise, bytes_to_keep(self.shardwise, self._config))

    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's `generate`, inside `Engine.inference`. Raises `StateError` if the model has none."""
        if not hasattr(self.module, "generate"):
            raise StateError(
                f"{type(self.module).__name__} has no generate(). Call the model inside `with "
                f"engine.shardwise.inference():` instead."
            )
        return self.module.generate(*inputs, **kwargs)  # type: ignore[operator]

    def destroy(self) -> None:
        """Remove all hooks. Parameters stay sharded."""
        Generation.remove(self.module)
        super().destroy()
