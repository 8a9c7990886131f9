"""Finds tensors of a model that share memory with a parameter without being that parameter.

A parameter moves to the engine's memory, and every other tensor on its old memory would stay behind. Two parameters on
one memory cannot be made one either: the plain loop steps each of them with its own gradient and its own states.
Parameters that only lie side by side in one storage, as those of a fused layer or of a mapped file do, are independent.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from shardwise.errors import ModelError
from shardwise.memory import is_dense
from shardwise.system.torch_private import DisableTorchFunctionSubclass, FakeTensor, storage_id

Tensor = torch.Tensor


@dataclass(frozen=True)
class _Place:
    """Which bytes a tensor spans: of the process's memory, or of one storage that has none."""

    kind: str
    name: str
    tensor: Tensor
    memory: int
    """The storage, if it has no memory; else 0."""
    start: int
    stop: int

    @classmethod
    def of(cls, kind: str, name: str, tensor: Tensor) -> _Place | None:
        """`None` for a tensor without elements, or whose elements do not lie in memory as they are."""
        with DisableTorchFunctionSubclass():
            if not is_dense(tensor) or not tensor.numel():
                return None
            storage = tensor.untyped_storage()
            start = int(tensor.storage_offset()) * tensor.element_size()
        base = 0 if isinstance(tensor, FakeTensor) else storage.data_ptr()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        stop = start + (last + 1) * tensor.element_size()
        return cls(kind, name, tensor, 0 if base else storage_id(storage), base + start, base + stop)

    def is_like(self, other: _Place) -> bool:
        """Whether both are the same elements, in one shape."""
        one, two = self.tensor, other.tensor
        return self.start == other.start and one.shape == two.shape and one.stride() == two.stride()

    def overlaps(self, other: _Place) -> bool:
        """Whether they have an element in common."""
        if self.memory != other.memory or max(self.start, other.start) >= min(self.stop, other.stop):
            return False
        one, two = self.tensor, other.tensor
        if one.element_size() != two.element_size() or (_fills_its_span(one) and _fills_its_span(two)):
            return True
        first, last = min(self.start, other.start), max(self.stop, other.stop)
        touched = torch.zeros((last - first) // one.element_size(), dtype=torch.bool, device="cpu")
        for place, mark in ((self, True), (other, False)):
            offset = (place.start - first) // one.element_size()
            view = touched.as_strided(place.tensor.shape, place.tensor.stride(), offset)
            if not mark:
                return bool(view.any())
            view.fill_(True)
        return False


def _fills_its_span(tensor: Tensor) -> bool:
    spanned = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return spanned <= tensor.numel()


def check_memory(model: nn.Module) -> None:
    """Raise `ModelError`, naming both, if a parameter that may be trained shares memory with another tensor of the
    model: a parameter, a buffer, or an attribute of a module."""
    found: list[tuple[str, str, Tensor]] = [("parameter", name, param) for name, param in model.named_parameters()]
    found += _others(model, {id(param) for _, _, param in found})
    places = [place for one in found if (place := _Place.of(*one)) is not None]
    near: list[_Place] = []
    for place in sorted(places, key=lambda one: (one.memory, one.start)):
        near = [one for one in near if one.memory == place.memory and one.stop > place.start]
        for other in near:
            trained = [one for one in (other, place) if one.kind == "parameter" and one.tensor.requires_grad]
            if trained and other.overlaps(place):
                raise _shared(trained[0], place if trained[0] is other else other)
        near.append(place)


def _others(model: nn.Module, params: Container[int]) -> Iterator[tuple[str, str, Tensor]]:
    """Kind, name and tensor of the model's buffers, and of attributes of its modules that are tensors or hold some.
    `params` are the ids of its parameters."""
    known = set()
    for name, buffer in model.named_buffers():
        known.add(id(buffer))
        yield "buffer", name, buffer
    for path, module in model.named_modules():
        # Torch's older `spectral_norm` begins with the parameter itself there, and computes it before every forward.
        computed = {hook.name for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)}
        for attribute, value in vars(module).items():
            if attribute in computed:
                continue
            held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
            for tensor in held:
                if isinstance(tensor, Tensor) and id(tensor) not in known and id(tensor) not in params:
                    yield "attribute", f"{path}.{attribute}" if path else attribute, tensor


def _shared(param: _Place, other: _Place) -> ModelError:
    if other.kind != "parameter":
        return ModelError(
            f"The {other.kind} {other.name} shares memory with the parameter {param.name}, which moves to the engine's "
            f"memory, so that {other.name} would keep the values of now. Read the parameter itself in the forward, or "
            f"give the {other.kind} a copy (.clone())."
        )
    if param.is_like(other):
        return ModelError(
            f"The parameters {param.name} and {other.name} share memory, but are two objects, which a step would "
            f"update one after the other. Make them one before the optimizer is made: {other.name} = {param.name}."
        )
    return ModelError(
        f"The parameters {param.name} and {other.name} share a part of their memory, and only whole parameters can be "
        f"shared. Keep one of them, and take the part in the forward."
    )
