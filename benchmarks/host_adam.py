"""One process of `tiers`: AdamW over flat tensors on the host, ours beside torch's and DeepSpeed's, in turns.

    python -m benchmarks.host_adam THREADS NUMEL

In `fp32` all has one dtype. In `bf16` gradients come in bf16 and parameters leave in it; DeepSpeed's kernel then needs
a copy before and after, which its engine makes too. CPU time is that of all threads, of which those that spin while
they wait use much; between two calls there is a pause in which the threads of the one before come to rest. Prints one
line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median

import torch

from shardwise.optim.host_adam import AdamTensors, HostAdam

ROUNDS = 7
PAUSE_SECONDS = 0.05
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


class Case:
    """One set of tensors for everybody: what they compute makes no difference to how long it takes."""

    def __init__(self, threads: int, numel: int) -> None:
        self.param = torch.randn(numel)
        self.narrow = torch.randn(numel).bfloat16()
        self.grad = self.narrow.float()
        self.exp_avg, self.exp_avg_sq = torch.zeros(numel), torch.zeros(numel)
        self.out = torch.empty(numel, dtype=torch.bfloat16)
        self.wide = torch.empty(numel)
        self.adam = HostAdam(threads)
        self.step = torch.tensor(3.0)

    def ours_fp32(self) -> None:
        self.adam.update([AdamTensors(self.param, self.grad, self.exp_avg, self.exp_avg_sq)], SETTINGS, step=3)

    def ours_bf16(self) -> None:
        tensors = AdamTensors(self.param, self.narrow, self.exp_avg, self.exp_avg_sq, out=self.out)
        self.adam.update([tensors], SETTINGS, step=3)

    def torch_fp32(self, grad: torch.Tensor | None = None) -> None:
        torch._fused_adamw_(
            [self.param],
            [self.grad if grad is None else grad],
            [self.exp_avg],
            [self.exp_avg_sq],
            [],
            [self.step],
            lr=1e-3,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.01,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    def torch_bf16(self) -> None:
        self.torch_fp32(self.wide.copy_(self.narrow))
        self.out.copy_(self.param)

    def least_bf16(self) -> None:
        """The same bytes read and written, and nothing worked out."""
        for tensor in (self.param, self.exp_avg, self.exp_avg_sq):
            tensor.add_(1.0)
        self.out.copy_(self.narrow)

    def least_fp32(self) -> None:
        """The same, but for the gradient, which would have to be written somewhere."""
        for tensor in (self.param, self.exp_avg, self.exp_avg_sq):
            tensor.add_(1.0)
        self.grad.sum()


def deepspeed_calls(case: Case) -> tuple[dict[str, Callable[[], None]], str]:
    """Its kernel as its optimizer calls it; or why it cannot be had."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        param = torch.nn.Parameter(case.param)
        optimizer = DeepSpeedCPUAdam([param], **SETTINGS, adamw_mode=True)
    except Exception as error:  # not installed, or its extension does not build: whatever that raises
        return {}, f"{type(error).__name__}: {str(error).strip().splitlines()[-1:]}"
    param.grad = case.grad

    def bf16() -> None:
        case.grad.copy_(case.narrow)
        optimizer.step()
        case.out.copy_(param.detach())

    return {"deepspeed fp32": optimizer.step, "deepspeed bf16": bf16}, ""


def over_ours(times: dict[str, list[float]]) -> dict[str, float]:
    """Of neighbours in time, by whose it is."""
    return {
        name: median(a / b for a, b in zip(each, times[f"ours {name.rpartition(' ')[2]}"], strict=True))
        for name, each in times.items()
        if not name.startswith("ours")
    }


def main(threads: int, numel: int) -> None:
    torch.set_num_threads(threads)
    case = Case(threads, numel)
    calls: dict[str, Callable[[], None]] = {}
    theirs, trouble = deepspeed_calls(case)
    for dtype in ("fp32", "bf16"):
        calls[f"ours {dtype}"] = getattr(case, f"ours_{dtype}")
        calls[f"torch fused {dtype}"] = getattr(case, f"torch_{dtype}")
        calls |= {name: call for name, call in theirs.items() if name.endswith(dtype)}
        calls[f"the same bytes {dtype}"] = getattr(case, f"least_{dtype}")
    times: dict[str, list[float]] = {name: [] for name in calls}
    cpu_times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(ROUNDS + 1):
        for name, call in calls.items():
            time.sleep(PAUSE_SECONDS)
            started, worked = time.perf_counter(), time.process_time()
            call()
            if number:
                times[name].append(time.perf_counter() - started)
                cpu_times[name].append(time.process_time() - worked)
    found = {
        "threads": threads,
        "numel": numel,
        "seconds": {name: median(each) for name, each in times.items()},
        "cpu_seconds": {name: median(each) for name, each in cpu_times.items()},
        "ratios": over_ours(times),
        "cpu_ratios": over_ours(cpu_times),
        "trouble": trouble,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
