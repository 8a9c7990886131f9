"""Broadcasting parameters and optimizer state; exchanging Python objects."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from shardwise.errors import ConfigError
from shardwise.integrations.horovod.current_session import current_session
from shardwise.integrations.horovod.process_sets import ProcessSet, global_process_set
from shardwise.integrations.horovod.torch.data_movement import allgather_async, broadcast_async, broadcast_async_

Tensor = torch.Tensor


def broadcast_parameters(params: Any, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Copy `root_rank`'s parameters to all ranks, in place.

    `params` is a state dict, or an iterable of names and tensors; other values in it are ignored. Raises `ValueError`
    for parameters without names.
    """
    named = sorted(params.items()) if isinstance(params, Mapping) else _named(params)
    handles = [
        broadcast_async_(tensor, root_rank, f"parameter.{name}", process_set)
        for name, tensor in named
        if isinstance(tensor, Tensor) and tensor.numel()
    ]
    for handle in handles:
        handle.wait()


def _named(params: Iterable[Any]) -> list[tuple[str, Any]]:
    pairs = list(params)
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise ValueError(
            "broadcast_parameters() takes model.state_dict() or model.named_parameters(): tensors are matched by name."
        )
    return pairs


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy the state and options of `root_rank`'s optimizer to all ranks.

    An optimizer without state gets the root's, without taking a step. As in Horovod its gradients are zeros afterwards,
    which are sparse for `SparseAdam`, and for SGD over the sparse embeddings of `model`. Raises `ValueError` for
    L-BFGS.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("The state of L-BFGS depends on one rank's data and cannot be broadcast.")
    if not optimizer.state:
        _set_zero_gradients(optimizer, model)
    is_root = current_session().rank == root_rank
    tensors: dict[str, Tensor] = {}
    state = _without_tensors(optimizer.state_dict(), "optimizer", tensors) if is_root else None
    metadata = {name: (tensor.dtype, tuple(tensor.shape), tensor.device.type) for name, tensor in tensors.items()}
    state, metadata = broadcast_object((state, metadata), root_rank, "optimizer.state", process_set)
    if not is_root:
        tensors = {
            name: torch.empty(shape, dtype=dtype, device=device) for name, (dtype, shape, device) in metadata.items()
        }
    handles = [
        broadcast_async_(tensor, root_rank, name, process_set) for name, tensor in tensors.items() if tensor.numel()
    ]
    for handle in handles:
        handle.wait()
    if not is_root:
        optimizer.load_state_dict(_with_tensors(state, tensors))


def _set_zero_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    """Scripts use them: Horovod creates a state by a step with zeros."""
    modules = model.modules() if model is not None and isinstance(optimizer, torch.optim.SGD) else ()
    embeddings = [module for module in modules if isinstance(module, torch.nn.Embedding) and module.sparse]
    sparse = {param for module in embeddings for param in module.parameters()}
    for param in (param for group in optimizer.param_groups for param in group["params"] if param.requires_grad):
        zeros = torch.zeros_like(param)
        is_sparse = param in sparse or isinstance(optimizer, torch.optim.SparseAdam)
        param.grad = zeros.to_sparse() if is_sparse else zeros


class _TensorReference:
    """Replaces a tensor that is sent separately."""

    def __init__(self, name: str) -> None:
        self.name = name


def _without_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[path] = value
        return _TensorReference(path)
    if isinstance(value, dict):
        return {key: _without_tensors(one, f"{path}.{key}", tensors) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_tensors(one, f"{path}.{index}", tensors) for index, one in enumerate(value))
    return value


def _with_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, _TensorReference):
        return tensors[value.name]
    if isinstance(value, dict):
        return {key: _with_tensors(one, tensors) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_tensors(one, tensors) for one in value)
    return value


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return `root_rank`'s `obj` on all ranks. It is pickled, so all ranks must trust the root."""
    label = name or "object"
    is_root = current_session().rank == root_rank
    content = _pickled(obj) if is_root else torch.empty(0, dtype=torch.uint8, device="cpu")
    length = torch.tensor([content.numel()], device="cpu")
    length = broadcast_async(length, root_rank, f"{label}.length", process_set).wait()
    if not is_root:
        content = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    received: Tensor = broadcast_async(content, root_rank, f"{label}.content", process_set).wait()
    return obj if is_root else _unpickled(received)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the list of all ranks' objects. They are pickled, so all ranks must trust each other."""
    label = name or "object"
    content = _pickled(obj)
    lengths_handle = allgather_async(torch.tensor([content.numel()], device="cpu"), f"{label}.lengths", process_set)
    contents = allgather_async(content, f"{label}.contents", process_set).wait()
    lengths: list[int] = lengths_handle.wait().tolist()
    return [_unpickled(part) for part in contents.split(lengths)]


def _pickled(obj: Any) -> Tensor:
    content = io.BytesIO()
    try:
        torch.save(obj, content)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(f"An object of {type(obj).__name__} cannot be sent to other ranks: {error}.") from error
    return torch.frombuffer(bytearray(content.getbuffer()), dtype=torch.uint8)


def _unpickled(content: Tensor) -> Any:
    return torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=False, map_location="cpu")
