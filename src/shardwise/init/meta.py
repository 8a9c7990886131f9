"""Models on the meta device: their initialisers are called once for every module, and recorded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch
from torch import nn

from shardwise.errors import ModelError, some
from shardwise.init.recorder import Recorder
from shardwise.init.tape import origin_of

CPU = torch.device("cpu")
Init = Callable[[nn.Module], object]


def record_init(model: nn.Module, init: Init | None, filled: Collection[str]) -> None:
    """Give the tensors on the meta device a history, recorded from the initialisers of their modules.

    `filled` are names whose values come from elsewhere. For every module with other tensors, in the order of
    `nn.Module.apply` (children first), this calls `init(module)` if there is an `init`, else `_init_weights(module)` of
    the transformers model around it, else its `reset_parameters()`. Raises `ModelError` naming tensors without an
    initialiser.
    """
    wanted = dict(_on_meta(model, filled))
    modules = {path: module for path, module in _children_first(model, "") if _owns(path, module, wanted)}
    chosen = {path: init or _initialiser(model, path) for path in modules}
    unfilled = [path for path, found in chosen.items() if found is None]
    if unfilled:
        raise _without_values([name for name in wanted if name.rpartition(".")[0] in unfilled])
    recorder = Recorder()
    recorder.include(model)
    adopt(model, recorder)
    with recorder.recording():
        for path, module in modules.items():
            found = chosen[path]
            assert found is not None
            found(module)
            fallback = getattr(module, "reset_parameters", None)
            if init is None and fallback is not None and _unwritten(path, module, wanted):
                fallback()
    left = [name for path, module in modules.items() for name in _unwritten(path, module, wanted)]
    if left:
        raise _without_values(left)
    recorder.finish(but=filled_buffers(model, filled))


def await_values(model: nn.Module, device: torch.device) -> None:
    """Make a model on the meta device one that gets all its values from elsewhere: parameters without memory, and
    buffers on `device`."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = made.setdefault(buffer, torch.empty_like(buffer, device=device))
    adopt(model, Recorder())


def adopt(model: nn.Module, recorder: Recorder) -> None:
    """Replace each meta tensor by one without memory. Parameters stay the same objects, because an
    optimizer may already have them."""
    for param in model.parameters():
        if param.is_meta:
            tensor, _ = recorder.tensor(param, CPU)
            other = nn.Parameter(tensor, requires_grad=param.requires_grad)
            other.__class__ = type(param)
            other.__dict__.update(param.__dict__)
            torch.utils.swap_tensors(param, other)
    replaced: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                if buffer not in replaced:
                    replaced[buffer] = recorder.tensor(buffer, CPU)[0]
                module._buffers[name] = replaced[buffer]


def filled_buffers(model: nn.Module, filled: Collection[str]) -> list[torch.Tensor]:
    return [buffer for name, buffer in model.named_buffers() if name in filled]


def _on_meta(model: nn.Module, filled: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for named in (model.named_parameters(), model.named_buffers()):
        yield from ((name, tensor) for name, tensor in named if tensor.is_meta and name not in filled)


def _children_first(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        yield from _children_first(child, f"{path}.{name}" if path else name)
    yield path, module


def _owns(path: str, module: nn.Module, wanted: Collection[str]) -> list[str]:
    """The names in `wanted` of the module's own tensors."""
    own = (*module._parameters, *module._buffers)
    return [name for name in (f"{path}.{short}" if path else short for short in own) if name in wanted]


def _initialiser(model: nn.Module, path: str) -> Init | None:
    """The initialiser of the module at `path`: that of the nearest transformers model around it, or its own."""
    module = model.get_submodule(path)
    above = path
    while True:
        around = model.get_submodule(above)
        method = getattr(around, "_init_weights", None)
        if callable(method):
            found: Init = method
            return found
        if not above:
            break
        above = above.rpartition(".")[0]
    for name in ("reset_parameters", "_reset_parameters"):  # nn.MultiheadAttention has the second
        reset = getattr(module, name, None)
        if callable(reset):
            return lambda _: reset()
    return None


def _unwritten(path: str, module: nn.Module, wanted: Collection[str]) -> list[str]:
    """The names of the module's own tensors that still have no value."""
    tensors = {**module._parameters, **module._buffers}
    return [
        name
        for name in _owns(path, module, wanted)
        if (tensor := tensors[name.rpartition(".")[2]]) is not None
        and (origin := origin_of(tensor)) is not None
        and not origin.writes
        and tensor.numel()
    ]


def _without_values(names: list[str]) -> ModelError:
    return ModelError(
        f"There are no initial values for {some(names)}: they are on the meta device, and no method of the modules "
        f"fills all of them (reset_parameters, or _init_weights of a transformers model). Build the model inside "
        f"`with shardwise.deferred_init():` instead, which needs no such method, or give shard() "
        f"init=function(module), or weights= that contain them."
    )
