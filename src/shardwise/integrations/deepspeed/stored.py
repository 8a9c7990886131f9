"""Weights in a checkpoint, without an engine: `deepspeed.utils.zero_to_fp32`, and loading parameters alone.

The checkpoints may be shardwise's or DeepSpeed's own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import nn

from shardwise.checkpoint import formats
from shardwise.errors import CheckpointError, some
from shardwise.integrations.deepspeed.tags import latest_tag
from shardwise.system.units import parse_bytes

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]
Tensor = torch.Tensor
Model = TypeVar("Model", bound=nn.Module)


class StoredWeights(Mapping[str, Tensor]):
    """The `state_dict` in a checkpoint. A tensor is read when it is asked for, and only the last one is kept.

    Floating-point tensors are converted to `dtype`, if there is one.
    """

    def __init__(
        self, source: formats.Source, dtype: torch.dtype | None = None, *, excludes_frozen: bool = False
    ) -> None:
        self._source = source
        self._dtype = dtype
        self._specs = {spec.name: spec for spec in source.weights}
        self._specs |= {name: self._specs[first] for name, first in source.ties.items()}
        self.extra: dict[str, Any] = source.engine.get("extra_state", {})
        """What modules return from `get_extra_state`, by name."""
        self._last: tuple[str, Tensor] | None = None
        if excludes_frozen:
            self._exclude_frozen()

    def _exclude_frozen(self) -> None:
        trained = {name for group in self._source.groups for name in group.get("params", ())}
        if not trained:
            raise CheckpointError(
                f"{self._source.path} does not say which parameters were trained. Leave out exclude_frozen_parameters."
            )
        self._specs = {name: spec for name, spec in self._specs.items() if spec.name in trained}

    def __getitem__(self, name: str) -> Any:
        if name in self.extra:
            return self.extra[name]
        spec = self._specs[name]
        if self._last is None or self._last[0] != name:
            self._last = None  # freed before the next one is read
            tensor = self._source.read(spec)
            is_converted = self._dtype is not None and tensor.is_floating_point()
            self._last = name, tensor.to(self._dtype) if is_converted else tensor
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        yield from self._specs
        yield from self.extra

    def __len__(self) -> int:
        return len(self._specs) + len(self.extra)

    def read_all(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """What is stored under `names`, by default all; names of one parameter get the same tensor."""
        found: dict[str, Any] = {}
        first_of: dict[str, str] = {}
        for name in self if names is None else names:
            spec = self._specs.get(name)
            first = name if spec is None else first_of.setdefault(spec.name, name)
            found[name] = found[first] if first in found else self[name]
        return found

    def num_bytes(self, name: str) -> int:
        """The bytes of a tensor, after its conversion. What modules give besides is small, and not counted."""
        if name in self.extra:
            return 0
        spec = self._specs[name]
        dtype = self._dtype if self._dtype is not None and spec.dtype.is_floating_point else spec.dtype
        return spec.numel * dtype.itemsize


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> Mapping[str, Tensor]:
    """The whole `state_dict` in fp32 of the checkpoint `checkpoint_dir/tag`, by default the latest.

    With `lazy_mode` a tensor is read when it is taken from the result. Raises `CheckpointError` if there is no
    checkpoint, or it is damaged.
    """
    weights = _opened(checkpoint_dir, tag, torch.float32, exclude_frozen_parameters)
    return weights if lazy_mode else weights.read_all()


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the whole `state_dict` into `output_dir`: `pytorch_model.bin`, or `model.safetensors`.

    If it is larger than `max_shard_size`, into several files with an index. Raises `CheckpointError` for what modules
    return from `get_extra_state` with `safe_serialization`.
    """
    weights = _opened(checkpoint_dir, tag, dtype, exclude_frozen_parameters)
    if safe_serialization and weights.extra:
        raise CheckpointError(
            f"{checkpoint_dir} has {some(weights.extra)}, from get_extra_state of modules, and safetensors holds named "
            f"tensors alone. Leave out safe_serialization."
        )
    stem, ending = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    parts = _in_parts(weights, math.inf if max_shard_size is None else parse_bytes(max_shard_size))
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    file_of: dict[str, str] = {}
    for number, names in enumerate(parts, 1):
        file = f"{stem}-{number:05}-of-{len(parts):05}.{ending}" if len(parts) > 1 else f"{stem}.{ending}"
        if safe_serialization:  # in which tensors cannot share memory
            save_file({name: weights[name] for name in names}, folder / file, metadata={"format": "pt"})
        else:
            torch.save(weights.read_all(names), folder / file)
        file_of |= dict.fromkeys(names, file)
    if len(parts) > 1:
        index = {"metadata": {"total_size": sum(map(weights.num_bytes, file_of))}, "weight_map": file_of}
        (folder / f"{stem}.{ending}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """As `convert_zero_checkpoint_to_state_dict`, in fp32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def load_state_dict_from_zero_checkpoint(model: Model, checkpoint_dir: str | Path, tag: str | None = None) -> Model:
    """Move `model`, which must not belong to an engine, to the CPU, and load the checkpoint's weights into it."""
    model.cpu().load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag))
    return model


def _opened(folder: str | Path, tag: str | None, dtype: torch.dtype, excludes_frozen: bool) -> StoredWeights:
    name = latest_tag(Path(folder)) if tag is None else tag
    if name is None:
        raise CheckpointError(f"There is no file latest in {folder}. Pass tag, the name of a checkpoint there.")
    return StoredWeights(formats.open_checkpoint(Path(folder) / name), dtype, excludes_frozen=excludes_frozen)


def _in_parts(weights: StoredWeights, limit: float) -> list[list[str]]:
    """The names of tensors, file by file, each of at most `limit` bytes if its first tensor is not larger."""
    parts: list[list[str]] = [[]]
    size = 0
    for name in weights:
        added = weights.num_bytes(name)
        if parts[-1] and size + added > limit:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += added
    return parts
