"""Turns PyTorch's hooks into events: a unit is about to compute, or has computed.

All hooks by which a unit is gathered, freed and reduced are registered here. Events per unit:

- `before_forward`, and `after_forward` or `forward_raised`, once per outermost call of one of its sites;
- `before_backward`, when the first gradient of an output is about to be used, and again whenever a forward is
  recomputed inside a backward (activation checkpointing);
- `after_backward`, when every trainable parameter has its gradient and, if the unit has frozen parameters, the
  gradients of its inputs have been computed too, because frozen parameters are read until then. For units found to have
  parameters that get no gradient, the gradients of the inputs alone decide;
- `end_of_backward`, when autograd has finished.

[Note: calls] Several forwards may wait for their backwards, and one graph may be run backward several times. So what a
unit's backward waits for is tracked per call: a call's inputs count from the moment a gradient of its own outputs
comes, and anew in each backward.

[Note: blind calls] A call whose inputs get no gradient never reports that its backward has ended. For trainable
parameters this is harmless, because none is read after its gradient is complete. Frozen parameters are read until the
last gradient of anything computed inside the call has been passed on, in other units too: if the call is that of the
whole model, the head's gradient comes long before that of a block below a frozen norm. The last one cannot be detected
before the backward ends, so the frozen parameters of such a call stay whole until then (`await_end`). An input that is
a leaf does not help either: autograd delivers its gradient at once, while other inputs wait for what was computed
later. If the leaf stands for an input of a recomputation, which runs an autograd of its own, the end of that one is
late enough.

[Note: a backward inside] Reentrant checkpointing runs a backward inside the backward, and when the inner one ends
gradients have arrived. If a module around the checkpointed one is a site of the same unit, for instance because it
reads a parameter itself, its own backward is still to come and reads parameters again. The outer backward has opened
the unit, so the inner one must not close it, and none of its gradients is the last. Autograd numbers backwards in the
order in which they begin.

[Note: hooks of parameters] What a post-accumulate hook refers to lives as long as its parameter, and Python's garbage
collector does not see that it does (torch 2.13): a hook that refers to its own parameter keeps it for ever. So ours
refer weakly to what they need, and a program may drop a model and its engine without `close()`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from shardwise.errors import ModelError, StateError
from shardwise.memory import Flat, Unit
from shardwise.runtime.buffer_dtypes import explain_dtypes
from shardwise.runtime.compiled import OuterCompile
from shardwise.runtime.kept_views import KeptViews
from shardwise.runtime.nested import tensors_in
from shardwise.runtime.split_backward import Halves
from shardwise.system.own_hooks import hook
from shardwise.system.torch_private import (
    DisableTorchFunctionSubclass,
    graph_task,
    is_transforming,
    queue_callback,
    storage_id,
    wraps_others,
)

Tensor = torch.Tensor
Prehook = Callable[[object], None]
"""Called by a node of autograd's graph before it uses the gradients that are its argument."""

CALLED_BY_TORCH = {
    **dict.fromkeys(("_enter_root", "_leave_root", "_before", "_after"), "the model's forward"),
    **dict.fromkeys(("_open_for_gradient", "_send_back", "_input_grad_done", "arrived", "_end"), "a backward"),
}
"""See `comm/watch/journal.py`."""


NO_COPY = (
    "A sharded model cannot be copied or pickled as it is: its parameters are in the engine's memory. Build another "
    "and load engine.state_dict() into it, on all ranks; checkpoints are written by engine.save(folder)."
)


