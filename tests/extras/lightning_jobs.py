"""Jobs for the tests of Lightning: Trainers with a given strategy, and their results."""

from __future__ import annotations

import gc
import math
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging, ModelCheckpoint
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, Dataset

import shardwise as sw

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
    "num_sanity_val_steps": 1,
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks with an embedding that is tied to the head."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(3)))
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(x))) * self.scale


class Rows(Dataset[torch.Tensor]):
    def __init__(self, num: int, seed: int = 0) -> None:
        self.rows = torch.randint(16, (num, 5), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class Module(pl.LightningModule):
    """Predicts next tokens; records losses, norms and evaluations."""

    def __init__(self, *, is_deferred: bool = False, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        self.net = None if is_deferred else Net()
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.predicted: list[int] = []

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(1)
            self.net = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("loss", loss, sync_dist=True)
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if (engine := in_stages(self)) is not None:
            self.norms.append(float(engine.clip_grad_norm_(math.inf)))
            return
        grads = [param.grad for param in self.parameters() if param.grad is not None]
        self.norms.append(torch.nn.utils.get_total_norm(grads).item())

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", self._loss(batch), sync_dist=True)

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("test", self._loss(batch), sync_dist=True, batch_size=len(batch))

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self(batch)[:, -1]

    def configure_optimizers(self) -> Any:
        decayed = [param for param in self.parameters() if param.dim() > 1]
        others = [param for param in self.parameters() if param.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Data(pl.LightningDataModule):
    """Rows for training and validation, and for tests a number that two ranks cannot divide evenly."""

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(46), batch_size=2)

    def val_dataloader(self) -> Any:
        return DataLoader(Rows(7, 1), batch_size=2)

    def test_dataloader(self) -> Any:
        return DataLoader(Rows(10, 2), batch_size=2)

    def predict_dataloader(self) -> Any:
        return DataLoader(Rows(9, 3), batch_size=2)


def strategy_of(plan: Any, **settings: Any) -> Any:
    """Our strategy; without a plan, Lightning's own."""
    from shardwise.integrations.lightning import ShardwiseStrategy

    return "ddp" if plan is None else ShardwiseStrategy(plan, **settings)


def trainer_of(plan: Any, folder: str, *, settings: Any = None, **arguments: Any) -> pl.Trainer:
    ranks = torch.distributed
    size = ranks.get_world_size() if ranks.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    own = {"default_root_dir": folder, "devices": size, "strategy": strategy_of(plan, **(settings or {}))}
    return pl.Trainer(**{**QUIET, **own, **arguments})


def in_stages(module: pl.LightningModule) -> sw.Engine | None:
    """The engine of a module that is in pipeline stages."""
    engine: sw.Engine | None = getattr(module.trainer.strategy, "engine", None)
    return engine if engine is not None and "pp" in (engine.plan.mesh or {}) else None


def values(module: pl.LightningModule) -> dict[str, Any]:
    engine = in_stages(module) if module._trainer is not None else None
    state = module.state_dict() if engine is None else engine.state_dict()
    return {name: value.detach().tolist() for name, value in state.items()}


def trained(plan: Any, folder: str, *, is_deferred: bool = False, settings: Any = None, **arguments: Any) -> Any:
    """Train two epochs with all features, then evaluate with each of Trainer's methods."""
    pl.seed_everything(3)
    module, data = Module(is_deferred=is_deferred), Data()
    kept = ModelCheckpoint(folder, "{epoch}", save_last="link", save_top_k=2, monitor="val", mode="min")
    arguments = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_epochs": 2, **arguments}
    trainer = trainer_of(plan, folder, settings=settings, callbacks=[kept], **arguments)
    trainer.fit(module, data)
    found: dict[str, Any] = {"losses": module.losses, "norms": module.norms, "state": values(module)}
    found["metrics"] = {name: value.item() for name, value in trainer.callback_metrics.items()}
    found["rate"] = trainer.optimizers[0].param_groups[0]["lr"]
    found["steps"] = trainer.global_step
    found["val"] = trainer.validate(module, data, verbose=False)
    found["test"] = trainer.test(module, data, verbose=False, ckpt_path="best")
    found["predicted"] = torch.cat(trainer.predict(module, data)).tolist()
    found["best"], found["last"] = kept.best_model_path, kept.last_model_path
    trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    return found


def resumed(plan: Any, folder: str, checkpoint: str, *, settings: Any = None, save: str = "") -> Any:
    """Repeat the second epoch of that training from a checkpoint of the first."""
    module = Module()
    arguments = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_epochs": 2}
    trainer = trainer_of(plan, folder, settings=settings, enable_checkpointing=False, **arguments)
    trainer.fit(module, Data(), ckpt_path=checkpoint)
    if save:
        trainer.save_checkpoint(save)
    return {"losses": module.losses, "state": values(module), "rate": trainer.optimizers[0].param_groups[0]["lr"]}


def fitted_twice(plan: Any, folder: str) -> Any:
    """Two fits of one Trainer, the second with another engine in the world of the first."""
    module = Module()
    trainer = trainer_of(plan, folder, max_epochs=1, enable_checkpointing=False)
    trainer.fit(module, Data())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, Data())
    gc.collect()
    found = trainer.validate(module, Data(), verbose=False)
    return {"losses": module.losses, "val": found[0]["val"], "state": values(module)}


def by_ddp(folder: str) -> Any:
    """Both with Lightning's own strategy."""
    found = trained(None, folder)
    return found, resumed(None, folder, f"{folder}/epoch=0.ckpt", save=f"{folder}/end.ckpt")


def by_plans(folder: str, theirs: str) -> Any:
    """Both with ours; the second epoch also from a checkpoint of Lightning's, under another plan, into one file."""
    found = trained("zero3", folder, is_deferred=True)
    again = resumed("zero3", folder, f"{folder}/epoch=0.ckpt")
    full = {"state_dict_type": "full"}
    other = resumed("zero1", folder, f"{theirs}/epoch=0.ckpt", settings=full, save=f"{folder}/end.ckpt")
    return found, again, other


def alone(folder: str, theirs: str) -> Any:
    """The second epoch in one process: ours from both kinds of checkpoint, and Lightning's from our single file."""
    ours = resumed("zero2", folder, f"{folder}/epoch=0.ckpt")
    plain = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "max_epochs": 3}
    plain |= {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "enable_progress_bar": False}
    found = []
    for checkpoint in (f"{folder}/end.ckpt", f"{theirs}/end.ckpt"):
        module = Module()
        pl.Trainer(**plain).fit(module, Data(), ckpt_path=checkpoint)
        found.append({"losses": module.losses, "state": values(module)})
    return ours, resumed("ddp", folder, f"{theirs}/epoch=0.ckpt"), *found


