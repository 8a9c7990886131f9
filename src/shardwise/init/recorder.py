"""Builds modules without memory: constructors run, and their operations are recorded instead of executed.

See [Note: histories] in `tape.py`.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from shardwise.errors import ModelError
from shardwise.init.deferred import Deferred, defer, undefer
from shardwise.init.loading import Building
from shardwise.init.tape import (
    Function,
    Operation,
    Origin,
    Ref,
    common_generator,
    fill,
    has_generators,
    origin_of,
    origin_of_storage,
    set_origin,
    values_of,
)
from shardwise.system.torch_functions import bound, operator_name
from shardwise.system.torch_private import (
    DisableTorchFunctionSubclass,
    TorchDispatchMode,
    dispatch_modes,
    num_tensors_on,
    tree_iter,
    tree_map,
    written_by,
)

Tensor = torch.Tensor
META = torch.device("meta")

_DRAWS = {"normal_", "uniform_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_", "bernoulli_"}
OVERWRITE = {*_DRAWS, "fill_", "zero_", "copy_"}
"""In-place operations that do not read the old values."""
_MESSAGES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""The namespaces of `torch.distributed`'s operators. A message between ranks cannot be sent later, when some ranks, and
not others, replay what came of it."""


@contextmanager
def deferred_init(model: nn.Module | None = None) -> Iterator[Building]:
    """A context in which modules are built without memory for their parameters; `shard` computes each rank's part.

    ```python
    with sw.deferred_init():
        model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = sw.shard(model, "zero3", optimizer=optimizer)
    ```

    The values are those that `build()` would have computed, bit for bit, and the random generators end in the same
    state. Each random operation is executed once, into a temporary tensor, so building takes as long as usual and, at
    its peak, the memory of one tensor. When the context ends, buffers and plain tensors get their values; parameters
    (`nn.Parameter`s registered in a module) get theirs from `shard`, and refuse to be computed with before, though they
    have a shape, a dtype and a device, and may be given to an optimizer, frozen or tied. Views of them that outlive the
    context refuse that for good. Values that a constructor reads (`.item()`) are computed when they are read, and so
    are those that it sends to other ranks with `torch.distributed`. Copies are kept of real tensors that it uses.

    `with sw.deferred_init() as building:` gives `building.load(model, folder)`: values from safetensors files.

    A `model` that was built inside another `deferred_init` may be passed, to be changed before `shard`. One inside
    another is part of it: parameters refuse to be computed with, and buffers get their values, when the outer one ends.
    `shard` ends it where it stands: what is built after it in the same `with` has memory at once.

    Any rank may call; there is no communication. Raises `ModelError` for operations that cannot be deferred.
    """
    around = _recording_of_this_thread()
    if around is not None:
        if model is not None:
            around.resume(model)
        yield around.building
        return
    recorder = Recorder()
    if model is not None:
        recorder.resume(model)
    try:
        with recorder.recording():
            yield recorder.building
        recorder.building.close()
    except BaseException:
        if model is not None:
            recorder.finish()
        recorder.abandon()
        raise
    recorder.finish()


def end_recording() -> None:
    """End the `deferred_init` of this thread, if it is in one, as leaving the context does."""
    for mode in dispatch_modes():
        if isinstance(mode, _Operations) and not mode.has_ended:
            mode.end()


