"""Scripts of Transformers' Trainer and of Accelerate, on DDP, FSDP2 or our engine.

Accelerate has no FSDP without an accelerator, so `fully_shard` is called on the model by hand, with the units that
Accelerate takes, and the libraries are told that the model is sharded already.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch.distributed as dist
import transformers
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from benchmarks.engines import LEARNING_RATE, adamw
from benchmarks.integrations_rank import CLIP, Script
from shardwise.integrations.accelerate import Accelerator as OurAccelerator
from shardwise.integrations.transformers import Trainer as OurTrainer

_IS_SHARDED = "_is_distributed_loading_by_transformers"


class _Clock(transformers.TrainerCallback):
    def __init__(self, script: Script) -> None:
        self._script = script

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._script.tick()

    def on_log(self, *_: Any, **given: Any) -> None:
        if "loss" in given["logs"]:
            self._script.losses.append(given["logs"]["loss"])


def trainer(ours: bool, sharding: str, script: Script) -> None:
    """`Trainer.train()`, with what it does in every step, and a log at the end."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=script.size.batch, max_steps=script.num_steps, use_cpu=True,
            learning_rate=LEARNING_RATE, weight_decay=0.01, max_grad_norm=CLIP, lr_scheduler_type="constant",
            optim="adamw_torch_fused", logging_steps=script.num_steps, save_strategy="no", report_to=[],
            disable_tqdm=True, seed=3,
        )  # fmt: skip
        model = script.model()
        if not ours and sharding == "zero3":
            _sharded(model)
            setattr(model, _IS_SHARDED, True)
        rows = script.rows(arguments.world_size)
        given: dict[str, Any] = {"args": arguments, "train_dataset": rows, "callbacks": [_Clock(script)]}
        made = OurTrainer(model, shardwise=sharding, **given) if ours else transformers.Trainer(model, **given)
        made.train()


def accelerate(ours: bool, sharding: str, script: Script) -> None:
    """The loop of Accelerate's examples."""
    accelerator = OurAccelerator(plan=sharding, cpu=True) if ours else Accelerator(cpu=True)
    model = script.model()
    rows: Any = script.rows(accelerator.num_processes)
    loader: Any = DataLoader(rows, script.size.batch)
    if ours or sharding == "ddp":
        model, optimizer, loader = accelerator.prepare(model, adamw(model), loader)
    else:
        model = accelerator.prepare_model(_sharded(model), evaluation_mode=True)
        optimizer, loader = accelerator.prepare(adamw(model), loader)
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        script.losses.append(accelerator.reduce(loss.detach(), "mean").item())
        script.tick()


def _sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers: Any = model.get_submodule("model.layers")
    for block in layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


FORMS = {"trainer": trainer, "accelerate": accelerate}
