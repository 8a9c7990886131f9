"""The state of a live engine: saved, resumed, moved to another plan; its tensors read and written whole."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from shardwise.checkpoint import Keep, Loaded, Stateful
from shardwise.comm import World
from shardwise.config import Plan, load_plan
from shardwise.errors import StateError
from shardwise.formats import DTYPES, MAX_FILE_BYTES, save_pretrained
from shardwise.sharded_model import ShardedModel
from shardwise.state import State, reshard

PlanLike = Plan | str | Path | Mapping[str, Any]


class EngineState:
    """Part of `Engine`, which makes what is named here."""

    module: nn.Module
    world: World
    _is_open: bool
    _state: State
    _sharded: ShardedModel

    # -- checkpoints ------------------------------------------------------------------------------------

    def save(
        self,
        folder: str | Path,
        step: int | None = None,
        state: Mapping[str, Any] | None = None,
        *,
        wait: bool = True,
        keep: Keep | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Path:
        """Write a checkpoint into `folder/step-XXXXXXXX` and make it the latest. All ranks call, between steps.

        `state` is the caller's own, rank 0's is kept: numbers, text, lists, dicts, tensors. `step` defaults to the
        number of optimizer steps taken. With `wait=False` it returns when what the model shows is copied to host
        memory, and goes on in the background; what only the optimizer holds is copied first there, and the next step
        waits for that. A failure is raised by the next call that saves, resumes or closes. `keep`
        says which checkpoints of the folder stay, and `metrics` by what the best is known.

        Raises `CheckpointError` on all ranks if it could not be written; what was there before is still there.
        """
        self._require_open()
        return self._state.save(
            self._sharded, Path(folder), step, state or {}, wait=wait, keep=keep or Keep(), metrics=metrics or {}
        )

    def claim(self, folder: str | Path) -> None:
        """Take the right to write into `folder` now, as the first `save` there does. All ranks call.

        Before a job writes anything of its own beside its checkpoints: raises `CheckpointError` on all ranks if another
        job that lives writes there. The right ends with the engine.
        """
        self._require_open()
        self._state.saver.claim(Path(folder))

    def remember(self, **objects: Stateful) -> None:
        """Keep what these objects say in `state_dict()` in every checkpoint, each rank its own; `resume` gives it back.

        `engine.remember(scheduler=scheduler, loader=loader)`. All ranks call, before `resume`.
        """
        self._state.remembered.update(objects)

    def wait_for_save(self) -> None:
        """Return once the last `save(wait=False)` is on disk; raise `CheckpointError` if it failed. All ranks call."""
        self._state.saver.settle()

    def resume(self, folder: str | Path) -> Loaded | None:
        """Continue from the latest checkpoint in `folder`; `None`, and nothing changed, if there is none.

        `folder` may be one checkpoint too. Any world size, plan and precision can have written it. All ranks call;
        all raise the same `CheckpointError`, and nothing is changed, if it is damaged or another model's.
        """
        self._require_open()
        return self._state.resume(self._sharded, Path(folder))

    def reshard(self, plan: PlanLike) -> None:
        """Go on by another plan: another table, mesh, units or precision over the same ranks. All ranks call.

        Parameters, optimizer states and counters are kept, and moved between the ranks unit by unit; model, optimizer
        and schedulers stay the same objects. Between steps: raises `StateError` while gradients wait for one, and
        `ConfigError` for a plan that cannot be meant here; nothing has been changed then.
        """
        self._require_open()
        self._sharded.refuse_stages("reshard()", "Save, make another engine, and resume from the checkpoint.")
        self._sharded = reshard(self._sharded, load_plan(plan))

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        dtype: Literal["fp32", "bf16", "fp16"] | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
        overwrite: bool = False,
    ) -> None:
        """Write the model as a folder of Hugging Face, which `from_pretrained` loads. All ranks call.

        Unit by unit: no rank ever has the whole model; rank 0 writes. Parameters have the precision in which the
        optimizer keeps them, unless `dtype` asks for another. A model of the transformers library gets its
        configuration too; any other module its state dict, as `model.safetensors`, split at `max_file_bytes`.
        Raises `CheckpointError` on all ranks if `folder` is not empty and `overwrite` is not given.
        """
        self._require_open()
        self._sharded.refuse_stages("save_pretrained()", "Save, then run: shardwise convert CHECKPOINT MODEL --to hf.")
        save_pretrained(
            self.module,
            self._sharded.access.kept_params(),
            self._sharded.access.whole_params(),
            self.world,
            Path(folder),
            dtype=None if dtype is None else DTYPES[dtype],
            max_file_bytes=max_file_bytes,
            overwrite=overwrite,
        )

    # -- whole tensors ----------------------------------------------------------------------------------

    def gathered(self, *names: str, write: bool = False) -> AbstractContextManager[None]:
        """Inside `with`, the named parameters of the model (all, without names) are whole on every rank.

        With `write` rank 0's edits are taken over by all ranks on leaving. All ranks enter and leave.
        """
        self._require_open()
        self._sharded.refuse_stages("gathered()", "engine.get(name) and engine.set(name, value) reach every stage.")
        if write:
            self._state.saver.wait_for_copy()
        return self._sharded.access.gathered(names, write=write)

    def get(self, name: str, what: str = "param") -> torch.Tensor | None:
        """A whole tensor by the parameter's name, on every rank. All ranks call.

        `what` is `param`, `grad` (between backward and step, averaged over ranks), or a state of the
        optimizer such as `exp_avg`; in the dtype in which it is kept. `None` if there is none.
        """
        self._require_open()
        if what == "grad":
            self._sharded.gradients.prepare()
        if self._sharded.pipeline is not None:
            return self._sharded.pipeline.across.read(name, what, self._sharded.access)
        return self._sharded.access.read(name, what)

    def set(self, name: str, value: torch.Tensor, what: str = "param") -> None:
        """Replace what `get` returns. All ranks call, with the same value."""
        self._require_open()
        if what == "grad":
            self._sharded.gradients.prepare()
        self._state.saver.wait_for_copy()
        if self._sharded.pipeline is None or self._sharded.pipeline.across.takes(name, value, what):
            self._sharded.access.write(name, value, what)

    def state_dict(self, *, rank_0_only: bool = False) -> dict[str, torch.Tensor]:
        """The plain model's `state_dict`, whole, on the CPU, for `model.load_state_dict` anywhere. All ranks call.

        Unit by unit, so that no device holds more than one. Ranks other than 0 get `{}` if `rank_0_only`.
        """
        self._require_open()
        on_rank = not rank_0_only or self.world.rank == 0
        if self._sharded.pipeline is not None:
            whole = self._sharded.pipeline.across.merged(self._sharded.access.state_dict())
            return whole if on_rank else {}
        return self._sharded.access.state_dict(on_rank=on_rank)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over a plain model's `state_dict`, the same on every rank. All ranks call."""
        self._require_open()
        self._state.saver.wait_for_copy()
        if self._sharded.pipeline is not None:
            state = self._sharded.pipeline.across.own_part(state)
        self._sharded.access.load_state_dict(state)

    def optimizer_state_dict(self, *, rank_0_only: bool = False) -> dict[str, Any]:
        """The plain optimizer's `state_dict()`, whole, on the CPU. All ranks call; see `state_dict`."""
        self._require_open()
        self._sharded.refuse_stages("optimizer_state_dict()", "Checkpoints have the states: engine.save(folder).")
        return self._sharded.access.optimizer_state_dict(on_rank=not rank_0_only or self.world.rank == 0)

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a plain optimizer's `state_dict()`, the same on every rank. All ranks call.

        `optimizer.load_state_dict` does the same."""
        self._require_open()
        self._sharded.refuse_stages(
            "load_optimizer_state_dict()", "Checkpoints have the states: engine.resume(folder)."
        )
        self._sharded.require_optimizer().load_state_dict(state)

    def _require_open(self) -> None:
        if not self._is_open:
            raise StateError("This engine was closed; call shard() again to train the model.")
        if self._sharded.is_taken_down:
            raise StateError(
                "A change of plan failed half-way, and this engine's values are gone with it. Close it, make another "
                "with shard(), and resume from the last checkpoint."
            )
