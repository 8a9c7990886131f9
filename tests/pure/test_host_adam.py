"""Adam on the host, in slices and by several threads, does what torch's does over whole tensors."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.errors import ConfigError, ModelError
from shardwise.optim.adam import CACHE_NUMEL
from shardwise.optim.host_adam import AdamTensors, HostAdam, _kernel, bundles
from tests.thorough import drawn, varies

Tensor = torch.Tensor
SIZES = (1, 7, 64, 1000, 4097)


def tensors_of(sizes: tuple[int, ...], grad: torch.dtype, out: torch.dtype | None, amsgrad: bool) -> list[AdamTensors]:
    numbers = torch.Generator().manual_seed(1)
    return [
        AdamTensors(
            torch.randn(size, generator=numbers),
            torch.randn(size, generator=numbers).to(grad),
            torch.zeros(size),
            torch.zeros(size),
            torch.zeros(size) if amsgrad else None,
            None if out is None else torch.full((size,), torch.nan, dtype=out),
        )
        for size in sizes
    ]


def twins_of(every: list[AdamTensors], make: type[torch.optim.Adam], **options: Any) -> torch.optim.Optimizer:
    params = [torch.nn.Parameter(one.param.clone()) for one in every]
    return make(params, fused=True, **options)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True, "weight_decay": 0.1}])
@pytest.mark.parametrize("dtypes", [(torch.float32, None), (torch.bfloat16, torch.bfloat16), (torch.float16, None)])
def test_the_bits_are_those_of_torchs_fused_update(
    kind: type[torch.optim.Adam], options: dict[str, Any], dtypes: tuple[torch.dtype, torch.dtype | None]
) -> None:
    scale = 1.0 if dtypes[0] == torch.float32 else 0.37
    every = tensors_of(SIZES, *dtypes, options.get("amsgrad", False))
    twin = twins_of(every, kind, lr=0.01, **options)
    (group,) = twin.param_groups
    adam = HostAdam(num_threads=3, slice_numel=128)
    for step in (1, 2, 3):
        group["lr"] *= 0.5
        for one, param in zip(every, group["params"], strict=True):
            one.grad.mul_(-1.5)
            param.grad = one.grad.float() * scale
        before = [one.grad.clone() for one in every]
        twin.step()
        adam.update(every, group, step=step, scale=scale)
        for one, param, grad in zip(every, group["params"], before, strict=True):
            state = twin.state[param]
            assert torch.equal(one.param, param)
            assert torch.equal(one.exp_avg, state["exp_avg"])
            assert torch.equal(one.exp_avg_sq, state["exp_avg_sq"])
            assert torch.equal(one.grad, grad), "gradients are only read"
            assert one.max_exp_avg_sq is None or torch.equal(one.max_exp_avg_sq, state["max_exp_avg_sq"])
            assert one.out is None or torch.equal(one.out, param.to(one.out.dtype))
    adam.close()
    adam.close()


@varies
@settings(max_examples=drawn(20, 200), deadline=None)
@given(st.lists(st.integers(0, 5000), max_size=8), st.integers(1, 3000))
def test_slices_cover_everything_once_and_in_order(sizes: list[int], slice_numel: int) -> None:
    every = tensors_of(tuple(sizes), torch.float32, None, False)
    tasks = list(bundles(every, slice_numel))
    assert all(0 < sum(part.param.numel() for part in task) <= slice_numel for task in tasks)
    for name in ("param", "grad", "exp_avg", "exp_avg_sq"):
        parts = [getattr(part, name) for task in tasks for part in task]
        wholes = [getattr(one, name) for one in every if one.param.numel()]
        assert torch.equal(torch.cat([torch.empty(0), *parts]), torch.cat([torch.empty(0), *wholes]))
    assert len(tasks) <= 2 * (sum(sizes) // slice_numel) + 1, "small tensors go together"


class Cache(TorchDispatchMode):
    """What operations move between memory and a cache of so many bytes that forgets what was used longest ago."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.lines: OrderedDict[int, bool] = OrderedDict()
        self.num_lines = num_bytes // self.LINE
        self.moved_bytes = 0

    LINE = 2**12

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            written = [arg for arg, said in zip(args, func._schema.arguments, strict=False) if said.is_write]
            tensors = [one for one in tree_leaves(args) if isinstance(one, Tensor) and one.dim()]
            written = {one.data_ptr() for one in tree_leaves(written) if isinstance(one, Tensor)}
            for share in range(64):  # an operation goes through all of its tensors side by side
                for one in tensors:
                    part = one.nbytes // 64
                    first = (one.data_ptr() + share * part) // self.LINE
                    for line in range(first, (one.data_ptr() + (share + 1) * part - 1) // self.LINE + 1):
                        self.touch(line, one.data_ptr() in written)
        return result

    def touch(self, line: int, is_written: bool) -> None:
        if line not in self.lines:
            self.moved_bytes += self.LINE  # read, also where all of it is about to be written
        self.lines[line] = self.lines.pop(line, False) | is_written
        if len(self.lines) > self.num_lines:
            self.moved_bytes += self.LINE * self.lines.popitem(last=False)[1]

    def flush(self) -> None:
        self.moved_bytes += self.LINE * sum(self.lines.values())
        self.lines.clear()


def test_memory_is_gone_through_once() -> None:
    """28 bytes an element at least; two more for the lines of the output, which are read before they are written."""
    numel = 2**22
    (tensors,) = tensors_of((numel,), torch.bfloat16, torch.bfloat16, False)
    adam = HostAdam(num_threads=1)
    kernel = _kernel(torch.optim.AdamW([Tensor()]).param_groups[0], [tensors])

    def moved(slice_numel: int) -> float:
        adam._scratch.memory = {torch.float32: torch.empty(slice_numel)}
        with Cache(6 * 2**20) as cache:
            for task in bundles([tensors], slice_numel):
                adam._update(task, kernel, torch.tensor(1.0), 0.5)
        cache.flush()
        return cache.moved_bytes / numel

    assert 28 <= moved(CACHE_NUMEL) <= 1.1 * 28
    assert moved(numel) > 1.6 * 28, "as without slices"
    adam.close()


def test_torchs_own_threads_are_left_alone() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    seen: list[int] = []
    try:
        adam = HostAdam(num_threads=2)
        adam.update(tensors_of((10,), torch.float32, None, False), torch.optim.Adam([Tensor()]).param_groups[0], step=1)
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
        pool = adam._threads()
        assert {pool.submit(torch.get_num_threads).result() for _ in range(8)} == {1}
        assert [torch.get_num_threads(), *seen] == [2, 2]
        adam.close()
    finally:
        torch.set_num_threads(before)


def test_what_a_thread_raises_is_raised_when_all_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    def kernel(params: list[Tensor], *args: Any, **kwargs: Any) -> None:
        if params[0][0] == 0:
            raise RuntimeError("no such instruction")
        ended.append(int(params[0][0]))

    monkeypatch.setattr(torch, "_fused_adam_", kernel)
    every = tensors_of((64 * 8,), torch.float32, None, False)
    every[0].param.copy_(torch.arange(8).repeat_interleave(64))
    adam = HostAdam(num_threads=2, slice_numel=64)
    updating = adam.start(every, torch.optim.Adam([Tensor()]).param_groups[0], step=1, scale=0.5)
    with pytest.raises(RuntimeError, match="no such instruction"):
        updating.wait()
    assert sorted(ended) == list(range(1, 8))
    adam.close()


def test_what_cannot_be_updated_is_refused_first() -> None:
    good = torch.zeros(4)
    for bad in (torch.zeros(3), torch.zeros(2, 2), torch.zeros(8)[::2], torch.zeros(4, dtype=torch.int32)):
        with pytest.raises(ModelError, match="grad is"):
            AdamTensors(good, bad, good, good)
    with pytest.raises(ModelError, match=r"exp_avg_sq is bfloat16 of shape \(4,\)"):
        AdamTensors(good, good, good, good.bfloat16())
    with pytest.raises(ModelError, match="fp32 or fp64"):
        AdamTensors(*[good.bfloat16()] * 4)
    one = AdamTensors(good, good, good, good)
    group = torch.optim.Adam([Tensor()]).param_groups[0]
    adam = HostAdam(num_threads=1)
    with pytest.raises(ModelError, match="only then"):
        adam.update([one], {**group, "amsgrad": True}, step=1)
    with pytest.raises(ConfigError, match="none of Adam's"):
        adam.update([one], torch.optim.SGD([Tensor()]).param_groups[0], step=1)
    with pytest.raises(ConfigError, match="at least 1"):
        HostAdam(num_threads=0)
