"""Accelerate scripts that select DeepSpeed, by a plugin or by `accelerate launch`: its config becomes the plan."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils.dataclasses import DeepSpeedPlugin
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.integrations.accelerate import Accelerator
from shardwise.integrations.deepspeed.config import ComponentConfig
from shardwise.integrations.deepspeed.initialization import make_optimizer
from shardwise.integrations.deepspeed.schedules import make_schedule
from shardwise.integrations.hf_deepspeed import TUNING_VARIABLE, USE_VARIABLE, read_with
from shardwise.integrations.hf_zero3 import LIVE
from shardwise.integrations.plans import PlanLike, without
from shardwise.system.flags import says_yes
from shardwise.system.printable import printable
from shardwise.system.process_rank import process_rank_of

_LOG_WITH = "accelerator.log writes to the trackers set by log_with of Accelerator"
_PLUGINS = ("deepspeed_plugin", "deepspeed_plugins")


class DeepSpeedAccelerator(Accelerator):
    """Accelerate's `Accelerator` for scripts that pass `deepspeed_plugin=`. Its config becomes the plan.

    `DummyOptim` and `DummyScheduler` become the config's optimizer and scheduler when they are prepared. If the config
    sets `gradient_clipping`, `optimizer.step()` clips. Without a plugin it behaves like its base class.
    """

    def __init__(self, *args: Any, plan: PlanLike | None = None, **kwargs: Any) -> None:
        self._plugin = None if plan is not None else _plugin_of(kwargs)
        if self._plugin is None:
            super().__init__(*args, plan=plan, **kwargs)
            return
        config = self._plugin.deepspeed_config
        num_steps = config.get("gradient_accumulation_steps")
        if isinstance(num_steps, int) and "gradient_accumulation_plugin" not in kwargs:
            given = kwargs.get("gradient_accumulation_steps", num_steps)
            if given not in (1, num_steps):
                raise ConfigError(
                    f"The DeepSpeed config sets gradient_accumulation_steps {num_steps}, but Accelerator is given "
                    f"{given}. Set only one of them."
                )
            kwargs["gradient_accumulation_steps"] = num_steps
        for name in ("bf16", "fp16"):
            if (config.get(name) or {}).get("enabled") is True and kwargs.get("mixed_precision") is None:
                kwargs["mixed_precision"] = name
        self._sets_clipping = config.get("gradient_clipping") not in (None, "auto")
        self._made: dict[int, Any] = {}
        self._has_reported = False
        super().__init__(*args, plan=self._read_plan(None, process_rank_of(os.environ).size or 1)[0], **kwargs)
        if TUNING_VARIABLE in os.environ:
            half = self.plan_precision
            self.deepspeed_config = config, {f"{name}.enabled": half == name for name in ("fp16", "bf16")}
        self.state: Any = _State(self.state, self._plugin)
        LIVE.note(self._plugin)

    def _read_plan(self, model: nn.Module | None, world_size: int) -> tuple[sw.Plan, float | None]:
        """The plan, and the norm to which to clip."""
        assert self._plugin is not None
        batches = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        rest = {name: value for name, value in self._plugin.deepspeed_config.items() if name not in batches}
        half = None if model is None else self.plan_precision
        reading = read_with(rest, world_size, model, {f"{name}.enabled": half == name for name in ("fp16", "bf16")})
        report = reading.report(monitors_by=_LOG_WITH)
        if model is not None and not self._has_reported and self.is_main_process and report:
            self._has_reported = True
            print(f"shardwise: about the DeepSpeed config\n{printable(report)}")
        plan = sw.load_plan(reading.plan)
        return without(plan, "clip_grad_norm"), plan.clip_grad_norm

    def _plan_of(self, model: nn.Module) -> sw.Plan:
        if self._plugin is None:
            return super()._plan_of(model)
        plan, limit = self._read_plan(model, self.num_processes)
        kept = {name: getattr(plan, name) for name in plan.model_fields_set}
        return plan if limit is None else sw.load_plan({**kept, "clip_grad_norm": limit})

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """See accelerate. If the config sets `gradient_clipping`, this only returns the norm."""
        is_theirs = self._plugin is not None and self._sets_clipping
        return super().clip_grad_norm_(parameters, float("inf") if is_theirs else max_norm, norm_type)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """See accelerate."""
        if self._plugin is None:
            return super().prepare(*args, device_placement=device_placement)
        given = [self._make_optimizer(one) for one in args]
        result = super().prepare(*given, device_placement=device_placement)
        several = result if len(args) > 1 else (result,)
        made = tuple(self._make_scheduler(one) if isinstance(one, DummyScheduler) else one for one in several)
        return made if len(args) > 1 else made[0]

    def _make_optimizer(self, given: Any) -> Any:
        is_dummy = isinstance(given, DummyOptim)
        if not is_dummy and not isinstance(given, torch.optim.Optimizer):
            return given
        section = self._section("optimizer")
        if section is None and is_dummy:
            raise ConfigError(
                "The script uses a DummyOptim, but the DeepSpeed config has no optimizer. Use a real one."
            )
        if section is None:
            return given
        if not is_dummy:
            raise ConfigError(
                f"There are two optimizers, {type(given).__name__} and that of the DeepSpeed config. Keep one of them."
            )
        made = make_optimizer(
            _fill_auto(section, {"lr": given.lr, "weight_decay": given.weight_decay}), list(given.params)
        )
        self._made[id(given)] = made
        return made

    def _make_scheduler(self, given: DummyScheduler) -> Any:
        over = self._made.get(id(given.optimizer), given.optimizer)
        prepared = [one for one in self._optimizers if one is over or one.optimizer is over]
        if not prepared:
            raise ConfigError("The DummyScheduler was prepared before its optimizer. Prepare them together.")
        if given.lr_scheduler_callable is not None:
            made = given.lr_scheduler_callable(prepared[0].optimizer)
        else:
            section = self._section("scheduler")
            if section is None:
                raise ConfigError(
                    "The script uses a DummyScheduler, but the DeepSpeed config has no scheduler. Give it an "
                    "lr_scheduler_callable, or use a real scheduler."
                )
            total = given.total_num_steps
            per_step = 1 if self.split_batches else self.num_processes
            known = {
                "warmup_min_lr": 0,
                "warmup_max_lr": prepared[0].defaults.get("lr"),
                "warmup_num_steps": max(1, given.warmup_num_steps),
                "total_num_steps": None if total is None else -(-total // per_step),
            }
            named = _fill_auto(section, known)
            made = make_schedule(named.name, prepared[0].optimizer, named.params)
        wrapped = _OncePerStep(made, prepared[0], split_batches=True)
        self._schedulers.append(wrapped)
        return wrapped

    def _section(self, name: str) -> dict[str, Any] | None:
        assert self._plugin is not None
        section: dict[str, Any] | None = self._plugin.deepspeed_config.get(name)
        return section


class _OncePerStep(AcceleratedScheduler):
    """Steps once per step of the optimizer, and not if that was skipped."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        if self.gradient_state.sync_gradients and not any(one.step_was_skipped for one in self.optimizers):
            self.scheduler.step(*args, **kwargs)


