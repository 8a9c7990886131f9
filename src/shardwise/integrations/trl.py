"""Where TRL's trainers that generate have the weights from: an engine that shards them, gathered for a round of
generation or loaded into vLLM.

[Note: in the instance] A script that knows nothing of us derives TRL's classes from our Trainer, so TRL's methods come
before those of our mixin; in a class of its own the mixin comes first. So methods are replaced in the trainer itself.
TRL (1.16) has two ways to vLLM: `VLLMGeneration`, and in `OnlineDPOTrainer` methods from the time before it. Either
loads into a server, by rank 0, or with `vllm_mode="colocate"` into an engine of vLLM in each rank's process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from shardwise.errors import ConfigError, StateError

_ROUNDS = ("_generate_single_turn", "_generate")
"""What generates from beginning to end, the first that a trainer has: `_generate` calls tools between turns if there
are turns."""
_WALK = "_move_model_to_vllm_inner"


def feed_generation(trainer: Any) -> None:
    """Give `trainer`, which has an engine, its weights when it generates; others are left as they are. Asked again, it
    changes nothing. Raises `ConfigError` for a trainer whose way to vLLM is not known here."""
    if getattr(trainer.args, "use_vllm", False):
        if hasattr(trainer, "vllm_generation"):  # its own walks over the model's parameters, which are sharded
            trainer.vllm_generation._iter_named_params = lambda: iter(_weights(trainer))
        elif hasattr(trainer, _WALK):
            setattr(trainer, _WALK, partial(_load, trainer))
        else:
            raise ConfigError(
                f"{type(trainer).__name__} has a way of its own to load weights into vLLM, and would take shards for "
                f"whole weights. Leave out use_vllm."
            )
    elif hasattr(trainer.args, "ds3_gather_for_generation"):
        name = next((one for one in _ROUNDS if hasattr(trainer, one)), None)
        keep_bytes = None if trainer.args.ds3_gather_for_generation else 0  # then each token gathers, unit by unit
        if name is not None:
            setattr(trainer, name, partial(_gathered, trainer, getattr(type(trainer), name), keep_bytes))


def _gathered(trainer: Any, generate: Callable[..., Any], keep_bytes: int | None, *args: Any, **kwargs: Any) -> Any:
    with trainer.engine.inference(keep_bytes):
        return generate(trainer, *args, **kwargs)


def _weights(trainer: Any) -> Any:
    """Whole tensors one by one, in the dtype that the model had. All ranks iterate, to the end."""
    if trainer.engine is None:
        raise StateError("vLLM gets the weights of a model that is sharded, and this one was released. Call train().")
    return trainer.engine.weights(dtype=trainer.accelerator.dtype_before(trainer.model))


def _load(trainer: Any) -> None:
    """OnlineDPOTrainer's walk. All ranks call; one whose vLLM fails takes part to the end."""
    receive: Callable[..., Any] | None = None
    if trainer.vllm_mode == "colocate":
        model = trainer.llm.llm_engine.model_executor.driver_worker.model_runner.model
        receive = lambda name, tensor: model.load_weights([(name, tensor)])  # noqa: E731
    elif trainer.accelerator.is_main_process:
        receive = trainer.vllm_client.update_named_param
    _weights(trainer).send(receive)
