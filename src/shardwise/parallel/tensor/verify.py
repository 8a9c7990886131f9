"""`tensor.verify`: runs the first batch through a copy of the unsplit model too, and compares outputs by module."""

from __future__ import annotations

import copy
import logging
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.comm import DataGroup, World
from shardwise.comm.agreed import raise_first
from shardwise.errors import ConfigError, ModelError
from shardwise.parallel.tensor.forwards import keeps_whole_sequences
from shardwise.parallel.tensor.generators import draws
from shardwise.parallel.tensor.model_split import ModelSplit
from shardwise.parallel.tensor.partition import AXIS
from shardwise.runtime.nested import tensors_in
from shardwise.system.own_hooks import hook

Tensor = torch.Tensor
_log = logging.getLogger("shardwise")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
HALF_TOLERANCE = 5e-2
"""For bf16 and fp16."""


class Verifier:
    """Compares the first forward of a split model with that of an unsplit copy, which is freed afterwards.

    With `tensor.sequence` a forward inside `engine.inference()` splits no sequence. So the first one inside is
    compared, if it comes first, and then the first one outside.
    """

    def __init__(self, model: nn.Module) -> None:
        """Call it before the model is split. Raises `ConfigError` for a model that cannot be compared."""
        if any(param.device.type == "meta" for param in model.parameters()) or any(
            type(param) is not nn.Parameter for param in model.parameters()
        ):
            raise ConfigError(
                "tensor.verify needs a model with values. Build it without deferred_init or the meta device, at a size "
                "that fits a rank."
            )
        if draws(model):
            raise ConfigError("tensor.verify cannot compare outputs with dropout. Build the model without it.")
        self._unsplit: nn.Module | None = copy.deepcopy(model)
        self._found: list[tuple[str, Tensor]] = []
        self._handles: list[RemovableHandle] = []

    def watch(self, model: nn.Module, split: ModelSplit, world: World, group: DataGroup) -> None:
        """Call it after the model is split. Collective: the copies take the values of the first rank."""
        unsplit = self._unsplit
        assert unsplit is not None
        dtypes = {name: param.dtype for name, param in model.named_parameters()}
        for name, param in unsplit.named_parameters():
            values = param.detach().contiguous()
            group.broadcast(values.view(-1), "verify")
            param.data = values.to(dtypes[name])
        zeros = [name for name, param in unsplit.named_parameters() if param.dim() > 1 and not param.any()]
        if zeros and world.rank == 0:
            _log.warning(
                "tensor.verify compares what modules return, and %s begins with zeros: what is computed before it is "
                "not compared. Give it other values for the check.",
                ", ".join(zeros),
            )
        given: list[tuple[Any, Any]] = []
        has_compared_whole = False

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._found.clear()
            given.clear()
            if not (has_compared_whole and keeps_whole_sequences(module)):
                given.append(_for_another_call(args, kwargs))

        def after(module: nn.Module, _: Any, output: Any) -> None:
            nonlocal has_compared_whole
            if output is None or not given:  # the forward raised, or is not compared
                return
            args, kwargs = given.pop()
            problem = self._compare(split, module, args, kwargs)
            self._found.clear()
            has_compared_whole = bool(split.blocks) and keeps_whole_sequences(module)
            if problem or not has_compared_whole:
                self.close()
            raise_first(world.exchange(problem.encode(), "verify"), ModelError)

        self._handles += _record_outputs(model, self._found, lambda: bool(given))
        self._handles.append(model.register_forward_pre_hook(hook(before), with_kwargs=True))
        self._handles.append(model.register_forward_hook(hook(after)))

    def close(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()
        self._unsplit = None

    def _compare(self, split: ModelSplit, model: nn.Module, args: Any, kwargs: Any) -> str:
        """An error message about the first difference; "" if there is none."""
        unsplit = self._unsplit
        assert unsplit is not None
        unsplit.train(model.training)
        for path, module in unsplit.named_modules():
            module.training = split.modules[path].training
        expected: list[tuple[str, Tensor]] = []
        handles = _record_outputs(unsplit, expected, lambda: True)
        with torch.no_grad():
            unsplit(*args, **kwargs)
        for handle in handles:
            handle.remove()
        wanted = dict(_numbered(expected))
        for (path, number), value in _numbered(self._found):
            other = _part(wanted.get((path, number)), value, split, path)
            if other is None:
                continue
            error = float((value.double() - other.double()).norm() / other.double().norm().clamp_min(1e-30))
            if not error <= TOLERANCE.get(value.dtype, HALF_TOLERANCE):
                module = split.modules[path] if path else model
                return (
                    f"Split along {AXIS}, the model computes something else than the unsplit model. The first module "
                    f"that differs is {path or 'the model'} ({type(module).__name__}), by {error:.1e} of its output at "
                    f"index {split.index} along it. Check how tensor.plan splits it, and whether tensor.divide lacks "
                    f"an attribute."
                )
        return ""


def _for_another_call(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments for a call besides this one: the same tensors, and copies of objects that a forward changes, such
    as a key-value cache. Objects that cannot be copied are passed on."""
    try:
        memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors_in((args, kwargs))}
        copied: tuple[Any, Any] = copy.deepcopy((args, kwargs), memo)
    except (TypeError, RuntimeError, ValueError, AttributeError, pickle.PickleError):
        return args, kwargs
    return copied


def _record_outputs(
    model: nn.Module, found: list[tuple[str, Tensor]], is_recorded: Callable[[], bool]
) -> list[RemovableHandle]:
    """Record the first floating-point tensor that each module returns, in the order in which the modules finish, in
    forwards for which `is_recorded` returns true."""

    from shardwise.parallel.tensor.split_logits import own_part  # only ranks that verify, or have split logits, load it

    def listen(path: str, module: nn.Module) -> RemovableHandle:
        def note(_: nn.Module, __: Any, output: Any) -> None:
            if not is_recorded():
                return
            tensor = next((one for one in tensors_in(output) if one.is_floating_point()), None)
            if tensor is not None:
                found.append((path, own_part(tensor).detach().clone()))

        return module.register_forward_hook(hook(note))

    return [listen(path, module) for path, module in model.named_modules()]


def _numbered(found: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[tuple[str, int], Tensor]]:
    """The outputs of one forward, by module path and the number of the call of this module."""
    calls: Counter[str] = Counter()
    for path, value in found:
        yield (path, calls[path]), value
        calls[path] += 1


def _part(whole: Tensor | None, like: Tensor, split: ModelSplit, path: str) -> Tensor | None:
    """This rank's part of the output of an unsplit module, `like` the split module's; `None` if it is not known."""
    if whole is None or whole.shape == like.shape:
        return whole
    shares = split.outputs.get(path)
    if shares is not None and whole.shape[:-1] == like.shape[:-1]:
        return torch.cat([whole.narrow(-1, span.start, span.numel) for span in shares.ranges[split.index]], -1)
    if split.blocks and whole.dim() >= 2 and whole.shape[-2] == like.shape[-2] * split.num_ranks:
        part = whole.chunk(split.num_ranks, -2)[split.index]
        return part if part.shape == like.shape else None
    return None
