"""Converts any readable format to any writable one, with one tensor in memory at a time."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.formats import hf, ours
from shardwise.checkpoint.formats.drafts import drafted, refuse_to_overwrite
from shardwise.checkpoint.formats.forms import open_checkpoint
from shardwise.checkpoint.formats.hf_names import as_the_model_has_it, names_of
from shardwise.checkpoint.formats.source import PARAM, Source, Spec
from shardwise.errors import CheckpointError, ConfigError, nearest
from shardwise.system.units import format_bytes, parse_bytes

TARGETS = ("hf", "shardwise", "dcp")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_FILE_BYTES = 5 * 2**30
Tick = Callable[[Spec], None]


@dataclass(frozen=True)
class Conversion:
    """What `convert` writes, or would write: tensors by file, and notes for the user."""

    source: Source
    out: Path
    to: str
    files: dict[str, list[Spec]]
    notes: tuple[str, ...]
    max_file_bytes: int

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for specs in self.files.values() for spec in specs)

    @property
    def num_tensors(self) -> int:
        return sum(map(len, self.files.values()))


def convert(
    source: str | Path,
    out: str | Path,
    to: str,
    *,
    dtype: str | None = None,
    weights_only: bool = False,
    config: str | Path | None = None,
    max_file_bytes: int | str = MAX_FILE_BYTES,
    dry_run: bool = False,
) -> Conversion:
    """Write the checkpoint at `source` (see `inspect` for readable formats) as `to` into the new folder `out`.

    `to` is `hf` (weights, for `from_pretrained`), `shardwise` (for `engine.resume`) or `dcp` (for FSDP2 and
    `torch.distributed.checkpoint`). `dtype` (fp32, bf16, fp16) is that of floating-point parameters, unchanged by
    default; optimizer states keep theirs. `weights_only` leaves out the optimizer, the step and the script's own state.
    `config` is a Hugging Face folder or config.json to copy along. Files are split at `max_file_bytes`. With `dry_run`
    nothing is written.

    Called by one process, without ranks. Raises `CheckpointError` if `out` is not empty or `source` cannot be read, and
    `ConfigError` for invalid arguments; then nothing is left at `out`.
    """
    conversion = plan_conversion(
        source, out, to, dtype=dtype, weights_only=weights_only, config=config, max_file_bytes=max_file_bytes
    )
    if not dry_run:
        carry_out(conversion)
    return conversion


def plan_conversion(
    source: str | Path,
    out: str | Path,
    to: str,
    *,
    dtype: str | None = None,
    weights_only: bool = False,
    config: str | Path | None = None,
    max_file_bytes: int | str = MAX_FILE_BYTES,
) -> Conversion:
    """What `convert` would write, with the same arguments. Writes nothing."""
    settings = _Settings.of(to, dtype, max_file_bytes)
    target = Path(out)
    refuse_to_overwrite(target)
    opened = _prepared(open_checkpoint(Path(source)), settings, weights_only, config)
    return Conversion(opened, target, to, _files(opened, settings), tuple(_notes(opened, settings)), settings.max_bytes)


def carry_out(conversion: Conversion, tick: Tick = lambda _: None) -> None:
    """Write what was planned; `tick` is called after each tensor. See `convert`."""
    with drafted(conversion.out) as draft:
        _write(conversion, draft, tick)


@dataclass(frozen=True)
class _Settings:
    """The checked arguments."""

    to: str
    dtype: torch.dtype | None
    max_bytes: int

    @classmethod
    def of(cls, to: str, dtype: str | None, max_file_bytes: int | str) -> _Settings:
        if to not in TARGETS:
            raise ConfigError(f"There is no format {to!r} to convert to. {nearest(to, TARGETS)}")
        return cls(to, dtype_of(dtype), file_bytes(max_file_bytes))


def dtype_of(dtype: object) -> torch.dtype | None:
    """The dtype of this name, `bf16` or torch's `bfloat16`, or the dtype itself. Raises `ConfigError` for others."""
    if dtype is None or dtype in DTYPES.values():
        return dtype  # type: ignore[return-value]  # one of those
    name = str(dtype).removeprefix("torch.")
    for short, known in DTYPES.items():
        if name in (short, str(known).removeprefix("torch.")):
            return known
    raise ConfigError(f"dtype is {dtype!r}. {nearest(name, DTYPES)}")