def alone_from(folder: str, theirs: str) -> Any:
    """The second epoch in one process, from checkpoints of ours and of Lightning's."""
    return resumed("zero2", folder, f"{folder}/epoch=0.ckpt"), resumed("ddp", folder, f"{theirs}/epoch=0.ckpt")


CUT = {"blocks.*.up": "column", "blocks.*.down": "row", "embed": "vocabulary", "head": "vocabulary"}


def split(folder: str, theirs: str) -> Any:
    """The same on 2 x 2 ranks, with the model split over neighbours; also from and into single files."""
    plan = {"preset": "zero2", "mesh": {"dp": 2, "tp": 2}, "tensor": {"plan": CUT}}
    found = trained(plan, folder)
    again = resumed(plan, folder, f"{folder}/epoch=0.ckpt")
    full = {"state_dict_type": "full"}
    other = resumed(plan, folder, f"{theirs}/epoch=0.ckpt", settings=full, save=f"{folder}/end.ckpt")
    return found, again, other


STAGES: Any = {"preset": "zero3", "mesh": {"pp": 2, "dp": 2}}


def staged(folder: str) -> Any:
    """The same on 2 x 2 ranks, in two pipeline stages."""
    return trained(STAGES, folder, is_deferred=True), resumed(STAGES, folder, f"{folder}/epoch=0.ckpt")


