"""DeepSpeed configs in the hands of Transformers' `TrainingArguments`: `--deepspeed ds.json`, with `"auto"` in them.

Transformers itself says what `"auto"` is, from its arguments (`HfTrainerDeepSpeedConfig`); what the config then is
becomes a plan. `"auto"` that goes by the model's width is filled once the model is there.
"""

from __future__ import annotations

import copy
import functools
import os
from typing import Any

from torch import nn

from shardwise.errors import ConfigError
from shardwise.integrations.deepspeed.config import ComponentConfig, TranslatedConfig, read_config
from shardwise.integrations.deepspeed.initialization import make_optimizer
from shardwise.integrations.deepspeed.schedules import make_schedule
from shardwise.integrations.hf_zero3 import LIVE

ASKED = "hf_deepspeed_config"
"""What `TrainingArguments` has once it was given a DeepSpeed config; Transformers' own name."""
USE_VARIABLE = "ACCELERATE_USE_DEEPSPEED"
"""What `accelerate launch` says DeepSpeed with."""


def read_with(
    config: dict[str, Any], world_size: int, model: nn.Module | None, auto: dict[str, Any] | None = None
) -> TranslatedConfig:
    """What a config comes to for `model`, whose width fills what Transformers fills by it; `auto` fills the rest."""
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
    """Let the class `TrainingArguments` keep a DeepSpeed config for our Trainer, in the place of starting DeepSpeed."""
    plain = arguments.__post_init__

    @functools.wraps(plain)
    def settle(self: Any) -> None:
        given, self.deepspeed = self.deepspeed, None
        is_asked_for = os.environ.pop(USE_VARIABLE, "false").lower() in ("true", "1", "yes")
        try:
            plain(self)
        finally:
            if is_asked_for:
                os.environ[USE_VARIABLE] = "true"
        if given or is_asked_for:
            _keep(self, given)
        self.deepspeed = given

    arguments.__post_init__ = settle


def _keep(arguments: Any, given: dict[str, Any] | str | None) -> None:
    from accelerate.utils import DeepSpeedPlugin
    from transformers.integrations import deepspeed

    theirs: Any = deepspeed
    config = theirs.HfTrainerDeepSpeedConfig(given or DeepSpeedPlugin().deepspeed_config)
    theirs.unset_hf_deepspeed_config()  # models are built by us, see hf_zero3
    config.trainer_config_process(arguments)
    if config.mismatches:
        listed = "; ".join(line.removeprefix("- ") for line in config.mismatches)
        raise ConfigError(
            f'The DeepSpeed config and TrainingArguments contradict each other: {listed}. Say "auto" in the config.'
        )
    setattr(arguments, ASKED, config)
    LIVE.note(config)


class Sections:
    """The optimizer and the scheduler of a DeepSpeed config that `TrainingArguments` was given."""

    def __init__(self, arguments: Any) -> None:
        self._arguments = arguments
        self._config = copy.deepcopy(getattr(arguments, ASKED))

    def reading(self, model: nn.Module | None) -> TranslatedConfig:
        """All of the config; what is still `"auto"` is known when training begins."""
        rest = {name: value for name, value in self._config.config.items() if name != "train_batch_size"}
        return read_with(rest, self._arguments.world_size, model)  # Transformers has compared that with its own

    def has(self, section: str) -> bool:
        return section in self._config.config

    def optimizer(self, model: nn.Module) -> Any:
        """The config's optimizer over what of `model` is trained."""
        return make_optimizer(self._named("optimizer"), [one for one in model.parameters() if one.requires_grad])

    def scheduler(self, optimizer: Any, model: nn.Module, num_steps: int) -> Any:
        """The config's schedule for a training of `num_steps` steps."""
        config = copy.deepcopy(self._config)
        config.trainer_config_finalize(self._arguments, model, num_steps)
        named = self._named("scheduler", config.config)
        return make_schedule(named.name, optimizer, named.params)

    def _named(self, section: str, config: dict[str, Any] | None = None) -> ComponentConfig:
        said = (config or self._config.config)[section]
        if not isinstance(said, dict) or not isinstance(said.get("type"), str):
            raise ConfigError(f"{section} of the DeepSpeed config has to be an object with a type, which is a name.")
        return ComponentConfig(
            said["type"], {key: one for key, one in (said.get("params") or {}).items() if one != "auto"}
        )
