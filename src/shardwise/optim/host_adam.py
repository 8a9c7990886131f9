"""Adam on the host: each element goes through memory once, on several threads, by torch's own fused kernel.

[Note: one pass] Torch's kernel requires gradients in the dtype of the parameters, so a bf16 gradient costs an fp32
copy, and a bf16 parameter another pass. In slices that stay in a processor's cache both cost no memory traffic: a slice
of the gradient is widened (and scaled) there and used for the update, and the parameter is narrowed while it is still
cached. With bf16 gradients and parameters that is 28 bytes per element: 2 + 12 read, 12 + 2 written. Slices are taken
by our own threads instead of torch's: those wait for each other, spinning, at the end of every operation, whereas ours
keep all of a slice on one core.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

from shardwise.errors import ConfigError, ModelError
from shardwise.optim.adam import CACHE_NUMEL
from shardwise.system.disk import Pending
from shardwise.system.even_parts import round_up

Tensor = torch.Tensor
Kernel = Callable[..., None]
LANES = 64
"""Elements in a cache line or vector at most, for the narrowest dtype. Cuts between slices are multiples of it, so that
every element is computed by the same instructions as in one call for the whole."""

TORCHS_ADAMS = (torch.optim.Adam, torch.optim.AdamW)
"""Those whose step this computes; classes derived from them may do anything."""

MANY_THREADS, FEWER_SLICES = 8, 4
"""Starting a slice takes the interpreter, which threads have in turns: with 16 of them, slices of 2^18 elements update
1.3 G parameters/s, of 2^19 2.9, of 2^20 3.0, of 2^21 2.4 (bf16 gradients and parameters, on the host of an H200;
benchmarks/results/device-h200.json). With few threads it is the cache that counts."""

TURNS = 2
"""Slices of each thread if nothing is widened or narrowed. Each byte is then touched once, however long they are. More
than one, so that a thread whose core does other work leaves some to the others."""


@dataclass(frozen=True)
class AdamTensors:
    """What one update reads and writes: flat, contiguous tensors on the host, of one length.

    `param`, `exp_avg`, `exp_avg_sq` (and `max_exp_avg_sq`, for amsgrad) have one dtype, fp32 or fp64, and are updated
    in place. `grad` has any floating dtype and is not changed. `out`, if given, receives the updated parameter, in its
    own dtype. Raises `ModelError` for other tensors.
    """

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None = None
    out: Tensor | None = None

    def __post_init__(self) -> None:
        for name, tensor in self._given():
            alike = self.param.dtype if name not in ("grad", "out") else tensor.dtype
            if (
                tensor.device.type != "cpu"
                or tensor.dim() != 1
                or tensor.numel() != self.param.numel()
                or not tensor.is_contiguous()
                or not tensor.is_floating_point()
                or tensor.dtype != alike
            ):
                raise ModelError(
                    f"{name} is {_describe(tensor)}, the parameter {_describe(self.param)}. Host updates need "
                    f"flat, contiguous CPU tensors of one length, the states in the parameter's dtype."
                )
        if self.param.dtype not in (torch.float32, torch.float64):
            raise ModelError(
                f"The parameter is {_describe(self.param)}; an update on the host keeps masters in fp32 or fp64."
            )

    def split(self, numel: int) -> Iterator[AdamTensors]:
        """Views of `numel` elements of everything, one after the other; the last may be shorter."""
        if self.param.numel() <= numel:
            yield self
            return
        names, tensors = zip(*self._given(), strict=True)
        for views in zip(*(tensor.split(numel) for tensor in tensors), strict=True):
            part = object.__new__(AdamTensors)  # what is whole was checked
            part.__dict__.update(_NOT_GIVEN, **dict(zip(names, views, strict=True)))
            yield part

    def _given(self) -> list[tuple[str, Tensor]]:
        pairs = ((one.name, getattr(self, one.name)) for one in fields(self))
        return [(name, tensor) for name, tensor in pairs if tensor is not None]


_NOT_GIVEN = {"max_exp_avg_sq": None, "out": None}


class HostAdam:
    """Adam and AdamW (arXiv:1412.6980, arXiv:1711.05101) over flat tensors on the host. `close()` it.

    In fp32 an update has the bits of `torch.optim.AdamW(fused=True)` (or `Adam`) over the same tensors.
    """

    def __init__(self, num_threads: int | None = None, slice_numel: int | None = None) -> None:
        """By default as many threads as torch has (`OMP_NUM_THREADS`), with slices of 2^18 elements, or of 2^20 if
        there are many threads."""
        self.num_threads = torch.get_num_threads() if num_threads is None else num_threads
        if slice_numel is None:
            slice_numel = slice_numel_of(self.num_threads)
        if self.num_threads < 1 or slice_numel < 1:
            raise ConfigError(
                f"A host Adam of {self.num_threads} threads and slices of {slice_numel} elements was asked for; both "
                f"are at least 1."
            )
        self._slice_numel = round_up(slice_numel, LANES)
        self._scratch = threading.local()
        self._pool: ThreadPoolExecutor | None = None

    def start(
        self, every: Iterable[AdamTensors], group: Mapping[str, Any], *, step: int, scale: float = 1.0
    ) -> Pending:
        """Start one update of `every`. The tensors must not be touched until `wait`.

        `group` has the settings: an entry of `param_groups` of torch's Adam or AdamW. `step` counts from 1. Gradients
        are multiplied by `scale` in the dtype of the parameter: the reciprocal of the loss scale, a clipping factor, or
        both.
        """
        every = list(every)
        kernel = _kernel(group, every)
        slice_numel = self._slice_numel
        if not _needs_scratch(every, scale):
            share = sum(one.param.numel() for one in every) // (TURNS * self.num_threads)
            slice_numel = max(slice_numel, share // LANES * LANES)
        at_most = sum(-(-one.param.numel() // slice_numel) for one in every)
        tasks, drawing = bundles(every, slice_numel), threading.Lock()
        count = torch.tensor(float(step), device="cpu")

        def work() -> None:
            while True:
                with drawing:
                    task = next(tasks, None)
                if task is None:
                    return
                self._update(task, kernel, count, scale)

        pool = self._threads()
        return Pending([pool.submit(work) for _ in range(min(self.num_threads, at_most))])

    def update(self, every: Iterable[AdamTensors], group: Mapping[str, Any], *, step: int, scale: float = 1.0) -> None:
        """`start`, and wait."""
        self.start(every, group, step=step, scale=scale).wait()

    def close(self) -> None:
        """End the threads. May be called twice; another update starts new ones."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def _update(self, task: Sequence[AdamTensors], kernel: Kernel, count: Tensor, scale: float) -> None:
        params = [one.param for one in task]
        grads = self._widened(task, scale)
        moments = [one.exp_avg for one in task], [one.exp_avg_sq for one in task]
        maxima = [one.max_exp_avg_sq for one in task if one.max_exp_avg_sq is not None]
        kernel(params, grads, *moments, maxima, [count] * len(task))
        for one in task:
            if one.out is not None:
                one.out.copy_(one.param)

    def _widened(self, task: Sequence[AdamTensors], scale: float) -> list[Tensor]:
        """The gradients in the parameters' dtype and scaled, in this thread's scratch memory if that changes them."""
        grads, start = [], 0
        for one in task:
            if one.grad.dtype == one.param.dtype and scale == 1:
                grads.append(one.grad)
                continue
            wide = self._memory(one.param.dtype)[start : start + one.grad.numel()].copy_(one.grad)
            start += one.grad.numel()
            grads.append(wide if scale == 1 else wide.mul_(scale))
        return grads

    def _memory(self, dtype: torch.dtype) -> Tensor:
        kept = self._scratch.__dict__.setdefault("memory", {})
        if dtype not in kept:
            kept[dtype] = torch.empty(self._slice_numel, dtype=dtype, device="cpu")
        memory: Tensor = kept[dtype]
        return memory

    def _threads(self) -> ThreadPoolExecutor:
        """[Note: threads of threads] The number of threads of torch's operations is a setting of the calling thread,
        and a thread that torch has not seen yet starts with the value that was set last. So the caller's value is set
        again at the end."""
        if self._pool is None:
            before = torch.get_num_threads()
            started = threading.Barrier(self.num_threads + 1)

            def begin() -> None:
                torch.get_num_threads()  # the first query in a thread initializes the setting
                torch.set_num_threads(1)
                started.wait()

            self._pool = ThreadPoolExecutor(self.num_threads, "shardwise update")
            beginning = [self._pool.submit(begin) for _ in range(self.num_threads)]
            started.wait()
            for one in beginning:
                one.result()
            torch.set_num_threads(before)
        return self._pool


