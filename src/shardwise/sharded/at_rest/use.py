"""What a PyTorch function does when it is called with parameters at rest, or with whole tensors of them.

Reads and writes are collective: every rank calls the same function, which gathers the tensors it was given. A function
that needs no special treatment runs on the values themselves. Whether it has changed them is read from their version
counter, except for a few functions that do not increment it.

Autograd saves a reference to a parameter at rest, not its values: a term of the loss over all parameters gathers each
twice, and never holds the whole model.

[Note: terms outside of the model] A loop may add a term of its own over parameters to the loss, such as a penalty on
their squares. Gradients are averaged over ranks that have different samples, and such a term is the same on all of
them. Two kinds of parameters have gradients that are combined in other ways: stages of a pipeline add up those of a
parameter that they share, so each counts a part of the term; and experts get the gradients of all ranks' tokens,
divided by the number of ranks along `ep`, while only one of these has the term, which so counts as many times more.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from shardwise.errors import CommError, StateError
from shardwise.sharded.at_rest import uses
from shardwise.sharded.at_rest.handles import Home, Resting, Source, Whole, source_of, uncounted
from shardwise.sharded.at_rest.parts import Part, completed, part_of_gradient, refuse_wholes, require_apart
from shardwise.sharded.at_rest.stage_terms import TermOfStage, Terms, Written, note_taken, require_own_copies, terms_in
from shardwise.system.graph_nodes import is_of_stages
from shardwise.system.torch_functions import is_called_by, is_called_by_torch
from shardwise.system.torch_private import (
    DisableTorchFunctionSubclass,
    is_checkpointing,
    parsed_to,
    storage_id,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)

Tensor = torch.Tensor
Function = Callable[..., Any]


def use(func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result of `func(*args, **kwargs)`, as plain PyTorch would give it."""
    if func is torch.autograd.grad:
        return _gradients(*args, **kwargs)
    if func is torch.autograd.backward and (inputs := kwargs.get("inputs")):
        _require_no_stages(args[0], inputs)
    if func in uses.METADATA:
        if func in uses.COUNTS and isinstance(asked := (*args, *kwargs.values())[0], Resting | Whole):
            source_of(asked).note_counted()
        if func is Tensor.register_hook and isinstance(args[0], Resting):
            args[0].home().note_hook()
        return plainly(func, args, kwargs)
    leaves, form = tree_flatten((args, dict(kwargs)))
    handles = [leaf for leaf in leaves if isinstance(leaf, Resting | Whole)]
    homes = [handle.home() for handle in handles if isinstance(handle, Resting)]
    for home in homes:
        home.require_open()
    if homes and homes[0].is_computing:
        for home in homes:
            home.reach()
        if not any(isinstance(handle, Whole) for handle in handles):
            return _computed(func, args, kwargs, homes)
    if func in uses.IN_BACKGROUND or (func in uses.COLLECTIVES and kwargs.get("async_op")):
        _refuse(handles[0], "its memory, for a collective that goes on in the background,")
    if func is uses.REDUCE:
        func, args, kwargs = _to_all(*args, **kwargs)
        return use(func, args, kwargs)
    if any(source_of(handle).in_stage for handle in handles):
        require_own_copies(func, args)
    require_apart(func, args, kwargs)
    special = _SPECIAL.get(func)
    if special is not None and args and isinstance(args[0], Resting | Whole):
        return special(func, args, kwargs)
    whole = args[0] if len(handles) == 1 and args and isinstance(args[0], Whole) else None
    if whole is not None and not (whole.is_view if func in uses.NORMS else whole.steps):
        known = _without_gathering(func, whole, args[1:], kwargs)
        if known is not None:
            return known
    return _run(func, leaves, form, handles)


def _computed(func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], homes: Iterable[Home]) -> Any:
    """`func` inside a forward or backward, on parameters that have just been gathered."""
    before = [(home, home.num_writes()) for home in homes]
    result = plainly(func, args, kwargs)
    for home, num_writes in before:
        home.require_unwritten(num_writes)
    return result