class Recorder:
    """One recording, with the storages that it has left without memory."""

    def __init__(self) -> None:
        self.building = Building()
        self._storages: list[weakref.ref[torch.UntypedStorage]] = []
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._thread_id = threading.get_ident()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Defer operations of this thread, and record the modules that get parameters or submodules."""
        operations = _Operations(self)
        noting = (register_module_parameter_registration_hook, register_module_module_registration_hook)
        handles = [register(self._note) for register in noting]
        try:
            with _MemoryReads(operations), operations:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def resume(self, model: nn.Module) -> None:
        """Allow computing with the deferred parameters of `model` until `finish`."""
        for param in model.parameters():
            origin = origin_of(param)
            if isinstance(param, Deferred) and origin is not None:
                undefer(param)
                self._storages.append(weakref.ref(param.untyped_storage()))
        self.include(model)

    def include(self, module: nn.Module) -> None:
        """Include the parameters of `module` and its submodules, which were built before the recording."""
        self._modules.add(module)

    def _note(self, module: nn.Module, _: str, part: object) -> None:
        if threading.get_ident() == self._thread_id:
            self._modules.update(found for found in (module, part) if isinstance(found, nn.Module))

    def _params(self) -> Iterator[Tensor]:
        """The parameters of all recorded modules and their submodules: a copied module is recorded as a submodule."""
        modules = {inner for module in self._modules for inner in module.modules()}
        for module in modules:
            yield from (param for param in module._parameters.values() if param is not None)

    def finish(self, but: Iterable[Tensor] = ()) -> None:
        """Compute all values except those of parameters and of the tensors `but`; mark parameters as deferred."""
        ours = self._live()
        with DisableTorchFunctionSubclass():  # of parameters at rest, too
            params = {param for param in self._params() if origin_of(param) in ours}
        of_classes = {origin_of(param) for param in params if type(param) is not nn.Parameter}
        waiting = [param for param in params if origin_of(param) not in of_classes]
        left = {}
        for tensor in (*waiting, *but):
            if (origin := origin_of(tensor)) in ours:
                left[origin] = ours.pop(origin)
        for origin, storage in ours.items():
            fill(storage, origin)
        for tensor in (*waiting, *_others_on(left, {*params, *but})):
            defer(tensor)
        self._storages.clear()

    def abandon(self) -> None:
        """Compute nothing more: every tensor that is left refuses to be computed with."""
        for tensor in _others_on(self._live(), ()):
            defer(tensor)
        self._storages.clear()

    def _live(self) -> dict[Origin, torch.UntypedStorage]:
        """The storages that are used yet, and have no values."""
        live = [storage for reference in self._storages if (storage := reference()) is not None]
        return {origin: storage for storage in live if (origin := origin_of_storage(storage)) is not None}

    def tensor(self, like: Tensor, device: torch.device) -> tuple[Tensor, Origin]:
        """A tensor with the geometry of `like` but without memory, and its history, still empty."""
        tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
        storage = tensor.untyped_storage()
        origin = Origin(storage.nbytes(), tensor.device)
        storage.resize_(0)
        set_origin(storage, origin)
        self._storages.append(weakref.ref(storage))
        return tensor, origin


class _Operations(TorchDispatchMode):
    """Sees every operation below autograd, and defers it, executes it now, or leaves it alone."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._recorder = recorder
        self.is_paused = False
        self.has_ended = False
        """Whether operations are executed until the context is left."""

    def end(self) -> None:
        self.is_paused = self.has_ended = True
        self._recorder.building.close()
        self._recorder.finish()

    def __torch_dispatch__(
        self,
        func: Function,
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if self.is_paused:
            return func(*args, **given)
        tensors = [leaf for leaf in tree_iter((args, given)) if isinstance(leaf, Tensor)]
        put_off = [tensor for tensor in tensors if origin_of(tensor) is not None]
        if func.namespace in _MESSAGES:
            _give_values(put_off)
            return func(*args, **given)
        if not put_off:
            if tensors or not _makes_plain_tensors(func, given):
                return func(*args, **given)
        elif _only_changes_view(func):
            with _sized(put_off):
                return func(*args, **given)
        written = _written(func, args, given)
        if any(origin_of(tensor) is None for tensor in written) or not (written or _makes_tensors(func)):
            return func(*_real(args), **_real(given))  # a value is read, or is written to a tensor that is not recorded
        return self._put_off(func, args, given, written)

    @torch.no_grad()
    def _put_off(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor]) -> Any:
        """Determine the shapes of the results of `func`, and record it."""
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            state = _generator(args, kwargs).get_state()
            result = func(*_real(args, _scratch(func)), **_real(kwargs))
            kwargs.pop("generator", None)
        else:
            try:
                result = func(*_on_meta(args), **_on_meta({**kwargs, **_meta_device(func, kwargs)}))
            except (NotImplementedError, RuntimeError):
                # There is no meta kernel, or shapes depend on values, or the call is wrong and raises again here.
                result = func(*_real(args), **_real(kwargs))
                if not written:
                    return result
        return self._write_down(func, args, kwargs, written, result, state)

    def _write_down(
        self,
        func: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: list[Tensor],
        result: Any,
        state: Tensor | None,
    ) -> Any:
        """Append the call to the tape; returns its results without memory, to be replayed."""
        device = _device(args, kwargs)
        default_dtype = None
        if _follows_default_dtype(args, kwargs, result):
            if isinstance(result, Tensor) and _takes_dtype(func):
                kwargs = {**kwargs, "dtype": result.dtype}
            else:
                default_dtype = torch.get_default_dtype()
        made: list[tuple[Tensor, Ref]] = []

        def without_memory(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            tensor, origin = self._recorder.tensor(leaf, device)
            made.append((tensor, Ref.to(tensor, origin)))
            return tensor

        returned = _in_place_results(func, args, kwargs)
        result = returned if returned is not None else tree_map(without_memory, result)
        shown = {id(tensor): _ref(tensor) for tensor in written}
        overwritten = tuple(ref.origin for ref in shown.values() if operator_name(func) in OVERWRITE and ref.covers_all)
        recorded_args, recorded_kwargs = tree_map(_recorded, (args, kwargs))
        operation = Operation(
            func,
            recorded_args,
            recorded_kwargs,
            tuple(ref for _, ref in made),
            _needed(func, recorded_args, recorded_kwargs, overwritten),
            overwritten,
            default_dtype,
            state,
        )
        for ref in (*shown.values(), *operation.made):
            ref.origin.writes.append(operation)
        return result


def _follows_default_dtype(args: Any, kwargs: Mapping[str, Any], result: Any) -> bool:
    """Whether a result has floats, of a dtype that is neither named nor that of floats among the arguments."""

    def has_floats(tree: Any) -> bool:
        tensors = (leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor))
        return any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)

    return kwargs.get("dtype") is None and has_floats(result) and not has_floats((args, kwargs))


