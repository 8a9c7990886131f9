"""The private parts of PyTorch that this library uses (2.11 and later): imported here and nowhere else.

Those that concern communication are in `comm/compat.py`, one symbol of C++ in `comm/transport/gloo_abort.py`, and a
class of which DCP's files are pickles in `checkpoint/formats/dcp_write.py`, which only conversions load.
Private attributes of torch's objects are used where they stand, and listed in `tests/pure/test_torch_private.py`; that
test says which of all these a new version of torch has lost, and finds uses that are on no list.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass, _storage_Use_Count
from torch._C._functorch import peek_interpreter_stack
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import (
    tree_flatten,
    tree_iter,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

__all__ = [
    "CALL_CODE",
    "TENSOR_ATTRIBUTES",
    "UNMARKED",
    "DataDependentOutputException",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "UncompiledMode",
    "as_on_meta",
    "asks_device",
    "computes_without_values",
    "dispatch_modes",
    "fake_tensor",
    "forget_cached_parametrizations",
    "function_of",
    "graph_task",
    "has_own_memory",
    "is_checkpointing",
    "is_traceable_wrapper_subclass_type",
    "is_transforming",
    "may_write",
    "num_calls",
    "num_tensors_on",
    "outside_modes",
    "outside_transforms",
    "parsed_to",
    "pytree",
    "queue_callback",
    "refuse_address",
    "set_version",
    "storage_id",
    "tree_flatten",
    "tree_iter",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "treespec_dumps",
    "treespec_loads",
    "unset_fake_temporarily",
    "unwatched",
    "with_same_version",
    "wraps_others",
    "written_by",
]
"""Imported names, and why:

- `TorchDispatchMode`: torch's documentation of how to extend it names this path. Without it nothing records
  constructors, rehearses, or recomputes by operator.
- `tree_*`, `pytree`: containers as torch itself sees them, user-registered classes included. The public `torch.utils.
  pytree` (2.10) does not have all of these. Without them tensors inside outputs and arguments are not found.
- `FakeTensor`, its mode and exceptions: rehearsals of what does not fit into memory.
- `OpOverload`, `OpOverloadPacket`: what a dispatch mode, or a tensor's `__torch_function__`, is called with; types.
- `DisableTorchFunctionSubclass`, `DisableTorchFunction`: documented as `torch._C`'s. Without them a parameter at rest
  cannot be looked at without gathering it, and what collectives do in a forward would be taken for the model's own.
- `is_traceable_wrapper_subclass_type`: whether a tensor's bytes are those of tensors inside.
"""

graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that autograd runs on this thread, -1 if none. Without it a backward inside another one,
or a recomputation, could not be told from the next training step."""

