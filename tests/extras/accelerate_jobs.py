"""Jobs for the tests of Accelerate: loops like those in its examples, with a given Accelerator."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from typing import Any

import accelerate
import torch
from accelerate.local_sgd import LocalSGD
from torch import nn
from torch.utils.data import DataLoader
from trainer_jobs import llama, rows

from shardwise.errors import ConfigError


def made(plan: Any, **settings: Any) -> Any:
    """Our Accelerator; without a plan, accelerate's own."""
    from shardwise.integrations.accelerate import Accelerator

    return (
        accelerate.Accelerator(cpu=True, **settings) if plan is None else Accelerator(cpu=True, plan=plan, **settings)
    )


class Loop:
    """Train with accumulation, clipping and a scheduler, and evaluate."""

    def __init__(self, plan: Any, *, apart: bool = False, **settings: Any) -> None:
        self.accelerator = made(plan, gradient_accumulation_steps=2, **settings)
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=40)
        self.losses: list[float] = []
        self.norms: list[float] = []
        prepare = self.accelerator.prepare
        if apart and plan is not None:
            self.model, self.optimizer = prepare(model), prepare(optimizer)
            self.scheduler, self.batches, self.tests = prepare(
                scheduler, DataLoader(rows(32), 2), DataLoader(rows(7, seed=1), 2)
            )
        else:
            self.model, self.optimizer, self.batches, self.tests, self.scheduler = prepare(
                model, optimizer, DataLoader(rows(32), 2), DataLoader(rows(7, seed=1), 2), scheduler
            )

    def train(self) -> None:
        self.model.train()
        for batch in self.batches:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    self.norms.append(norm.item())
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(self.accelerator.gather(loss.detach()[None]).mean().item())

    def evaluate(self) -> list[float]:
        self.model.eval()
        found = []
        with torch.no_grad():
            for batch in self.tests:
                logits = self.model(**batch).logits.mean((1, 2))
                found += self.accelerator.gather_for_metrics(logits).tolist()
        return found


def looped(plan: Any, folder: str, **settings: Any) -> dict[str, Any]:
    """Train two epochs, then repeat the second from a state that was saved between them."""
    loop = Loop(plan, **settings)
    accelerator = loop.accelerator
    loop.train()
    accelerator.save_state(f"{folder}/state")
    saved = written(accelerator, loop.model)
    loop.train()
    evaluated = loop.evaluate()
    first = loop.losses[:]
    state = accelerator.get_state_dict(loop.model)
    accelerator.load_state(f"{folder}/state")
    loop.train()
    again = loop.losses[len(first) :]
    bare = accelerator.unwrap_model(loop.model)
    accelerator.save_model(loop.model, f"{folder}/weights")
    found = {
        "losses": first, "again": again, "norms": loop.norms, "evaluated": evaluated, "class": type(bare).__name__,
        "state": {name: value.tolist() for name, value in state.items()} if accelerator.is_main_process else {},
        "rate": loop.optimizer.param_groups[0]["lr"], "saved": saved,
    }  # fmt: skip
    loop.model, loop.optimizer = accelerator.free_memory(loop.model, loop.optimizer)
    accelerator.end_training()
    return found


def written(accelerator: Any, model: nn.Module) -> dict[str, Any]:
    """The model's values on the main process, as they are now: Accelerate's own tensors are the model's."""
    state = accelerator.get_state_dict(model)
    return {key: value.tolist() for key, value in state.items()} if accelerator.is_main_process else {}


def unfrozen(plan: Any, folder: str, rows_of_a_batch: int = 2) -> dict[str, Any]:
    """A head that is trained alone, then with a layer more, which is added to the optimizer. A state is saved amid the
    micro-batches of a step, which go on, and loaded."""
    accelerator = made(plan, gradient_accumulation_steps=2)
    model = llama()
    model.model.requires_grad_(False)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=3e-3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(rows(32), rows_of_a_batch))
    found = []
    for epoch in range(2):
        if epoch == 1:
            layer = accelerator.unwrap_model(model).model.layers[1].requires_grad_(True)
            optimizer.add_param_group({"params": layer.parameters(), "lr": 1e-3})
        for number, batch in enumerate(batches):
            with accelerator.accumulate(model):
                ids = batch["input_ids"]  # all tokens count, so that batches of any size weigh the same
                loss = model(ids, labels=ids).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            found.append(accelerator.gather(loss.detach()[None]).mean().item())
            if (epoch, number) == (1, 4):
                accelerator.save_state(folder)
    ended = written(accelerator, model)
    accelerator.load_state(folder)
    return {"losses": found, "ended": ended, "loaded": written(accelerator, model)}


