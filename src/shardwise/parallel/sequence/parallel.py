"""Sequence parallelism of one model: hooks, attention, batches and random numbers.

[Note: dropout] Ranks with the same seed would drop the same elements of different tokens. So inside a training forward
a rank draws from a generator that depends on its place on the line, seeded by one number drawn from the user's
generator, whose state is then restored. This state does not outlive the forward, so checkpoints need nothing more;
recomputation sees the generator as it was inside the forward, because torch's checkpointing keeps its state.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.comm import Line, World
from shardwise.errors import ModelError, StateError
from shardwise.parallel.library_model import pretrained_in
from shardwise.parallel.sequence import hugging_face
from shardwise.parallel.sequence.attention import Attention, Sample
from shardwise.parallel.sequence.batch import Splitter
from shardwise.parallel.sequence.outliving import SplitBatches, WholeOutputs
from shardwise.parallel.sequence.parts import mark_output, unmarked
from shardwise.parallel.sequence.refusals import is_ring
from shardwise.parallel.sequence.rehearsed import rehearsed
from shardwise.parallel.sequence.routing import Routing
from shardwise.parallel.sequence.whole_outputs import changed, join, whole_output
from shardwise.plan import Plan
from shardwise.plan.mesh import SEQUENCE_AXIS, Mesh
from shardwise.runtime import in_backward
from shardwise.runtime.micro_batches import MicroBatch
from shardwise.runtime.nested import tensors_in
from shardwise.system.own_hooks import hook
from shardwise.system.telemetry import Ledger

if TYPE_CHECKING:
    from shardwise.parallel.sequence.coincidences import Coincidences

Tensor = torch.Tensor


class SequenceParallel:
    """Routes the attention of `model` over the ranks along `sp`, and splits its batches. All ranks must construct it.

    `close` restores the model. `reopened` is for a batch that was split over other ranks than there are now.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        mesh: Mesh,
        world: World,
        device: torch.device,
        whole_outputs: WholeOutputs,
        batches: SplitBatches,
        *,
        ends_here: Callable[[], bool] | None,
    ) -> None:
        """`batches` are those that were split before, under another plan or in another world. In pipeline stages a
        forward of `model` is that of one of them, and `ends_here()` tells in it whether its output is the model's."""
        self.line = Line(world.collectives(device), world.group(mesh, SEQUENCE_AXIS))
        num_cuts = math.prod(mesh.size(axis) for axis in mesh.same_params_axes)  # other ranks have some of the heads
        ring = is_ring(model, plan, self.line.num_ranks * num_cuts)
        self.attention = Attention(self.line, is_ring=ring)
        self.batches = batches.divided(self.line.num_ranks, is_zigzag=ring)
        self.attention.sample = self.batches.last
        self._model = model
        self._device = device
        self._splitter = Splitter(model, self.line, is_zigzag=ring)
        self._is_pretrained = bool(pretrained_in(model))
        self._numbering = None if self._splitter.adds_positions else model
        self._running = _Running()
        self._is_suspended = False
        self._whole_outputs = whole_outputs
        self._split_call: dict[str, Any] | None = None
        """The whole batch of the current forward, if the forward has split it by itself."""
        self._called: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        """What the model is called with, while its forward runs."""
        self.coincidences: Coincidences | None = None
        """Tells tokens from what is as many; without it, what looks like tokens is taken for them."""
        self._ends_here = ends_here
        self._looked_at: set[bool] = set()
        """Whether forwards in training, and in evaluation, were looked at for numbers of tokens."""
        self._is_checked = False
        """Whether it has been checked that some stage calls attention."""
        self._hooks = ExitStack()
        self._open()

    def _open(self) -> None:
        for module in self._model.modules():
            before = module.register_forward_pre_hook(hook(self._before), prepend=True)
            after = module.register_forward_hook(hook(self._after), always_call=True)
            self._hooks.callback(before.remove)
            self._hooks.callback(after.remove)
        finds = self._model.register_forward_pre_hook(hook(self._find_sample), prepend=True, with_kwargs=True)
        self._hooks.callback(finds.remove)
        self._put_back = hugging_face.route(self._model, self.attention)

    def close(self) -> None:
        """Remove hooks and routing. May be called twice."""
        self._hooks.close()
        self._put_back()

    @contextmanager
    def reopened(self) -> Iterator[None]:
        """After `close`, in another world: a context in which this rank computes its part of a batch that was split in
        this one's. Nothing is sent, and only shapes are meaningful."""
        self.line.fall_silent()
        self._open()
        try:
            yield
        finally:
            self.close()

    @property
    def is_ring(self) -> bool:
        """Whether keys and values circulate, and a rank has two parts of each sample, equally long."""
        return self.attention.is_ring

    def divides_like(self, other: SequenceParallel) -> bool:
        """Whether ranks get as many tokens, in the same order, as by `other`."""
        return (self.line.num_ranks, self.attention.is_ring) == (other.line.num_ranks, other.attention.is_ring)

    def split(self, batch: Any, documents: Tensor | None) -> Any:
        """See `Engine.split_sequence`."""
        part, sample = self._splitter.split(batch, documents)
        return self._noted(part, batch, sample)

    def _noted(self, part: Any, batch: Any, sample: Sample) -> Any:
        self.batches.note(part, batch, sample)
        self._use(sample)
        return part

    def _use(self, sample: Sample) -> None:
        self.attention.sample = self.batches.last = sample

    def join(self, part: Tensor, dim: int) -> Tensor:
        """See `Engine.join_sequence`."""
        if self._is_suspended:
            return part
        if self.attention.sample is None:
            raise StateError(
                "engine.join_sequence joins outputs for a batch that engine.split_sequence, or the model, has "
                "split, and there is none yet. Call the model first."
            )
        return join(part, self.line, self.attention.sample, dim)

    def note_micro_batches(self, batch: object, parts: Sequence[MicroBatch]) -> None:
        """Remember the samples of `parts`, which have the rows of `batch`, in order. Those of a list were split one by
        one, and are known."""
        is_cut = isinstance(batch, Tensor | tuple | Mapping)
        sample = self.batches.sample_of(batch) if is_cut else None
        if sample is not None and len(parts) > 1:
            for place, part in enumerate(parts):
                self.batches.note((part.args, part.kwargs), batch, sample.rows(place, len(parts)))

    def note_parts(self, whole: MicroBatch, parts: Sequence[MicroBatch], rows: Sequence[int]) -> None:
        """The same for `parts` of a call, with so many rows of `whole` each."""
        sample = self.batches.sample_of((whole.args, whole.kwargs))
        if sample is not None and len(parts) > 1:
            for part, (start, stop) in zip(parts, pairwise(accumulate(rows, initial=0)), strict=True):
                self.batches.note((part.args, part.kwargs), (whole.args, whole.kwargs), sample.between(start, stop))

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """A context in which this rank computes whole sequences by itself."""
        self._put_back()
        self._is_suspended = True
        try:
            yield
        finally:
            self._is_suspended = False
            self._put_back = hugging_face.route(self._model, self.attention)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """A context, in a backward, in which recomputed modules are routed as in a forward."""
        running = self._running
        running.depth += 1
        with ExitStack() as stack:
            stack.callback(lambda: setattr(running, "depth", max(0, running.depth - 1)))
            if running.depth == 1 and not self._is_suspended:
                stack.enter_context(self._routing())
            yield

    def rehearsed(self, twin: nn.Module, ledger: Ledger | None = None) -> AbstractContextManager[None]:
        """A context in which attention of a rehearsed copy of the model has this rank's shapes and sends nothing;
        `ledger` counts what it would send."""
        return rehearsed(twin, Line(None, self.line.group, ledger), is_ring=self.attention.is_ring)

    def plain(self, given: Any) -> Any:
        """What a loop has of split sequences, for computations of our own: see [Note: parts of a sequence]."""
        return unmarked(given)

    def splits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the model, called with these, takes this rank's part of them by itself."""
        is_known = self.batches.sample_of((args, kwargs)) is not None
        return self._is_pretrained and not is_known and self._splitter.whole_call(args, kwargs) is not None

    # -- hooks on the model and its modules --------------------------------------------------------------

    def _before(self, module: nn.Module, args: object) -> None:  # noqa: ARG002  # of a hook
        running = self._running
        running.depth += 1
        if running.depth > 1 or self._is_suspended:
            return
        running.stack = ExitStack()
        self._enter(running.stack, module)

    def _find_sample(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Find the sample of the model's inputs. A whole batch given to a transformers model is replaced by its
        part."""
        if self._is_suspended or in_backward():
            return None
        self._split_call = None
        self._called = self._own_part(args, kwargs)
        self._refuse_parts(*self._called)
        return self._called

    def _refuse_parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise `ModelError` in the first forward of each kind if the model, which is no library's, computes what a
        part of the tokens gives another value."""
        sample, is_library = self.attention.sample, self._is_pretrained or self._ends_here is not None
        if is_library or sample is None or self.coincidences is None or self.line.is_silent:
            return
        if self._model.training in self._looked_at:
            return
        self._looked_at.add(self._model.training)
        self.coincidences.refuse_part(args, kwargs, sample.layout.num_local)

    def _own_part(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        sample = self.batches.sample_of((args, kwargs))
        if sample is not None:
            self._use(sample)
            return unmarked(args), unmarked(kwargs)
        called = self._splitter.whole_call(args, kwargs) if self._is_pretrained else None
        if called is not None:
            self._split_call = called
            part, sample = self._splitter.split(called, None)
            return (), self._noted(unmarked(part), called, sample)
        self.batches.require_one()
        return unmarked(args), unmarked(kwargs)

    def _is_coincidence(self, func: Callable[..., Any]) -> bool:
        sample = self.attention.sample
        if self.coincidences is None or sample is None:
            return False
        return self.coincidences.is_one(func, self._called, sample.layout.num_local)

    def _after(self, module: nn.Module, args: object, output: object) -> object:  # noqa: ARG002  # of a hook
        running = self._running
        running.depth = max(0, running.depth - 1)
        if running.depth or running.stack is None:
            return None
        stack, running.stack = running.stack, None
        stack.close()
        if not in_backward():
            self._watch(output)
            self._called = None
        if module is not self._model or output is None or in_backward():
            return None
        if self._ends_here is not None:
            return self._joined(output) if self._ends_here() else None
        self._require_attention(self.attention.num_calls)
        joined = self._joined(output)
        return self._marked(output if joined is None else joined)

    def _marked(self, output: object) -> object:
        """The output for a loop: see [Note: parts of a sequence]."""
        sample = self.attention.sample
        if sample is None or self.line.is_silent:
            return output
        return changed(output, lambda tensor: mark_output(tensor, sample.layout))

    def _joined(self, output: object) -> object:
        """The output for the whole batch, if this forward has split the batch by itself and whole outputs are
        requested."""
        sample, called, self._split_call = self.attention.sample, self._split_call, None
        if called is None or sample is None or not self._whole_outputs.are_asked_for:
            return None
        trains = torch.is_grad_enabled() or (self.line.is_silent and self._model.training)  # silent: in void iterations
        with_tokens = self._whole_outputs.with_tokens
        return whole_output(output, self.line, sample, called, trains=trains, with_tokens=with_tokens)

    def _enter(self, stack: ExitStack, module: nn.Module) -> None:
        if not in_backward():
            if module is self._model and self._ends_here is None:
                self.attention.num_calls = 0
            if module.training:
                stack.enter_context(_random_numbers_of(self.line.index, self._device))
        stack.enter_context(self._routing())

    def _watch(self, output: object) -> None:
        """Hook the gradients of `output`, so that whatever the backward recomputes for it uses its sample."""
        sample = self.attention.sample
        nodes = {tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None}
        for node in nodes if sample is not None else ():
            node.register_prehook(lambda _, of=sample: self.attention.note_backward(of))

    def _routing(self) -> Routing:
        return Routing(
            self.attention,
            self._numbering,
            is_own=not self._is_pretrained,
            is_coincidence=self._is_coincidence,
        )

    def check_was_asked(self, stages: Line) -> None:
        """Raise `ModelError` if no stage has called attention; once. All ranks of the pipeline must call."""
        if not self._is_checked:
            self._is_checked = True
            asked = max(map(int, stages.exchange(str(int(self.attention.num_calls > 0)).encode())))
            self._require_attention(asked)

    def _require_attention(self, num_calls: int) -> None:
        if num_calls == 0:
            raise ModelError(
                f"{type(self._model).__name__} computed a forward without any attention that could be split over "
                f"{self.line.axis!r}: neither torch.nn.functional.scaled_dot_product_attention nor transformers' "
                f"AttentionInterface was called. Use one of them, or leave {self.line.axis} out of the mesh."
            )


class _Running(threading.local):
    """How deeply modules of the model are nested in this thread; autograd recomputes in its own threads on devices."""

    depth = 0
    stack: ExitStack | None = None


@contextmanager
def _random_numbers_of(place: int, device: torch.device) -> Iterator[None]:
    """A context in which random numbers depend on `place`; see [Note: dropout]."""
    (seed,) = torch.randint(2**62, (1,), device="cpu").tolist()
    is_host = device.type == "cpu"
    devices = [] if is_host else [device.index or 0]
    with torch.random.fork_rng(devices, device_type="cuda" if is_host else device.type):
        torch.manual_seed((seed + place) % 2**63)
        yield
