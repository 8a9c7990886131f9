"""The validation of an index before anything in it is used, by every reader of a checkpoint.

Single fields are validated by the dataclasses in `index.py`. Relations between fields are checked here: files are files
of this folder, chunks lie in them and cover every tensor once, and encoded values can be decoded. Whether the files
match the index is checked by `read.py`, when it opens them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from shardwise.checkpoint.index import (
    FACTOR,
    INDEX,
    ISLAND,
    LOST,
    UNSENT,
    Chunk,
    File,
    Index,
    block_bytes_of,
    box_of,
    own_kind,
    read_body,
)
from shardwise.checkpoint.json_codec import MAX_DIMS, decode, dtype_of
from shardwise.errors import CheckpointError
from shardwise.plan.placement import Box
from shardwise.system.safe_files import is_portable_name

MAX_TENSOR_BYTES = 2**60
MAX_HEAD_BYTES = 2**30
MAX_BLOCKS = 1024
"""Limit for one tensor, because each block is compared with every other."""
RANK = "rank"
_SCALER = ("scale", "num_skipped", "good_steps", "chances")


class _WrongError(Exception):
    """A field, and what is wrong with it."""


def read_index(folder: Path) -> Index:
    """The index of the checkpoint in `folder`, checked. Raises `CheckpointError` that names the file and the field."""
    body = read_body(folder)
    try:
        index = _schema().validate_python(body)
        _check(index)
    except ValidationError as error:
        raise CheckpointError(f"{folder / INDEX} is not an index that shardwise wrote: {_first(error)}.") from error
    except (_WrongError, CheckpointError) as error:
        raise CheckpointError(f"{folder / INDEX} is not an index that shardwise wrote: {error}") from error
    return index


@functools.cache
def _schema() -> TypeAdapter[Index]:
    return TypeAdapter(Index)


def _first(error: ValidationError) -> str:
    """For example `chunks[3].start is -1: input should be greater than or equal to 0`."""
    wrong = error.errors(include_url=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in wrong["loc"]).removeprefix(".")
    reason = wrong["msg"][:1].lower() + wrong["msg"][1:]
    is_short = isinstance(wrong["input"], int | float | str) and wrong["type"] != "missing"
    return f"{where} is {str(wrong['input'])[:80]!r}: {reason}" if is_short else f"{where}: {reason}"


def _check(index: Index) -> None:
    _check_texts(index)
    _check_shapes(index)
    files = _checked_files(index)
    for number, chunk in enumerate(index.chunks):
        _check_chunk(f"chunks[{number}] ({chunk.key[:80]})", chunk, index, files)
    _check_keys(index)
    _check_coverage(index)
    _check_names(index)
    _check_ranks(index)
    _check_narrow(index)
    _check_state(index)


def _check_texts(index: Index) -> None:
    """Refuse names that cannot be encoded as text."""
    names = [index.layout, index.optimizer, *index.versions, *index.versions.values()]
    names += [*index.shapes, *index.ties, *index.metrics, *(file.name for file in index.files)]
    names += [text for chunk in index.chunks for text in (chunk.kind, chunk.name, chunk.file, chunk.key)]
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise _WrongError(f"{name!a} is not text: {error}.") from error


def _check_shapes(index: Index) -> None:
    for name, shape in index.shapes.items():
        if len(shape) > MAX_DIMS or math.prod(shape) > MAX_TENSOR_BYTES:
            raise _WrongError(f"shapes[{name!r}] is {shape[:8]}, which is not a tensor's shape.")


def _checked_files(index: Index) -> dict[str, File]:
    files: dict[str, File] = {}
    for number, file in enumerate(index.files):
        where = f"files[{number}]"
        if not is_portable_name(file.name) or not file.name.endswith(".safetensors"):
            raise _WrongError(f"{where}.name is {file.name[:80]!r}, which is not the plain name of a safetensors file.")
        if file.name in files:
            raise _WrongError(f"{where}.name is {file.name!r}, which is listed twice.")
        if not 8 < file.head_bytes <= min(file.num_bytes, MAX_HEAD_BYTES):
            raise _WrongError(f"{where} has a header of {file.head_bytes} bytes in a file of {file.num_bytes}.")
        files[file.name] = file
    return files


def _check_chunk(where: str, chunk: Chunk, index: Index, files: Mapping[str, File]) -> None:
    """Check one chunk, by itself and against its file."""
    if chunk.kind != RANK and chunk.name not in index.shapes:
        raise _WrongError(f"{where}.name is {chunk.name[:80]!r}, which shapes does not list.")
    if not _is_known_kind(chunk, index):
        raise _WrongError(f"{where} has the unknown kind {chunk.kind[:80]!r}.")
    if chunk.key != f"{chunk.kind}/{chunk.name}":
        raise _WrongError(f"{where} has a key that does not fit {chunk.kind} {chunk.name}.")
    try:
        itemsize = dtype_of(chunk.dtype).itemsize
    except ValueError as error:
        raise _WrongError(f"{where}.dtype: {error}.") from error
    file = files.get(chunk.file)
    if file is None:
        raise _WrongError(f"{where}.file is {chunk.file[:80]!r}, which files does not list.")
    if chunk.offset < file.head_bytes or chunk.offset + chunk.num_bytes > file.num_bytes:
        raise _WrongError(
            f"{where} has bytes {chunk.offset} to {chunk.offset + chunk.num_bytes} of {chunk.file}, whose tensors lie "
            f"from {file.head_bytes} to {file.num_bytes}."
        )
    if _numel(where, chunk, index) * itemsize != chunk.num_bytes:
        raise _WrongError(f"{where}.num_bytes is {chunk.num_bytes}, which does not fit its elements of {chunk.dtype}.")
    if chunk.block_bytes != block_bytes_of(chunk.num_bytes):
        raise _WrongError(f"{where}.block_bytes is {chunk.block_bytes} instead of {block_bytes_of(chunk.num_bytes)}.")
    if len(chunk.crc32) != -(-chunk.num_bytes // chunk.block_bytes):
        raise _WrongError(f"{where}.crc32 has {len(chunk.crc32)} sums for {chunk.num_bytes} bytes.")


def _is_known_kind(chunk: Chunk, index: Index) -> bool:
    first, dot, rest = chunk.kind.partition(".")
    if first == RANK and not dot:
        return _is_number(chunk.name, index.world_size) and chunk.shape is not None and chunk.dtype == "uint8"
    if first == "outer":
        return bool(rest)
    if first == ISLAND and not _is_number(rest.partition(".")[0], index.world_size):
        return False
    own = own_kind(chunk.kind)
    if own in ("param", "buffer", FACTOR) or _is_state(own) or _is_unsent(own, index):
        return True
    return first == "buffer" and _is_number(rest, index.world_size)


def _is_state(kind: str) -> bool:
    """Whether it is a state of the optimizer, of all islands or of one."""
    own = own_kind(kind)
    return own.startswith("state.") and own != "state."


def _is_unsent(kind: str, index: Index) -> bool:
    """Whether it is what a rank has not sent, or what codes that it sent have lost."""
    first, dot, rest = kind.partition(".")
    if first == LOST:
        number, _, place = rest.partition(".")
        return _is_number(number, index.world_size + 1) and _is_number(place, int(number))
    return first == UNSENT and (not dot or _is_number(rest, index.world_size))


def _is_number(text: str, limit: int) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10 and int(text) < limit and str(int(text)) == text


def _numel(where: str, chunk: Chunk, index: Index) -> int:
    if chunk.shape is not None:
        if (chunk.start, chunk.stop) != (0, 0) or len(chunk.shape) > MAX_DIMS:
            raise _WrongError(f"{where} is whole and has elements {chunk.start} to {chunk.stop} as well.")
        if not _is_state(chunk.kind) and own_kind(chunk.kind) not in (RANK, FACTOR):
            raise _WrongError(f"{where}.shape is for states of an optimizer only.")
        return math.prod(chunk.shape)
    numel = math.prod(index.shapes[chunk.name])
    if chunk.box is not None:
        numel = _checked_box(where, chunk.box, index.shapes[chunk.name]).numel
    if not chunk.start <= chunk.stop <= numel:
        raise _WrongError(f"{where} has elements {chunk.start} to {chunk.stop} of {numel}.")
    return chunk.stop - chunk.start


def _checked_box(where: str, ranges: list[list[list[int]]], shape: list[int]) -> Box:
    """A part of a tensor of `shape`; along each dimension its ranges must be ascending, disjoint and within bounds."""
    if len(ranges) != len(shape) or not shape or math.prod(map(len, ranges)) > MAX_BLOCKS:
        raise _WrongError(f"{where}.box has ranges for {len(ranges)} dimensions of a tensor of shape {shape[:8]}.")
    for size, own in zip(shape, ranges, strict=True):
        ends = [end for span in own for end in span]
        rises = all(before <= after for before, after in itertools.pairwise([0, *ends, size]))
        if not own or not rises or any(len(span) != 2 or span[0] == span[1] for span in own):
            raise _WrongError(
                f"{where}.box has {str(own)[:80]}, which are no ranges in order of a dimension of {size}."
            )
    return box_of(ranges, shape)


def _check_keys(index: Index) -> None:
    """Chunks must fill each file without gaps or overlaps."""
    by_file: dict[str, list[Chunk]] = defaultdict(list)
    for chunk in index.chunks:
        by_file[chunk.file].append(chunk)
    for file in index.files:
        end = file.head_bytes
        for chunk in sorted(by_file[file.name], key=lambda chunk: (chunk.offset, chunk.num_bytes)):
            if chunk.offset != end:
                raise _WrongError(
                    f"{file.name} has {chunk.key} from byte {chunk.offset} on, but what is before ends at {end}."
                )
            end += chunk.num_bytes
        if end != file.num_bytes:
            raise _WrongError(f"{file.name} has {file.num_bytes} bytes, but its tensors end at {end}.")


def _check_coverage(index: Index) -> None:
    """Every element of every tensor must be there once, in one dtype."""
    by_tensor: dict[tuple[str, str], list[Chunk]] = defaultdict(list)
    for chunk in index.chunks:
        by_tensor[chunk.kind, chunk.name].append(chunk)
    for name, shape in index.shapes.items():
        if math.prod(shape) and not any((kind, name) in by_tensor for kind in ("param", "buffer")):
            raise _WrongError(f"there are no elements of {name}; it is incomplete.")
    for (kind, name), chunks in by_tensor.items():
        whole = [chunk for chunk in chunks if chunk.shape is not None]
        if whole:
            if len(chunks) > 1:
                raise _WrongError(f"{kind} {name} appears {len(chunks)} times.")
            continue
        if len({(chunk.dtype, chunk.is_narrow) for chunk in chunks}) > 1:
            raise _WrongError(f"{kind} {name} is partly {chunks[0].dtype} and partly something else.")
        _check_boxes(f"{kind} {name}", chunks, index.shapes[name])


def _check_boxes(what: str, chunks: list[Chunk], shape: list[int]) -> None:
    """The chunks of one box must cover it, and the boxes the tensor."""
    if all(chunk.box is None for chunk in chunks):
        _check_tiles(what, chunks, math.prod(shape))
        return
    by_box: dict[Box | None, list[Chunk]] = defaultdict(list)
    for chunk in chunks:
        by_box[None if chunk.box is None else box_of(chunk.box, shape)].append(chunk)
    for box, own in by_box.items():
        _check_tiles(what if box is None else f"{what} {box}", own, math.prod(shape) if box is None else box.numel)
    boxes = [box or Box.whole(shape) for box in by_box]
    if len(boxes) == 1 and not boxes[0].is_split:
        return
    blocks = [block for box in boxes for block in box.blocks]
    if len(blocks) > MAX_BLOCKS:
        raise _WrongError(f"{what} is in {len(blocks)} blocks; there are at most {MAX_BLOCKS}.")
    for block, other in itertools.combinations(blocks, 2):
        if all(one.overlap(two).numel for one, two in zip(block, other, strict=True)):
            raise _WrongError(f"two boxes of {what} overlap; some of its elements appear twice.")
    missing = math.prod(shape) - sum(box.numel for box in boxes)
    if missing:
        raise _WrongError(f"{missing} elements of {what} are in no box; it is incomplete.")


def _check_tiles(what: str, chunks: list[Chunk], numel: int) -> None:
    end = 0
    for chunk in sorted(chunks, key=lambda chunk: (chunk.start, chunk.stop)):
        if chunk.start > end:
            raise _WrongError(f"elements {end} to {chunk.start} of {what} are missing; it is incomplete.")
        if chunk.start < end:
            raise _WrongError(f"elements {chunk.start} to {min(end, chunk.stop)} of {what} appear twice.")
        end = chunk.stop
    if end != numel:
        raise _WrongError(f"elements {end} to {numel} of {what} are missing; it is incomplete.")


def _check_names(index: Index) -> None:
    """Ties, groups and numbers must refer to existing tensors."""
    for alias, name in index.ties.items():
        if alias in index.shapes or name not in index.shapes:
            raise _WrongError(f"ties[{alias!r}] is {name!r}; one has to be a new name, the other a tensor's.")
    seen: set[str] = set()
    for number, group in enumerate(index.groups):
        params = group.get("params", [])
        if not isinstance(params, list):
            raise _WrongError(f"groups[{number}]['params'] is not a list of names.")
        for name in params:
            if not isinstance(name, str) or name not in index.shapes or name in seen:
                raise _WrongError(f"groups[{number}]['params'] has {name!r}, which is unknown or listed twice.")
            seen.add(name)
    for name in index.numbers:
        if name not in index.shapes:
            raise _WrongError(f"numbers has {name!r}, which shapes does not list.")
    if all("params" in group for group in index.groups):  # a converted optimizer may not say whose groups they are
        states = (chunk.name for chunk in index.chunks if _is_state(chunk.kind))
        for name in (*states, *index.numbers):
            if name not in seen:
                raise _WrongError(f"groups has no {name!r}, whose states are there and would not be loaded.")


def _check_ranks(index: Index) -> None:
    """Every rank wrote its document, or none did (converted checkpoints)."""
    there = {chunk.name for chunk in index.chunks if chunk.kind == RANK}
    if there and len(there) != index.world_size:
        raise _WrongError(f"world_size is {index.world_size}, but {len(there)} ranks wrote what they remember.")


def _check_narrow(index: Index) -> None:
    """A narrow state has fewer bits than its parameter; otherwise it would be rounded on loading."""
    sizes = {chunk.name: dtype_of(chunk.dtype).itemsize for chunk in index.chunks if chunk.kind in ("param", "buffer")}
    for chunk in index.chunks:
        size = dtype_of(chunk.dtype).itemsize
        if chunk.is_narrow and (not _is_state(chunk.kind) or size >= sizes.get(chunk.name, size)):
            raise _WrongError(f"{chunk.key[:80]} is narrow, but its {chunk.dtype} has not fewer bits than others have.")


def _check_state(index: Index) -> None:
    """Encoded values must be decodable, and be what the engine expects."""
    for number, group in enumerate(index.groups):
        decode(group, f"groups[{number}]")
    for name, numbers in index.numbers.items():
        states = decode(numbers, f"numbers[{name!r}]")
        if not isinstance(states, dict):
            raise _WrongError(f"numbers[{name!r}] is not states by name.")
        for key, value in states.items():
            if isinstance(value, float) and math.isnan(value):
                raise _WrongError(f"numbers[{name!r}] has {key} = nan, which is not a number.")
            if key == "step" and isinstance(value, int | float) and not 0 <= value < math.inf:
                raise _WrongError(f"numbers[{name!r}] has step = {value}, which is not a number of steps.")
    state = decode(index.state, "state")
    num_steps = state.get("num_steps")
    if type(num_steps) is not int or not 0 <= num_steps <= 2**60:
        raise _WrongError(f"state['num_steps'] is {num_steps!r}, which is not a number of steps.")
    if not isinstance(state.get("user"), dict):
        raise _WrongError("state['user'] must be an object.")
    for problem in (*_problems_of_scale(state), *_problems_of_islands(state)):
        raise _WrongError(problem)


def _problems_of_islands(state: Mapping[str, Any]) -> Iterator[str]:
    islands = state.get("islands", {"pending": None, "settings": ""})
    if not isinstance(islands, dict) or not isinstance(islands.get("settings"), str):
        yield "state['islands'] has not the settings of islands as text."
    elif islands.get("pending") is not None and type(islands["pending"]) is not int:
        yield f"state['islands'] has pending = {str(islands['pending'])[:80]!r}, which is no fragment's number."


def _problems_of_scale(state: Mapping[str, Any]) -> Iterator[str]:
    scale = state.get("loss_scale", dict.fromkeys(_SCALER, 1))
    if not isinstance(scale, dict) or any(type(scale.get(key)) not in (int, float) for key in _SCALER):
        yield f"state['loss_scale'] has not the numbers {', '.join(_SCALER)}."
    elif not all(0 <= scale[key] < math.inf for key in _SCALER) or scale["scale"] == 0:
        yield f"state['loss_scale'] is {scale}, which no run comes to."
