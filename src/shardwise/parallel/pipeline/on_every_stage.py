"""Buffers and counters of modules that are in no stage, such as the model itself, whose forward runs on every stage.

[Note: once per micro-batch] A model may count in them, or collect statistics. A rank with several stages would do so
several times. So what its first stage changes for a micro-batch is kept, and its other stages run on copies of the
values from before. This is right if all ranks make the same change: in watched forwards they compare it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.errors import ModelError

Tensor = torch.Tensor
_SMALL_BYTES = 4096
"""Buffers up to this size are copied before each forward, larger ones only if a watched forward changed them."""
_NOTHING = nullcontext()


class _Key(NamedTuple):
    path: str
    name: str

    def __str__(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name


class _Value(NamedTuple):
    """A buffer or number, the buffer's version, and a copy of it, if one was made."""

    now: Any
    version: int
    copy: Any


@dataclass
class OnEveryStage:
    """The state of the modules of one rank that are in no stage. `pieces` are the names of those that are in one."""

    model: nn.Module
    pieces: Sequence[str]
    _changing: set[_Key] = field(default_factory=set)
    _before: dict[int, dict[_Key, Any]] = field(default_factory=dict)
    """By micro-batch: what the first stage found."""
    _changes: dict[str, str] = field(default_factory=dict)
    """Digests of buffers that watched forwards of the first stage have changed."""
    _is_watched: bool = False

    def __post_init__(self) -> None:
        named = self.model.named_modules(remove_duplicate=False)
        self._modules = {name: one for name, one in named if not self._is_in_stage(name)}

    def _is_in_stage(self, name: str) -> bool:
        return any(name == piece or name.startswith(f"{piece}.") for piece in self.pieces)

    def during(self, micro_batch: int, *, is_first: bool, is_watched: bool) -> AbstractContextManager[None]:
        """A context for the forward of a micro-batch in the first stage of this rank, or in another one."""
        self._is_watched |= is_watched
        before = self._read(everything=is_watched)
        if not before:  # nor is anything kept of the micro-batch
            return _NOTHING
        if is_first:
            return self._in_first(micro_batch, before, is_watched=is_watched)
        return self._in_other(micro_batch, before, is_watched=is_watched)

    def compare(self, exchange: Callable[[bytes], list[bytes]]) -> None:
        """After a step: if forwards were watched, raise `ModelError` unless all ranks have changed buffers alike."""
        if not self._is_watched:
            return
        changes, self._changes, self._is_watched = self._changes, {}, False
        told: list[dict[str, str]] = [json.loads(one) for one in exchange(json.dumps(changes).encode())]
        for name in sorted(set().union(*told)):
            if len({one.get(name) for one in told}) > 1:
                raise _changed_on_some(name)

    def forget(self) -> None:
        """A step has ended."""
        self._before.clear()

    @contextmanager
    def _in_first(self, micro_batch: int, before: dict[_Key, _Value], *, is_watched: bool) -> Iterator[None]:
        yield
        changed = self._changed(before)
        self._changing |= changed.keys()
        self._before[micro_batch] = {key: before[key].copy for key in self._changing if key in before}
        if is_watched:
            self._changes |= {str(key): _digest(now) for key, now in changed.items() if isinstance(now, Tensor)}

    @contextmanager
    def _in_other(self, micro_batch: int, now: dict[_Key, _Value], *, is_watched: bool) -> Iterator[None]:
        found = {key: value for key, value in self._before.get(micro_batch, {}).items() if value is not None}
        for key, value in found.items():
            self._put(key, value.clone() if isinstance(value, Tensor) else value)
        try:
            yield
            if is_watched:
                others = {key: value for key, value in now.items() if key not in found}
                for key, value in self._changed(others).items():
                    if isinstance(value, Tensor):
                        raise _changed_on_some(str(key))
        finally:
            for key in found:
                self._put(key, now[key].now)

    def _read(self, *, everything: bool) -> dict[_Key, _Value]:
        found: dict[_Key, _Value] = {}
        for path, module in self._modules.items():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    key = _Key(path, name)
                    copies = everything or buffer.nbytes <= _SMALL_BYTES or key in self._changing
                    found[key] = _Value(buffer, buffer._version, buffer.detach().clone() if copies else None)
            for name, value in vars(module).items():
                if type(value) in (int, float):
                    found[_Key(path, name)] = _Value(value, 0, value)
        return found

    def _changed(self, before: dict[_Key, _Value]) -> dict[_Key, Any]:
        """What is otherwise now, other than in shape: what has another shape is a cache, made for longer sequences."""
        changed: dict[_Key, Any] = {}
        for key, (was, version, copy) in before.items():
            now = self._get(key)
            if not isinstance(was, Tensor):
                if now != was:
                    changed[key] = now
            elif isinstance(now, Tensor) and (now is not was or now._version != version):
                is_alike = now.shape == was.shape and now.dtype == was.dtype
                if is_alike and not (copy is not None and torch.equal(now, copy)):
                    changed[key] = now
        return changed

    def _get(self, key: _Key) -> Any:
        module = self._modules[key.path]
        return module._buffers[key.name] if key.name in module._buffers else vars(module).get(key.name)

    def _put(self, key: _Key, value: Any) -> None:
        module = self._modules[key.path]
        if key.name in module._buffers:
            module._buffers[key.name] = value
        else:
            vars(module)[key.name] = value


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def _changed_on_some(name: str) -> ModelError:
    return ModelError(
        f"The forward changes the buffer {name}, which is in no pipeline stage, differently on some stages "
        f"(it depends on activations, or changes after the first stage has ended), so that no rank has the right one. "
        f"Move it into a module of one stage."
    )
