"""Weights in files as a part of recorded histories, so that deferred tensors can take their values from there.

Loading a tensor is recorded as an operation that writes to it. So like any deferred tensor it may be renamed, wrapped,
tied or computed with before `shard`, and whoever replays its history reads the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from shardwise.errors import ModelError, StateError
from shardwise.init.deferred import Deferred, undefer
from shardwise.init.files import WeightFiles
from shardwise.init.match import Match, match
from shardwise.init.tape import Operation, Origin, Ref, fill, origin_of
from shardwise.plan.placement import Span

Tensor = torch.Tensor
Files = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class Loaded:
    """Names of the model whose values are in the files, names that the files lack, and names in the files that the
    model lacks."""

    names: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


class Building:
    """The object that `with deferred_init()` returns."""

    def __init__(self) -> None:
        self._is_open = True
        self._buffers: list[tuple[_Read, Tensor]] = []
        """Buffers with values that are filled when the context ends."""

    def close(self) -> None:
        """End the context."""
        self._is_open = False
        for read, buffer in self._buffers:
            read(buffer)

    def load(self, model: nn.Module, weights: Files, *, strict: bool = True) -> Loaded:
        """Give parameters and buffers of `model`, which was built inside, the values in safetensors files.

        `weights` is a file, a list of files, or a folder as `save_pretrained` writes it. Headers are read now, values
        by `shard`: of a parameter that is not changed afterwards only the elements that a rank keeps, of others the
        whole tensor, one at a time. Without `strict` the files may have more or fewer tensors. Any rank may call; there
        is no communication.

        Raises `ModelError` for weights of another model, `CheckpointError` for files that cannot be read, and
        `StateError` outside of the context.
        """
        if not self._is_open:
            raise StateError("load() was called after `with deferred_init()` was left. Call it inside.")
        files = WeightFiles(Path(weights) if isinstance(weights, str | Path) else [Path(one) for one in weights])
        found = match(model, files, strict=strict)
        params = dict(model.named_parameters())
        tensors = {**params, **dict(model.named_buffers())}
        origins = {name: origin_of(tensors[name]) for name in found}
        strange = [name for name, origin in origins.items() if origin is None and name in params]
        if strange:
            raise ModelError(
                f"{strange[0]} was not built inside this deferred_init, so its values cannot be put off. Build the "
                f"whole model inside, or give shard() the files as weights=."
            )
        for name, origin in origins.items():
            if origin is not None:
                self._write(found, name, Ref.to(tensors[name], origin))
            else:  # a buffer made from Python numbers, such as a counter
                self._buffers.append((_Read(found, name), tensors[name]))
        return Loaded(tuple(found), tuple(found.missing), tuple(found.unexpected))

    def _write(self, found: Match, name: str, ref: Ref) -> None:
        overwritten = (ref.origin,) if ref.covers_all else ()
        needs = () if ref.covers_all else (ref,)
        ref.origin.writes.append(Operation(_Read(found, name), (ref,), {}, (), needs, overwritten, None, None))


@dataclass(frozen=True, eq=False)
class _Read:
    """A recorded operation that fills a tensor from files."""

    found: Match
    name: str

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(self.found.read(self.name, Span(0, tensor.numel())).view(tensor.shape))

    def __str__(self) -> str:
        return f"{self.name} of {self.found.files.label}"


def read_part(tensor: Tensor, origin: Origin, span: Span) -> Tensor | None:
    """Elements `span` of `tensor`, flat, if they lie in files unchanged; `None` if there were other operations."""
    last = origin.writes[-1] if origin.writes else None
    if last is None or not isinstance(last.function, _Read):
        return None
    (written,) = last.args
    if not tensor.is_contiguous() or written != Ref.to(tensor, origin):
        return None
    return last.function.found.read(last.function.name, span).to(tensor.dtype)


def materialize(model: nn.Module) -> None:
    """Compute the values of the deferred parameters of `model`, whole, on this rank."""
    for param in model.parameters():
        if isinstance(param, Deferred):
            undefer(param)
        if (origin := origin_of(param)) is not None:
            fill(param.untyped_storage(), origin)
