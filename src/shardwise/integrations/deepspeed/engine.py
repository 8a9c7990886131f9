"""An engine with DeepSpeed's calls: `engine(batch)`, `backward`, `step`, `save_checkpoint`, `load_checkpoint`."""

from __future__ import annotations

import copy
import itertools
import math
import os
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from shardwise import Engine, Plan
from shardwise.checkpoint import formats
from shardwise.comm.agreed import agreed
from shardwise.errors import CheckpointError, ConfigError, StateError, engines_are_made_by
from shardwise.integrations.deepspeed.config import TranslatedConfig
from shardwise.integrations.deepspeed.enums import OffloadDeviceEnum, OffloadStateTypeEnum
from shardwise.integrations.deepspeed.monitor import LOSS_SCALE, RATE, TRAIN_LOSS, Event, Monitor
from shardwise.integrations.deepspeed.names import OFF, SETTINGS, refusal
from shardwise.integrations.deepspeed.stored import StoredWeights
from shardwise.integrations.deepspeed.tags import agreed_tag, latest_tag, write_latest
from shardwise.integrations.deepspeed.timers import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer
from shardwise.integrations.plans import with_rows_on_host
from shardwise.system.process_rank import process_rank_of

_LIVE: weakref.WeakValueDictionary[int, DeepSpeedEngine] = weakref.WeakValueDictionary()
"""All engines, by the order in which they were made, which is the same on all ranks. A `WeakSet` would be ordered by
addresses, which are not."""
_numbers = itertools.count()

_OPEN: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()
"""The engines beneath, by the same numbers. Hooks of their models keep them alive when a script drops its own."""

engines_are_made_by("DeepSpeed", "engine.shardwise")


class Scheduler(Protocol):
    """An LR scheduler: `step()` is called once per optimizer step."""

    def step(self) -> object: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


