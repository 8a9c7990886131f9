"""Python values as JSON and back, exactly, without pickle, so that a checkpoint can hold data but never run code.

JSON alone would turn the integer keys of a scheduler's milestones into text, and tuples into lists. What JSON cannot
express is an object with one key that starts with `$`.
"""

from __future__ import annotations

import base64
import functools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from shardwise.errors import CheckpointError, ConfigError
from shardwise.system.safe_files import MAX_JSON_DEPTH, nests_deeper

MAX_DIMS = 64
"""Dimensions of a tensor or an array; numpy's own limit."""
MAX_DEPTH = MAX_JSON_DEPTH - 10
"""Nesting of lists and dicts; an index contains them a few levels down."""
_ARRAY_DTYPE = re.compile(r"[<>|][biufcSUVMm]\d{1,9}(\[\w{1,9}\])?")


def check_depth(text: bytes, what: str) -> None:
    """Raise `ConfigError` for JSON that is nested too deeply to be read again."""
    if nests_deeper(text, MAX_DEPTH):
        raise ConfigError(f"{what} nests more than {MAX_DEPTH} lists and dicts, which a checkpoint cannot keep.")


def encode(value: Any, where: str = "state") -> Any:
    """`value` as JSON data. Raises `ConfigError` with the path of a value that cannot be stored."""
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
        f"{where} is a {type(value).__name__}, which a checkpoint cannot store: it contains no pickles. Store numbers, "
        f"text, bytes, lists, tuples, dicts, tensors and arrays, or an object's state_dict()."
    )


def as_bytes(memories: Mapping[str, Any]) -> bytes:
    """The JSON that `read_document` reads. Raises `ConfigError` with the path of a value that cannot be stored."""
    return json.dumps(encode(dict(memories), "memories")).encode()


def decode(value: Any, where: str = "state") -> Any:
    """The inverse of `encode`. Raises `CheckpointError` with the path of a value that `encode` cannot have written."""
    if isinstance(value, list):
        return [decode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    word = next(iter(value), "")
    if not word.startswith("$"):
        return {key: decode(item, f"{where}[{key!r}]") for key, item in value.items()}
    try:
        return _decode_word(word, value, where)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:  # numpy's and torch's own errors
        raise CheckpointError(f"{where} is not what shardwise writes there: {word}: {error}.") from error


def _decode_word(word: str, value: dict[str, Any], where: str) -> Any:
    """The value that `word`, the only key of `value`, encodes."""
    if len(value) > 1:
        raise ValueError(f"it stands beside {list(value)[1]!r}")
    match word, value[word]:
        case "$tuple", list(items):
            return tuple(decode(item, f"{where}[{index}]") for index, item in enumerate(items))
        case "$dict", list(items):
            return dict(_decoded_pairs(items, where))
        case "$counter", list(items):
            return Counter(dict(_decoded_pairs(items, where)))
        case "$bytes", str(text):
            return _decoded_bytes(text)
        case "$array", [str(name), list(shape), str(text)]:
            content, dtype = _decoded_bytes(text), _array_dtype(name)
            _check_size(shape, len(content), dtype.itemsize)
            array = np.frombuffer(bytearray(content), dtype=dtype).reshape(shape)
            if dtype.kind == "U":
                array.tolist()  # raises for invalid code points
            return array
        case "$number", [str(name), str(text)]:
            content, dtype = _decoded_bytes(text), _array_dtype(name)
            _check_size([], len(content), dtype.itemsize)
            return np.frombuffer(content, dtype=dtype)[0]
        case "$tensor", [str(name), list(shape), str(text)]:
            content, torch_dtype = _decoded_bytes(text), dtype_of(name)
            _check_size(shape, len(content), torch_dtype.itemsize)
            return bytes_tensor(content).view(torch_dtype).reshape(shape)
    raise ValueError("the key is unknown, or its value is malformed")


def _decoded_pairs(items: list[Any], where: str) -> Iterator[tuple[Any, Any]]:
    for item in items:
        if not isinstance(item, list) or len(item) != 2:
            raise ValueError("an item is not a pair of key and value")
        key = decode(item[0], f"a key of {where}")
        yield key, decode(item[1], f"{where}[{key!r}]")


def _decoded_bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _array_dtype(name: str) -> np.dtype[Any]:
    """A dtype with a size, and without Python objects."""
    dtype = np.dtype(name) if _ARRAY_DTYPE.fullmatch(name) else None
    if dtype is None or not dtype.itemsize or dtype.str != name:
        raise ValueError(f"{name!r} is not a dtype of numbers or text")
    return dtype


def _check_size(shape: list[Any], num_bytes: int, itemsize: int) -> None:
    if not all(type(size) is int and size >= 0 for size in shape) or len(shape) > MAX_DIMS:
        raise ValueError(f"{shape} is not a shape")
    if math.prod(shape) * itemsize != num_bytes:
        raise ValueError(f"shape {shape} does not fit {num_bytes} bytes")


def _encode_dict(value: dict[Any, Any], where: str) -> Any:
    named = [(key, encode(item, f"{where}[{key!r}]")) for key, item in value.items()]
    if isinstance(value, Counter):
        return {"$counter": [[encode(key, where), item] for key, item in named]}
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return dict(named)
    return {"$dict": [[encode(key, where), item] for key, item in named]}


def _encode_array(value: Any, where: str) -> Any:
    if value.dtype.hasobject:
        raise ConfigError(
            f"{where} is an array of Python objects, which a checkpoint cannot store. Store an array of numbers."
        )
    text = base64.b64encode(value.tobytes()).decode()
    if isinstance(value, np.generic):
        return {"$number": [value.dtype.str, text]}
    return {"$array": [value.dtype.str, list(value.shape), text]}


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of this torch")
    return dtype


def bytes_tensor(content: bytes) -> torch.Tensor:
    """The bytes as a uint8 tensor; `torch.frombuffer` refuses empty ones."""
    return (
        torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if content
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