refuse_address: Callable[[torch.Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
"""From now on C++ that asks for the address of a tensor's memory raises `RuntimeError`, as for torch's fake tensors.
Without it `torch.utils.dlpack.to_dlpack`, which asks no subclass, hands out the address 0 of a tensor without memory,
whose reader crashes."""

TENSOR_ATTRIBUTES: Mapping[str, Any] = vars(torch._C.TensorBase)
"""The descriptors of `grad`, `data` and `requires_grad`: what `__torch_function__` is called with for them. Parameters
at rest, and deferred ones, know them by these."""


class UncompiledMode(TorchDispatchMode):
    """A mode for code that is never compiled: torch would switch dynamo off and on at each operator, for a fifth of the
    time of a rehearsal."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


as_on_meta = in_kernel_invocation_manager
"""A context in which fake tensors of a mode are taken for tensors on the meta device, so that an operator computes
shapes alone. Its results are plain tensors there."""


def fake_tensor(made: torch.Tensor, device: torch.device, attributes: Mapping[str, Any]) -> FakeTensor:
    """What `FakeTensor(mode, made, device)` is, in a third of the time: `attributes` are those of another one of that
    mode on that device."""
    found: FakeTensor = torch.Tensor._make_subclass(
        FakeTensor, made, made.requires_grad, dispatch_device=True, device_for_backend_keys=device
    )
    refuse_address(found)
    vars(found).update(attributes)
    return found


_ASKS_DEVICE = torch.ops.prim.device.default


def asks_device(func: object, args: Any) -> bool:
    """Whether autograd only asks a fake tensor for its device, as it does oftener than it computes: a mode that answers
    at once (`args[0].device`) spares those below it."""
    return func is _ASKS_DEVICE and type(args[0]) is FakeTensor


def storage_id(storage: torch.UntypedStorage) -> int:
    """What tells storages apart that may have no memory, or whose memory has been released: their address has no public
    name, and `data_ptr()` is 0 for all of them."""
    return int(storage._cdata)


def has_own_memory(tensor: torch.Tensor) -> bool:
    """Whether no other tensor, such as one of which it is a view, has the same storage."""
    with DisableTorchFunctionSubclass():
        storage = tensor.untyped_storage()
    return int(_storage_Use_Count(storage._cdata)) <= 2  # this tensor and `storage`


def wraps_others(tensor: torch.Tensor) -> bool:
    """Whether its elements are in tensors inside it, or are made from them, as those of weights that torchao has
    quantized: its storage has no memory, and asking for it raises."""
    if isinstance(tensor, FakeTensor):
        return False
    try:
        with DisableTorchFunctionSubclass():
            tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return True
    return False


def num_tensors_on(storage: torch.UntypedStorage) -> int:
    """How many tensors have this storage; some may have no Python object. Torch counts its references, of which
    `storage` is one. Without it every recording would have to look for views among all objects."""
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def is_transforming() -> bool:
    """Whether a transform of `torch.func` is under way. Torch has no public way to ask."""
    return peek_interpreter_stack() is not None


def function_of(node: Any) -> type | None:
    """The `autograd.Function` whose backward a node of autograd's graph is; `None` for torch's own operators. A node
    has no public name for it, and would not say whose code it runs."""
    return getattr(type(node), "_forward_cls", None)


def forget_cached_parametrizations() -> None:
    """Let parametrized tensors that `parametrize.cached()` of a caller has kept be computed again: those of a rehearsal
    have no values, and are kept by `id` of the module, which another one has when the rehearsal's is gone; and one that
    two forwards share would have its graph freed by the first of their backwards."""
    parametrize._cache.clear()


def computes_without_values() -> bool:
    """Whether operators on this thread compute shapes, or a graph, rather than values: on fake tensors, or under
    `make_fx`."""
    return any(mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack())


Given = ParamSpec("Given")
Made = TypeVar("Made")


def unwatched(function: Callable[Given, Made]) -> Callable[Given, Made]:
    """Decorates what the library computes by itself inside a user's forward, such as a collective: modes that look at
    what the model calls (`TorchFunctionMode`) do not see it. It must call no code of the user's, and tensors that stand
    for others are plain in it. Takes 0.2 us."""

    @functools.wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        with DisableTorchFunction():
            return function(*args, **kwargs)

    return call


def outside_modes() -> Any:
    """A context outside all dispatch modes, fake tensors and tracers included, in which what ranks send each other has
    values."""
    return _disable_current_modes()


def outside_transforms() -> Any:
    """A context outside all transforms of `torch.func`, which refuse writes to memory that they have not made, such as
    what a gather has filled."""
    return torch._C._DisableFuncTorch()


def queue_callback(call: Callable[[], None]) -> None:
    """Call it when the innermost running autograd has finished, as DDP and FSDP do. Without it gradients of the last
    unit would be reduced at the next call of the model."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def dispatch_modes() -> list[Any]:
    """The dispatch modes of this thread, outermost first. Without them a recording could not be found by the code that
    it records."""
    return list(_get_current_dispatch_mode_stack())


def num_calls(module: torch.nn.Module) -> int:
    """How many calls of `module` this thread is in, by its frames. Of a call that Ctrl-C has ended no hook is told:
    torch calls those that are always called for an `Exception` alone. Takes some microseconds."""
    frame, found = sys._getframe(), 0
    while frame.f_back is not None:
        frame = frame.f_back
        found += frame.f_code is CALL_CODE and frame.f_locals.get("self") is module
    return found


CALL_CODE = torch.nn.Module._call_impl.__code__
"""By which frames of calls of modules are told: their `self` is the module."""


def is_checkpointing() -> bool:
    """Whether autograd saves nothing here, because `torch.utils.checkpoint` will compute this again, or does. Hooks of
    ours would hide from it what is saved, now or then, and it would miss that. Torch has no public way to ask."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def parsed_to(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Device, dtype, ... from the arguments of `Tensor.to`, in all of its forms, as `nn.Module.to` reads them."""
    return tuple(torch._C._nn._parse_to(*args, **kwargs))


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set how often `tensor` was written to, as autograd sees it. Without it a graph could not be sent back after the
    memory of a parameter was exchanged and given back."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def with_same_version(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` detached, with the same memory and version counter, also below autograd, where `detach` gives a counter
    of its own. Without it a write to what is kept for a recomputation goes unseen."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


UNMARKED = frozenset(
    {
        *("aten::batch_norm", "aten::native_batch_norm", "aten::_batch_norm_impl_index", "aten::cudnn_batch_norm"),
        *("aten::miopen_batch_norm", "aten::batch_norm_update_stats", "aten::batch_norm_gather_stats"),
        "aten::batch_norm_gather_stats_with_counts",
    }
)
"""Operators that write to running statistics, in training if they can be told whether they train, and whose schemas do
not say so. Nor do they count these writes in the versions of tensors."""


def may_write(schema: Any) -> bool:
    """Whether an operator with this schema may write to an argument."""
    return schema.is_mutable or schema.name in UNMARKED


def written_by(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What is in the arguments that an operator with this schema writes to when it is called with these."""
    if not may_write(schema):
        return []
    given = {argument.name: argument.default_value for argument in schema.arguments}
    given.update(zip(given, args, strict=False))
    given.update(kwargs)
    names = [one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    if schema.name in UNMARKED and given.get("training", True):
        names += ["running_mean", "running_var"]
    return tree_leaves([given.get(name) for name in names])