class EndOfForward(Exception):  # noqa: N818  # it is no error
    """Raised inside a forward to end it early, with `output`; the caller that asked for it catches this."""

    def __init__(self, output: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.output = output


class Listener(Protocol):
    """Receives the events."""

    def enter_root(self) -> None: ...
    def leave_root(self, *, raised: bool) -> None: ...
    def before_forward(self, unit: Unit) -> None: ...
    def after_forward(self, unit: Unit, *, opaque: bool) -> None: ...
    def forward_raised(self, unit: Unit) -> None: ...
    def before_backward(self, unit: Unit) -> None: ...
    def after_backward(self, unit: Unit) -> None: ...
    def await_graph(self, unit: Unit) -> None: ...
    def await_end(self, unit: Unit) -> None: ...
    def end_of_backward(self) -> None: ...


@dataclass(eq=False)
class _Call:
    """One forward of a unit, and how many gradients of its inputs are still to come; see [Note: calls]."""

    num_inputs: int = 0
    num_left: int = 0
    backward: int = -1
    """The backward that `num_left` belongs to, by autograd's number."""
    is_blind: bool = False
    """Whether its inputs cannot show that its backward has ended; see [Note: blind calls]."""
    leaves: list[Node] = field(default_factory=list)
    """The nodes of inputs that are leaves; nothing else keeps them alive until the leaf is used."""
    waits_for_end: bool = False
    """Whether the end of its backward counts as one more input: it was recomputed from leaves, in an autograd of its
    own."""

    def join(self, backward: int) -> bool:
        """Something of this call takes part in `backward`. Returns whether it is the first."""
        if self.backward == backward:
            return False
        self.backward, self.num_left = backward, self.num_inputs
        return True


@dataclass
class _Use:
    """How often a unit is open in forwards, and what its backward still waits for."""

    depth: int = 0
    num_writes: int = 0
    """The unit's write counter when it opened."""
    call: _Call | None = None
    """The running forward, if its inputs are watched."""
    recomputed: list[_Call | None] = field(default_factory=list)
    """The same for forwards recomputed inside a backward, innermost last."""
    sent_back: set[_Call] = field(default_factory=set)
    """The calls whose output gradients have come in the running backward."""
    backward: int | None = None
    """The backward in which gradients of its outputs have come; the outermost if one runs inside another."""

    def open_in(self, backward: int) -> bool:
        """Returns whether it was open in a backward that ran inside this one, and so has to start over."""
        is_anew = self.backward is not None and backward < self.backward
        if self.backward is None or is_anew:
            self.backward = backward
        return is_anew

    def close(self) -> None:
        """Its backward has ended."""
        self.sent_back.clear()
        self.backward = None


class _Watched:
    """What the hooks of a buffer's parameters need."""

    def __init__(self, hooks: Hooks, unit: Unit, flat: Flat) -> None:
        self.hooks, self.unit, self.flat = hooks, unit, flat
        self.guard, self.grads = flat.guard, flat.grads
        self.arrive, self.count, self.summed = flat.grads.arrive, flat.grads.count, flat.grads.summed
        self.use, self.halves = hooks._uses[unit.name], hooks._halves


class NotCopied:
    """What an engine hangs on a user's model, which can then be neither copied nor pickled."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise StateError(NO_COPY)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise StateError(NO_COPY)


class Hooks(NotCopied):
    """The hooks of one model. `remove()` takes them off.

    The listener owns the hooks and is referenced weakly, so that its buffers are freed with it and need no garbage
    collection. A graph may outlive both; its backward then raises `StateError`.
    """

    def __init__(self, root: nn.Module, units: list[Unit], listener: Listener, halves: Halves) -> None:
        self._halves = halves
        self._alive = weakref.ref(listener)
        self._listener: Listener = weakref.proxy(listener)
        self._is_void: Callable[[], bool] = lambda: False
        self._units = units
        self._uses = {unit.name: _Use() for unit in units}
        self._inputs_decide: set[str] = set()
        self._awaits_end = False
        self.lets_sum = False
        """Whether autograd may add later gradients to those that stay: see [Note: sums by autograd] in
        `memory/fresh.py`."""
        self._outer_compile = OuterCompile(root, [site for unit in units for site in unit.sites])
        self._root = root
        self._kept = KeptViews(root)
        self._watched: list[_Watched] = []
        self._handles: list[RemovableHandle] = []
        self._root_handles: list[RemovableHandle] = []
        for unit in units:
            for site in unit.sites:
                self.add_site(unit, site)
            for flat in unit.flats:
                if flat.spec.trainable:
                    self._watch_params(unit, flat)

    def report_to(self, listener: Listener, is_void: Callable[[], bool]) -> None:
        """Report to `listener` from here on; it forwards events to the owner of the hooks. While `is_void()`, a graph
        that has outlived these hooks may be sent back: nothing of it counts."""
        self._listener, self._is_void = listener, is_void

    def add_site(self, unit: Unit, site: nn.Module, *, num_running: int = 0) -> None:
        """Gather `unit` before `site` runs. `num_running` calls of `site` have started already; only their ends will be
        seen."""
        use = self._uses[unit.name]
        open_backward = partial(self._open_for_gradient, unit)
        if num_running and not use.depth:
            use.num_writes = unit.num_writes()
        use.depth += num_running
        before, after = hook(self._before, unit, use), hook(self._after, unit, use, open_backward)
        self._handles.append(site.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._handles.append(site.register_forward_hook(after, always_call=True))
        self._hook_root()

    def _hook_root(self) -> None:
        """Keep the root's own hooks outermost: before and after all others on it, for the root may be a site of a
        unit."""
        for handle in self._root_handles:
            handle.remove()
        self._root_handles = [
            self._root.register_forward_pre_hook(hook(self._enter_root), prepend=True),
            self._root.register_forward_hook(hook(self._leave_root), always_call=True),
        ]

    def look_for_kept_views(self, looks: bool) -> None:
        """Whether what modules keep of a forward is looked through at the ends of units, from now on."""
        self._kept.looks = looks

    def watch_inputs(self, unit: Unit) -> None:
        """From the next forward on, the unit's backward ends when the gradients of its inputs have been computed."""
        self._inputs_decide.add(unit.name)

    def remove(self) -> None:
        for handle in (*self._handles, *self._root_handles):
            handle.remove()
        self._handles.clear()
        self._root_handles.clear()
        self._watched.clear()

    # -- forward ----------------------------------------------------------------------------------------

    def _enter_root(self, _: nn.Module, args: object) -> None:  # noqa: ARG002
        refuse_transformed_calls()
        if not in_backward():
            self._outer_compile.check_callers()
            self._listener.enter_root()

    def _leave_root(self, _: nn.Module, args: object, output: object) -> None:  # noqa: ARG002
        if in_backward():
            return
        error = sys.exc_info()[1] if output is None else None
        if error is None or isinstance(error, EndOfForward):
            self._listener.leave_root(raised=False)
            return
        self._outer_compile.explain(error)
        explain_dtypes(error, self._root)
        self._listener.leave_root(raised=True)

    @property
    def is_open(self) -> bool:
        """Whether some unit is computing its forward."""
        for use in self._uses.values():  # noqa: SIM110  # no generator: see [Note: once for each event] in `script.py`
            if use.depth:
                return True
        return False

    @property
    def is_cut_short(self) -> bool:
        """Whether a backward has begun and autograd left it without reaching its end."""
        return self.has_begun_backward and not in_backward()

    @property
    def has_begun_backward(self) -> bool:
        """Whether a backward has begun and not reached its end."""
        return self._awaits_end

    def _before(self, unit: Unit, use: _Use, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_dynamo_compiling():
            self._outer_compile.warn_of_tracing()
        if graph_task() != -1:  # `in_backward`, without a call: see [Note: once for each event] in `script.py`
            self._open_backward(unit)
            use.recomputed.append(self._watch_inputs(unit, (args, kwargs)))
            return
        use.depth += 1
        if use.depth == 1:
            self._listener.before_forward(unit)
            use.num_writes = unit.num_writes()
            if self._inputs_decide or unit.has_frozen:
                use.call = self._watch_inputs(unit, (args, kwargs))

    def _after(
        self,
        unit: Unit,
        use: _Use,
        open_backward: Prehook,
        _: nn.Module,
        args: object,  # noqa: ARG002  # torch's hook signature
        output: object,
    ) -> object:
        if graph_task() != -1:
            output = self._kept.apart(unit, output)
            call = use.recomputed.pop() if use.recomputed else None
            _watch_outputs(output, self._opening(unit, use, call, open_backward))
            return output
        use.depth -= 1
        if use.depth > 0:
            return None
        call, use.call = use.call, None
        if output is None and (error := sys.exc_info()[1]) is not None:  # the forward raised
            if not isinstance(error, EndOfForward):
                self._listener.forward_raised(unit)
                return None
            output = error.output
        if unit.num_writes() != use.num_writes:
            self._listener.forward_raised(unit)
            raise changed_inside(unit.name)
        output, given = self._kept.apart(unit, output), output
        opening = open_backward if call is None else self._opening(unit, use, call, open_backward)
        opaque = torch.is_grad_enabled() and not (
            _watch_outputs(output, opening) or _has_no_backward(unit, call, output)
        )
        if opaque and call is not None:  # no hook will report the start of its backward
            call.num_left = call.num_inputs
            use.sent_back.add(call)
            self._await_end_if_blind(unit, call)
        self._listener.after_forward(unit, opaque=opaque)
        return None if output is given else output

    # -- backward ---------------------------------------------------------------------------------------

    def _watch_inputs(self, unit: Unit, inputs: object) -> _Call | None:
        """Count the gradients of `inputs`, leaves included (an embedding's output under adapters), if the end of the
        unit's backward depends on them."""
        if not (unit.has_frozen or unit.name in self._inputs_decide) or not torch.is_grad_enabled():
            return None
        tensors = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        nodes = {get_gradient_edge(tensor).node for tensor in tensors}
        leaves = [get_gradient_edge(tensor).node for tensor in tensors if tensor.is_leaf]
        call = _Call(num_inputs=len(nodes), leaves=leaves)
        only_leaves = len(leaves) == len(tensors)
        call.is_blind = not nodes or (only_leaves and not in_backward())
        if only_leaves and not call.is_blind:
            call.waits_for_end = True
            call.num_inputs += 1

        for node in nodes:
            node.register_prehook(partial(self._input_grad_done, unit, call))
        return call

    def _input_grad_done(self, unit: Unit, call: _Call, *_: object) -> None:
        """One of the gradients that a call of `unit` waits for has come."""
        call.join(graph_task())
        call.num_left -= 1
        self._close_backward(unit)

    def _opening(self, unit: Unit, use: _Use, call: _Call | None, open_backward: Prehook) -> Prehook:
        """The prehook for gradients of this forward's outputs."""
        if call is None:
            return open_backward
        call.leaves.clear()
        return partial(self._send_back, unit, use, call)

    def _send_back(self, unit: Unit, use: _Use, call: _Call, grads: object) -> None:
        """A gradient of an output of `call` is about to be used."""
        if call.join(graph_task()) and call.waits_for_end:
            queue_callback(partial(self._input_grad_done, unit, call))
        use.sent_back.add(call)
        self._open_for_gradient(unit, grads)
        self._await_end_if_blind(unit, call)

    def _await_end_if_blind(self, unit: Unit, call: _Call) -> None:
        if call.is_blind:
            self._listener.await_end(unit)

    def _open_for_gradient(self, unit: Unit, _: object) -> None:
        """Open the unit's backward for a gradient that has come, as opposed to a recomputed forward."""
        if self._alive() is None:
            if self._is_void():
                return
            raise StateError(
                "The engine that held this model's parameters is gone, or follows another plan now, so what was "
                "computed before cannot be sent back. Run the forward again."
            )
        if torch.is_grad_enabled():  # backward(create_graph=True)
            self._listener.await_graph(unit)
        if self._uses[unit.name].open_in(graph_task()):
            for flat in unit.flats:
                flat.grads.expect_all()
        if not self._awaits_end:
            self._await_end()
        self._listener.before_backward(unit)

    def _watch_params(self, unit: Unit, flat: Flat) -> None:
        watched = _Watched(self, unit, flat)
        self._watched.append(watched)
        known = weakref.ref(watched)  # see [Note: hooks of parameters]
        for index, param in enumerate(flat.params):

            def arrived(param: Tensor, index: int = index) -> None:  # [Note: once for each gradient]
                watched = known()
                if watched is None:
                    return
                summed = watched.summed[index]
                if summed is not None and (_seen_at_rest(param) if watched.guard.is_resting else param.grad) is summed:
                    if not watched.hooks._awaits_end:
                        watched.hooks._await_end()
                    backward = watched.use.backward
                    if watched.count(index, backward is None or backward >= graph_task()):
                        watched.hooks._close_backward(watched.unit)
                    return
                if watched.guard.is_resting:
                    grad = _taken_at_rest(param)
                else:
                    grad, param.grad = param.grad, None
                if grad is None:
                    return
                if grad.requires_grad or grad.is_sparse:
                    raise _cannot_sum(grad, watched.flat.slots[index].name)
                if not watched.hooks._awaits_end:
                    watched.hooks._await_end()
                if watched.halves.units and watched.halves.keep(watched.unit, watched.flat, index, grad):
                    return
                backward = watched.use.backward
                is_last = backward is None or backward >= graph_task()  # [Note: a backward inside]
                have_all = watched.arrive(index, grad, is_last)
                if watched.hooks.lets_sum and watched.grads.leave(index, grad, param):
                    param.grad = grad
                if have_all:
                    watched.hooks._close_backward(watched.unit)

            handle = param.register_post_accumulate_grad_hook(arrived)
            self._handles.append(handle)

    def _open_backward(self, unit: Unit) -> None:
        if not self._awaits_end:
            self._await_end()
        self._listener.before_backward(unit)

    def _close_backward(self, unit: Unit) -> None:
        use = self._uses[unit.name]
        trained = unit.trained_grads
        if not trained and not use.sent_back:
            return  # it has ended already: a recomputed forward has the inputs of the original
        if use.sent_back and any(call.num_left > 0 for call in use.sent_back):
            return
        num_to_come = 0
        for grads in trained:  # no generator: see [Note: once for each event] in `script.py`
            num_to_come += grads.num_to_come
        have_all = not num_to_come
        if not (have_all or self._do_inputs_decide(unit, use)):
            return
        if use.backward is None or use.backward >= graph_task():  # see [Note: a backward inside]
            use.close()
            for flat in unit.flats:
                flat.grads.expect_all()
            self._listener.after_backward(unit)

    def _do_inputs_decide(self, unit: Unit, use: _Use) -> bool:
        is_told = bool(use.sent_back) and all(call.num_inputs for call in use.sent_back)
        return is_told and unit.name in self._inputs_decide

    def _await_end(self) -> None:
        self._awaits_end = True
        queue_callback(self._end)

    def _end(self) -> None:
        self._awaits_end = False
        for use in self._uses.values():
            if use.backward is not None or use.sent_back:
                use.close()
        for unit in self._units:
            for flat in unit.flats:
                if flat.grads.num_to_come < len(flat.slots):
                    flat.grads.expect_all()
        self._listener.end_of_backward()

    def forget(self) -> None:
        """A forward or backward raised: nothing is open any more."""
        self._awaits_end = False
        for unit in self._units:
            for flat in unit.flats:
                flat.grads.expect_all()
        for use in self._uses.values():
            use.depth = 0
            use.call = None
            use.recomputed.clear()
            use.close()


def _cannot_sum(grad: Tensor, name: str) -> ModelError:
    if grad.requires_grad:
        return ModelError(
            f"backward(create_graph=True) would leave a gradient of {name} that is part of a graph, but gradients are "
            f"summed over ranks outside of it. Use torch.autograd.grad(..., create_graph=True) for what is "
            f"differentiated again, and a plain backward() for the rest."
        )
    return ModelError(
        f"The gradient of {name} is sparse; build the embedding with sparse=False, and train it with Adam if that was "
        f"SparseAdam, which takes no other gradients."
    )


def _seen_at_rest(param: Tensor) -> Tensor | None:
    """The gradient that autograd has stored."""
    with DisableTorchFunctionSubclass():
        return param.grad


def _taken_at_rest(param: Tensor) -> Tensor | None:
    """Take the gradient that autograd has stored; at rest, `param.grad` is a property of ours."""
    with DisableTorchFunctionSubclass():
        grad, param.grad = param.grad, None
        return grad


def refuse_transformed_calls() -> None:
    """Raise `StateError` if a sharded model is called by what compiles, transforms or traces whole models."""
    if is_dynamo_compiling():  # where the graph must not end, the text is part of torch's error
        torch._dynamo.graph_break(
            msg="A sharded model cannot be one graph, as torch.compile(..., fullgraph=True) wants it: parameters come "
            "and go at its units. Call the plain model, and have each unit compiled by the plan: compile: inductor."
        )
    if is_transforming():
        raise StateError(
            "A sharded model was called inside a torch.func transform (grad, vmap, jvp, ...), which would compute "
            "with memory that comes and goes. Use loss.backward() or torch.autograd.grad(), or torch.autograd."
            "functional.jvp and jacobian, which compute by backwards."
        )
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]  # torch's own
        raise StateError(
            "A sharded model was called by torch.jit.trace, or an ONNX export by it, which records no gathering of "
            "parameters. Trace a plain model that has loaded engine.state_dict()."
        )


def in_backward() -> bool:
    """Whether autograd is running on this thread; a forward that starts now is a recomputation."""
    return graph_task() != -1


def _watch_outputs(output: object, open_backward: Prehook) -> bool:
    """Open the unit's backward before any gradient of `output` is used. False if there is nothing to watch."""
    if isinstance(output, Tensor):
        if output.grad_fn is None:
            return False
        output.grad_fn.register_prehook(open_backward)
        return True
    nodes = {tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None}
    for node in nodes:
        node.register_prehook(open_backward)
    return bool(nodes)


def _has_no_backward(unit: Unit, call: _Call | None, output: object) -> bool:
    """Whether nothing of `unit` can be read after this forward, because no graph has come to it: all of it is frozen,
    what it was given gets no gradient, and what it returns was made without a graph, in memory of its own. So with a
    tower of frozen blocks, which would all be whole together until the backward ends, and with an embedding, also where
    a hook lets its output require a gradient (peft's, for recomputation)."""
    if call is None or call.num_inputs or unit.trained_grads:
        return False
    returned = list(tensors_in(output))
    if not returned or any(one.grad_fn is not None or one.layout is not torch.strided for one in returned):
        return False
    with DisableTorchFunctionSubclass():  # parameters at rest would hide their storage
        own = {storage_id(flat.full.untyped_storage()) for flat in unit.flats}
        return not any(wraps_others(one) or storage_id(one.untyped_storage()) in own for one in returned)


def changed_inside(unit: str) -> ModelError:
    """The error for a forward that writes to parameters (weight clipping, an embedding's `max_norm`)."""
    return ModelError(
        f"A parameter of {unit} was changed in place while the model computed. Each rank would change it by its own "
        f"batch, and where parameters are gathered the change would be lost. Change parameters between steps, under "
        f"torch.no_grad(), or keep what a forward changes in a buffer. What the first forward sets by its batch, set "
        f"by one before shard(). Some models have a setting without which they do not: config.rescale_every=0 for RWKV."
    )
