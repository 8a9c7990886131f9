"""verl on our engine: `VERL_USE_EXTERNAL_MODULES=shardwise.integrations.verl`, and the strategy `shardwise`.

verl finds training engines in a registry, by the strategy of an actor, a critic or a reference. Importing this module
registers ours, for models that predict tokens and for those that predict values. What they share with verl's own FSDP
engine (building the model, packing sequences, log-probabilities and losses) is inherited from it; this module has what
differs: who owns the parameters, their gradients and the optimizer (docs/after-training.md).

[Note: averages of verl] verl multiplies a loss by the number of data ranks and divides it by the tokens or sequences of
the whole mini-batch, so gradients are to be averaged over ranks and summed over micro-batches. So our plan accumulates
nothing: `loss.backward()` averages over ranks, and a step ends where verl says so. How many micro-batches there are
depends on the lengths of the samples.

[Note: verl's offload] Between its phases verl asks engines to leave the device (`to("cpu", ...)`), so that samplers
have its memory, and to come back. Here that is another table, with the rows on the host, and `Engine.reshard` moves
values. Parameters rest on the host only together with optimizer states, which are updated where they are.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from verl.trainer.config import CheckpointConfig
from verl.utils.device import get_device_id, get_device_name
from verl.workers.config import FSDPEngineConfig
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

import shardwise as sw
from shardwise.errors import CheckpointError, ConfigError
from shardwise.integrations.peft_saving import adapter_state_dict
from shardwise.integrations.plans import with_rows_on_host

__all__ = ["ShardwiseEngine", "ShardwiseEngineConfig", "ShardwiseValueEngine"]

STRATEGY = "shardwise"
DEVICES = ["cuda", "npu", "cpu"]
_log = logging.getLogger("shardwise")
_PRECISIONS = {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16"}


@dataclass
class ShardwiseEngineConfig(FSDPEngineConfig):
    """Settings of verl's FSDP engine, and our plan: `actor.fsdp_config._target_=shardwise.integrations.verl.` with the
    name of this class, `+actor.fsdp_config.plan=zero3` (a preset, a file, or a mapping).

    Without a plan, or with verl's own `FSDPEngineConfig`, the plan follows from the settings: `zero3` if
    `reshard_after_forward`, else `zero2`; `hsdp` if `fsdp_size` is less than all ranks. The precision is that of
    `mixed_precision.param_dtype` (default bf16).
    """

    plan: Any = None

    def __post_init__(self) -> None:
        strategy, self_dict = self.strategy, self.__dict__
        if strategy == STRATEGY:  # verl's own class knows its own strategies only
            self_dict["strategy"] = "fsdp2"
        super().__post_init__()
        self_dict["strategy"] = strategy


def plan_of(config: FSDPEngineConfig, num_ranks: int) -> sw.Plan:
    """The plan that verl's settings ask for. Raises `ConfigError` for settings that have no meaning here."""
    refused = {
        "qat.enable": bool(getattr(getattr(config, "qat", None), "enable", False)),
        "ulysses_sequence_parallel_size": config.ulysses_sequence_parallel_size > 1,
    }
    for setting, is_set in refused.items():
        if is_set:
            raise ConfigError(
                f"{setting} is not supported by verl's strategy {STRATEGY}. Leave it out, or use verl's own fsdp2."
            )
    asked = getattr(config, "plan", None)
    word = dict(config.mixed_precision or {}).get("param_dtype", "bf16")
    precision = _PRECISIONS.get(str(word))
    if precision is None:
        raise ConfigError(
            f"mixed_precision.param_dtype {word!r} is not supported by verl's strategy {STRATEGY}. Use bf16 or fp32."
        )
    if asked is not None:
        plan = sw.load_plan(dict(asked) if not isinstance(asked, str | Path) else asked)
        if (plan.mesh or {}).get("pp", 1) > 1 or (plan.mesh or {}).get("sp", 1) > 1:
            raise ConfigError(
                f"The plan's mesh has pp or sp, and verl computes its losses from whole logits outside of the model. "
                f"Use a mesh of dp, node, local, tp and ep for verl's strategy {STRATEGY}."
            )
        if plan.accumulate != 1:
            raise ConfigError("verl decides how many micro-batches a step has. Leave accumulate out of the plan.")
        return plan if "precision" in plan.model_fields_set else sw.load_plan(plan, [f"precision={precision}"])
    values: dict[str, Any] = {"preset": "zero3" if config.reshard_after_forward else "zero2", "precision": precision}
    size = config.fsdp_size
    if 0 < size < num_ranks:
        values |= {"preset": "hsdp", "mesh": {"node": num_ranks // size, "local": size}}
    if config.offload_policy:
        values["preset"] = "zero3-offload"
    return sw.load_plan(values)


def rows_to_move(engine: sw.Engine) -> dict[str, list[str]]:
    """The rows of the table that go to the host for a while, for verl's `optimizer` and `model`: none of what is whole
    on every rank, or on a lower tier anyway."""
    table = engine.table
    if table.optim.tier != "device" or not table.optim.shard:
        return {"optimizer": [], "model": []}
    states = ["optim", *(["grad"] if table.grad.shard == table.optim.shard else [])]
    return {"optimizer": states, "model": [*states, "param"] if table.param.shard else []}


class _Sharded:
    """What our engines do otherwise than verl's FSDP engine."""

    engine: sw.Engine
    module: Any
    engine_config: Any
    optimizer_config: Any
    checkpoint_config: CheckpointConfig
    model_config: Any
    optimizer: Any
    lr_scheduler: Any
    rank: int

    # -- building -----------------------------------------------------------------------------------------

    def initialize(self) -> None:
        """Build the model, shard it with its optimizer, and make the schedule of learning rates; then offload what verl
        is told to. All ranks call."""
        self._saved: list[Path] = []
        self._build_model_optimizer()  # type: ignore[attr-defined]
        self._own_plan, self._on_host = self.engine.plan, frozenset[str]()
        self._away: set[str] = set()
        self._rows = rows_to_move(self.engine)
        if self.rank == 0:
            self._say_what_is_not_moved()
        self.to("cpu", self.is_param_offload_enabled, self.is_optimizer_offload_enabled, self.is_param_offload_enabled)

    def _say_what_is_not_moved(self) -> None:
        asked = {"model": self.engine_config.param_offload, "optimizer": self.engine_config.optimizer_offload}
        for kind, setting in (("model", "param_offload"), ("optimizer", "optimizer_offload")):
            if asked[kind] and not self._rows[kind]:
                _log.warning(
                    "%s is set and moves nothing: under the plan %s every rank has all of it, or the host has it "
                    "already. zero3 and hsdp can move both, zero1 and zero2 optimizer states.",
                    setting,
                    self._own_plan.preset,
                )
        if self._rows["model"] and asked["model"] and not asked["optimizer"]:
            _log.warning("param_offload moves optimizer states too: parameters rest on the host only with these.")

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        """verl calls it with a model of which rank 0 has the values; the others may have none."""
        plan = plan_of(self.engine_config, torch.distributed.get_world_size())
        # our units cast their parameters themselves, and outputs have the precision's dtype
        self._autocast_dtype = torch.float32
        optimizer = None
        if self.engine_config.forward_only:
            module.requires_grad_(False)
        else:
            optimizer = build_optimizer(
                [one for one in module.parameters() if one.requires_grad], self.optimizer_config
            )
        accelerator = get_device_name()
        device = None if accelerator == "cpu" else torch.device(accelerator, get_device_id())
        self.engine = sw.shard(module, plan, optimizer=optimizer, device=device)
        self._sharded_optimizer = optimizer
        return module

    def _build_optimizer(self, module: nn.Module) -> Any:
        return self._sharded_optimizer

    # -- a step -------------------------------------------------------------------------------------------

    @contextmanager
    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> Iterator[None]:
        yield
        if not is_last_micro_batch:
            self.engine.step(is_last=False)

    def optimizer_zero_grad(self) -> None:
        """Drop all gradients. All ranks call."""
        self.engine.zero_grad()

    def optimizer_step(self) -> float:
        """Clip, update, and return the norm of the gradients before; nothing is updated if it is not finite. All ranks
        call."""
        norm = float(self.engine.clip_grad_norm_(self.optimizer_config.clip_grad))
        if math.isfinite(norm):
            self.engine.step(is_last=True)
        else:
            self.engine.zero_grad()
        return norm

    # -- where values are ---------------------------------------------------------------------------------

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Keep parameters, optimizer states or both on the host, with `device` "cpu", or where the plan has them, with
        another; what the plan has on a lower tier stays there. Between steps there are no gradients. All ranks call,
        between steps. See [Note: verl's offload]."""
        named = {kind for kind, is_named in (("model", model), ("optimizer", optimizer)) if is_named}
        self._away = self._away | named if device == "cpu" else self._away - named
        rows = frozenset(row for kind in self._away for row in self._rows[kind])
        if rows != self._on_host:
            self.engine.reshard(with_rows_on_host(self._own_plan, sorted(rows)) if rows else self._own_plan)
            self._on_host = rows

    @property
    def is_param_offload_enabled(self) -> bool:
        return bool(self.engine_config.param_offload and self._rows["model"])

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return bool(self.engine_config.optimizer_offload and self._rows["optimizer"])

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **_: Any
    ) -> tuple[Iterator[tuple[str, torch.Tensor]], dict[str, Any] | None]:
        """The weights for a sampler, unit by unit, under their Hugging Face names, on every rank; and the
        configuration of the adapters that are sent apart. All ranks iterate, to the end.

        Adapters are merged if verl is told so (`model.lora.merge`); else they alone are sent once the base is known
        there (`base_sync_done`), and before that base and adapters apart are refused.
        """
        adapters = getattr(self.module, "peft_config", None)
        if adapters is None or self.model_config.lora.get("merge", False):
            return iter(self.engine.weights(dtype="bf16")), None
        if not base_sync_done:
            raise ConfigError(
                f"verl asks for the base and the adapters apart, which its strategy {STRATEGY} does not send. Set "
                f"model.lora.merge=true, or load the base into the sampler from its folder (rollout.load_format)."
            )
        found = {name: value.to(torch.bfloat16) for name, value in adapter_state_dict(self.module, self.engine).items()}
        return iter(found.items()), adapters["default"].to_dict()

    def get_per_tensor_param_shard(self, **_: Any) -> Any:
        """Refused: our shards are pieces of flat buffers, of which verl's delta engines know nothing."""
        raise ConfigError(
            f"verl's delta checkpoint engines are not supported by its strategy {STRATEGY}. Use naive or nccl."
        )

    def disable_adapter(self) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = self.module.disable_adapter()
        return found

    # -- checkpoints --------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:
        """A checkpoint of ours in `local_path`, of which any plan and number of ranks can be resumed, and the model's
        configuration and tokenizer in `local_path/huggingface`; its weights too if `save_contents` has `hf_model`. All
        ranks call.

        Keeps the last `max_ckpt_to_keep` folders of this run.
        """
        if hdfs_path is not None:
            raise ConfigError(f"hdfs_path is not supported by verl's strategy {STRATEGY}. Save to a mounted folder.")
        folder = Path(local_path)
        schedule = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        self.engine.save(folder, global_step, {"scheduler": schedule})
        hugging_face = folder / "huggingface"
        if "hf_model" in self.checkpoint_config.save_contents:
            self.engine.save_pretrained(hugging_face, overwrite=True, merge_adapters=True)
        if self.rank == 0:
            hugging_face.mkdir(exist_ok=True)
            self.model_config.hf_config.save_pretrained(hugging_face)
            words: Any = self.model_config.get_processor()
            if words is not None:
                words.save_pretrained(hugging_face)
        self._saved = [one for one in self._saved if one != folder] + [folder]
        surplus = len(self._saved) - max_ckpt_to_keep if max_ckpt_to_keep else 0
        for old in self._saved[: max(0, surplus)]:
            if self.rank == 0:
                shutil.rmtree(old, ignore_errors=True)
        self._saved = self._saved[max(0, surplus) :]
        torch.distributed.barrier()

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False, **_: Any
    ) -> None:
        """Continue from the checkpoint in `local_path`, which may have been saved by another number of ranks. All ranks
        call. The folder is kept, whatever `del_local_after_load` says: it is the only copy."""
        if not Path(local_path).is_dir():
            raise CheckpointError(f"There is no folder {local_path} to resume from.")
        loaded = self.engine.resume(local_path)
        if loaded is None:
            raise CheckpointError(f"There is no checkpoint in {local_path} to resume from.")
        schedule = loaded.state.get("scheduler")
        if self.lr_scheduler is not None and schedule:
            self.lr_scheduler.load_state_dict(schedule)


class ShardwiseEngine(_Sharded, FSDPEngineWithLMHead):
    """A language model: actors, references, and what verl's SFT trainer trains."""


class ShardwiseValueEngine(_Sharded, FSDPEngineWithValueHead):
    """A model of values: critics."""


EngineRegistry.register("language_model", STRATEGY, DEVICES)(ShardwiseEngine)
EngineRegistry.register("value_model", STRATEGY, DEVICES)(ShardwiseValueEngine)
