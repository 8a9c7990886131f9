"""Python values as JSON and back, exactly: no pickle, so a checkpoint can hold data but never run code.

JSON alone would turn the integer keys of a scheduler's milestones into text and tuples into lists. What JSON has no
word for is an object with one key that starts with `$`.
"""

from __future__ import annotations

import base64
from collections import Counter
from typing import Any

import numpy as np
import torch

from shardwise.errors import ConfigError


def encode(value: Any, where: str = "state") -> Any:
    """`value` in words that JSON has. Raises `ConfigError` naming the place of what cannot be kept."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, list):
        return [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]}
    if isinstance(value, dict):
        return _encode_dict(value, where)
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray | np.generic):
        return _encode_array(value, where)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        text = base64.b64encode(flat.numpy().tobytes()).decode()
        return {"$tensor": [dtype_name(value.dtype), list(value.shape), text]}
    raise ConfigError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot keep: it holds no pickles. Keep numbers, "
        f"text, bytes, lists, tuples, dicts, tensors and arrays, or an object's state_dict()."
    )


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    match next(iter(value.items()), None):
        case "$tuple", items:
            return tuple(map(decode, items))
        case "$dict", items:
            return {decode(key): decode(item) for key, item in items}
        case "$counter", items:
            return Counter({decode(key): decode(item) for key, item in items})
        case "$bytes", text:
            return base64.b64decode(text)
        case "$array", [dtype, shape, text]:
            return np.frombuffer(bytearray(base64.b64decode(text)), dtype=np.dtype(dtype)).reshape(shape)
        case "$number", [dtype, text]:
            return np.frombuffer(base64.b64decode(text), dtype=np.dtype(dtype))[0]
        case "$tensor", [name, shape, text]:
            return bytes_tensor(base64.b64decode(text)).view(dtype_of(name)).reshape(shape)
    return {key: decode(item) for key, item in value.items()}


def _encode_dict(value: dict[Any, Any], where: str) -> Any:
    named = [(key, encode(item, f"{where}[{key!r}]")) for key, item in value.items()]
    if isinstance(value, Counter):
        return {"$counter": [[encode(key, where), item] for key, item in named]}
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return dict(named)
    return {"$dict": [[encode(key, where), item] for key, item in named]}


def _encode_array(value: Any, where: str) -> Any:
    if value.dtype.hasobject:
        raise ConfigError(f"{where} is an array of Python objects, which a checkpoint cannot keep. Keep numbers in it.")
    text = base64.b64encode(value.tobytes()).decode()
    if isinstance(value, np.generic):
        return {"$number": [value.dtype.str, text]}
    return {"$array": [value.dtype.str, list(value.shape), text]}


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16`, as torch calls it."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of this torch")
    return dtype


def bytes_tensor(content: bytes) -> torch.Tensor:
    """The bytes as a tensor of them; `torch.frombuffer` refuses to be empty."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
