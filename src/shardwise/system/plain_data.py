"""Reads messages of other processes as plain data of an expected shape, within bounds. Nothing is unpickled."""

from __future__ import annotations

import json
import math
from typing import Any

from shardwise.system.safe_files import no_number

Shape = Any
"""A type (`float` accepts integers too), `None`, a list `[shape]` of any length, a tuple of shapes, a dict of shapes by
key (with exactly these keys), a dict `{str: shape}` with any keys, or `OneOf` several shapes."""
MAX_BYTES = 2**24


class OneOf:
    """Any one of several shapes."""

    def __init__(self, *shapes: Shape) -> None:
        self.shapes = shapes


def read(content: bytes | str, shape: Shape, *, max_bytes: int = MAX_BYTES) -> Any:
    """The JSON value in `content`, which must have `shape`. Raises `ValueError` for anything else."""
    content = content.encode() if isinstance(content, str) else content
    if len(content) > max_bytes:
        raise ValueError(f"it has {len(content)} bytes, more than {max_bytes}")
    try:
        value = json.loads(content.decode(), parse_constant=no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not fits(value, shape):
        raise ValueError("it is not of the form that is expected")
    if b"\\ud" in content.lower():
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate raises UnicodeEncodeError, a ValueError
    return value


def fits(value: Any, shape: Shape) -> bool:
    """Whether plain data has a shape."""
    if isinstance(shape, OneOf):
        return any(fits(value, one) for one in shape.shapes)
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(one, shape[0]) for one in value)
    if isinstance(shape, tuple):
        return isinstance(value, list) and len(value) == len(shape) and all(map(fits, value, shape))
    if isinstance(shape, dict):
        return isinstance(value, dict) and _fits_dict(value, shape)
    if shape is float or shape is int:
        return not isinstance(value, bool) and _is_number(value, shape)
    return value is None if shape is None else isinstance(value, shape)


def _fits_dict(value: dict[str, Any], shape: dict[Any, Shape]) -> bool:
    if set(shape) == {str}:
        return all(fits(one, shape[str]) for one in value.values())
    return value.keys() == shape.keys() and all(fits(value[key], inner) for key, inner in shape.items())


def _is_number(value: Any, kind: type) -> bool:
    """Whether it is a 64-bit integer, or a number that a float can hold."""
    if kind is int:
        return isinstance(value, int) and abs(value) < 2**63
    return isinstance(value, int | float) and _is_finite(value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False
