"""What is computed of a head's logits, some rows at a time: no rank ever has the logits of all rows.

[Note: rows in chunks] A head multiplies hidden states [N, H] with a weight [V, H], and what follows keeps a number or
two of each row of V logits. So rows are taken in chunks: forward computes the logits of a chunk and what is asked of
them, and drops them; backward computes them again. That costs one product in four, and N x V never exists.

- *The head is called once*, through its hooks, in place of its own forward. An engine therefore gathers it once before
  all chunks, and once more for the backward, and each of its parameters gets one gradient.
- *Sums over chunks* are at least fp32, whatever the parameters' dtype.
- *A plain linear head* is multiplied by hand, so that gradients of its weight are added to one tensor. Any other one
  (adapters, a quantized base, a forward of its own) runs its own forward and autograd, chunk by chunk.
- *Under tp* the input of a split head is exchanged once for all rows (`enter`), and each rank keeps its words: what is
  computed of a chunk sends a few numbers per row (`split_logits.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from shardwise.errors import ModelError
from shardwise.parallel.tensor import draws
from shardwise.parallel.tensor.forwards import Column, VocabularyEmbedding
from shardwise.runtime import own_forward

Tensor = torch.Tensor
Compute = Callable[..., tuple[Tensor, ...]]
"""Takes logits [n, V], and what else belongs to the n rows; gives tensors [n, ...]."""
CHUNK_BYTES = 64 << 20
"""Of the logits of a chunk, in fp32. Some hundred rows of a large vocabulary: enough for a product at full speed."""


def over_logits(
    head: nn.Module | Tensor,
    rows: Tensor,
    compute: Compute,
    per_row: Sequence[Tensor],
    *,
    bias: Tensor | None = None,
    chunk_rows: int | None,
    around: Autocast | None = None,
) -> tuple[Tensor, ...]:
    """What `compute` gives for the logits of `rows` [N, H], which `enter` has returned, and for `per_row` [N, ...],
    which get no gradient. See [Note: rows in chunks]. `around` is the autocast of the head; default: the present one.
    """
    around = around or Autocast.now(rows.device)
    if isinstance(head, torch.Tensor):
        return _by_chunks(_Linear(head, bias), rows, compute, per_row, chunk_rows, around)

    def forward(given: Tensor) -> tuple[Tensor, ...]:
        return _by_chunks(_projection(head, inner), given, compute, per_row, chunk_rows, around)

    inner = own_forward(head)  # activations are recomputed here already
    with _in_place_of_forward(head, forward):
        made: tuple[Tensor, ...] = nn.Module.__call__(head, rows)
    return made


def enter(head: nn.Module | Tensor, hidden: Tensor) -> Tensor:
    """The input of `head` [..., H] as each rank along `tp` needs it. Its ranks call; differentiable."""
    forward = None if isinstance(head, torch.Tensor) else own_forward(head)
    return forward.entered(hidden) if isinstance(forward, Column) and forward.is_linear else hidden


def num_words(head: nn.Module | Tensor) -> int | None:
    """The size of the vocabulary; `None` if the head does not say."""
    if isinstance(head, torch.Tensor):
        return head.shape[0]
    forward = own_forward(head)
    if isinstance(forward, Column):
        return sum(forward.sizes)
    for name in ("out_features", "nf", "num_embeddings"):
        size = getattr(head, name, None)
        if isinstance(size, int):
            return size
    return None


def rows_per_chunk(rows: Tensor, words: int, chunk_bytes: int | None = None) -> int:
    """How many of `rows` [..., H] are computed at a time: as many as have `chunk_bytes` of logits in fp32. Default:
    64 MiB, or what the rows themselves take, which keeps the work per chunk as V grows."""
    if chunk_bytes is None:
        chunk_bytes = max(CHUNK_BYTES, 4 * rows.numel())
    return max(1, chunk_bytes // (4 * max(1, words)))


@dataclass(frozen=True)
class Autocast:
    """The autocast of a moment, entered again later: backwards, and what is put off, run outside of it."""

    device: str
    is_enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: torch.device) -> Autocast:
        kind = device.type
        if not torch.amp.is_autocast_available(kind):
            return cls(kind, False, torch.float32)
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def again(self) -> AbstractContextManager[Any]:
        if not torch.amp.is_autocast_available(self.device):
            return nullcontext()
        # The cache would keep a copy of every parameter, which may be freed meanwhile.
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.is_enabled, cache_enabled=False)


@contextmanager
def _in_place_of_forward(head: nn.Module, forward: Callable[[Tensor], Any]) -> Iterator[None]:
    """Inside, a call of `head` runs `forward`, between the hooks of the module."""
    own = head.__dict__.get("forward")
    head.__dict__["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del head.__dict__["forward"]
        else:
            head.__dict__["forward"] = own


# -- heads -------------------------------------------------------------------------------------------------


class _Projection(Protocol):
    """A head, for one chunk of rows."""

    @property
    def params(self) -> tuple[Tensor, ...]: ...

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        ...

    def logits(self, rows: Tensor) -> Tensor: ...

    def send_back(
        self, rows: Tensor, outputs: Callable[[Tensor], list[Tensor]], grads: Sequence[Tensor], sums: _Sums
    ) -> Tensor | None:
        """Add the gradients of `params` to `sums`; returns that of `rows`, if it is needed. `outputs` makes what
        `grads` are the gradients of."""
        ...


def _projection(head: nn.Module, forward: Callable[..., Any]) -> _Projection:
    """What computes the logits of `head`, whose own forward is `forward`."""
    weight, bias = head._parameters.get("weight"), head._parameters.get("bias")
    if isinstance(forward, VocabularyEmbedding):
        raise ModelError(
            "An embedding that is split along tp cannot be the head of chunked losses. Give the model an nn.Linear "
            "that shares its weight, and pass that."
        )
    if isinstance(forward, Column) and forward.is_linear and weight is not None:
        return _Linear(weight, bias, is_transposed=forward.is_conv1d, wrap=forward.as_cut)
    own = getattr(forward, "__func__", None)
    if weight is not None and (own is nn.Linear.forward or own is nn.Embedding.forward):
        return _Linear(weight, bias)
    return _AnyHead(head, forward)


def _as_it_is(logits: Tensor) -> Tensor:
    return logits


@dataclass
class _Linear:
    """A product with a weight [V, H], or [H, V] if it `is_transposed`, by hand."""

    weight: Tensor
    bias: Tensor | None = None
    is_transposed: bool = False
    wrap: Callable[[Tensor], Tensor] = _as_it_is
    """Makes logits of what the product gives: under `tp` a rank's words."""

    @property
    def params(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def draws(self) -> bool:
        return False

    def logits(self, rows: Tensor) -> Tensor:
        return self.wrap(self._product(rows))

    def _product(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, self.weight.t() if self.is_transposed else self.weight, self.bias)

    def send_back(
        self, rows: Tensor, outputs: Callable[[Tensor], list[Tensor]], grads: Sequence[Tensor], sums: _Sums
    ) -> Tensor | None:
        product = self._product(rows).requires_grad_()
        with torch.enable_grad():
            made = outputs(self.wrap(product))
        (grad,) = torch.autograd.grad(made, product, grads)
        rows = rows.to(grad.dtype)  # under autocast both were rounded for the product
        if sums.needed[0]:
            sums.add_product(0, *((rows, grad) if self.is_transposed else (grad, rows)))
        if self.bias is not None and sums.needed[1]:
            sums.add(1, grad.sum(0, dtype=sums.wide(self.bias)))
        if not sums.needs_rows:
            return None
        weight = self.weight.to(grad.dtype)
        return grad @ (weight.t() if self.is_transposed else weight)


class _AnyHead:
    """A head with a forward of its own."""

    def __init__(self, head: nn.Module, forward: Callable[..., Any]) -> None:
        self.params: tuple[Tensor, ...] = tuple(head.parameters())
        self._forward = forward
        self.draws = head.training and draws(head)

    def logits(self, rows: Tensor) -> Tensor:
        made: Tensor = self._forward(rows)
        return made

    def send_back(
        self, rows: Tensor, outputs: Callable[[Tensor], list[Tensor]], grads: Sequence[Tensor], sums: _Sums
    ) -> Tensor | None:
        given = rows.detach().requires_grad_(sums.needs_rows)
        numbers = [number for number, needed in enumerate(sums.needed) if needed]
        with torch.enable_grad():
            made = outputs(self.logits(given))
        wanted = [*([given] if sums.needs_rows else []), *(self.params[number] for number in numbers)]
        found = list(torch.autograd.grad(made, wanted, grads, allow_unused=True))
        of_rows = found.pop(0) if sums.needs_rows else None
        for number, grad in zip(numbers, found, strict=True):
            if grad is not None:  # one tensor may be the gradient of several parameters
                sums.add(number, grad if number in sums.sums else grad.clone())
        return of_rows


@dataclass
class _Sums:
    """The gradients of parameters, summed over chunks in fp32 at least."""

    needed: Sequence[bool]
    needs_rows: bool
    params: Sequence[Tensor]
    sums: dict[int, Tensor] = field(default_factory=dict)

    def wide(self, param: Tensor) -> torch.dtype:
        return torch.promote_types(param.dtype, torch.float32)

    def add(self, number: int, grad: Tensor) -> None:
        dtype = self.wide(self.params[number])
        if number not in self.sums:
            self.sums[number] = grad.to(dtype)
        else:
            self.sums[number] += grad

    def add_product(self, number: int, left: Tensor, right: Tensor) -> None:
        """Add `left.T @ right`."""
        if number in self.sums and self.sums[number].dtype == left.dtype:
            self.sums[number].addmm_(left.t(), right)
        else:
            self.add(number, left.t() @ right)

    def found(self, number: int) -> Tensor | None:
        found = self.sums.pop(number, None)
        return None if found is None else found.to(self.params[number].dtype)


# -- the loop over chunks ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """What a forward and its backward do for each chunk."""

    head: _Projection
    compute: Compute
    chunk_rows: int
    head_autocast: Autocast
    autocast: Autocast
    num_per_row: int

    def chunks(self, num_rows: int) -> list[slice]:
        return [slice(start, start + self.chunk_rows) for start in range(0, num_rows, self.chunk_rows)] or [slice(0, 0)]

    def outputs(self, per_row: Sequence[Tensor], logits: Tensor) -> tuple[Tensor, ...]:
        with self.autocast.again():
            return self.compute(logits, *per_row)

    def differentiable(self, per_row: Sequence[Tensor], logits: Tensor) -> list[Tensor]:
        return [one for one in self.outputs(per_row, logits) if one.is_floating_point()]


def _by_chunks(
    head: _Projection,
    rows: Tensor,
    compute: Compute,
    per_row: Sequence[Tensor],
    chunk_rows: int | None,
    around: Autocast,
) -> tuple[Tensor, ...]:
    if chunk_rows is None:
        chunk_rows = len(rows) or 1
    job = _Job(head, compute, chunk_rows, around, Autocast.now(rows.device), len(per_row))
    made: tuple[Tensor, ...] = _Chunks.apply(job, rows, *per_row, *head.params)  # type: ignore[no-untyped-call]  # torch's own
    return made


class _Chunks(torch.autograd.Function):
    """Inputs: the job, rows [N, H], what else belongs to rows, and the parameters of the head."""

    @staticmethod
    def forward(ctx: Any, job: _Job, rows: Tensor, *others: Tensor) -> Any:
        per_row = others[: job.num_per_row]
        ctx.job = job
        ctx.save_for_backward(rows, *others)  # parameters too, as a product does: autograd sees if they are changed
        ctx.random = _random_states(rows) if job.head.draws else None
        parts = []
        for chunk in job.chunks(len(rows)):
            with job.head_autocast.again():
                logits = job.head.logits(rows[chunk])
            parts.append(job.outputs([one[chunk] for one in per_row], logits))
            del logits
        made = tuple(torch.cat(same) for same in zip(*parts, strict=True))
        ctx.mark_non_differentiable(*(one for one in made if not one.is_floating_point()))
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        job: _Job = ctx.job
        rows, *others = ctx.saved_tensors
        per_row = others[: job.num_per_row]
        needs_rows = ctx.needs_input_grad[1]
        sums = _Sums(ctx.needs_input_grad[2 + job.num_per_row :], needs_rows, job.head.params)
        of_rows = torch.empty_like(rows) if needs_rows else None
        with _with_random_states(ctx.random, rows):
            for chunk in job.chunks(len(rows)):
                outputs = partial(job.differentiable, [one[chunk] for one in per_row])
                of_outputs = [grad[chunk] for grad in grads if grad.is_floating_point()]
                with job.head_autocast.again():
                    found = job.head.send_back(rows[chunk], outputs, of_outputs, sums)
                if of_rows is not None and found is not None:
                    of_rows[chunk] = found
        of_params = (sums.found(number) if needed else None for number, needed in enumerate(sums.needed))
        return None, of_rows, *(None for _ in per_row), *of_params


def _random_states(rows: Tensor) -> list[Tensor]:
    on_device = [] if rows.device.type == "cpu" else [torch.get_device_module(rows.device).get_rng_state(rows.device)]
    return [torch.get_rng_state(), *on_device]


@contextmanager
def _with_random_states(states: list[Tensor] | None, rows: Tensor) -> Iterator[None]:
    """Inside, random numbers are drawn again as they were in the forward."""
    if states is None:
        yield
        return
    devices = [] if rows.device.type == "cpu" else [rows.device]
    with torch.random.fork_rng(devices, device_type=rows.device.type if devices else "cuda"):
        torch.set_rng_state(states[0])
        if devices:
            torch.get_device_module(rows.device).set_rng_state(states[1], rows.device)
        yield