class DeepSpeedEngine(nn.Module):
    """DeepSpeed's engine API on shardwise's engine. Created by `initialize`.

    `backward` and `step` are called once per micro-batch. Every `gradient_accumulation_steps`-th step updates the
    parameters, calls the LR scheduler and frees the gradients. Other attributes are looked up in the model. `shardwise`
    is the underlying `shardwise.Engine`.
    """

    _LABEL = "engine"
    """The name of such an engine in `names.py`."""

    def __init__(
        self,
        engine: Engine,
        config: TranslatedConfig,
        optimizer: torch.optim.Optimizer | None,
        lr_scheduler: Scheduler | None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        super().__init__()
        self.module = engine.module
        self.shardwise = engine
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.collate_fn = collate_fn
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        self.skipped_steps = 0
        self.loaded_checkpoint_tag: str | None = None
        self._config = config
        self._last_was_skipped = False
        self._last_was_boundary = False
        self._is_boundary: bool | None = None
        """What `set_gradient_accumulation_boundary` has said last."""
        self._num_backwards = 0
        """Calls of `backward` since the last `step`."""
        self._has_noted_frozen = False
        described = {name: value for name, value in engine.plan.model_dump(mode="json").items() if value is not None}
        self._note_overflow()
        self.monitor = Monitor(
            config.monitors,
            lambda: engine.world.rank,
            _samples_of(self),
            {"world_size": engine.world.size, "train_batch_size": config.global_batch, **described},
        )
        self._losses: list[torch.Tensor] = []
        self.timers = SynchronizedWallClockTimer() if config.value("wall_clock_breakdown") else NoopTimer()
        self.tput_timer = ThroughputTimer(batch_size=config.global_batch)
        self.training_dataloader: DataLoader[Any] | None = None
        self._plan_before_offload: Plan | None = None
        engine.divide_every_backward()
        engine.remember(deepspeed=_Counters(self))
        if lr_scheduler is not None:
            engine.remember(lr_scheduler=lr_scheduler)
        self._number = next(_numbers)
        _LIVE[self._number] = self
        _OPEN[self._number] = engine

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            if name in SETTINGS:
                return partial(self._config.value, SETTINGS[name])
            if name in OFF:
                return _off
            try:
                return getattr(self.module, name)
            except AttributeError as error:
                message = refusal(f"{self._LABEL}.{name}") or refusal(f"engine.{name}")
                raise AttributeError(message or str(error)) from None

    # -- what it is ---------------------------------------------------------------------------------------

    @property
    def config(self) -> Mapping[str, Any]:
        """The config. `engine.shardwise.plan` is the plan into which it was translated."""
        return self._config.source

    @property
    def device(self) -> torch.device:
        return next(iter(self.shardwise.module.parameters())).device

    @property
    def world_size(self) -> int:
        return self.shardwise.world.size

    @property
    def global_rank(self) -> int:
        return self.shardwise.world.rank

    @property
    def local_rank(self) -> int:
        return process_rank_of(os.environ).local_rank

    @property
    def dp_world_size(self) -> int:
        return self._config.num_replicas

    @property
    def sequence_parallel_size(self) -> int:
        return int(self._config.value("sequence_parallel_size"))

    @property
    def mp_world_size(self) -> int:
        """The ranks among which layers are split."""
        return self.shardwise.mesh.degree("tp")

    @property
    def sparse_tensor_module_names(self) -> frozenset[str]:
        """With `sparse_gradients`, the weights whose gradients DeepSpeed sends as rows; here they are dense."""
        if not self._config.value("sparse_gradients"):
            return frozenset()
        kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        modules = self.shardwise.module.named_modules()
        return frozenset(f"{name}.weight" for name, module in modules if isinstance(module, kinds))

    seq_dp_world_size = property(lambda self: self.dp_world_size * self.sequence_parallel_size)

    def get_data_parallel_rank(self) -> int:
        return self.shardwise.data_ranks[0]

    def get_model_parallel_rank(self) -> int:
        """This rank's place among those that split layers."""
        return self.shardwise.mesh.coordinate(self.global_rank).get("tp", 0)

    get_tensor_parallel_rank = get_model_parallel_rank

    def autotp_size(self) -> int:
        return self.mp_world_size

    @property
    def is_compiled(self) -> bool:
        """Whether the plan compiles the model."""
        return self.shardwise.plan.compile is not None

    # -- settings -----------------------------------------------------------------------------------------

    def optimizer_name(self) -> str | None:
        """The config's optimizer, or the class of the one that the script made."""
        named = self._config.optimizer
        if named is not None and self.optimizer is not None:
            return named.name.lower() if named.name.lower() in ("adam", "adamw", "lamb", "lion") else named.name
        return None if self.optimizer is None else type(self.optimizer).__name__

    def postscale_gradients(self) -> bool:
        return not self._config.value("prescale_gradients")

    def zero_cpu_offload(self) -> bool:
        return bool(self._config.value("zero_optimization.offload_optimizer.device") == "cpu")

    zero_use_cpu_optimizer = zero_cpu_offload

    def zero_nvme_offload_optimizer(self) -> bool:
        return bool(self._config.value("zero_optimization.offload_optimizer.device") == "nvme")

    def checkpoint_tag_validation_enabled(self) -> bool:
        return self._config.tag_validation != "ignore"

    def checkpoint_tag_validation_fail(self) -> bool:
        return self._config.tag_validation == "fail"

    def train_batch_size(self) -> int:
        return self._config.global_batch

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._config.micro_batch

    def gradient_accumulation_steps(self) -> int:
        return self._config.accumulate

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Accepted only if it changes nothing."""
        self._require_unchanged("train_batch_size", self.train_batch_size(), train_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Accepted only if it changes nothing."""
        name = "train_micro_batch_size_per_gpu"
        self._require_unchanged(name, self.train_micro_batch_size_per_gpu(), micro_batch_size)

    def _require_unchanged(self, name: str, now: int, wanted: int) -> None:
        if wanted != now:
            raise StateError(
                f"{name} is {now} and cannot be changed to {wanted} during training. Save a checkpoint, and load it "
                f"into an engine whose config has {name} {wanted}."
            )

    def get_batch_info(self) -> tuple[int, int, int]:
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def zero_optimization_stage(self) -> int:
        return self._config.stage

    def zero_optimization(self) -> bool:
        return self._config.stage > 0

    def zero_optimization_partition_weights(self) -> bool:
        return self._config.stage == 3

    def zero_optimization_partition_gradients(self) -> bool:
        return self._config.stage >= 2

    def fp16_enabled(self) -> bool:
        return self.shardwise.plan.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self.shardwise.plan.precision == "bf16"

    def gradient_clipping(self) -> float:
        return self.shardwise.plan.clip_grad_norm or 0.0

    def dynamic_loss_scale(self) -> bool:
        return self.shardwise.plan.loss_scale.dynamic

    # -- training -----------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        return self.shardwise(*inputs, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Compute gradients of `loss`, averaged over ranks and, unless `scale_wrt_gas` is false, over micro-batches.

        Returns the loss, divided by the number of micro-batches if the gradients are.
        """
        if self.monitor.enabled:
            self.monitor.begin()
            self._losses.append(loss.detach())
        self._num_backwards += 1
        # Gradients are divided by the micro-batches as they arrive, whoever has called backward.
        count = self._config.accumulate if scale_wrt_gas else 1
        own = loss if scale_wrt_gas else loss * self._config.accumulate
        if retain_graph:
            self.shardwise.scale(own).backward(retain_graph=True)
        else:
            self.shardwise.backward(own)
        return loss.detach() / count

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss`, to be used as `engine.scale(loss).backward()`: scaled in fp16."""
        return self.shardwise.scale(loss)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last of its step: by its number, unless
        `set_gradient_accumulation_boundary` has said so. With `managed_gradient_accumulation: false` that is known in
        `step` alone, and this is false."""
        if self._is_boundary is not None:
            return self._is_boundary
        return self._is_managed and (self.micro_steps + 1) % self._config.accumulate == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next `step` updates, from now on in the place of the number of the micro-batch. Gradients are
        divided by `gradient_accumulation_steps` all the same."""
        if not self._is_managed:
            raise StateError(
                "With managed_gradient_accumulation: false every engine.step() is a boundary. Leave out "
                "set_gradient_accumulation_boundary()."
            )
        self._is_boundary = is_boundary

    @property
    def _is_managed(self) -> bool:
        return bool(self._config.value("managed_gradient_accumulation"))

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; the last one of a step updates the parameters. All ranks call."""
        is_boundary = self.is_gradient_accumulation_boundary() or not self._is_managed
        norm = self.shardwise.step(is_last=is_boundary)
        self.micro_steps += 1
        self._last_was_boundary = False
        num_batches = 1 if self._is_managed else self._num_backwards
        self._num_backwards = 0
        self.global_samples += self._config.micro_batch * self._config.num_replicas * num_batches
        if is_boundary:
            self._end_step(lr_kwargs, norm)
            if self.monitor.enabled:
                self._write_events()

    def _begin_step_anew(self) -> None:
        """After a checkpoint was loaded: gradients of a step that was begun are not in it."""
        if self._is_managed:
            self.micro_steps -= self.micro_steps % self._config.accumulate

    def _write_events(self) -> None:
        """Write the mean of the losses given to `backward`, over micro-batches and ranks."""
        losses, self._losses = self._losses, []
        mine = torch.stack([loss.float().mean() for loss in losses]).mean().item() if losses else math.nan
        loss = self.shardwise.mean(mine)
        self._write_step_events([(TRAIN_LOSS, loss, self.global_samples)] if losses else [])

    def _write_step_events(self, events: list[Event]) -> None:
        """Write the events of DeepSpeed after each step. Learning rate and loss scale are those of the next step."""
        if rates := self.get_lr():
            events.append((RATE, rates[0], self.global_samples))
        if self.fp16_enabled():
            events.append((LOSS_SCALE, self.cur_scale, self.global_samples))
        self.monitor.write_events(events)

    def _end_step(self, lr_kwargs: Mapping[str, Any] | None, norm: object) -> None:
        self.global_steps += 1
        self._last_was_boundary = True
        only_finite = self.shardwise.plan.takes_only_finite
        self._last_was_skipped = only_finite and isinstance(norm, float) and not math.isfinite(norm)
        self._note_overflow()
        if self._last_was_skipped:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        every = self._config.steps_per_print
        if every and self.global_steps % every == 0 and self.global_rank == 0:
            print(f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}, mom={self.get_mom()}")

    def _note_overflow(self) -> None:
        """Scripts ask the optimizer, which in DeepSpeed is one of its own that has this attribute."""
        if self.optimizer is not None:
            self.optimizer.overflow = self._last_was_skipped  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free all gradients. `step` does this itself."""
        self.shardwise.zero_grad()

    def no_sync(self) -> AbstractContextManager[None]:
        return self.shardwise.no_sync()

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Inside, backwards leave gradients on the rank that made them; the step, or whoever reads a gradient first,
        sums all at once. All ranks enter."""
        return self.shardwise.no_sync()

    def empty_partition_cache(self) -> None:
        """Does nothing: parameters are freed after their last use."""

    def print_forward_breakdown(self, fwd_time: float) -> None:
        """Does nothing: `engine.shardwise.timeline` shows forwards."""

    def compile(self, *args: object, **options: object) -> None:
        """Not supported: raises `StateError`."""
        raise StateError(f"{refusal('engine.compile')} It compiles each unit, before the first step.")

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Keep parameters, gradients and optimizer states on the host until `reload_states`. All ranks call, between
        steps.

        Training goes on if it is not called. `include` narrows it to optimizer states and masters (`optim_states`,
        `hp_params`) or parameters (`lp_params`), which go only together with these. `pin_memory` and `non_blocking`
        have no effect. Raises `ConfigError` for nvme, and for a plan that offloads parameters already.
        """
        if str(OffloadDeviceEnum(device).value) == "none" or self._plan_before_offload is not None:
            return
        if OffloadDeviceEnum(device) is OffloadDeviceEnum.nvme:
            raise ConfigError("offload_states(device=nvme) is not supported. Offload to the cpu.")
        plan = self.shardwise.plan
        if self.shardwise.table.param.tier != "device":
            raise ConfigError("offload_states() was called, but the config offloads parameters already.")
        kinds = OffloadStateTypeEnum
        has_params = include is None or kinds.lp_params in include
        moved = (kinds.optim_states, kinds.hp_params, kinds.lp_params)
        if include is not None and not any(one in include for one in moved):
            return  # gradients are not kept between steps
        if self._config.stage == 0:
            raise ConfigError("offload_states() needs zero_optimization.stage 1, 2 or 3, as offload_optimizer does.")
        is_moved = {"optim": True, "grad": self._config.stage > 1, "param": has_params and self._config.stage == 3}
        self.shardwise.reshard(with_rows_on_host(plan, [row for row, is_it in is_moved.items() if is_it]))
        self._plan_before_offload = plan

    def reload_states(self, non_blocking: bool = False) -> None:
        """Undo `offload_states`. All ranks call, between steps."""
        if self._plan_before_offload is not None:
            plan, self._plan_before_offload = self._plan_before_offload, None
            self.shardwise.reshard(plan)

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Does nothing: `backward` or `step` reduces the gradients."""

    # -- the last step ------------------------------------------------------------------------------------

    def loss_scale(self) -> float:
        """The current loss scale; 1 except in fp16."""
        return self.cur_scale

    @property
    def cur_scale(self) -> float:
        """The current loss scale; 1 except in fp16."""
        scaler = self.shardwise.scaler
        return 1.0 if scaler is None else scaler.scale

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because of an overflow, or of gradients that were not finite."""
        return self._last_was_skipped

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step, before clipping. On a GPU this call waits for it."""
        return self.shardwise.gradient_norm

    def get_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self._groups()]

    def get_type(self) -> list[str]:
        return [type(self.optimizer).__name__ for _ in self._groups()]

    def get_mom(self) -> list[Any]:
        return [group.get("betas", group.get("momentum")) for group in self._groups()]

    def was_step_applied(self) -> bool:
        """Whether the last `step()` updated parameters."""
        return self._last_was_boundary and not self._last_was_skipped

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    # -- data ---------------------------------------------------------------------------------------------

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """A data loader of this rank's share of `dataset`, in micro-batches of the config's size.

        It shuffles if `route` is `train`, and not for `eval` and `predict`.
        """
        index, count = self.shardwise.data_ranks
        sampler = data_sampler
        if sampler is None and hasattr(dataset, "__len__"):
            sampler = DistributedSampler(dataset, num_replicas=count, rank=index, shuffle=route == "train")
        return DataLoader(
            dataset,
            batch_size=batch_size or self._config.micro_batch,
            sampler=sampler,
            collate_fn=collate_fn or self.collate_fn,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory and self.device.type != "cpu",
        )

    def training_loader(self, dataset: Dataset[Any]) -> DataLoader[Any]:
        """The data loader that `initialize` returns for its `training_data`."""
        self.training_dataloader = self.deepspeed_io(dataset)
        return self.training_dataloader

    # -- checkpoints --------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write `save_dir/tag` (by default `global_stepN`), and its name to `save_dir/latest`. All ranks call.

        This is a shardwise checkpoint, from which any world size, stage and precision resumes. `client_state` may
        contain numbers, text, lists, dicts and tensors. Frozen parameters are always saved; a note says so if they are
        to be excluded. If ranks give different tags, `checkpoint.tag_validation` of the config decides: `fail` raises,
        `warn`, the default, prints a note, and rank 0's is used. Raises `ConfigError` for an empty `save_dir`.
        """
        if not save_dir:
            raise ConfigError(f"save_checkpoint() needs a folder; save_dir is {save_dir!r}.")
        if exclude_frozen_parameters and self.global_rank == 0 and not self._has_noted_frozen:
            self._has_noted_frozen = True
            print(
                "shardwise: save_checkpoint(exclude_frozen_parameters=True) saves frozen parameters, too, because "
                "checkpoints are complete. For the others alone use save_16bit_model(exclude_frozen_parameters=True)."
            )
        folder, name = Path(save_dir), f"global_step{self.global_steps}" if tag is None else str(tag)
        if tag is not None:
            name = agreed_tag(self.shardwise.world, name, self._config.tag_validation)
        # Between micro-batches, too: what has come of this step's gradients stays here, and is not in the checkpoint.
        client = {"client_state": dict(client_state or {})}
        self.shardwise.save(folder / name, self.global_steps, client, without_gradients=True)
        with agreed(self.shardwise.world, "latest", CheckpointError):  # no rank reads it before it is written
            if save_latest and self.global_rank == 0:
                write_latest(folder, name)
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: object | None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load `load_dir/tag`, by default the latest one. All ranks call.

        With `load_module_only`, or without `load_optimizer_states`, only parameters and buffers are loaded, also from a
        checkpoint written by DeepSpeed itself; the latter also loads the counters and, with `load_lr_scheduler_states`,
        the LR scheduler. There `load_module_strict=False` leaves parameters alone that the checkpoint does not have,
        and ignores what the model does not have; shapes must be the model's in any case.

        Returns the folder and the saved `client_state`, or `(None, {})` if there is no checkpoint. Raises
        `CheckpointError` for a checkpoint that cannot be read or does not fit, and to continue from one written by
        DeepSpeed itself; `shardwise convert` converts it.
        """
        if custom_load_fn is not None:
            raise CheckpointError(
                "load_checkpoint(custom_load_fn=...) is not supported, because no rank has the whole state. Change "
                "parameters after load_checkpoint() inside deepspeed.zero.GatheredParameters(params, modifier_rank=0)."
            )
        folder = Path(load_dir)
        name = latest_tag(folder) if tag is None else str(tag)
        if name is None:
            return None, {}
        if load_module_only or not load_optimizer_states:
            others: dict[str, Any] = {} if load_module_only else {"deepspeed": _Counters(self)}
            if others and load_lr_scheduler_states and self.lr_scheduler is not None:
                others["lr_scheduler"] = self.lr_scheduler
            client_state = self._load_weights(folder / name, others, load_module_strict)
            self.loaded_checkpoint_tag = name
            return str(folder / name), client_state
        if any(folder.joinpath(name).glob("*_model_states.pt")):
            raise CheckpointError(
                f"{folder / name} was written by DeepSpeed itself. Convert it once: "
                f"shardwise convert {folder / name} NEW --to shardwise; then call engine.shardwise.resume(NEW)."
            )
        if not load_module_strict:
            self._require_names(folder / name)
        kept = None if self.lr_scheduler is None else copy.deepcopy(self.lr_scheduler.state_dict())
        loaded = self.shardwise.resume(folder / name)
        if kept is not None and self.lr_scheduler is not None and not load_lr_scheduler_states:
            self.lr_scheduler.load_state_dict(kept)
        if loaded is None:
            return None, {}
        self.monitor.restart()
        self.loaded_checkpoint_tag = name
        return str(folder / name), dict(loaded.state.get("client_state", {}))

    def _require_names(self, path: Path) -> None:
        """Raise `CheckpointError` unless the checkpoint has the model's names, as its optimizer states must."""
        stored = {name for group in formats.open_checkpoint(path).groups for name in group.get("params", ())}
        trained = {name for name, param in self.module.named_parameters() if param.requires_grad}
        if stored and (odd := stored ^ trained):
            raise CheckpointError(
                f"The optimizer states in {path} are those of another model: only one of them has "
                f"{', '.join(sorted(odd)[:3])}. To load the weights that both have, call load_checkpoint(..., "
                f"load_module_strict=False, load_optimizer_states=False)."
            )

    def _load_weights(self, path: Path, others: Mapping[str, Any], is_strict: bool) -> dict[str, Any]:
        """Load parameters, buffers and the objects `others`, by the names under which they are remembered, from `path`.

        Returns the saved `client_state`. Objects are loaded after the weights, which are checked against the model.
        """
        source = formats.open_checkpoint(path)
        remembered = source.remembered() if others else {}
        if absent := others.keys() - remembered.keys():
            raise CheckpointError(
                f"{path} has no state of {', '.join(sorted(absent))}. To load only its weights, call "
                f"load_checkpoint(..., load_module_only=True)."
            )
        self.shardwise.load_state_dict(StoredWeights(source), strict=is_strict)
        for name, one in others.items():
            one.load_state_dict(remembered[name])
        self.monitor.restart()
        return dict(source.user.get("client_state", {}))

    def module_state_dict(self, *, prefix: str = "", exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The plain model's whole `state_dict`, on the CPU of every rank. All ranks call."""
        skipped = self._frozen_names() if exclude_frozen_parameters else frozenset()
        return {prefix + key: one for key, one in self.shardwise.state_dict().items() if key not in skipped}

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the whole weights in the forward's precision to one file, by `torch.save`. All ranks call."""
        state = self.shardwise.state_dict(rank_0_only=True)
        with agreed(self.shardwise.world, "save_16bit_model", CheckpointError):
            if self.global_rank == 0:
                folder = Path(save_dir)
                folder.mkdir(parents=True, exist_ok=True)
                skipped = self._frozen_names() if exclude_frozen_parameters else frozenset()
                kept = {key: self._narrowed(one) for key, one in state.items() if key not in skipped}
                torch.save(kept, folder / save_filename)
        return True

    save_fp16_model = save_16bit_model

    def _frozen_names(self) -> frozenset[str]:
        return frozenset(name for name, param in self.module.named_parameters() if not param.requires_grad)

    def _narrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.shardwise.plan.precision)
        return tensor.to(narrow) if narrow is not None and tensor.dtype == torch.float32 else tensor

    def destroy(self) -> None:
        """Remove all hooks. Parameters stay sharded."""
        _LIVE.pop(self._number, None)
        _OPEN.pop(self._number, None)
        self.monitor.close()
        self.shardwise.close()


def _off() -> bool:
    return False


def _samples_of(engine: DeepSpeedEngine) -> Callable[[], int]:
    """A function that returns the number of samples trained on, without keeping `engine` alive."""
    reference = weakref.proxy(engine)
    return lambda: int(reference.global_samples)


class _Counters:
    """The step and sample counters of a `DeepSpeedEngine`, as saved in checkpoints."""

    _NAMES = ("global_steps", "global_samples", "micro_steps", "skipped_steps")

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = weakref.proxy(engine)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self._engine, name) for name in self._NAMES}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self._NAMES:
            setattr(self._engine, name, int(state[name]))
        self._engine._begin_step_anew()


def release(model: nn.Module) -> None:
    """End the engine that has `model`, if there is one, with a note, and leave the model plain and whole. All ranks
    call."""
    # the list of references is taken at once: ranks that are threads make engines meanwhile
    numbers = [ref.key for ref in _OPEN.valuerefs() if (engine := ref()) is not None and engine.module is model]
    if not numbers:
        return
    found = _OPEN.pop(max(numbers))
    if (ours := _LIVE.pop(max(numbers), None)) is not None:
        ours.monitor.close()
    found.unshard()
    if found.world.rank == 0:
        print("shardwise: initialize() was called again with the same model, whose earlier engine has ended.")


def engines_of(params: Iterable[nn.Parameter]) -> list[tuple[DeepSpeedEngine, list[str]]]:
    """The open engines that have any of `params`, each with their names in its model, in an order shared by all
    ranks."""
    wanted = {id(param) for param in params}
    found = []
    living = ((ref.key, ref()) for ref in _LIVE.valuerefs())
    for _, engine in sorted((number, engine) for number, engine in living if engine is not None):
        names = [name for name, param in engine.module.named_parameters() if id(param) in wanted]
        if names:
            found.append((engine, names))
    return found