class Direct(Module):
    """Its steps call a model in it."""

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        logits = self.net(batch[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class Attending(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.mix = nn.Linear(width, 3 * width, bias=False)  # a bias of keys has no gradient but rounding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + mixed.transpose(1, 2).flatten(2)


class Sequences(Module):
    """Ranks along `sp` share the tokens of a batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Embedding(16, 8), Attending(), nn.Linear(8, 16))

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        tokens, labels = batch[:, :-1], batch[:, 1:]
        engine = getattr(self.trainer.strategy, "engine", None)
        if engine is not None:
            tokens, labels = engine.split_sequence((tokens, labels))
        return nn.functional.cross_entropy(self(tokens).flatten(0, 1), labels.flatten())


class Experts(Module):
    """A layer of experts in the middle."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        moe = sw.experts.MoE(8, 16, num_experts=4, top_k=2)
        self.net = nn.Sequential(nn.Embedding(16, 8), moe, nn.Linear(8, 16))


def shared(kind: str, plan: Any, folder: str) -> Any:
    """Train an epoch with tokens, experts or stages split over ranks by `plan`."""
    module = {"sp": Sequences, "ep": Experts, "pp": Direct}[kind]()
    trainer = trainer_of(plan, folder, max_epochs=1, gradient_clip_val=0.5, enable_checkpointing=False)
    trainer.fit(module, DataLoader(Rows(12), batch_size=2))
    found = {"losses": module.losses, "state": values(module)}
    if kind == "ep" and plan is not None:
        try:
            trainer.strategy.release()
        except ValueError as error:
            found["error"] = str(error)
    return found


def mixed(plan: Any, precision: str, folder: str) -> Any:
    """Train an epoch in a precision, set by a plugin if Lightning would use another one on a CPU."""
    from lightning.pytorch.plugins import MixedPrecision

    module = Module()
    asked = {"plugins": MixedPrecision(precision, "cpu")} if precision == "16-mixed" else {"precision": precision}
    trainer = trainer_of(plan, folder, max_epochs=1, gradient_clip_val=0.1, gradient_clip_algorithm="value", **asked)
    trainer.fit(module, Data())
    return {"losses": module.losses, "state": values(module), "dtype": str(next(module.parameters()).dtype)}


def several(jobs: list[Any]) -> Any:
    """Run several, one after the other."""
    return [mixed(*job) for job in jobs]


class Adversaries(pl.LightningModule):
    """Manual optimization: two optimizers in turns, toggling, clipping and accumulation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(1)
        self.maker = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5))
        self.judge = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        rows = batch.float() / 16
        self.toggle_optimizer(first)
        made_up = self.maker(rows)
        loss = self.judge(made_up).square().mean() + (made_up - rows).square().mean()
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.clip_gradients(first, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            first.step()
            first.zero_grad()
        self.untoggle_optimizer(first)

        def judged() -> torch.Tensor:
            with torch.no_grad():
                made_up = self.maker(rows)
            loss = (self.judge(rows) - self.judge(made_up)).sigmoid().mean()
            self.manual_backward(loss)
            return loss

        self.toggle_optimizer(second)
        other = second.step(closure=judged)
        second.zero_grad()
        self.untoggle_optimizer(second)
        self.losses += self.all_gather(torch.stack([loss.detach(), other.detach()])).mean(0).tolist()
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.maker.parameters(), lr=0.01)
        second = torch.optim.SGD(self.judge.parameters(), lr=0.1, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.LinearLR(one, 1.0, 0.1) for one in (first, second)]


def by_hand(plan: Any, folder: str) -> Any:
    module = Adversaries()
    plain = {"strategy": "ddp_find_unused_parameters_true"} if plan is None else {}
    trainer = trainer_of(plan, folder, max_epochs=1, **plain)
    trainer.fit(module, DataLoader(Rows(24), batch_size=2))
    trainer.save_checkpoint(f"{folder}/some.ckpt")
    states = [one.state_dict()["state"] for one in trainer.optimizers]
    again = Adversaries()
    trainer = trainer_of(plan, folder, max_epochs=2, **plain)
    trainer.fit(again, DataLoader(Rows(24), batch_size=2), ckpt_path=f"{folder}/some.ckpt")
    return {"losses": module.losses + again.losses, "state": values(again), "counts": [len(one) for one in states]}


class Own(torch.utils.data.IterableDataset[torch.Tensor]):
    """An iterable dataset of this rank's rows, without a length."""

    def __iter__(self) -> Any:
        yield from Rows(2 + 3 * int(os.environ.get("RANK", "0")), 4)


def averaged(plan: Any, folder: str) -> Any:
    """Average weights with Lightning's callback, and evaluate with different numbers of batches per rank."""
    module = Module()
    callbacks = [EMAWeightAveraging(decay=0.5)]
    trainer = trainer_of(plan, folder, max_epochs=1, callbacks=callbacks, use_distributed_sampler=False)
    trainer.fit(module, DataLoader(Rows(12), batch_size=2), DataLoader(Own(), batch_size=1))
    found = {"val": trainer.callback_metrics["val"].item(), "averaged": values(module)}
    trainer.save_checkpoint(f"{folder}/some.ckpt")
    again = Module()
    trainer = trainer_of(plan, folder, max_epochs=2, callbacks=[EMAWeightAveraging(decay=0.5)])
    trainer.fit(again, DataLoader(Rows(12), batch_size=2), ckpt_path=f"{folder}/some.ckpt")
    predicted = trainer.predict(again, DataLoader(Own(), batch_size=1))
    if plan is not None:
        trainer.strategy.release()
    return {**found, "again": values(again), "losses": again.losses, "predicted": [one.tolist() for one in predicted]}


def refused(what: str, folder: str) -> None:
    """Do something that is refused."""
    arguments: dict[str, Any] = {"max_epochs": 1}
    plan: Any = "zero3"
    settings: dict[str, Any] = {}
    if what == "ddp's own":
        settings = {"find_unused_parameters": True}
    elif what == "a hook":
        settings = {"ddp_comm_state": None, "ddp_comm_hook": default_hooks.bf16_compress_hook}
    elif what == "spawn":
        settings = {"start_method": "spawn"}
    elif what == "axes":
        plan, settings = {"preset": "zero3", "mesh": {"pp": 2}}, {"state_dict_type": "full"}
    elif what == "batch norms":
        arguments["sync_batchnorm"] = True
    elif what == "accumulation":
        plan = {"preset": "zero3", "accumulate": 4}
    elif what == "clipping":
        plan, arguments["gradient_clip_val"] = {"preset": "zero3", "clip_grad_norm": 2.0}, 1.0
    elif what == "precision":
        plan, arguments["precision"] = {"preset": "zero3", "precision": "fp16"}, "bf16-mixed"
    elif what == "double":
        arguments["precision"] = "64-true"
    elif what == "scaler":
        from lightning.pytorch.plugins import MixedPrecision

        arguments["plugins"] = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    elif what == "state":
        settings = {"state_dict_type": "sharded_"}
    trainer = trainer_of(plan, folder, settings=settings, **arguments)
    if what == "cut short":
        Path(folder, "some.ckpt").mkdir()
        trainer.fit(Module(), Data(), ckpt_path=f"{folder}/some.ckpt")
    module: Any = Module()
    trainer.fit(torch.compile(module) if what == "compiled" else module, Data())


class BlockByBlock(BaseFinetuning):
    """As in Lightning's documentation: blocks are frozen, and come to the optimizer one by one."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net.blocks)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch in (1, 2):
            self.unfreeze_and_add_param_group(pl_module.net.blocks[-epoch], optimizer, initial_denom_lr=2.0)


class OfTrained(Module):
    """With an optimizer over what is trained at the beginning."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], lr=self.hparams.lr)


def finetuned(plan: Any, folder: str, batch_size: int = 2, **settings: Any) -> Any:
    """Three epochs, each with a block more that is trained; the last again, from a checkpoint."""

    def fit(max_epochs: int, start: str | None = None) -> Any:
        module, saving = OfTrained(), ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, monitor=None)
        trainer = trainer_of(
            plan, folder, callbacks=[BlockByBlock(), saving], max_epochs=max_epochs, gradient_clip_val=0.5,
            num_sanity_val_steps=0, limit_val_batches=0, settings=settings,
        )  # fmt: skip
        trainer.fit(module, DataLoader(Rows(24), batch_size), ckpt_path=start)
        groups = trainer.optimizers[0].param_groups
        return {"state": values(module), "norms": module.norms, "groups": [len(group["params"]) for group in groups]}

    return {"at once": fit(3), "resumed": fit(3, f"{folder}/epoch=1.ckpt")}
