"""Reads untrusted files: checks that they are what and where they should be, and bounds their JSON. Writes files whole.

A checkpoint is data from elsewhere, and may be damaged or malicious. So the names in it must be plain, its files
regular and in its own folder, and its JSON small, shallow and without duplicate keys. Everything else is refused with a
`CheckpointError` before any of it is used.

Our own checkpoints have stricter names (`is_portable_name`), and links are not followed there (`read_own_text`).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from shardwise.errors import CheckpointError, ConfigError

MAX_JSON_BYTES = 10**8
"""The limit of the safetensors library for the header of a file."""
MAX_JSON_DEPTH = 100
"""Nesting of lists and objects."""
MAX_NAME_CHARS = 4096
MAX_CONFIG_BYTES = 2**20
"""Of a file that people write, such as a host file."""
HUB_LINKS, HUB_FILES = "snapshots", "blobs"
"""The cache of huggingface_hub: `snapshots/REVISION/` has links to files in the neighbouring `blobs/`."""
_PORTABLE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}")
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_OPENING = frozenset(b"[{")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_NOT_MARKS = bytes(set(range(256)) - set(b'[]{}"'))

# -- names ------------------------------------------------------------------------------------------------


def is_plain_name(name: object) -> bool:
    """Whether `name` can only refer to an entry directly in a folder."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= MAX_NAME_CHARS
        and name not in (".", "..")
        and not any(char in "/\\\0" or 0xD800 <= ord(char) < 0xE000 for char in name)
    )


def is_portable_name(name: str) -> bool:
    """Whether `name` also means the same on every system, and is not hidden."""
    return _PORTABLE_NAME.fullmatch(name) is not None


def inside(folder: Path, name: object) -> Path:
    """`folder / name`, with links followed as long as they stay in the folder; it need not exist.

    Raises `CheckpointError` if `name` is not a plain name, or is a link to elsewhere. Links of the hub's cache, from a
    snapshot to its blobs, are followed.
    """
    if not isinstance(name, str) or not is_plain_name(name):
        raise CheckpointError(
            f"{folder} names {_short(name)}, which is not a plain file name. All files of a checkpoint are in its "
            f"own folder; this one is damaged, or was forged to read other files."
        )
    path = folder / name
    if not path.is_symlink():
        return path
    try:
        real, home = path.resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: circular links, before Python 3.13
        raise CheckpointError(f"{path} is a link that leads nowhere: {error}") from error
    homes = [home, home.parent.parent / HUB_FILES] if home.parent.name == HUB_LINKS else [home]
    if not any(real.is_relative_to(one) for one in homes):
        raise CheckpointError(
            f"{path} is a link to {real}, outside of the checkpoint, which is not followed. Put the file itself there "
            f"if it belongs to it."
        )
    return path


# -- files ------------------------------------------------------------------------------------------------