def plainly(func: Function, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Any:
    """`func` as if parameters at rest were plain ones."""
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _gradients(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """What `torch.autograd.grad` gives for parameters: parts of split ones, and nothing in pipeline stages, where a
    call of the model is one node that has no parameters among its inputs."""
    given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    if any(isinstance(one, Resting) and one.home().is_computing for one in given):
        return plainly(torch.autograd.grad, (outputs, inputs, *args), kwargs)  # by the model itself
    _require_no_stages(outputs, given)
    sources = [source_of(one) if isinstance(one, Resting | Whole) else None for one in given]
    found = plainly(torch.autograd.grad, (outputs, inputs, *args), kwargs)
    return tuple(
        one if one is None or source is None else part_of_gradient(one, source)
        for one, source in zip(found, sources, strict=True)
    )


def _require_no_stages(outputs: Tensor | Iterable[Tensor], inputs: Iterable[Any]) -> None:
    """Raise `StateError` if gradients of some parameters alone are asked for, and `outputs` come from a call of a model
    in pipeline stages. Torch finds none then, or those of terms that the loop has added."""
    of_stage = [one for one in inputs if isinstance(one, Resting | Whole) and source_of(one).in_stage]
    given = [outputs] if isinstance(outputs, Tensor) else [one for one in outputs if isinstance(one, Tensor)]
    if of_stage and is_of_stages(given):
        raise StateError(
            f"Gradients of {source_of(of_stage[0]).name} are asked for by torch.autograd.grad or backward(inputs=...), "
            f"and the model is in pipeline stages: a call of it is one node of autograd, whose backward gives all "
            f"stages theirs. Use loss.backward(), and read them by engine.get(name, 'grad'), called by all ranks. What "
            f"is not to train is frozen before the forward: requires_grad_(False)."
        )


def _without_gathering(func: Function, whole: Whole, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """A norm, or a change by a number, for which each rank's own elements are enough; `None` for anything else."""
    if func in uses.NORMS:
        norm, own = _norm(whole, *args, **kwargs), whole.source.in_stage
        return norm if norm is None or own is None else TermOfStage.of(norm, Terms.of([own]))
    if func in uses.SCALINGS and _are_numbers((*args, *kwargs.values())) and whole.source.scale(func, args, kwargs):
        return whole
    return None


# -- any function: run on the values ----------------------------------------------------------------------


def _run(func: Function, leaves: list[Any], form: Any, handles: list[Resting | Whole]) -> Any:
    if torch.is_inference_mode_enabled():  # there tensors have no versions, and writes would go unnoticed
        with torch.inference_mode(False), torch.no_grad():
            return _run(func, leaves, form, handles)
    differentiates = torch.is_grad_enabled() and any(map(_requires_gradient, handles))
    own = [one for handle in handles if (one := source_of(handle).in_stage) is not None]
    for handle in handles:
        home = handle.source.gathers_again if isinstance(handle, Whole) else None
        if home is not None and home.is_computing:  # what is saved of it now is read before that ends
            home.reach()
    with ExitStack() as stack:
        opened = _opened(handles, stack)
        if opened is None:
            again = tree_unflatten(leaves, form)
            return use(func, *again)
        seen: dict[int, Tensor] = {}
        for handle in handles:
            values = _values_of(handle, opened)
            if isinstance(handle, Whole):
                seen[id(handle)] = handle.seen_in(values)
            else:
                seen[id(handle)] = _weighted(handle) if differentiates else values
        args, kwargs = tree_unflatten([seen.get(id(leaf), leaf) for leaf in leaves], form)
        before = {source: values._version for source, values in opened.items()}
        forms = [plainly(_form, [seen[id(handle)]], {}) for handle in handles]
        apart = [  # what `.data` gives counts its writes for itself
            (handle.source, seen[id(handle)], seen[id(handle)]._version)
            for handle in handles
            if isinstance(handle, Whole) and uncounted in handle.steps
        ]
        saves = torch.is_grad_enabled() and any(
            isinstance(leaf, Tensor) and _requires_gradient(leaf) for leaf in leaves
        )
        if saves and not is_checkpointing():
            stack.enter_context(_saving_homes(opened, handles))
        written_to = Written(leaves if own else ())
        try:
            result = plainly(func, args, kwargs)
        except RuntimeError as error:
            refuse_wholes(func, leaves, error)
            raise
        made, result_form = tree_flatten(result)
        parts, marks = completed(made, func, leaves, form)
        result = tree_unflatten(parts, result_form)
        if differentiates and any(isinstance(one, Tensor) and one.requires_grad for one in tree_leaves(result)):
            for handle in handles:
                if isinstance(handle, Resting):
                    handle.home().require_gradient()
        for handle, form_before in zip(handles, forms, strict=True):
            if plainly(_form, [seen[id(handle)]], {}) != form_before:
                _refuse(handle, "another shape, given to it in place,")
        counted = {source for source, values in opened.items() if values._version != before[source]}
        counted |= _sources(uses.written_uncounted(func, *tree_unflatten(leaves, form)))
        written = {source for source, values, version in apart if values._version != version}
        for source, values in opened.items():
            if source in counted:
                source.take_over(values)
            elif source in written:
                source.take_over(uncounted(values))
        given_back = _given_back(result, func, leaves, form, handles, seen, opened)
        if own:
            note_taken(Terms.of(own), given_back)
            written_to.note(Terms.of(own), given_back)
        if not (any(marks) or own):
            return given_back
        results, result_form = tree_flatten(given_back)
        results = Part.each_marked(results, marks, leaves)
        if own:
            each = [[one] for one in own] if len(own) == len(results) else [own] * len(results)
            terms = [terms_in(one, leaves, of) for one, of in zip(results, each, strict=True)]
            results = TermOfStage.each_marked(results, terms, leaves)
        return tree_unflatten(results, result_form)


def _form(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    return tensor.shape, tensor.stride()


def _weighted(param: Resting) -> Tensor:
    """The parameter, for a term of a loss outside of the model; see [Note: terms outside of the model]."""
    weight = param.home().weight_outside
    return param if weight == 1 else plainly(_Weighted.apply, (param, weight), {})  # type: ignore[return-value]


class _Weighted(torch.autograd.Function):
    """A tensor as it is, with its gradient times `weight`."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return param.view_as(param)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.weight, None


def _requires_gradient(tensor: object) -> bool:
    return bool(plainly(uses.GET_REQUIRES_GRAD, [tensor], {}))


def _storage_of(tensor: Tensor) -> int:
    return storage_id(plainly(Tensor.untyped_storage, [tensor], {}))


def _sources(given: Any) -> set[Source]:
    handles = (leaf for leaf in tree_leaves(given) if isinstance(leaf, Resting | Whole))
    return set(map(source_of, handles))


def _opened(handles: list[Resting | Whole], stack: ExitStack) -> dict[Source, Tensor] | None:
    """The values of all `handles`, each source opened once, in the order in which they appear. They are closed with
    `stack`, which is empty. `None` if ranks were lost and the others go on: the parameters have other homes then, or
    none, if one rank is left and they are plain again."""
    sources = dict.fromkeys(map(source_of, handles))
    try:
        return {source: stack.enter_context(source.opened()) for source in sources}
    except CommError as error:
        stack.close()
        if not any(source.recover(error) for source in sources):
            raise
        return None


def _given_back(
    result: Any,
    func: Function,
    leaves: list[Any],
    form: Any,
    handles: list[Resting | Whole],
    seen: Mapping[int, Tensor],
    opened: Mapping[Source, Tensor],
) -> Any:
    """`result` without references to memory that will be freed: handles in place of values, and views as `Whole`."""
    storages = {_storage_of(values) for values in opened.values()}
    results, result_form = tree_flatten(result)

    def kept(number: int, value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, Whole):
            return value
        for handle in handles:
            if value is seen[id(handle)]:
                return handle
        if isinstance(value, Resting) or value.layout is not torch.strided:
            return value
        if _storage_of(value) not in storages:
            return value
        if value.requires_grad:
            return plainly(Tensor.clone, [value], {})
        if len(handles) != 1:
            return _view_of_several(value)
        return _view(func, leaves, form, handles[0], number, value)

    def _view_of_several(value: Tensor) -> Tensor:
        """`kept.view_as(param)`, ...: which of them it views says the memory, and where, its strides."""
        storage = _storage_of(value)
        handle, base = next(
            (handle, values) for handle in handles if _storage_of(values := _values_of(handle, opened)) == storage
        )
        if value.dtype != base.dtype:
            return plainly(Tensor.clone, [value], {})  # type: ignore[no-any-return]
        size, stride, offset = value.shape, value.stride(), value.storage_offset() - base.storage_offset()
        whole = _as_whole(handle)

        def step(values: Tensor) -> Tensor:
            return values.as_strided(size, stride, values.storage_offset() + offset)

        counted = (uncounted,) if uncounted in whole.steps else ()
        return Whole(whole.memory, (step, *counted), value)

    return tree_unflatten([kept(number, value) for number, value in enumerate(results)], result_form)


def _view(func: Function, leaves: list[Any], form: Any, handle: Resting | Whole, number: int, like: Tensor) -> Whole:
    """The `number`-th result of `func`, which is a view of what `handle` stands for."""

    def again(values: Tensor) -> Tensor:
        args, kwargs = tree_unflatten([values if leaf is handle else leaf for leaf in leaves], form)
        view: Tensor = tree_flatten(plainly(func, args, kwargs))[0][number]
        return view

    whole = _as_whole(handle)
    return Whole(whole.memory, (*whole.steps, again), like)


def _as_whole(handle: Resting | Whole) -> Whole:
    return handle if isinstance(handle, Whole) else handle.home().whole()


def _values_of(handle: Resting | Whole, opened: Mapping[Source, Tensor]) -> Tensor:
    return opened[source_of(handle)]


@contextmanager
def _saving_homes(opened: Mapping[Source, Tensor], handles: Iterable[Resting | Whole]) -> Iterator[None]:
    """Makes autograd save a reference to parameters that come and go instead of their values, also of `p.detach()`,
    which needs no gradient and whose partner in a product may; the backward gathers them.

    Autograd does not ask what it saves in this way whether it was written to since, so that is asked here. Writes by
    `.data` do not count, as in plain PyTorch.
    """
    by_storage = {
        _storage_of(values): home for source, values in opened.items() if (home := source.gathers_again) is not None
    }
    if not by_storage:
        yield
        return
    counts = not any(isinstance(handle, Whole) and uncounted in handle.steps for handle in handles)

    def pack(tensor: Tensor) -> Any:
        home = by_storage.get(_storage_of(tensor))
        if home is None:
            return tensor
        place = tensor.size(), tensor.stride(), tensor.storage_offset()
        return home, home.has_lost_backward, home.param._version, place

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        home, has_lost, version, place = packed
        nothing = partial(torch.zeros, place[0], dtype=home.param.dtype, device=home.param.device)
        if has_lost(None):  # a rank is gone since, and the parameter may have another home
            return nothing()
        if counts and home.param._version != version:
            raise StateError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{home.name} was at version {version} when it was used, and is at version {home.param._version} now. "
                f"Write to it before the forward or after the backward, or use a copy: param.clone()."
            )
        try:
            home.reach()
        except CommError as error:
            if has_lost(error):
                return nothing()
            raise
        view: Tensor = home.seen(*place)
        return view

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


# -- functions that mean something of their own -----------------------------------------------------------


def _get_grad(_: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ARG001
    return args[0].home().gradient() if isinstance(args[0], Resting) else None


def _set_grad(_: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:  # noqa: ARG001
    value = args[1] if len(args) > 1 else None
    args[0].home().set_gradient(value)


def _detach(func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Whole:  # noqa: ARG001
    handle, steps = args[0], (uncounted,) if func == uses.GET_DATA else ()
    if is_called_by("distribute_tensor"):  # it would send values from one rank, which alone reads them
        _refuse(handle, "its memory, for a DTensor (parallelize_module, distribute_module: leave that call out),")
    if isinstance(handle, Whole):
        return Whole(handle.memory, (*handle.steps, *steps), handle)
    return handle.home().whole(steps)  # type: ignore[no-any-return]


def _set_data(_: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:  # noqa: ARG001
    handle, value = args
    if value is handle:
        return
    if isinstance(value, Resting):
        value = value.home().whole()
    with torch.no_grad():
        if isinstance(handle, Resting):
            handle.home().assign(value)
        elif handle.steps:
            _refuse(handle, "other memory for what its .data was,")
        else:
            handle.copy_(value)  # `param.grad.data = value`


def _copy(func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A parameter that is overwritten completely is not gathered first."""
    handle: Any = args[0]
    value = args[1] if len(args) > 1 else kwargs.get("src", kwargs.get("other"))
    if not isinstance(handle, Resting) or not isinstance(value, Tensor) or torch.is_grad_enabled():
        return _generic(func, args, kwargs)
    home, like = handle.home(), plainly(Tensor.detach, [handle], {})
    values = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    values.copy_(_generic(Tensor.clone, (value,), {}) if isinstance(value, Resting | Whole) else value)
    home.take_over(values)
    torch.autograd.graph.increment_version(home.param)
    return handle


def _to(func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    handle = args[0]
    if not kwargs.get("copy") and not any(isinstance(arg, Tensor) for arg in (*args[1:], *kwargs.values())):
        more = {key: value for key, value in kwargs.items() if key != "copy"}
        device, dtype, *_ = parsed_to(*args[1:], **more)
        device = handle.device if device is None else device
        is_there = device == handle.device or (device.type == handle.device.type and device.index is None)
        if is_there and dtype in (None, handle.dtype):
            return handle
    return _generic(func, args, kwargs)


def _cpu(func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Code that takes a parameter's values to the host gets a copy on a CPU, too, where torch returns the parameter:
    one rank may save it. Without gradients it is the parameter, as `model.cpu()` needs it."""
    handle: Any = args[0]
    is_taken = handle.device.type == "cpu" and torch.is_grad_enabled() and isinstance(handle, Resting)
    return _generic(Tensor.clone, (handle,), {}) if is_taken else _generic(func, args, kwargs)


def _copied(func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """An array that cannot be written to: in plain PyTorch, a write to it would be one to the parameter."""
    values = args[0].clone() if isinstance(args[0], Whole) else args[0].detach().clone()
    copied = func(values, *args[1:], **kwargs)
    if func is not Tensor.tolist:
        copied.flags.writeable = False
    return copied


def _own_node(func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A view of a parameter as itself is for its node, and reads no values. Others than torch hook into that, to find
    the gradient that has just been added up, which is this rank's alone and already gone."""
    is_own = len(args) > 1 and args[0] is args[1] and isinstance(args[0], Resting) and torch.is_grad_enabled()
    if is_own and not is_called_by_torch():
        args[0].home().refuse_hook()
    return plainly(func, args, kwargs) if is_own else _generic(func, args, kwargs)


def _alike(func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if isinstance(args[0], Resting):
        return plainly(func, args, kwargs)
    return func(torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device), *args[1:], **kwargs)


def _storage(func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ARG001
    _refuse(args[0], uses.STORAGE[func])


def _refuse(handle: Resting | Whole, what: str) -> NoReturn:
    source_of(handle).refuse(what)


def _to_all(
    tensor: Tensor,
    dst: int | None = None,  # noqa: ARG001  # as all others
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    **_: Any,
) -> tuple[Function, tuple[Any, ...], dict[str, Any]]:
    """A call of torch's `all_reduce` for one of its `reduce`, whose arguments these are: see `uses.REDUCE`."""
    return dist.all_reduce, (tensor, op, group), {}


def _requires_grad(func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    wanted = bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
    if isinstance(args[0], Whole):
        if wanted:  # `nn.Parameter(p)` and `nn.Parameter(p.detach())` come here, too
            _refuse(args[0], "its memory, for another parameter or leaf with a gradient of its own,")
        return args[0]
    args[0].home().note_wish(trains=wanted)
    return plainly(func, args, kwargs)


def _leave(_: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ARG001
    return args[0]


def _post_accumulate(_: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ARG001
    args[0].home().refuse_hook()


def _generic(func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    leaves, form = tree_flatten((args, dict(kwargs)))
    return _run(func, leaves, form, [leaf for leaf in leaves if isinstance(leaf, Resting | Whole)])


_SPECIAL: dict[Function, Callable[[Function, tuple[Any, ...], Mapping[str, Any]], Any]] = {
    uses.GET_GRAD: _get_grad,
    uses.SET_GRAD: _set_grad,
    uses.DELETE_GRAD: _set_grad,
    uses.SET_DATA: _set_data,
    uses.SET_REQUIRES_GRAD: _requires_grad,
    Tensor.requires_grad_: _requires_grad,
    Tensor.detach_: _leave,
    Tensor.copy_: _copy,
    Tensor.cpu: _cpu,
    Tensor.to: _to,
    Tensor.register_post_accumulate_grad_hook: _post_accumulate,
    **dict.fromkeys(uses.DETACH, _detach),
    **dict.fromkeys(uses.COPIED, _copied),
    **dict.fromkeys(uses.NODE, _own_node),
    **dict.fromkeys(uses.ALIKE, _alike),
    **dict.fromkeys(uses.STORAGE, _storage),
}


def _norm(
    whole: Whole, norm_type: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **more: Any
) -> Tensor | None:
    """The norm of all elements; `None` if something else was asked for."""
    norm_type = more.pop("p", more.pop("ord", norm_type))
    if norm_type == "fro":
        norm_type = 2
    if more or dim is not None or keepdim or not isinstance(norm_type, numbers.Real):
        return None
    norm = whole.source.norm(float(norm_type))
    return None if norm is None else torch.tensor(norm, dtype=dtype or whole.dtype, device=whole.device)


def _are_numbers(values: Iterable[Any]) -> bool:
    return all(
        value is None
        or isinstance(value, numbers.Number)
        or (isinstance(value, Tensor) and not isinstance(value, Resting | Whole) and value.dim() == 0)
        for value in values
    )
