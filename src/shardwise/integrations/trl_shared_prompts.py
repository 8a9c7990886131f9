"""TRL's trainers that generate, where ranks share prompts: those of one pipeline, or along `tp`.

[Note: one process] TRL (1.16) numbers prompts, completions and rewards by the process that has them, and takes the
rewards of a group from several. Ranks that share prompts are one process to it: a round has as many completions as
there are ranks with prompts of their own, and in steps and evaluations numbers of processes, and what is gathered, are
counted so. What could differ between these ranks is that of the first of them: samples that vLLM draws in each, and
rewards.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import shardwise as sw
from shardwise.errors import ConfigError, StateError

_CONFIGS = {"GRPOConfig", "RLOOConfig", "OnlineDPOConfig"}
_STEPS = ("training_step", "prediction_step")
_COLOCATED = "_generate_vllm_colocate"
_REWARDS = "_calculate_rewards_from_functions"
_SYNC = "sync_target_model"


def generates(args: Any) -> bool:
    """Whether these are the arguments of a trainer that generates."""
    return hasattr(args, "use_vllm")


def require_known(args: Any, plan: sw.Plan) -> None:
    """Raise `ConfigError` unless the trainer with these arguments can have ranks that share prompts, as `plan` does."""
    if (plan.mesh or {}).get("sp", 1) > 1:
        raise ConfigError(
            "The plan's mesh has sp, but trainers of TRL that generate take log-probabilities of whole completions, "
            "and a rank along sp has some of their tokens. Use data axes (dp, node, local), tp and pp."
        )
    if not any(kind.__name__ in _CONFIGS for kind in type(args).__mro__):
        raise ConfigError(
            f"{type(args).__name__} is that of a trainer which generates, and of these only GRPOTrainer, RLOOTrainer "
            f"and OnlineDPOTrainer of TRL let ranks share prompts, along tp or pp. Use a mesh of data axes only (dp, "
            f"node, local)."
        )


def count_completions_once(args: Any, ranks_per_batch: int) -> None:
    """Let a round of generation have as many completions as ranks with prompts of their own make; by TRL's count every
    rank makes some. Raises `ConfigError` if these are no whole groups."""
    if ranks_per_batch == 1 or not hasattr(args, "steps_per_generation") or args.world_size % ranks_per_batch:
        return  # a world that the mesh does not divide is refused when ranks meet
    num_batches = args.world_size // ranks_per_batch
    args.generation_batch_size = args.per_device_train_batch_size * num_batches * args.steps_per_generation
    _require_groups(args.generation_batch_size, args.num_generations, "A round of generation")
    if args.do_eval and args.eval_strategy != "no":
        num_rows = args.per_device_eval_batch_size * num_batches
        _require_groups(num_rows, args.num_generations_eval or args.num_generations, "A batch of an evaluation")


def _require_groups(num_completions: int, num_generations: int, what: str) -> None:
    if num_completions % num_generations:
        raise ConfigError(
            f"{what} has {num_completions} completions where ranks share prompts, which are no groups of "
            f"{num_generations} (num_generations). Give a device more samples, or a round more steps "
            f"(steps_per_generation)."
        )


def share_prompts(trainer: Any) -> None:
    """Let `trainer`, which has an engine, count ranks that share prompts as one process; others are left as they are.
    Asked again, it changes nothing."""
    if trainer.accelerator.ranks_per_batch == 1 or not generates(trainer.args):
        return
    for name in _STEPS:
        setattr(trainer, name, partial(_counting_once, trainer, getattr(type(trainer), name)))
    sampler = getattr(trainer, "vllm_generation", None)
    if sampler is not None:
        sampler.generate = partial(_of_first, trainer, type(sampler).generate, sampler)
    if hasattr(trainer, _COLOCATED):
        setattr(trainer, _COLOCATED, partial(_of_first, trainer, getattr(type(trainer), _COLOCATED), trainer))
    if hasattr(trainer, _REWARDS):
        setattr(trainer, _REWARDS, partial(_rewards_of_first, trainer, getattr(type(trainer), _REWARDS)))


def _counting_once(trainer: Any, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with trainer.accelerator.counting_batches_once():
        return step(trainer, *args, **kwargs)


def _of_first(trainer: Any, sample: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
    return trainer.accelerator.of_first_peer(sample(owner, *args, **kwargs), trainer.accelerator.world)


def _rewards_of_first(trainer: Any, reward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    rewards = reward(trainer, *args, **kwargs)
    return rewards.new_tensor(trainer.accelerator.of_first_peer(rewards.tolist(), trainer.accelerator.world))


def sync_reference(trainer: Any) -> None:
    """Let `sync_ref_model` of a `trainer` whose ranks have parts of the model read whole parameters. Raises
    `ConfigError` if it has another way than TRL's callback."""
    if trainer.accelerator.ranks_per_batch == 1 or not getattr(trainer.args, "sync_ref_model", False):
        return
    found = [one for one in trainer.callback_handler.callbacks if hasattr(one, _SYNC)]
    if not found:
        raise ConfigError(
            f"{type(trainer).__name__} has a way of its own to sync_ref_model, and would copy this rank's part of the "
            f"model. Leave sync_ref_model out, or the axes tp and pp."
        )
    for callback in found:
        setattr(callback, _SYNC, partial(_mix, trainer))


def _mix(trainer: Any, _: Any, target: Any, alpha: float) -> None:
    """Move each parameter of `target` towards the model's by the share `alpha`, as TRL's callback does. All ranks
    call."""
    in_stages = trainer.accelerator.engine_of(target)
    if in_stages is not None:
        for name, value in trainer.engine.weights(names="module"):
            own = in_stages.get(name)
            in_stages.set(name, own.mul(1.0 - alpha).add(value.to(own), alpha=alpha))
        return
    left = {name: param.data for name, param in target.named_parameters()}
    for name, value in trainer.engine.weights(names="module"):
        if name in left:
            own = left.pop(name)
            own.mul_(1.0 - alpha).add_(value.to(own), alpha=alpha)
    if left:
        raise StateError(f"The reference model has parameters that the model has not, such as {min(left)}.")
