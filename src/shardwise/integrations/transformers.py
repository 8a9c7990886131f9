"""The Trainer of Hugging Face Transformers on our engine: `Trainer(..., shardwise="zero3")`.

Trainer uses its Accelerator for everything that differs between DDP, FSDP and DeepSpeed, so it gets ours
(`shardwise.integrations.accelerate`). This file replaces the parts of Trainer that read or write whole models.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers.trainer
from torch import nn

import shardwise as sw
from shardwise.checkpoint.formats.merged_adapters import copied_with
from shardwise.errors import CheckpointError, ConfigError, engines_are_made_by
from shardwise.init import materialize
from shardwise.integrations.accelerate import Accelerator
from shardwise.integrations.accelerate_batches import ranks_per_batch
from shardwise.integrations.checkpoint_folders import STATE_FOLDER, staged
from shardwise.integrations.hf_deepspeed import CONFIG_ATTRIBUTE, TUNING_VARIABLE, Sections
from shardwise.integrations.peft_saving import adapter_state_dict, prompts_precomputed
from shardwise.integrations.plans import PlanLike, has_stages, require_agreement, without
from shardwise.integrations.trainer_arguments import refuse_arguments
from shardwise.integrations.trainer_stages import WholeStep, has_plain_steps, runs_schedules
from shardwise.integrations.trl import feed_generation
from shardwise.integrations.trl_shared_prompts import count_completions_once, share_prompts, sync_reference
from shardwise.system.printable import printable

_Base: Any = object
_SCHEDULER = "scheduler.pt"
_SAVE = transformers.trainer.Trainer._save
_log = logging.getLogger("shardwise")
_REPORT_TO = "Trainer logs to the trackers set by report_to of TrainingArguments"

engines_are_made_by("Trainer", "trainer.engine")


class ShardwiseTrainerMixin(_Base):
    """Makes any Trainer use our engine: `class MyTrainer(ShardwiseTrainerMixin, Seq2SeqTrainer)`.

    `shardwise` is the plan: a preset's name, a file, a dict or a `sw.Plan`. Precision, accumulation, clipping and
    compiler come from `TrainingArguments`; a plan that contradicts them is refused. The model is sharded, and moved to
    its device, by the first `train()`, `evaluate()` or `predict()`.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any
    gather_function: Any
    _sections: Sections | None
    default_plan: PlanLike = "zero3"
    """The plan if `shardwise` is not given."""

    def __init__(self, *args: Any, shardwise: PlanLike | None = None, **kwargs: Any) -> None:
        self.plan = sw.load_plan(self.default_plan if shardwise is None else shardwise)
        self._sections = None
        self._in_stages: WholeStep | None = None  # not `_step`, by which TRL's GRPO trainer counts
        self._is_step_logged = False
        self._is_planned = shardwise is not None
        super().__init__(*args, **kwargs)
        self._refuse_two_optimizers()

    @property
    def engine(self) -> sw.Engine | None:
        """The engine of `self.model`, once it is sharded."""
        engine: sw.Engine | None = self.accelerator.engine_of(self.model)
        return engine

    # -- the accelerator --------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        if hasattr(self.args, CONFIG_ATTRIBUTE):
            self._take_deepspeed_config()
        refuse_arguments(self.args, self.plan, self.model)
        require_agreement(
            self.plan, "accumulate", self.plan.accumulate, self.args.gradient_accumulation_steps,
            "gradient_accumulation_steps of TrainingArguments",
        )  # fmt: skip
        require_agreement(
            self.plan, "clip_grad_norm", self.plan.clip_grad_norm, self.args.max_grad_norm,
            "max_grad_norm of TrainingArguments",
        )  # fmt: skip
        count_completions_once(self.args, ranks_per_batch(self.plan))
        super().create_accelerator_and_postprocess()
        plan = without(self.plan, "accumulate", "clip_grad_norm")
        self.accelerator = Accelerator(plan=plan, **self._accelerator_arguments)
        self.accelerator.keeps_engines = True
        self.accelerator.reference_kind = type(self.model)
        self.accelerator.num_micro_batches = self.args.gradient_accumulation_steps
        self.accelerator.runs_whole_steps = has_stages(self.plan)
        self.accelerator.steps_are_schedules = has_stages(self.plan) and runs_schedules(self, ShardwiseTrainerMixin)
        if self._sections is not None and TUNING_VARIABLE in os.environ:
            self.accelerator.deepspeed_config = self._sections.to_tune()
        self.gather_function = self.accelerator.gather_for_metrics
        if "use_gather_object" in inspect.signature(self.gather_function).parameters:
            self.gather_function = functools.partial(
                self.gather_function, use_gather_object=self.args.eval_use_gather_object
            )

    def _take_deepspeed_config(self) -> None:
        """`TrainingArguments(deepspeed=...)` under `shardwise launch --as-deepspeed`: the config becomes the plan."""
        if self._is_planned:
            raise ConfigError("There are two plans: deepspeed= of TrainingArguments, and shardwise=. Keep one of them.")
        self._sections = Sections(self.args)
        reading = self._sections.reading(self.model)
        self.plan = without(sw.load_plan(reading.plan), "accumulate", "clip_grad_norm")
        if self.args.process_index == 0 and (report := reading.report(monitors_by=_REPORT_TO)):
            print(f"shardwise: about the DeepSpeed config\n{printable(report)}")

    def _refuse_two_optimizers(self) -> None:
        if self._sections is not None and self._sections.has("optimizer") and self.optimizer is not None:
            raise ConfigError("There are two optimizers, the DeepSpeed config's and optimizers=. Keep one of them.")

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        if self._sections is not None and self._sections.has("optimizer") and self.optimizer is None:
            self.optimizer = self._sections.optimizer(self.model)
        is_ours_to_make = self.optimizer is None
        made = super().create_optimizer(model)
        if is_ours_to_make and type(made) is transformers.Adafactor:
            self.optimizer = made = sw.optim.Adafactor.from_transformers(made)  # which updates sharded parameters
        return made

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self._sections is not None and self._sections.has("scheduler") and self.lr_scheduler is None:
            over = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = self._sections.scheduler(over, self.model, num_training_steps)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def get_tp_size(self) -> int:
        """The number of ranks that get the same batch. Trainer uses it to count tokens and samples."""
        copies: int = self.accelerator.ranks_per_batch
        return copies

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._accelerator_arguments = super()._build_accelerator_args(**kwargs)
        return dict(self._accelerator_arguments)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Does nothing: the engine moves the model, part by part."""

    # -- batches that several ranks share --------------------------------------------------------------

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Trainer divides the count by the number of ranks that share a batch. That is only right if it has summed over
        all ranks; a local count is multiplied here to compensate."""
        counted = super()._get_num_items_in_batch(batch_samples, device)
        is_local = not (self.args.average_tokens_across_devices and self.args.world_size > 1)
        return counted * self.get_tp_size() if is_local and isinstance(counted, torch.Tensor) else counted

    def _track_num_input_tokens(self, inputs: Any) -> None:
        with self.accelerator.counting_batches_once():
            super()._track_num_input_tokens(inputs)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """See Trainer. If sequences are split, logits are gathered only if they are returned."""
        if self.engine is not None:
            self.engine.give_whole_outputs(tokens=not prediction_loss_only)
        return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)

    # -- training ---------------------------------------------------------------------------------------

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """See Trainer. In pipeline stages, the first `training_step` trains all of them."""
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        is_full = len(batches) == self.args.gradient_accumulation_steps
        runs_whole = has_stages(self.plan) and is_full and runs_schedules(self, ShardwiseTrainerMixin)
        self._in_stages = WholeStep(self, batches) if runs_whole else None
        return batches, num_items

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        """See Trainer."""
        if self.engine is not None:
            self.engine.give_whole_outputs(training=not has_plain_steps(self, ShardwiseTrainerMixin))
            if self._in_stages is not None:
                return self._in_stages.loss_of_next(self.engine, model, num_items_in_batch)
        return super().training_step(model, inputs, num_items_in_batch, **kwargs)

    def get_train_dataloader(self) -> Any:
        """See Trainer."""
        self.accelerator.training_loader = None  # this one, whichever was prepared before
        return super().get_train_dataloader()

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        self.accelerator.release(self.model)
        prepared = super()._prepare_for_training(*args, **kwargs)
        self._follow_engine()
        return prepared

    def _follow_engine(self) -> None:
        """What trainers of TRL do by themselves goes by the engine, which there is now."""
        feed_generation(self)
        share_prompts(self)
        sync_reference(self)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self.engine is None:
            return super()._clip_grad_norm(model)
        return self.engine.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if self.engine is None:
            return super()._get_grad_norm(model, grad_norm)
        return self.engine.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        self._is_step_logged = self.control.should_log and self.state.global_step > self._globalstep_last_logged
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """See Trainer. If the plan has `run`, rank 0 also writes the values to its record: as `step`, `validation` for
        evaluations, `train` for the summary of a training, or `log` for the script's own calls."""
        if "grad_norm" in logs:
            logs = logs | {"grad_norm": float(logs["grad_norm"])}  # on a GPU, waits for the norm
        known = len(self.state.log_history)
        super().log(logs, *args, **kwargs)
        is_step, self._is_step_logged = self._is_step_logged, False  # only the first call; an evaluation may follow
        engine, new = self.engine, self.state.log_history[known:]
        if engine is not None and engine.plan.run is not None:
            kind, values = ("step", _numbers(new, "")) if is_step else _kind_of(new)
            engine.log(values, kind=kind, mean=False)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        if self.engine is None and any(param.requires_grad for param in self.model.parameters()):
            self.create_optimizer()
            if self.plan.preset == "auto" and self.train_dataset is not None:
                self.get_train_dataloader()  # to know its batches, because those of an evaluation may be smaller
            self.model_wrapped, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
            self._follow_engine()
        generates = has_stages(self.plan) and getattr(self.args, "predict_with_generate", False)
        if self.gather_function == self.accelerator.gather:  # as Seq2SeqTrainer has it
            self.gather_function = self.accelerator.gather_once
        with self.engine.inference() if generates and self.engine is not None else nullcontext():
            return super().evaluation_loop(*args, **kwargs)

    # -- saving -----------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """See Trainer. Collective; rank 0 writes, one unit of the model at a time."""
        engine = self.engine
        if engine is None:
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        if hasattr(self.model, "peft_config"):
            adapters = adapter_state_dict(self.model, engine)
            with prompts_precomputed(self.model):
                if self.args.should_save:
                    self._save(str(folder), state_dict=adapters)
        elif type(self)._save is not _SAVE and not has_stages(self.plan):
            self._save_whole(engine, folder)
        else:
            if type(self)._save is not _SAVE and engine.world.rank == 0:
                _log.warning(
                    "%s writes models by a _save() of its own, for which a rank needs all pipeline stages: %s has "
                    "weights and configuration as transformers writes them instead.",
                    *(type(self).__name__, folder),
                )
            with staged(folder, engine) as draft:
                engine.save_pretrained(draft, dtype=self.accelerator.dtype_before(self.model))
            if self.args.should_save:
                self._save_extras(folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_whole(self, engine: sw.Engine, folder: Path) -> None:
        """Let the class write the model in its own way, as sentence-transformers does, from a plain copy of it. What
        else refers to the model may compute with it meanwhile, on the rank that saves alone, as for a model card."""
        state = engine.state_dict(rank_0_only=not self.args.save_on_each_node)
        with engine.inference():
            if self.args.should_save and state:
                state = self.accelerator.in_dtypes_before(self.model, state)
                sharded, self.model = self.model, copied_with(self.model, state)
                try:
                    self._save(str(folder), state_dict=state)
                finally:
                    self.model = sharded

    def _save_extras(self, folder: Path) -> None:
        """Save the tokenizer and arguments, as Trainer does next to weights."""
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.engine is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        self.engine.save(Path(output_dir) / STATE_FOLDER)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    # -- resuming ---------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not (Path(resume_from_checkpoint) / STATE_FOLDER).is_dir():  # otherwise the engine loads it later
            materialize(self.model if model is None else model)
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.engine is None or checkpoint is None or not (Path(checkpoint) / STATE_FOLDER).is_dir():
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        self._resume_engine(self.engine, checkpoint)
        scheduler = Path(checkpoint) / _SCHEDULER
        self.lr_scheduler.load_state_dict(torch.load(scheduler, map_location="cpu", weights_only=True))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if self.engine is None or not (Path(best) / STATE_FOLDER).is_dir():
            super()._load_best_model()
            return
        self._resume_engine(self.engine, best)

    def _resume_engine(self, engine: sw.Engine, checkpoint: str) -> None:
        if engine.resume(Path(checkpoint) / STATE_FOLDER) is None:
            raise CheckpointError(
                f"{checkpoint}/{STATE_FOLDER} has no complete checkpoint; saving may have been interrupted. Resume "
                f"from another one."
            )


def _numbers(entries: list[dict[str, Any]], prefix: str) -> dict[str, float]:
    """The numbers in entries of Trainer's history, without the step, which the record has itself. Names lose
    `prefix`."""
    return {
        name.removeprefix(prefix): float(value)
        for entry in entries
        for name, value in entry.items()
        if isinstance(value, int | float) and name != "step"
    }


def _kind_of(entries: list[dict[str, Any]]) -> tuple[str, dict[str, float]]:
    """The kind and the numbers of entries that do not belong to a single step."""
    for kind, prefix in (("validation", "eval_"), ("train", "train_")):
        if any(name.startswith(prefix) for entry in entries for name in entry):
            return kind, _numbers(entries, prefix)
    return "log", _numbers(entries, "")


def sharded(trainer: type) -> type:
    """A subclass of a Trainer class with `ShardwiseTrainerMixin`."""
    if issubclass(trainer, ShardwiseTrainerMixin):
        return trainer
    return type(
        trainer.__name__, (ShardwiseTrainerMixin, trainer), {"__doc__": trainer.__doc__, "__module__": __name__}
    )


Trainer = sharded(transformers.trainer.Trainer)
