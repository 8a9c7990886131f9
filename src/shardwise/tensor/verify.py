"""`tensor.verify`: the first batch goes through a copy of the uncut model too, and outputs are compared by module."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.comm import DataGroup, World
from shardwise.errors import ConfigError, ModelError
from shardwise.runtime.nested import tensors_in
from shardwise.tensor.generators import draws
from shardwise.tensor.shares import AXIS
from shardwise.tensor.split import Split

Tensor = torch.Tensor
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
COARSE = 5e-2
"""For bf16 and fp16."""


class Verifier:
    """Compares the first forward of a model that is cut with that of a copy that is not, and then lets go of it."""

    def __init__(self, model: nn.Module) -> None:
        """Before the model is cut. Raises `ConfigError` for one that cannot be compared so."""
        if any(param.device.type == "meta" for param in model.parameters()) or any(
            type(param) is not nn.Parameter for param in model.parameters()
        ):
            raise ConfigError("tensor.verify needs a model with values: build it plainly, at a size that fits a rank.")
        if draws(model):
            raise ConfigError("tensor.verify compares numbers, and dropout draws others. Build the model without it.")
        self._uncut: nn.Module | None = copy.deepcopy(model)
        self._found: list[tuple[str, int, Tensor]] = []
        self._handles: list[RemovableHandle] = []

    def watch(self, model: nn.Module, split: Split, world: World, group: DataGroup) -> None:
        """Once the model is cut. All ranks call; the copies take the first one's values."""
        uncut = self._uncut
        assert uncut is not None
        kept = {name: param.dtype for name, param in model.named_parameters()}
        for name, param in uncut.named_parameters():
            values = param.detach().contiguous()
            group.broadcast(values.view(-1), "verify")
            param.data = values.to(kept[name])
        given: list[tuple[Any, Any]] = []

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._found.clear()
            given[:] = [(args, kwargs)]

        def after(module: nn.Module, _: Any, output: Any) -> None:
            if output is None or not given:  # the forward raised
                return
            args, kwargs = given.pop()
            for handle in self._handles:
                handle.remove()
            said = self._compared(split, module, args, kwargs)
            self._uncut = None
            self._found.clear()
            told = [message.decode() for message in world.exchange(said.encode(), "verify")]
            if any(told):
                raise ModelError(next(message for message in told if message))

        self._handles += _listening(model, self._found)
        self._handles.append(model.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(model.register_forward_hook(after))

    def _compared(self, split: Split, model: nn.Module, args: Any, kwargs: Any) -> str:
        """What differs first, in a sentence; empty if nothing does."""
        uncut = self._uncut
        assert uncut is not None
        uncut.train(model.training)
        expected: list[tuple[str, int, Tensor]] = []
        _listening(uncut, expected)
        with torch.no_grad():
            uncut(*args, **kwargs)
        wanted = {(path, number): value for path, number, value in expected}
        for path, number, value in self._found:
            other = _part(wanted.get((path, number)), value, split, path)
            if other is None:
                continue
            error = float((value.double() - other.double()).norm() / other.double().norm().clamp_min(1e-30))
            if not error <= TOLERANCE.get(value.dtype, COARSE):
                module = split.modules[path] if path else model
                return (
                    f"Cut along {AXIS} the model computes something else than the uncut one. The first module that "
                    f"differs is {path or 'the model'} ({type(module).__name__}), by {error:.1e} of its output at "
                    f"place {split.place}. Look at what of it tensor.plan cuts, and at what tensor.divide leaves out."
                )
        return ""


def _listening(model: nn.Module, found: list[tuple[str, int, Tensor]]) -> list[RemovableHandle]:
    """Note the first floating-point tensor that each module returns, in the order in which they end."""
    calls: Counter[str] = Counter()

    def listen(path: str, module: nn.Module) -> RemovableHandle:
        def note(_: nn.Module, __: Any, output: Any) -> None:
            tensor = next((one for one in tensors_in(output) if one.is_floating_point()), None)
            if tensor is not None:
                found.append((path, calls[path], tensor.detach().clone()))
            calls[path] += 1

        return module.register_forward_hook(note)

    return [listen(path, module) for path, module in model.named_modules()]


def _part(whole: Tensor | None, like: Tensor, split: Split, path: str) -> Tensor | None:
    """Of the output of a module that is not cut what the one that is has here; `None` where nobody can say."""
    if whole is None or whole.shape == like.shape:
        return whole
    shares = split.outputs.get(path)
    if shares is not None and whole.shape[:-1] == like.shape[:-1]:
        return torch.cat([whole.narrow(-1, span.start, span.numel) for span in shares.ranges[split.place]], -1)
    if split.blocks and whole.dim() >= 2 and whole.shape[-2] == like.shape[-2] * split.num_ranks:
        part = whole.chunk(split.num_ranks, -2)[split.place]
        return part if part.shape == like.shape else None
    return None
