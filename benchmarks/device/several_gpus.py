"""With several GPUs, one rank on each, by NCCL: every preset trains as the plain loop, and so do the splits.

The plain loop runs on every rank, over the shares of all ranks one after the other.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from benchmarks.device.models import TINY, Batch, llama
from benchmarks.device.rows import Rows

NUM_STEPS, ROWS = 4, 4


def meshes(num_ranks: int) -> list[tuple[str, dict[str, int] | None]]:
    cases: list[tuple[str, dict[str, int] | None]] = [
        (name, None) for name in ("ddp", "zero1", "zero2", "zero3", "zero3-kept", "offload", "zero3-offload")
    ]
    if num_ranks % 2 == 0:
        half = num_ranks // 2
        cases += [("hsdp", {"node": half, "local": 2}), ("hpz", {"node": half, "local": 2})]
        cases += [("zero3", {"dp": half, axis: 2}) for axis in ("tp", "sp")]
        cases += [("zero2", {"pp": 2, "dp": half})]
    return cases


def batches(num_shares: int, device: torch.device) -> list[Batch]:
    numbers = torch.Generator().manual_seed(3)
    rows = ROWS * num_shares
    drawn = [torch.randint(0, TINY.vocab, (rows, TINY.seq), generator=numbers).to(device) for _ in range(NUM_STEPS)]
    return [{"input_ids": one, "labels": one.clone()} for one in drawn]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain(model: nn.Module, num_shares: int, device: torch.device, dtype: torch.dtype, order: int) -> list[float]:
    """Losses of the loop without this library. `order` -1 takes the shares from the last to the first, which differs
    by rounding alone."""
    model = copy.deepcopy(model)
    masters = copy.deepcopy(model)
    model.to(dtype)
    optimizer, losses = sgd(masters), []
    for batch in batches(num_shares, device):
        shares = [{name: value.chunk(num_shares)[n] for name, value in batch.items()} for n in range(num_shares)]
        total = 0.0
        for share in shares[::order]:
            loss: Tensor = model(**share).loss
            (loss / num_shares).backward()
            total += loss.item() / num_shares
        for master, param in zip(masters.parameters(), model.parameters(), strict=True):
            master.grad = None if param.grad is None else param.grad.to(master.dtype)
            param.grad = None
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters.parameters(), model.parameters(), strict=True):
                param.copy_(master)
        losses.append(total)
    return losses


def trained(rows: Rows, preset: str, mesh: dict[str, int] | None, precision: str) -> dict[str, Any]:
    model = llama(TINY, rows.device)
    plan: dict[str, Any] = {
        "preset": preset,
        "precision": precision,
        "accumulate": 2,
        **({"mesh": mesh} if mesh else {}),
    }
    mine, losses = copy.deepcopy(model), []
    with sw.shard(mine, plan, optimizer=sgd(mine), world=rows.world) as engine:
        share, num_shares = engine.data_ranks
        for batch in batches(num_shares, rows.device):
            own = {name: value.chunk(num_shares)[share] for name, value in batch.items()}
            losses.append(engine.mean(engine.train_step(own).item()))
        outside = outside_of_torch(rows)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    twin, other = (plain(model, num_shares, rows.device, dtype, order) for order in (1, -1))
    rounding = max(abs(a - b) / abs(b) for a, b in zip(other, twin, strict=True))
    allowed = 8 * max(rounding, 2e-6 if precision == "fp32" else 2e-3)
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, twin, strict=True))
    if apart > allowed:
        raise AssertionError(f"losses {losses}, the plain loop's {twin}: {apart:.2e} apart, {allowed:.2e} allowed")
    return {"apart": apart, "allowed": allowed, "outside_of_torch_bytes": outside}


def outside_of_torch(rows: Rows) -> int | None:
    """Device memory that torch's allocator knows nothing of: contexts, libraries, NCCL's buffers for each communicator
    so far."""
    if not rows.is_real:
        return None
    free, total = torch.cuda.mem_get_info(rows.device)
    return total - free - torch.cuda.memory_reserved(rows.device)


def run(rows: Rows) -> None:
    for precision in ("fp32", "bf16") if rows.is_real else ("fp32",):
        for preset, mesh in meshes(rows.world.size):
            rows.measure(
                f"{preset} {mesh or ''} {precision}",
                lambda preset=preset, mesh=mesh, precision=precision: trained(  # type: ignore[misc]
                    rows, preset, mesh, precision
                ),
            )