def _takes_dtype(func: Function) -> bool:
    return any(argument.name == "dtype" and argument.kwarg_only for argument in func._schema.arguments)


def _others_on(storages: Mapping[Origin, torch.UntypedStorage], known: Collection[Tensor]) -> list[Tensor]:
    """Tensors with these histories other than those `known`. Torch has no list of the tensors on a storage, so if there
    are more than are known the garbage collector is asked for all that there are: 0.1 s in a small process."""
    counts = Counter(origin_of(tensor) for tensor in known)
    if all(num_tensors_on(storage) <= counts[origin] for origin, storage in storages.items()):
        return []
    tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    return [
        one
        for one in tensors
        if type(one) in (Tensor, nn.Parameter) and one not in known and origin_of(one) in storages
    ]


def _give_values(tensors: Iterable[Tensor]) -> None:
    """Compute the values of tensors that are recorded now, for good."""
    for tensor in tensors:
        if (origin := origin_of(tensor)) is not None:
            fill(tensor.untyped_storage(), origin)


def _recording_of_this_thread() -> Recorder | None:
    """The recording that is under way."""
    modes = dispatch_modes()
    return next((mode._recorder for mode in modes if isinstance(mode, _Operations) and not mode.has_ended), None)


class _MemoryReads(TorchFunctionMode):
    """Gives values to functions that read or copy memory without dispatching an operation."""

    SHOWS = (Tensor.__repr__, Tensor.__format__)
    READS = (Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__, Tensor.__reduce_ex__, *SHOWS)

    def __init__(self, operations: _Operations) -> None:
        super().__init__()
        self._operations = operations

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__deepcopy__ and origin_of(args[0]) is not None:
            copied, memo = args[0], args[1]
            memo[id(copied)] = copied.detach().clone(memory_format=torch.preserve_format)
            return memo[id(copied)].requires_grad_(copied.requires_grad)
        if func in self.READS and origin_of(args[0]) is not None:
            self._operations.is_paused = True  # the values are really computed
            try:
                values = values_of(args[0])
                args = (values.requires_grad_(args[0].requires_grad) if func in self.SHOWS else values, *args[1:])
            finally:
                self._operations.is_paused = False
        return func(*args, **(kwargs or {}))


# -- properties of a call ---------------------------------------------------------------------------------


def _makes_tensors(func: Function) -> bool:
    return any("Tensor" in str(returned.type) for returned in func._schema.returns)