def file_bytes(size: int | str) -> int:
    """The largest size of a file, such as `5GiB`. Raises `ConfigError` for what is none."""
    try:
        num_bytes = parse_bytes(size) if isinstance(size, str) else size
    except ValueError as error:
        raise ConfigError(f"The largest size of a file: {error}.") from error
    if num_bytes < 1:
        raise ConfigError(f"The largest size of a file is {num_bytes}; give at least 1 byte.")
    return num_bytes


def _prepared(source: Source, settings: _Settings, weights_only: bool, config: str | Path | None) -> Source:
    """The part of `source` to write, in the requested dtypes."""
    if not source.weights:
        raise CheckpointError(f"{source.path} has no weights to convert.")
    if config is not None:
        source = replace(source, kept=_configuration(Path(config)))
    if source.form == hf.FORM and settings.to != "hf":
        source = as_the_model_has_it(source)
    if weights_only or settings.to == "hf":
        source = source.without_optimizer()
    return source if settings.dtype is None else _cast(source, settings.dtype)


def _configuration(path: Path) -> tuple[Path, ...]:
    if path.is_file():
        return (path,)
    if (path / hf.CONFIG).is_file():
        return hf.files_to_keep(path)[0]
    raise ConfigError(f"--config is {path}; give a {hf.CONFIG}, or a folder that contains one.")


def _cast(source: Source, dtype: torch.dtype) -> Source:
    originals: dict[Spec, Spec] = {}
    for spec in source.specs:
        is_cast = spec.kind == PARAM and spec.dtype.is_floating_point
        originals[replace(spec, dtype=dtype) if is_cast else spec] = spec
    read = source.read
    return replace(source, specs=tuple(originals), read=lambda spec: read(originals[spec]).to(spec.dtype))


def _hf_specs(source: Source) -> dict[str, Spec]:
    """The name in the file for each name of the source. For tied weights it is the one that transformers looks for."""
    config = next((path.parent for path in source.kept if path.name == hf.CONFIG), None)
    names = names_of(config) if config is not None and source.form != hf.FORM else None
    if names is None:
        return {spec.name: spec for spec in source.weights}
    known = {spec.name for spec in source.weights}
    once = [spec for spec in source.weights if names.ties.get(spec.name) not in known]
    return {spec.name: replace(spec, name=names.saved_as.get(spec.name, spec.name)) for spec in once}


def _files(source: Source, settings: _Settings) -> dict[str, list[Spec]]:
    if settings.to == "hf":
        return hf.shards_of(list(_hf_specs(source).values()), settings.max_bytes)
    if settings.to == "dcp":
        files: dict[str, list[Spec]] = _dcp().files_of(source, settings.max_bytes)
        return files
    return {
        f"{ours.checkpoint_name(source)}/{name}": run
        for name, run in ours.shards_of(source, settings.max_bytes).items()
    }


def _write(conversion: Conversion, draft: Path, tick: Tick) -> None:
    source, max_bytes = conversion.source, conversion.max_file_bytes
    needed = sum(spec.num_bytes for spec in source.specs)
    free = shutil.disk_usage(draft).free
    if needed > free:
        raise CheckpointError(
            f"The result needs {format_bytes(needed)}, but {draft.parent} has only {format_bytes(free)} free."
        )
    if conversion.to == "hf":
        hf.write_hf(source, draft, _hf_specs(source), max_bytes, tick)
    elif conversion.to == "dcp":
        _dcp().write_dcp(source, draft, max_bytes, tick)
    else:
        ours.write_ours(source, draft, max_bytes, tick)


def _dcp() -> Any:
    """torch.distributed.checkpoint takes seconds to import, so it is imported on first use."""
    return importlib.import_module("shardwise.checkpoint.formats.dcp_write")


def _notes(source: Source, settings: _Settings) -> list[str]:
    """Notes for the user."""
    notes = [f"Left out: {words}." if not words.endswith(".") else words for words in source.left_out]
    if settings.to == "hf" and not any(path.name == hf.CONFIG for path in source.kept):
        notes.append(f"There is no {hf.CONFIG} to go along; from_pretrained needs one. Name it with --config.")
    if settings.to == "dcp" and source.states and not all("params" in group for group in source.groups):
        notes.append("Which parameters a group of the optimizer has is not known, so torch cannot load its settings.")
    return notes
