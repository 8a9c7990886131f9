"""The arguments of `init_inference`: read, checked, and what becomes of each. Needs no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from shardwise.errors import ConfigError, nearest
from shardwise.integrations.deepspeed.config import Note, load_config
from shardwise.integrations.deepspeed.fields import INFERENCE, INFERENCE_RENAMED, FieldStatus

DTYPES = {
    "fp32": ("fp32", "float32", "float"),
    "fp16": ("fp16", "float16", "half"),
    "bf16": ("bf16", "bfloat16", "bfloat"),
    "int8": ("int8",),
}
"""By the names of precisions here, those of DeepSpeed."""
_SECTIONS = frozenset(path.rpartition(".")[0] for path in INFERENCE) | {"quant"}
_BITS = {8: "int8", 4: "int4"}


@dataclass(frozen=True)
class InferenceConfig:
    """What `init_inference` was asked for."""

    given: Mapping[str, Any]
    """The arguments that are set, by path."""

    def value(self, path: str) -> Any:
        """The value of an argument, or DeepSpeed's default."""
        return self.given.get(path, INFERENCE[path].default)

    @property
    def precision(self) -> str:
        """fp32, fp16, bf16 or int8."""
        word = str(self.value("dtype")).removeprefix("torch.")
        return next(name for name, words in DTYPES.items() if word in words)

    @property
    def weights(self) -> str | None:
        """The `weights` of `shardwise.load_for_inference`."""
        if self.precision != "int8" or not (self.value("quant.enabled") and self.value("quant.weight.enabled")):
            return None
        return _BITS[self.value("quant.weight.num_bits")]

    @property
    def tp_size(self) -> int:
        return int(self.value("tensor_parallel.tp_size")) if self.value("tensor_parallel.enabled") else 1

    @property
    def base_dir(self) -> Path:
        given = self.value("base_dir") or self.value("checkpoint_config.base_dir") or ""
        if not _is_path(given):
            raise ConfigError(f"base_dir is {given!r}; it must be a folder.")
        return Path(given)

    @property
    def checkpoint(self) -> Path | list[Path] | None:
        """The folder with weights, or the files; `None` if they are those of the model.

        Raises `ConfigError` for a list that is none, or of files that are parts for a fixed number of ranks.
        """
        source = self.value("checkpoint")
        source = self.value("checkpoint_config.checkpoint_dir") if source is None else source
        if source is None:
            return None
        if isinstance(source, list | tuple):  # which DeepSpeed wants under "checkpoints" alone
            source = {"type": "ds_model", "checkpoints": [os.fspath(one) if _is_path(one) else one for one in source]}
        if _is_path(source):
            path = Path(source) if Path(source).exists() else self.base_dir / Path(source)
            if path.suffix != ".json":
                return path
            source = load_config(path)
        if not isinstance(source, Mapping):
            raise ConfigError(f"checkpoint is {source!r}; it must be a folder, a file, a list of files, or an object.")
        files = source.get("checkpoints")
        if isinstance(files, Mapping) or str(source.get("type", "")).lower() not in ("bloom", "ds_model"):
            raise ConfigError(
                f"checkpoint has files of the type {json.dumps(source.get('type'))} for a fixed number of ranks, or in "
                f"the layout of Megatron-LM, which cannot be read. Give the folder of the whole model, of which each "
                f"rank keeps its own part: checkpoint=FOLDER."
            )
        if not isinstance(files, list) or not files or not all(isinstance(one, str) for one in files):
            raise ConfigError(f"checkpoint has checkpoints {json.dumps(files)}; it must be a list of files.")
        base = source.get("base_dir") or self.base_dir
        if not _is_path(base):
            raise ConfigError(f"checkpoint has base_dir {json.dumps(base)}; it must be a folder.")
        return [Path(base, one) for one in files]

    def report(self) -> str:
        """One line for each argument that was not simply honoured."""
        notes = [Note(path, INFERENCE[path].status, INFERENCE[path].why) for path in self.given]
        return "\n".join(str(note) for note in notes if note.status is not FieldStatus.HONOURED)


def read_inference_config(
    config: Mapping[str, Any] | str | Path | None, arguments: Mapping[str, Any]
) -> InferenceConfig:
    """The config of `init_inference`, a mapping or a JSON file, and its keyword arguments.

    Raises `ConfigError` for an argument that is unknown, given twice with different values, not supported, or has an
    impossible value.
    """
    given: dict[str, Any] = {}
    for source in ({} if config is None else load_config(config), arguments):
        for path, value in _leaves(source):
            if path in given and given[path] != value:
                raise ConfigError(f"{path} is given twice, as {given[path]!r} and as {value!r}. Leave one of them out.")
            given[path] = value
    unknown = [path for path in given if path not in INFERENCE]
    if unknown:
        raise ConfigError(
            f"init_inference() has no argument {unknown[0]}. {nearest(unknown[0], [*INFERENCE, *INFERENCE_RENAMED])}"
        )
    given = {path: value for path, value in given.items() if value is not None}
    refused = [
        f"{path}: {INFERENCE[path].why}"
        for path, value in given.items()
        if INFERENCE[path].status is FieldStatus.REFUSED and value != INFERENCE[path].default
    ]
    if refused:
        lines = "\n".join(f"  {line}" for line in refused)
        raise ConfigError(f"init_inference() has arguments that shardwise does not support:\n{lines}")
    found = InferenceConfig(given)
    _check(found)
    return found


def default_inference_config() -> dict[str, Any]:
    """DeepSpeed's defaults, as a config."""
    config: dict[str, Any] = {}
    for path, field in INFERENCE.items():
        *sections, name = path.split(".")
        inner = config
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = field.default
    return config


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        path = INFERENCE_RENAMED.get(f"{prefix}{key}", f"{prefix}{key}")
        if path == "moe" and isinstance(value, bool):
            yield "moe.enabled", value
        elif path not in _SECTIONS:
            yield path, value
        elif isinstance(value, Mapping):
            yield from _leaves(value, f"{path}.")
        elif value is not None:
            raise ConfigError(f"{path} is {value!r}; it must be an object with arguments of its own.")


def _is_path(value: object) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(value, str | os.PathLike)


def _check(config: InferenceConfig) -> None:
    word = str(config.value("dtype")).removeprefix("torch.")
    known = [one for words in DTYPES.values() for one in words]
    if word not in known:
        raise ConfigError(f"dtype is {config.value('dtype')!r}. {nearest(word, known)}")
    size, bits = config.value("tensor_parallel.tp_size"), config.value("quant.weight.num_bits")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"tensor_parallel.tp_size is {size!r}; it must be an integer of at least 1.")
    if bits not in _BITS:
        raise ConfigError(f"quant.weight.num_bits is {bits!r}; it must be 8 or 4.")
