"""`deepspeed.elasticity`: the batch that many numbers of ranks can share, before a job starts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from shardwise.errors import ConfigError
from shardwise.integrations.deepspeed.config import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    read_elasticity,
)
from shardwise.integrations.deepspeed.elastic_batches import elastic_batch

__all__ = [
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "compute_elastic_config",
    "elasticity_enabled",
    "ensure_immutable_elastic_config",
]
_FIRST_VERSION = (0, 3, 8)
"""DeepSpeed's first version with elastic batches."""


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether the config has an `elasticity` section that is on."""
    return bool(ds_config.get("elasticity", {}).get("enabled", False))


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """Raise `ElasticityConfigError` if the `elasticity` section differs from that of the scheduler which started the
    job, in the variable `DEEPSPEED_ELASTICITY_CONFIG`, if there is one. `initialize` calls this."""
    planned = os.environ.get("DEEPSPEED_ELASTICITY_CONFIG")
    if planned is None:
        return
    ours, theirs = (read_elasticity({"elasticity": one}) for one in (runtime_elastic_config_dict, json.loads(planned)))
    if ours != theirs:
        raise ElasticityConfigError(
            f"The job was scheduled with another elasticity section, in DEEPSPEED_ELASTICITY_CONFIG: {theirs}; the "
            f"config has {ours}."
        )


def compute_elastic_config(
    ds_config: Mapping[str, Any], target_deepspeed_version: str, world_size: int = 0, return_microbatch: bool = False
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """The global batch, the numbers of data-parallel ranks that can share it, and with `world_size`, one of these, or
    with `return_microbatch` the micro-batch of a rank.

    `target_deepspeed_version` is that of the job. Version 0.2 of the solver needs `world_size`, or the number of ranks
    in the variable `WORLD_SIZE`. Raises `ElasticityError`.
    """
    if not isinstance(ds_config, Mapping):
        raise ValueError(f"ds_config is a {type(ds_config).__name__}; it must be a dict.")
    if not elasticity_enabled(ds_config):
        raise ElasticityConfigError("The config has no elasticity section that is enabled.")
    section = ds_config["elasticity"]
    if absent := [name for name in ("max_train_batch_size", "micro_batch_sizes") if name not in section]:
        raise ElasticityConfigError(f"elasticity.{absent[0]} is not set.")
    if tuple(map(int, re.findall(r"\d+", target_deepspeed_version)[:3])) < _FIRST_VERSION:
        raise ElasticityError(f"DeepSpeed {target_deepspeed_version} has no elastic batches; they came with 0.3.8.")
    try:
        wish = read_elasticity(ds_config)
        current = world_size
        if wish.version >= 0.2 and not world_size:
            given = os.environ.get("WORLD_SIZE", "")
            if not given.isdecimal():
                raise ConfigError("Version 0.2 of elasticity needs a number of ranks: world_size, or WORLD_SIZE.")
            current = int(given)
        shared = elastic_batch(wish, current // wish.model_parallel_size or None)
    except ConfigError as error:
        raise ElasticityConfigError(str(error)) from error
    ranks = list(shared.ranks)
    if not world_size and not return_microbatch:
        return shared.batch, ranks
    try:
        replicas = world_size or current // wish.model_parallel_size
        return shared.batch, ranks, shared.micro_batch(replicas, wish.micro_batch_sizes)
    except ConfigError as error:
        raise ElasticityIncompatibleWorldSize(str(error)) from error
