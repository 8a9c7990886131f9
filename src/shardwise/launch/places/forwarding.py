"""Which of the launcher's environment variables ranks on other hosts get. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from shardwise.errors import ConfigError

PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "SHARDWISE_", "UCX_", "HF_", "OMP_", "MALLOC_", "MLFLOW_", "WANDB_")
"""Of variables that mean the same on every host."""
_OF_ONE_HOST = frozenset({"SHARDWISE_LAUNCHER_PID", "SHARDWISE_CORES", "HF_HOME", "HF_HUB_CACHE", "TORCH_HOME"})


def forwarded(env: Mapping[str, str], named: Iterable[str] = (), prefixes: Iterable[str] = ()) -> dict[str, str]:
    """Variables of `env` by their prefixes, and those `named`: `NAME`, or `NAME=VALUE`. Sorted by name.

    Raises `ConfigError` for one that is named but not set.
    """
    beginnings = (*PREFIXES, *prefixes)
    found = {name: env[name] for name in env if name.startswith(beginnings) and name not in _OF_ONE_HOST}
    for word in named:
        name, equals, value = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"--env {word!r}: {name!r} is not a name of a variable.")
        if not equals and name not in env:
            raise ConfigError(f"--env {name}: there is no such variable here. Set it, or give --env {name}=VALUE.")
        found[name] = value if equals else env[name]
    return dict(sorted(found.items()))
