"""What our own checkpoints are read by: stricter names, text and JSON than those of other formats (`safe_files`).

A folder of checkpoints is data, and may come from anywhere. A name in an index must not lead out of its folder, a pipe
in the place of a file must not hold a rank up, and text must not be able to exhaust the stack.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError, ConfigError
from shardwise.safe_files import regular_descriptor

MAX_JSON_BYTES = 2**30
MAX_DEPTH = 100
"""Lists and objects within each other."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}")
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_OPENING = frozenset(b"[{")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def is_plain_name(name: str) -> bool:
    """Whether it names something in the folder itself, on any system: no path, nothing hidden."""
    return _PLAIN_NAME.fullmatch(name) is not None


def read_text(path: Path, max_bytes: int) -> str:
    """All of a small file, which is regular and no link.

    Raises `CheckpointError` if it is larger or no text, and `OSError` as the system does.
    """
    with os.fdopen(regular_descriptor(path, follows_links=False), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise CheckpointError(f"{path} has more than {max_bytes} bytes, which is more than it can mean.")
    return as_text(content, str(path))


def as_text(content: bytes, name: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{name} cannot be read: {error}.") from error


def parse_json(text: str, name: str) -> Any:
    """The value that `text` has as JSON. Raises `CheckpointError`, naming `name`, for what is none, or too deep."""
    if _is_deeper(text.encode(errors="surrogatepass"), MAX_DEPTH):
        raise CheckpointError(f"{name} cannot be read: it nests more than {MAX_DEPTH} lists and objects.")
    try:
        return json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{name} cannot be read as JSON: {error}.") from error


def check_depth(text: bytes, what: str) -> None:
    """Raise `ConfigError` for what `parse_json` would not read again."""
    if _is_deeper(text, MAX_DEPTH - 10):  # an index has it a few levels down
        raise ConfigError(f"{what} nests more than {MAX_DEPTH - 10} lists and dicts, which a checkpoint cannot keep.")


def _is_deeper(text: bytes, limit: int) -> bool:
    """Whether brackets nest deeper outside of strings, found without parsing: a parser would recurse."""
    depth = 0
    for bracket in _STRING.sub(b"", text).translate(None, _NOT_BRACKETS):
        depth += 1 if bracket in _OPENING else -1
        if depth > limit:
            return True
    return False
