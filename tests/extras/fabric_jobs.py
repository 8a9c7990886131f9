"""Jobs for the tests of Fabric: plain loops with a given strategy, and their results."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning_jobs import CUT, Net, Rows
from torch import nn
from torch.utils.data import DataLoader

HALF = 6
"""Steps before a checkpoint is written: half an epoch."""


def fabric_of(plan: Any, *, settings: Any = None, **arguments: Any) -> Fabric:
    """Our strategy; without a plan, Fabric's own DDP."""
    from shardwise.integrations.fabric import ShardwiseStrategy

    strategy = "ddp" if plan is None else ShardwiseStrategy(plan, **(settings or {}))
    size = int(os.environ.get("WORLD_SIZE", "1"))
    fabric = Fabric(accelerator="cpu", devices=size, strategy=strategy, **arguments)
    fabric.launch()
    return fabric


def made(fabric: Fabric, *, is_apart: bool = False) -> Any:
    """Set up a model, its optimizer and a scheduler, together or one after the other."""
    torch.manual_seed(1)
    with fabric.init_module():
        net = Net()
    if is_apart:
        model = fabric.setup_module(net)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    else:
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    return model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer.optimizer, 1.0, 0.1, total_iters=12)


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def run(
    plan: Any, path: str, *, start: str = "", is_apart: bool = False, settings: Any = None, **arguments: Any
) -> Any:
    """Train an epoch with accumulation and clipping, saving to `path` half-way; from `start`, only the second half."""
    fabric = fabric_of(plan, settings=settings, **arguments)
    model, optimizer, scheduler = made(fabric, is_apart=is_apart)
    loader = fabric.setup_dataloaders(DataLoader(Rows(48), batch_size=2))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    rest = fabric.load(start, state) if start else {}
    losses, norms = [], []
    for number, batch in enumerate(loader):
        if number < 2 * state["step"]:
            continue
        is_last = number % 2 == 1
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = loss_of(model, batch)
            fabric.backward(loss / 2)
        losses.append(fabric.all_reduce(loss.detach()).item())
        if not is_last:
            continue
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False).item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        state["step"] += 1
        if state["step"] == HALF and path:
            fabric.save(path, {**state, "more": 7})
    with torch.no_grad():
        whole = fabric.strategy.get_module_state_dict(model.module)
    dtype = str(next(model.parameters()).dtype)
    values = {name: value.float().tolist() for name, value in whole.items()}
    return {"losses": losses, "norms": norms, "state": values, "rest": sorted(rest), "dtype": dtype}


def by_ddp(folder: str) -> Any:
    path = f"{folder}/theirs.ckpt"
    return run(None, path), run(None, "", start=path)


def by_plans(folder: str) -> Any:
    """Ours: from the start, from our folder, and under another plan from Fabric's file, saved as a single file."""
    found = run("zero3", f"{folder}/ours.ckpt")
    again = run("zero2", "", start=f"{folder}/ours.ckpt", is_apart=True)
    full = {"state_dict_type": "full"}
    other = run("zero1", f"{folder}/single.ckpt", settings=full)
    return found, again, other, run("ddp", "", start=f"{folder}/theirs.ckpt")


def split(folder: str) -> Any:
    """On 2 x 2 ranks, with the model split over neighbours."""
    plan = {"preset": "zero2", "mesh": {"dp": 2, "tp": 2}, "tensor": {"plan": CUT}}
    found = run(plan, f"{folder}/split.ckpt")
    again = run(plan, "", start=f"{folder}/ours.ckpt")
    return found, again, run(plan, "", start=f"{folder}/theirs.ckpt")


def in_stages(folder: str) -> Any:
    """On 2 x 2 ranks, with two pipeline stages; the loss is the loop's own, and other stages go on."""
    found = run({"preset": "zero2", "mesh": {"pp": 2, "dp": 2}}, f"{folder}/stages.ckpt")
    return found, run({"preset": "zero3", "mesh": {"dp": 2, "pp": 2}}, "", start=f"{folder}/stages.ckpt", is_apart=True)


def theirs_again(folder: str) -> Any:
    """Fabric's own DDP from our single file."""
    return run(None, "", start=f"{folder}/single.ckpt")


def precisions(names: list[tuple[Any, str]]) -> Any:
    found = []
    for plan, name in names:  # by a plugin where Fabric would fall back to another on a CPU
        asked = {"plugins": MixedPrecision(name, "cpu")} if name == "16-mixed" else {"precision": name}
        found.append(run(plan, "", **asked))
    return found


def refused(what: str, folder: str) -> None:
    """Do something that is refused."""
    if what in ("clipping", "ddp's own", "state"):
        plan = {"clipping": {"clip_grad_norm": 1.0}}.get(what, {})
        settings = {"ddp's own": {"find_unused_parameters": True}, "state": {"state_dict_type": "some"}}.get(what)
        fabric_of({"preset": "zero3", **plan}, settings=settings)
    if what == "precision":
        made(fabric_of("zero3", precision="64-true"))
    fabric = fabric_of("zero3")
    model, optimizer, _ = made(fabric)
    if what == "a second optimizer":
        fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    elif what == "no model":
        _, other, _ = made(fabric)
        fabric.save(f"{folder}/some.ckpt", {"model": model, "optimizer": other})
    elif what == "no state":
        fabric.save(f"{folder}/some.ckpt", {"model": model})
        fabric.load(f"{folder}/some.ckpt")
    elif what == "missing":
        fabric.save(f"{folder}/some.ckpt", {"model": model})
        fabric.load(f"{folder}/some.ckpt", {"model": model, "step": 0})
    elif what == "not finite":
        fabric.backward(loss_of(model, torch.zeros(1, 5, dtype=torch.long)) * float("inf"))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
