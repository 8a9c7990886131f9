"""`deepspeed.utils.logging`: messages of chosen ranks, by Python's logging."""

from __future__ import annotations

import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

logger = logging.getLogger("DeepSpeed")
LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}
log_levels = LEVELS


def _is_told(ranks: list[int] | None) -> bool:
    return not ranks or -1 in ranks or _rank() in ranks


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def log_dist(message: str, ranks: list[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on `ranks`; on all ranks if there are none, or if they include -1."""
    if _is_told(ranks):
        logger.log(level, "[Rank %d] %s", _rank(), message)


def log_dist_once(message: str, ranks: list[int] | None = None, level: int = logging.INFO) -> None:
    """As `log_dist`, but the same message only once in a process."""
    _log_once(message, tuple(ranks or ()), level)


@cache
def _log_once(message: str, ranks: tuple[int, ...], level: int) -> None:
    log_dist(message, list(ranks), level)


@cache
def warning_once(message: str) -> None:
    """Log a warning, the same only once in a process."""
    logger.warning(message)


def print_dist(message: str, ranks: list[int] | None = None) -> None:
    """Print `message` on `ranks`, as `log_dist` logs it."""
    if _is_told(ranks):
        print(f"[Rank {_rank()}] {message}")


def print_json_dist(message: dict[str, Any], ranks: list[int] | None = None, path: str | Path | None = None) -> None:
    """Write `message` with the rank as JSON to the file `path`, on `ranks`."""
    if _is_told(ranks) and path is not None:
        Path(path).write_text(json.dumps({"rank": _rank(), **message}))


def get_log_level_from_string(log_level_str: str) -> int:
    """Raises `ValueError` for an unknown name."""
    level = LEVELS.get(log_level_str.lower())
    if level is None:
        raise ValueError(f"{log_level_str} is not one of {', '.join(LEVELS)}.")
    return int(level)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of `custom_logger`, by default DeepSpeed's."""
    (custom_logger or logger).setLevel(get_log_level_from_string(log_level_str))