def _makes_plain_tensors(func: Function, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call without tensor arguments makes a tensor that can be deferred."""
    device = torch.device(kwargs.get("device") or "cpu")
    is_plain = kwargs.get("layout") in (None, torch.strided) and not kwargs.get("pin_memory")
    return is_plain and has_generators(device) and _makes_tensors(func)


def _only_changes_view(func: Function) -> bool:
    """Whether a call only makes or changes a view, which needs no values."""
    if torch.Tag.inplace_view in func.tags or operator_name(func) == "set_":
        return True
    seen = [returned.alias_info for returned in func._schema.returns]
    return bool(seen) and all(info is not None and not info.is_write for info in seen)


def _written(func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    return [leaf for leaf in written_by(func._schema, args, kwargs) if isinstance(leaf, Tensor)]


def _in_place_results(func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The arguments that an in-place call returns; `None` for a call that makes new tensors."""
    returns = func._schema.returns
    if any(returned.alias_info is None or not returned.alias_info.is_write for returned in returns):
        if any(returned.alias_info is not None for returned in returns):
            raise ModelError(
                f"{func} both changes and makes tensors, which cannot be deferred. Build without deferred_init."
            )
        return None
    by_name = {
        label: value
        for argument, value in bound(func, args, kwargs)
        if argument.alias_info is not None and argument.alias_info.is_write
        for label in argument.alias_info.before_set
    }
    labels = [next(iter(returned.alias_info.before_set)) for returned in returns if returned.alias_info is not None]
    found = tuple(by_name[label] for label in labels)
    return found[0] if len(found) == 1 else found


def _generator(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Generator:
    for leaf in tree_iter((args, dict(kwargs))):
        if isinstance(leaf, torch.Generator):
            return leaf
    return common_generator(_device(args, kwargs))


def _device(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    tensors = [leaf for leaf in tree_iter((args, dict(kwargs))) if isinstance(leaf, Tensor)]
    return next((tensor.device for tensor in tensors if tensor.dim()), torch.device("cpu"))


def _needed(
    func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], overwritten: Sequence[Origin]
) -> tuple[Ref, ...]:
    """The recorded arguments whose values, not only their shapes, the call reads."""
    if operator_name(func).endswith("_like") or operator_name(func).startswith("new_"):
        return ()
    refs = (leaf for leaf in tree_iter((args, dict(kwargs))) if isinstance(leaf, Ref))
    return tuple(ref for ref in refs if ref.origin not in overwritten)


# -- arguments in other forms -----------------------------------------------------------------------------


def _ref(tensor: Tensor) -> Ref:
    origin = origin_of(tensor)
    assert origin is not None
    return Ref.to(tensor, origin)


def _recorded(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return _ref(leaf) if origin_of(leaf) is not None else leaf.detach().clone()


def _real(value: Any, scratch: bool = False) -> Any:
    """`value` with real tensors in place of deferred ones; with `scratch` their values are arbitrary."""

    def real(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or origin_of(leaf) is None:
            return leaf
        if scratch:
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        return values_of(leaf)

    return tree_map(real, value)


def _scratch(func: Function) -> bool:
    return operator_name(func).endswith("_like") or (
        operator_name(func) in OVERWRITE and func._overloadname != "Tensor"
    )


def _on_meta(value: Any) -> Any:
    def on_meta(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=META)

    return tree_map(on_meta, value)


def _meta_device(func: Function, kwargs: Mapping[str, Any]) -> dict[str, torch.device]:
    takes_device = any(argument.name == "device" for argument in func._schema.arguments)
    makes_from_nothing = not any(str(argument.type) == "Tensor" for argument in func._schema.arguments)
    return {"device": META} if takes_device and ("device" in kwargs or makes_from_nothing) else {}


@contextmanager
def _sized(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Give storages their size, untouched, while a view is made, because its bounds are checked."""
    storages = {origin: tensor.untyped_storage() for tensor in tensors if (origin := origin_of(tensor)) is not None}
    for origin, storage in storages.items():
        storage.resize_(origin.num_bytes)
    try:
        yield
    finally:
        for origin, storage in storages.items():
            grown = storage.nbytes() != origin.num_bytes
            storage.resize_(0)
            if grown:
                raise ModelError(
                    "A tensor was made larger in place (resize_) inside deferred_init, which cannot be deferred. "
                    "Create it in its final size, or build the model without deferred_init."
                )
