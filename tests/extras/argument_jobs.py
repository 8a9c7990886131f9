"""Jobs for the tests of Trainer's arguments where the model is in pipeline stages."""

from __future__ import annotations

import tempfile
from typing import Any

import lion_pytorch
import torch
import transformers
from stage_jobs import padded
from torch import nn
from trainer_jobs import deep, llama, make, told
from transformers.integrations import neftune

SETTINGS: dict[str, Any] = {
    "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4,
    "adam_epsilon": 1e-3,  # with its own, rounding decides on updates where gradients are nearly zero
}  # fmt: skip


class Metrics:
    """Keeps what `compute_metrics` is given."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, prediction: Any) -> dict[str, float]:
        found = {"logits": prediction.predictions, "labels": prediction.label_ids}
        found |= {name: value for name in ("inputs", "losses") if (value := getattr(prediction, name)) is not None}
        self.seen.append({name: torch.as_tensor(value).tolist() for name, value in found.items()})
        return {"mean": float(prediction.predictions.mean())}


def argued(plan: Any, model: nn.Module | None = None, **settings: Any) -> dict[str, Any]:
    """A run with some arguments, what its metrics saw, and what it predicts."""
    metrics = Metrics()
    trainer = make(plan, llama() if model is None else model, compute_metrics=metrics, **{**SETTINGS, **settings})
    trainer.train_dataset, trainer.eval_dataset = padded(49), padded(7, 1)
    trainer.train()
    engine = getattr(trainer, "engine", None)
    predicted = trainer.predict(padded(4, 2)).predictions.tolist()
    found = told(trainer, engine) | {"seen": metrics.seen, "predicted": predicted, "epochs": trainer.state.epoch}
    return found | {"compile": None if engine is None else engine.plan.compile}


def with_noise(plan: Any, alpha: float, **settings: Any) -> dict[str, Any]:
    """NEFTune, with noise that depends on the place alone, because stages draw numbers of their own."""

    def add_noise(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return output
        waves = torch.arange(output[0].numel()).sin().view_as(output[0])
        return output + waves * module.neftune_noise_alpha / output[0].numel() ** 0.5

    neftune.neftune_post_forward_hook = add_noise
    return argued(plan, neftune_noise_alpha=alpha, **settings)


def by_lion(plan: Any, **settings: Any) -> dict[str, Any]:
    model = llama()
    optimizer = lion_pytorch.Lion(model.parameters(), lr=1e-3)
    return argued(plan, model, optimizers=(optimizer, None), **settings)


def stopped(plan: Any, folder: str, **settings: Any) -> dict[str, Any]:
    """A run whose evaluations become worse, so that it ends early, with the best of its checkpoints."""
    changes = {"learning_rate": 0.3, "max_steps": 12, "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    changes |= {"load_best_model_at_end": True, "callbacks": [transformers.EarlyStoppingCallback(2)], **settings}
    trainer = make(plan, llama(), folder, **{**SETTINGS, **changes})
    trainer.train_dataset, trainer.eval_dataset = padded(48), padded(7, 1)
    trainer.train()
    best = trainer.state.best_model_checkpoint.rpartition("/")[2]
    return told(trainer, getattr(trainer, "engine", None)) | {"best": best, "steps": trainer.state.global_step}


class StopsAt(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def in_parts(plan: Any, folder: str | None = None, start: str | None = None, stop: int = 6, **settings: Any) -> Any:
    """Steps of a run up to `stop`, from the checkpoint `start` if there is one; the last is saved in `folder`."""
    changes = {"max_steps": 6, "gradient_accumulation_steps": 4, "lr_scheduler_type": "cosine", **settings}
    changes |= {"save_strategy": "no" if folder is None else "steps", "save_steps": stop, "callbacks": [StopsAt(stop)]}
    trainer = make(plan, deep(), folder or tempfile.mkdtemp(), **{**SETTINGS, **changes})
    trainer.train_dataset, trainer.eval_dataset = padded(64), padded(7, 1)
    trainer.train(resume_from_checkpoint=start)
    engine = getattr(trainer, "engine", None)
    is_schedule = engine is not None and trainer._in_stages is not None
    return told(trainer, engine) | {"evaluated": trainer.evaluate()["eval_loss"], "is_schedule": is_schedule}
