"""DeepSpeed configs with `"auto"` values, given to Transformers' `TrainingArguments` (`--deepspeed ds.json`).

Transformers fills `"auto"` from its arguments (`HfTrainerDeepSpeedConfig`), and the resulting config becomes a plan.
`"auto"` values that depend on the model's width are filled when the model is known.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterator
from typing import Any

from torch import nn

from shardwise.errors import ConfigError
from shardwise.integrations.deepspeed.config import ComponentConfig, TranslatedConfig, load_config, read_config
from shardwise.integrations.deepspeed.initialization import make_optimizer
from shardwise.integrations.deepspeed.schedules import make_schedule
from shardwise.integrations.hf_zero3 import LIVE
from shardwise.system.flags import says_yes

CONFIG_ATTRIBUTE = "hf_deepspeed_config"
"""The attribute of `TrainingArguments` with its DeepSpeed config; the name is Transformers'."""
STEPS = "gradient_accumulation_steps"
TUNING_VARIABLE = "SHARDWISE_AUTOTUNING"
"""Set in ranks of a job that is started for `deepspeed --autotuning`."""
USE_VARIABLE = "ACCELERATE_USE_DEEPSPEED"
"""The variable with which `accelerate launch` selects DeepSpeed."""


def read_with(
    config: dict[str, Any], world_size: int, model: nn.Module | None, auto: dict[str, Any] | None = None
) -> TranslatedConfig:
    """Read a config for `model`. The model's width fills the same `"auto"` values as in Transformers; `auto` fills the
    others."""
    return read_config(config, world_size=world_size, auto={**_by_width(model), **(auto or {})})


def _by_width(model: nn.Module | None) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    for one in (config, getattr(config, "text_config", None)):
        width = getattr(one, "hidden_size", None) or max(getattr(one, "hidden_sizes", None) or [0])
        if width:
            return {
                "zero_optimization.reduce_bucket_size": width * width,
                "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * width * width),
                "zero_optimization.stage3_param_persistence_threshold": 10 * width,
            }
    return {}


def take_over_arguments(arguments: Any) -> None:
    """Patch the class `TrainingArguments` to keep a DeepSpeed config for our Trainer instead of starting DeepSpeed."""
    plain = arguments.__post_init__

    @functools.wraps(plain)
    def post_init(self: Any) -> None:
        given, self.deepspeed = self.deepspeed, None
        is_asked_for = says_yes(os.environ.pop(USE_VARIABLE, None))
        try:
            plain(self)
        finally:
            if is_asked_for:
                os.environ[USE_VARIABLE] = "true"
        if given or is_asked_for:
            _keep(self, given)
        self.deepspeed = given

    arguments.__post_init__ = post_init


def _keep(arguments: Any, given: dict[str, Any] | str | None) -> None:
    from accelerate.utils import DeepSpeedPlugin
    from transformers.integrations import deepspeed

    theirs: Any = deepspeed
    config = theirs.HfTrainerDeepSpeedConfig(given or DeepSpeedPlugin().deepspeed_config)
    theirs.unset_hf_deepspeed_config()  # hf_zero3 builds models instead
    config.trainer_config_process(arguments)
    if config.mismatches:
        listed = "; ".join(line.removeprefix("- ") for line in config.mismatches)
        raise ConfigError(
            f'The DeepSpeed config and TrainingArguments contradict each other: {listed}. Use "auto" in the config.'
        )
    setattr(arguments, CONFIG_ATTRIBUTE, config)
    LIVE.note(config)


def _leaves(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a config by path, such as `zero_optimization.stage`."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


class Sections:
    """The optimizer and scheduler sections of a DeepSpeed config given to `TrainingArguments`."""

    def __init__(self, arguments: Any) -> None:
        self._arguments = arguments
        self._config = copy.deepcopy(getattr(arguments, CONFIG_ATTRIBUTE))

    def reading(self, model: nn.Module | None) -> TranslatedConfig:
        """Read the whole config. Values that are still `"auto"` are filled when training begins."""
        rest = {name: value for name, value in self._config.config.items() if name != "train_batch_size"}
        return read_with(rest, self._arguments.world_size, model)  # Transformers has checked train_batch_size

    def to_tune(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The config as the script gives it, in which `"auto"` may be tuned, and what Transformers has filled it with.
        Accumulation stays as `TrainingArguments` say."""
        given = load_config(self._arguments.deepspeed)
        filled = {path: value for path, value in _leaves(self._config.config) if value != "auto"}
        return {**given, STEPS: filled[STEPS]}, filled

    def has(self, section: str) -> bool:
        return section in self._config.config

    def optimizer(self, model: nn.Module) -> Any:
        """The config's optimizer over the trained parameters of `model`."""
        return make_optimizer(self._named("optimizer"), [one for one in model.parameters() if one.requires_grad], model)

    def scheduler(self, optimizer: Any, model: nn.Module, num_steps: int) -> Any:
        """The config's scheduler for `num_steps` training steps."""
        config = copy.deepcopy(self._config)
        config.trainer_config_finalize(self._arguments, model, num_steps)
        named = self._named("scheduler", config.config)
        return make_schedule(named.name, optimizer, named.params)

    def _named(self, section: str, config: dict[str, Any] | None = None) -> ComponentConfig:
        given = (config or self._config.config)[section]
        if not isinstance(given, dict) or not isinstance(given.get("type"), str):
            raise ConfigError(f"{section} of the DeepSpeed config must be an object with a type, which is a name.")
        return ComponentConfig(
            given["type"], {key: one for key, one in (given.get("params") or {}).items() if one != "auto"}
        )