def slice_numel_of(num_threads: int) -> int:
    """The elements of a slice; see `MANY_THREADS`."""
    return CACHE_NUMEL * (FEWER_SLICES if num_threads >= MANY_THREADS else 1)


def bundles(every: Iterable[AdamTensors], slice_numel: int) -> Iterator[list[AdamTensors]]:
    """Slices of at most `slice_numel` elements; small tensors of one dtype are grouped up to that size."""
    together: list[AdamTensors] = []
    numel = 0
    for one in (each for each in every if each.param.numel()):
        for part in one.split(slice_numel):
            if together and (numel + part.param.numel() > slice_numel or part.param.dtype != together[0].param.dtype):
                yield together
                together, numel = [], 0
            together.append(part)
            numel += part.param.numel()
    if together:
        yield together


def _needs_scratch(every: Sequence[AdamTensors], scale: float) -> bool:
    return scale != 1 or any(one.out is not None or one.grad.dtype != one.param.dtype for one in every)


def _kernel(group: Mapping[str, Any], every: Sequence[AdamTensors]) -> Kernel:
    """Torch's own kernel, with the current settings of `group`.

    `torch.optim.adam.adam` is the public way to it, but takes longer to get there than a slice takes.
    """
    if "betas" not in group or "eps" not in group:
        raise ConfigError(
            f"The update on the host is Adam's; a group with {', '.join(sorted(group))} is none of Adam's."
        )
    amsgrad = bool(group.get("amsgrad", False))
    if any((one.max_exp_avg_sq is not None) != amsgrad for one in every):
        raise ModelError(f"The group has amsgrad={amsgrad}; max_exp_avg_sq is given with amsgrad=True, and only then.")
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return partial(
        torch._fused_adamw_ if group.get("decoupled_weight_decay", True) else torch._fused_adam_,
        lr=float(group["lr"]),
        beta1=beta1,
        beta2=beta2,
        weight_decay=float(group["weight_decay"]),
        eps=float(group["eps"]),
        amsgrad=amsgrad,
        maximize=bool(group.get("maximize", False)),
    )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)} on {tensor.device}"