class _State:
    """Accelerate's state, with the script's plugin as `deepspeed_plugin`."""

    def __init__(self, state: Any, plugin: DeepSpeedPlugin) -> None:
        self.__dict__["_state"] = state
        self.__dict__["deepspeed_plugin"] = plugin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._state, name, value)


def _plugin_of(arguments: dict[str, Any]) -> DeepSpeedPlugin | None:
    """The plugin among the arguments of an `Accelerator`, or the one that the environment selects. Removes both."""
    given = [one for one in (arguments.pop(name, None) for name in _PLUGINS) if one is not None]
    is_selected = says_yes(os.environ.pop(USE_VARIABLE, None))
    if not given:
        return DeepSpeedPlugin() if is_selected else None
    if len(given) > 1 or isinstance(given[0], dict):
        raise ConfigError("There are several DeepSpeed plugins. Give an Accelerator one plugin.")
    plugin: DeepSpeedPlugin = given[0]
    return plugin


def _fill_auto(section: dict[str, Any], known: dict[str, Any]) -> ComponentConfig:
    """A section whose `"auto"` values are replaced by the script's, if it has set them."""
    params = dict(section.get("params") or {})
    found = {key: known.get(key) if value == "auto" else value for key, value in params.items()}
    return ComponentConfig(str(section.get("type")), {key: value for key, value in found.items() if value is not None})
