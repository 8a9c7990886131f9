"""Settings from Horovod's environment variables, as set by `horovodrun`."""

from __future__ import annotations

import math
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
    """Settings of the negotiation. Rank 0's are used, except for the cache capacity, which each rank has."""

    fusion_bytes: int = FUSION_BYTES
    """The largest fused all-reduce in bytes; 0: no fusion."""
    cache_capacity: int = CACHE_CAPACITY
    """The number of cached messages between a rank and the coordinator, which are sent again as a number."""
    stall_warning_seconds: float = STALL_WARNING_SECONDS
    stall_error_seconds: float = STALL_ERROR_SECONDS
    """When a tensor that some ranks have not issued is reported, and when it is an error; 0: never."""
    timeline: str = ""
    """The file of a timeline that starts in `init`."""

    @classmethod
    def of(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """From the environment. Raises `ConfigError` for a variable that is not a number."""
        env = os.environ if environment is None else environment
        stall_warning_seconds = _number(env, "STALL_CHECK_TIME_SECONDS", STALL_WARNING_SECONDS)
        stall_error_seconds = _number(env, "STALL_SHUTDOWN_TIME_SECONDS", STALL_ERROR_SECONDS)
        if _number(env, "STALL_CHECK_DISABLE", 0):
            stall_warning_seconds = stall_error_seconds = 0.0
        timeline = env.get("HOROVOD_TIMELINE", "")
        return cls(
            fusion_bytes=int(_number(env, "FUSION_THRESHOLD", FUSION_BYTES)),
            cache_capacity=int(_number(env, "CACHE_CAPACITY", CACHE_CAPACITY)),
            stall_warning_seconds=stall_warning_seconds,
            stall_error_seconds=stall_error_seconds,
            timeline="" if timeline == "DYNAMIC" else timeline,
        )


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(f"HOROVOD_{name}", "")
    try:
        number = float(text) if text else float(default)
    except ValueError:
        number = -1.0
    if number < 0 or not math.isfinite(number):
        raise ConfigError(f"HOROVOD_{name}={text} is invalid; it must be a number, 0 or more.")
    return number