class Attending(nn.Module):
    """A model without transformers, with its own positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(61, 16), nn.Embedding(12, 16)
        self.mix, self.head = nn.Linear(16, 48), nn.Linear(16, 61)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(ids) + self.positions(positions)
        parts = self.mix(hidden).unflatten(-1, (3, 2, 8)).movedim(-3, 0).transpose(2, 3)
        seen = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        logits: torch.Tensor = self.head(hidden + seen.transpose(1, 2).flatten(2))
        return logits


def own_model(plan: Any) -> list[float]:
    """A loop that splits its batches, and computes its loss from whole logits."""
    accelerator = made(plan)
    torch.manual_seed(2)
    model = Attending()
    model, optimizer, batches = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3), DataLoader(rows(16), 2)
    )
    engine = None if plan is None else accelerator.engine_of(model)
    losses = []
    for batch in batches:
        given = (batch["input_ids"], torch.arange(12).expand(2, -1))
        logits = model(*given) if engine is None else engine.join_sequence(model(*engine.split_sequence(given)))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()[None]).mean().item())
    return losses


def continued(plan: Any, folder: str) -> dict[str, Any]:
    """Run the second epoch of that loop on another number of ranks, from the state in the folder."""
    loop = Loop(plan)
    loop.accelerator.load_state(f"{folder}/state")
    state = loop.accelerator.get_state_dict(loop.model)
    return {"state": {name: value.tolist() for name, value in state.items()}, "evaluated": loop.evaluate()}


def adversaries(plan: Any) -> dict[str, Any]:
    """Train two models with an optimizer each in turns, as in a GAN, and use one without training it."""
    accelerator = made(plan)
    torch.manual_seed(1)
    maker, judge = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), nn.Sequential(nn.Linear(4, 1))
    teacher = nn.Linear(4, 4).requires_grad_(False)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (maker, judge)]
    if plan is not None:  # DDP on a CPU refuses what is not trained
        teacher = accelerator.prepare(teacher)
    maker, judge, first, second = accelerator.prepare(maker, judge, *optimizers)
    batches = accelerator.prepare(DataLoader(torch.arange(64.0).sin().reshape(16, 4), 2))
    losses = []
    for batch in batches:
        made_up = maker(batch)
        loss = judge(made_up).square().mean() + (made_up - teacher(batch)).square().mean()
        accelerator.backward(loss)
        first.step()
        first.zero_grad()
        second.zero_grad()
        loss = (judge(batch) - judge(maker(batch).detach())).sigmoid().mean()
        accelerator.backward(loss)
        second.step()
        second.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return {"losses": losses}


def together(plan: Any, folder: str) -> dict[str, Any]:
    """Train two models with one optimizer, as DreamBooth does a U-Net and a text encoder; repeat the second epoch."""
    accelerator = made(plan, gradient_accumulation_steps=2)
    torch.manual_seed(1)
    encoder, head = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 1))
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=0.01, eps=1e-4)
    batches = DataLoader(torch.arange(64.0).sin().reshape(16, 4), 2)
    encoder, head, optimizer, batches = accelerator.prepare(encoder, head, optimizer, batches)
    norms: list[float] = []

    def train() -> list[float]:
        losses = []
        for batch in batches:
            with accelerator.accumulate(encoder, head):
                loss = (head(encoder(batch)) - batch.sum(1, keepdim=True)).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_([*encoder.parameters(), *head.parameters()], 0.5).item())
                    norms.append(accelerator.clip_grad_norm_(head.parameters(), 0.1).item())
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        return losses

    first = train()
    accelerator.save_state(folder)
    second = train()
    states = [accelerator.get_state_dict(one) for one in (encoder, head)]
    accelerator.load_state(folder)
    third = train()
    accelerator.backward(head(encoder(torch.ones(2, 4))).sum())
    encoder.zero_grad()
    have = [all(param.grad is not None for param in one.parameters()) for one in (encoder, head)]
    return {
        "losses": [*first, *second, *third],
        "norms": norms,
        "has_repeated": second == third,
        "have_gradients": have,
        "states": [{name: value.tolist() for name, value in state.items()} for state in states],
    }


def refused(what: str) -> None:
    """Do something that is refused."""
    if what == "plugin":
        made("zero3", fsdp_plugin=accelerate.FullyShardedDataParallelPlugin())
    elif what == "clipping":
        made({"preset": "zero3", "clip_grad_norm": 1.0})
    elif what == "accumulation":
        made({"preset": "zero3", "accumulate": 2})
    elif what == "strange state":
        model = nn.Linear(2, 2)
        accelerator = made("zero3")
        accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        accelerator.load_state(tempfile.mkdtemp())
    elif what == "axes":
        made({"preset": "zero3", "mesh": {"pp": -1}})
    accelerator = made("zero3")
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    if what == "spread":
        accelerator.prepare(first, torch.optim.SGD([*first.parameters(), *second.parameters()]))
    elif what == "together":
        made("auto").prepare(first, second, torch.optim.SGD([*first.parameters(), *second.parameters()]))
    elif what == "alone":
        accelerator.backward(accelerator.prepare(first)(torch.ones(2)).sum())
    elif what == "local":
        model, _ = accelerator.prepare(first, torch.optim.SGD(first.parameters()))
        with LocalSGD(accelerator, model, local_sgd_steps=2):
            pass
    elif what == "uneven":
        model, _ = accelerator.prepare(first, torch.optim.SGD(first.parameters()))
        with accelerator.join_uneven_inputs([model]):
            pass


def logged(plan: Any, folder: str, *, accumulates: bool) -> dict[str, Any]:
    """A loop that logs like Accelerate's examples: on all ranks or the main one, after steps and evaluations."""
    accelerator = made(
        plan, gradient_accumulation_steps=2 if accumulates else 1, log_with="tensorboard", project_dir=folder
    )
    accelerator.init_trackers("run")
    model = llama()
    model, optimizer, batches = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3), DataLoader(rows(32), 2)
    )
    told: list[tuple[int, dict[str, Any]]] = []

    def tell(values: dict[str, Any], step: int) -> None:
        told.append((step, {name: float(value) for name, value in values.items() if name != "note"}))
        accelerator.log(values, step=step)

    num_steps = 0
    for batch in batches:
        with accelerator.accumulate(model) if accumulates else nullcontext():
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        mean = accelerator.gather(loss.detach()[None]).mean()
        if not accelerator.sync_gradients:
            continue
        num_steps += 1
        if num_steps % 2 == 0:
            tell({"loss": mean, "epoch": 0, "note": "half", "step": num_steps}, num_steps)  # all ranks
        if num_steps == 2 and accelerator.is_main_process:
            tell({"eval_loss": mean}, num_steps)
            tell({"mine": 7}, num_steps)
    if accelerator.is_main_process:
        tell({"last": 1.0}, num_steps)
    accelerator.end_training()
    return {"told": told, "num_steps": num_steps}


def two_accelerators(plan: Any) -> dict[str, Any]:
    """A model for each of two Accelerators; the second one ends first. And one model for both."""
    first, second = made(plan), made(plan)
    parts = []
    for accelerator in (first, second):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        parts.append(accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    refusals = []
    try:
        second.prepare(*parts[0])
    except ConfigError as error:
        refusals.append(str(error))

    def step(accelerator: Any, model: nn.Module, optimizer: Any) -> float:
        loss = model(torch.ones(2, 4)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    losses = [step(second, *parts[1])]
    second.end_training()
    losses += [step(first, *parts[0]), step(first, *parts[0])]
    first.end_training()
    return {"losses": losses, "refusals": refusals}


def taken_over(plan: Any) -> list[float]:
    """The losses of a Llama that one Accelerator has sharded and another one trains."""
    first, second = made(plan), made("zero2")
    model = llama()
    model, _ = first.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model, optimizer = second.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for _ in range(2):
        batch = {name: value[None] for name, value in rows(1)[0].items()}
        loss = model(**batch).loss
        second.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    second.end_training()
    return losses