def open_regular(path: Path) -> BinaryIO:
    """`path`, open for reading without a buffer. Raises `CheckpointError` if it is missing or not a regular file.

    Never blocks: a pipe in a file's place is refused, not read.
    """
    try:
        handle = regular_descriptor(path, follows_links=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; the checkpoint is incomplete.") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return os.fdopen(handle, "rb", buffering=0)


def regular_descriptor(path: Path, *, follows_links: bool) -> int:
    """A descriptor for reading. Raises `CheckpointError` for a pipe, a device, a folder, or a link that must not be
    followed.

    Errors of the system, such as `FileNotFoundError`, are passed on.
    """
    if not follows_links and path.is_symlink():
        raise CheckpointError(
            f"{path} is a symbolic link, which is not followed: it may lead anywhere. Put the file itself there if you "
            f"trust it."
        )
    never_waits = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY  # a pipe without a writer would block for ever
    handle = os.open(path, os.O_RDONLY | never_waits | (0 if follows_links else os.O_NOFOLLOW))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CheckpointError(f"{path} is not a regular file, so it is not read.")
    return handle


def read_regular(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The content of the regular file `path`, which must not have more than `max_bytes`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise CheckpointError(f"{path} has {size} bytes, more than the {max_bytes} that such a file may have.")
        return read_exactly(file, 0, size, path)


def read_exactly(file: BinaryIO, start: int, num_bytes: int, path: Path) -> bytes:
    """Bytes `start` to `start + num_bytes` of `file` at `path`; checks the size before allocating memory."""
    size = os.fstat(file.fileno()).st_size
    if not 0 <= start <= start + num_bytes <= size:
        raise CheckpointError(
            f"{path} has {size} bytes, but {num_bytes} from byte {start} were expected: it is truncated."
        )
    content = bytearray(num_bytes)
    fill_exactly(file, start, memoryview(content), path)
    return bytes(content)


def fill_exactly(file: BinaryIO, start: int, into: memoryview, path: Path) -> None:
    """Fill `into` with the bytes of `file` at `path`, beginning at `start`."""
    done = 0
    while done < len(into):
        try:
            count = os.preadv(file.fileno(), [into[done:]], start + done)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read at byte {start + done}: {error}") from error
        if count == 0:
            raise CheckpointError(f"{path} ends at byte {start + done}: it is truncated.")
        done += count


def read_text(path: Path, max_bytes: int = 2**16) -> str:
    """The short text in the regular file `path`, stripped of whitespace."""
    return as_text(read_regular(path, max_bytes), path).strip()


def read_own_text(path: Path, max_bytes: int) -> str:
    """The content of a small file of our own, which must be regular and not a link.

    Raises `CheckpointError` if it is larger or not text, and `OSError` for errors of the system.
    """
    return as_text(read_own_bytes(path, max_bytes), path)


def read_own_bytes(path: Path, max_bytes: int) -> bytes:
    """Like `read_own_text`, for content that need not be text."""
    with os.fdopen(regular_descriptor(path, follows_links=False), "rb") as file:
        size = os.fstat(file.fileno()).st_size  # a read allocates memory for all requested bytes
        content = file.read(min(size, max_bytes) + 1)
    if len(content) > max_bytes:
        raise CheckpointError(f"{path} has more than {max_bytes} bytes, which is more than it can mean.")
    return content


def read_config_text(path: Path) -> str:
    """The text of a file that people write and name, with line breaks `\\n`; it may be a link, or a shell's pipe.

    No more than the limit is read. Raises `ConfigError` if it is larger, or not UTF-8, and `OSError` for errors of the
    system.
    """
    with path.open("rb") as file:
        content = file.read(MAX_CONFIG_BYTES + 1)
    if len(content) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} has more than {MAX_CONFIG_BYTES} bytes, which is more than such a file can mean.")
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file: byte {error.start} is not UTF-8.") from error


def draft_beside(path: Path) -> Path:
    """A name beside `path` that nobody else writes to: on another host that shares the folder, or in another container,
    a process may have the number of this one, and in this process another thread may write the same file."""
    return path.with_name(f".{path.name.removeprefix('.')}.{os.getpid()}-{secrets.token_hex(4)}")


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A draft beside `path`, to be written inside, which then takes its place in one move: who reads `path` finds what
    was there or what is there, and never a part. If anything is raised, `path` stays as it is."""
    draft = draft_beside(path)
    try:
        yield draft
        draft.replace(path)
    except BaseException:  # a full disk, Ctrl-C
        draft.unlink(missing_ok=True)
        raise


def as_text(content: bytes, name: Path | str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{name} cannot be read: it is not text, {error}.") from error


# -- JSON -------------------------------------------------------------------------------------------------


def read_json(path: Path, *, lenient: bool = False) -> dict[str, Any]:
    """The JSON object in the regular file `path`; see `parse_object`."""
    return parse_object(read_regular(path), path, lenient=lenient)


def parse_object(
    content: bytes, name: Path | str, *, max_depth: int = MAX_JSON_DEPTH, lenient: bool = False
) -> dict[str, Any]:
    """`content` as a JSON object. Raises `CheckpointError` as `parse_json` does, for text that is not Unicode, and for
    any other type of value."""
    value = parse_json(as_text(content, name), name, max_depth=max_depth, lenient=lenient)
    if b"\\u" in content:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise _no_json(name, error) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{name} cannot be read: it holds a JSON {type(value).__name__} instead of an object.")
    return value


def parse_json(text: str, name: Path | str, *, max_depth: int = MAX_JSON_DEPTH, lenient: bool = True) -> Any:
    """The JSON value in `text`. Raises `CheckpointError` with `name` if it is invalid or nested too deeply.

    NaN, infinity and duplicate keys are refused, unless it is `lenient`, for files that people write.
    """
    if nests_deeper(text.encode(errors="surrogatepass"), max_depth):
        raise CheckpointError(f"{name} cannot be read: it nests more than {max_depth} lists and objects.")
    strictly: dict[str, Any] = {} if lenient else {"object_pairs_hook": _once, "parse_constant": no_number}
    try:
        return json.loads(text, **strictly)
    except ValueError as error:
        raise _no_json(name, error) from error


def nests_deeper(text: bytes, limit: int) -> bool:
    """Whether brackets outside of strings nest deeper than `limit`, without parsing, because a parser would recurse."""
    depth = 0
    for bracket in _brackets(text):
        depth += 1 if bracket in _OPENING else -1
        if depth > limit:
            return True
    return False


def _brackets(text: bytes) -> bytes:
    """The brackets outside of strings. Most strings have neither brackets nor escapes, and are reduced to two
    quotes."""
    if b"\\" in text:
        return _STRING.sub(b"", text).translate(None, _NOT_BRACKETS)
    marks = text.translate(None, _NOT_MARKS).replace(b'""', b"")  # brackets outside of strings stay outside
    return _STRING.sub(b"", marks).translate(None, _NOT_BRACKETS)


def _no_json(name: Path | str, error: ValueError) -> CheckpointError:
    return CheckpointError(f"{name} cannot be read as JSON: {_short(str(error), quote=False)}.")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"it says {_short(twice)} twice")
    return made


def no_number(word: str) -> NoReturn:
    """For `parse_constant` of `json.loads`, which takes NaN and infinity for numbers."""
    raise ValueError(f"{word} is not a number in JSON")


def _short(value: object, *, quote: bool = True) -> str:
    text = ascii(value) if quote else value if isinstance(value, str) else str(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
