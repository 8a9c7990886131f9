"""First values from one rank, and Python objects from all."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from shardwise.errors import ConfigError
from shardwise.integrations.horovod.current_session import current_session
from shardwise.integrations.horovod.process_sets import ProcessSet, global_process_set
from shardwise.integrations.horovod.torch.mpi_ops import (
    allgather_async,
    broadcast_async,
    broadcast_async_,
    synchronize,
)

Tensor = torch.Tensor


def broadcast_parameters(params: Any, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Give all ranks what `root_rank` has: of a state dict, or of an iterable of names and tensors, in place.

    What is `None` or no tensor is left alone. Raises `ValueError` for parameters without names.
    """
    listed = sorted(params.items()) if isinstance(params, Mapping) else _named(params)
    tensors = [(name, tensor) for name, tensor in listed if isinstance(tensor, Tensor)]
    handles = [
        broadcast_async_(tensor, root_rank, f"parameter.{name}", process_set)
        for name, tensor in tensors
        if tensor.numel()
    ]
    for handle in handles:
        synchronize(handle)


def _named(params: Iterable[Any]) -> list[tuple[str, Any]]:
    listed = list(params)
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in listed):
        raise ValueError(
            "broadcast_parameters() takes model.state_dict() or model.named_parameters(): tensors are matched by name."
        )
    return listed


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give all ranks the state and options of `root_rank`'s optimizer.

    Ranks without any state get what the root has; no step is taken to make one. Raises `ValueError` for L-BFGS.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("The state of L-BFGS belongs to one rank's data, and is not broadcast.")
    is_root = current_session().rank == root_rank
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    frame = _without_tensors(state, "optimizer", tensors) if is_root else None
    said = {name: (tensor.dtype, tuple(tensor.shape), tensor.device.type) for name, tensor in tensors.items()}
    frame, said = broadcast_object((frame, said), root_rank, "optimizer.frame", process_set)
    if not is_root:
        tensors = {name: torch.empty(shape, dtype=dtype, device=kind) for name, (dtype, shape, kind) in said.items()}
    handles = {
        name: broadcast_async_(tensor, root_rank, name, process_set)
        for name, tensor in tensors.items()
        if tensor.numel()
    }
    for handle in handles.values():
        synchronize(handle)
    if not is_root:
        _load_state(optimizer, _with_tensors(frame, tensors))


def _load_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """`DistributedOptimizer` is the wrapped optimizer's class and more, so its state is loaded the same way."""
    optimizer.load_state_dict(state)


class _Place:
    """Stands for a tensor that is sent by itself."""

    def __init__(self, name: str) -> None:
        self.name = name


def _without_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[path] = value
        return _Place(path)
    if isinstance(value, dict):
        return {key: _without_tensors(one, f"{path}.{key}", tensors) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_tensors(one, f"{path}.{place}", tensors) for place, one in enumerate(value))
    return value


def _with_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[value.name]
    if isinstance(value, dict):
        return {key: _with_tensors(one, tensors) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_tensors(one, tensors) for one in value)
    return value


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """`root_rank`'s `obj`, pickled: only between ranks that trust each other, as those of one job do."""
    label = name or "object"
    is_root = current_session().rank == root_rank
    content = torch.frombuffer(bytearray(_pickled(obj)), dtype=torch.uint8) if is_root else torch.empty(0)
    length = torch.tensor([content.numel()])
    length = broadcast_async(length, root_rank, f"{label}.length", process_set).wait()
    if not is_root:
        content = torch.empty(int(length), dtype=torch.uint8)
    sent: Tensor = broadcast_async(content, root_rank, f"{label}.content", process_set).wait()
    return obj if is_root else _unpickled(sent)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Every rank's `obj`, by rank, pickled."""
    label = name or "object"
    content = torch.frombuffer(bytearray(_pickled(obj)), dtype=torch.uint8)
    lengths_handle = allgather_async(torch.tensor([content.numel()]), f"{label}.lengths", process_set)
    contents = allgather_async(content, f"{label}.contents", process_set).wait()
    lengths: list[int] = lengths_handle.wait().tolist()
    return [_unpickled(part) for part in contents.split(lengths)]


def _pickled(obj: Any) -> bytes:
    try:
        content = io.BytesIO()
        torch.save(obj, content)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(f"An object of {type(obj).__name__} cannot be sent to other ranks: {error}.") from error
    return content.getvalue()


def _unpickled(content: Tensor) -> Any:
    return torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=False, map_location="cpu")
