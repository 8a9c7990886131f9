"""What the environment says, in Horovod's variables: those that `horovodrun` sets and that mean something here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.errors import ConfigError

FUSION_BYTES = 16 * 2**20
CACHE_CAPACITY = 1024
STALL_WARNING_SECONDS = 60.0
STALL_ERROR_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How collectives are negotiated. Rank 0's count, but for the capacity, which each rank has of its own."""

    fusion_bytes: int = FUSION_BYTES
    """All-reduces that are ready together go as one message of up to so many bytes; 0: each by itself."""
    cache_capacity: int = CACHE_CAPACITY
    """So many messages between a rank and the coordinator are remembered, and sent again as a number."""
    stall_warning_seconds: float = STALL_WARNING_SECONDS
    stall_error_seconds: float = STALL_ERROR_SECONDS
    """When a tensor that some ranks have not issued is reported, and given up; 0: never."""
    timeline: str = ""
    """Where to write a trace from the start."""

    @classmethod
    def of(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Raises `ConfigError` for a variable that is not a number."""
        env = os.environ if environment is None else environment
        checks = _number(env, "STALL_CHECK_DISABLE", 0) == 0
        timeline = env.get("HOROVOD_TIMELINE", "")
        return cls(
            fusion_bytes=int(_number(env, "FUSION_THRESHOLD", FUSION_BYTES)),
            cache_capacity=int(_number(env, "CACHE_CAPACITY", CACHE_CAPACITY)),
            stall_warning_seconds=_number(env, "STALL_CHECK_TIME_SECONDS", STALL_WARNING_SECONDS) if checks else 0.0,
            stall_error_seconds=_number(env, "STALL_SHUTDOWN_TIME_SECONDS", STALL_ERROR_SECONDS) if checks else 0.0,
            timeline="" if timeline == "DYNAMIC" else timeline,
        )


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(f"HOROVOD_{name}", "")
    try:
        number = float(text) if text else float(default)
    except ValueError:
        number = -1.0
    if number < 0:
        raise ConfigError(f"HOROVOD_{name}={text} is not a number of 0 or more.")
    return number
