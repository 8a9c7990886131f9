"""The state of a live engine: saved, resumed, moved to another plan; its tensors read and written whole."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from shardwise import formats
from shardwise.access import arriving_error
from shardwise.checkpoint import Keep
from shardwise.checkpoint.codec import decode
from shardwise.config import Plan, load_plan
from shardwise.engine_in_job import EngineInJob
from shardwise.state import reshard

if TYPE_CHECKING:
    from shardwise.checkpoint import Loaded, Stateful

PlanLike = Plan | str | Path | Mapping[str, Any]


class EngineState(EngineInJob):
    """Part of `Engine`, whose constructor sets these attributes."""

    module: nn.Module

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
        without_gradients: bool = False,
    ) -> Path:
        """Write a checkpoint into `folder/step-XXXXXXXX` and make it the latest. All ranks call, between steps.

        `state` is the caller's own, and rank 0's is kept: numbers, text, lists, dicts, tensors. `step` defaults to the
        number of optimizer steps taken. With `wait=False` it returns once the model's visible values are copied to host
        memory, and goes on in the background; what only the optimizer holds is copied there, and the next step waits
        for that. A failure is then raised by the next call that saves, resumes or closes. `keep` says which checkpoints
        of the folder are kept, and `metrics` determine which is the best.

        Returns the checkpoint's path. Raises `CheckpointError` on all ranks if it could not be written; earlier
        checkpoints are then still there. Raises `StateError` while gradients wait for a step, unless
        `without_gradients`: a checkpoint has none, and a run that resumes from it begins this step without them.
        """
        self._require_open()
        return Path(
            self._asking(
                lambda: str(
                    self._state.save(
                        self._sharded,
                        Path(folder),
                        step,
                        state or {},
                        wait=wait,
                        keep=keep or Keep(),
                        metrics=metrics or {},
                        without_gradients=without_gradients,
                    )
                )
            )
        )

    def claim(self, folder: str | Path) -> None:
        """Take the right to write into `folder` now, as the first `save` would. All ranks call.

        For a job that writes files of its own beside its checkpoints: raises `CheckpointError` on all ranks if another
        living job writes there. The right ends with the engine.
        """
        self._require_open()
        if self._session is None or not self._session.is_arriving:  # the others have it already
            self._asking(lambda: self._state.saver.claim(Path(folder)))

    def remember(self, **objects: Stateful) -> None:
        """Save these objects' `state_dict()` in every checkpoint, each rank its own; `resume` restores them.

        `engine.remember(scheduler=scheduler, loader=loader)`. All ranks call, before `resume`.
        """
        self._state.remembered.update(objects)
        for name, thing in objects.items():
            if name in self._state.coming:
                thing.load_state_dict(decode(self._state.coming.pop(name), name))

    def wait_for_save(self) -> None:
        """Return once the last `save(wait=False)` is on disk; raise `CheckpointError` if it failed. All ranks call.

        In an elastic job, what a lost rank has not finished is written again, if no step was taken since.
        """
        self._asking(lambda: self._state.wait_for_save(self._sharded))

    def resume(self, folder: str | Path) -> Loaded | None:
        """Continue from the latest checkpoint in `folder`; `None`, and no change, if there is none.

        `folder` may also be one checkpoint. It may have been written with any world size, plan and precision. All ranks
        call; if it is damaged or another model's, all raise the same `CheckpointError` and nothing is changed.

        A rank that has joined ranks in training has their values already and reads nothing: it gets the number of steps
        they have taken, and their `state` as saved or resumed last (empty if it never was), or `None` if they have
        taken no step yet.
        """
        self._require_open()
        if self._session is not None and self._session.is_arriving:
            return self._session.resumed(Path(folder))
        self.wait_for_copy()
        self._sharded.unfreezing.replan_now()
        found = self._state.resume(self._sharded, Path(folder))
        if found is not None and self._session is not None:
            self._session.note_edit()
        return found

    def reshard(self, plan: PlanLike) -> None:
        """Continue with another plan: another table, mesh, units or precision over the same ranks. All ranks call.

        Parameters, optimizer states and counters are kept, and moved between the ranks unit by unit; model, optimizer
        and schedulers stay the same objects. Call it between steps: raises `StateError` while gradients wait for a
        step, `ConfigError` for a plan that is impossible here, and `TierError` for a disk without room; nothing has
        been changed then. If the disk of any rank fails while values move, all raise a `TierError` that names it: the
        new plan is in effect then, and `resume` on all ranks fills it from the last checkpoint.
        """
        self._require_open()
        self._sharded.refuse_stages("reshard()", "Save, make another engine, and resume from the checkpoint.")
        self._sharded, lost = reshard(self._sharded, load_plan(plan))
        if self._session is not None:
            self._session.renew(self._sharded)
        if self._run_log is not None:
            self._run_log.follow(self._sharded)
        if lost is not None:
            raise lost
        self._ask_for_room_first()

    def _ask_for_room_first(self) -> None:
        """Let the first forward that trains ask for disk space, if activations need any."""
        if self._sharded.plan.has_activations_on_disk:
            from shardwise.activation_room import ask_before_first_forward  # only these jobs load it

            ask_before_first_forward(self._sharded)

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        dtype: Literal["fp32", "bf16", "fp16"] | None = None,
        max_file_bytes: int = 5 * 2**30,
        overwrite: bool = False,
    ) -> None:
        """Write the model as a Hugging Face folder, for `from_pretrained`. All ranks call.

        Works unit by unit: no rank ever has the whole model; rank 0 writes. Parameters have the precision in which the
        optimizer keeps them, unless `dtype` asks for another. A model of the transformers library gets its
        configuration too; for any other module the folder has its state dict, as `model.safetensors`, split at
        `max_file_bytes`. Raises `CheckpointError` on all ranks if `folder` is not empty and `overwrite` is not given.
        """
        self._require_open()
        self._sharded.refuse_stages("save_pretrained()", "Save, then run: shardwise convert CHECKPOINT MODEL --to hf.")
        formats.save_pretrained(
            self.module,
            self._sharded.access.kept_params(),
            self._sharded.access.whole_params(),
            self.world,
            Path(folder),
            dtype=None if dtype is None else formats.DTYPES[dtype],
            max_file_bytes=max_file_bytes,
            overwrite=overwrite,
        )

    # -- whole tensors ----------------------------------------------------------------------------------

    def gathered(self, *names: str, write: bool = False) -> AbstractContextManager[None]:
        """Inside `with`, the named parameters of the model (all, without names) are whole on every rank.

        With `write`, all ranks take over rank 0's edits on leaving. All ranks enter and leave. Raises `ModelError` for
        an unknown name, and for parameters that `tp` or `ep` split.
        """
        self._require_open()
        self._sharded.refuse_stages("gathered()", "engine.get(name) and engine.set(name, value) reach every stage.")
        if write:
            self._before_change()
        return self._sharded.access.gathered(names, write=write)

    def get(self, name: str, what: str = "param") -> torch.Tensor | None:
        """A whole tensor by the parameter's name, on every rank. All ranks call.

        `what` is `param`, `grad` (between backward and step, averaged over ranks), or a state of the optimizer such as
        `exp_avg`. The result is in the dtype in which it is kept; `None` if there is none. Raises `ModelError` for an
        unknown name.
        """
        self._require_open()
        if self._is_arriving:
            return self._sharded.access.read_here(name, what)
        if what == "grad":
            self._sharded.gradients.prepare()
        if self._sharded.pipeline is not None:
            return self._sharded.pipeline.across.read(name, what, self._sharded.access)
        return self._asking(lambda: self._sharded.access.read(name, what), is_small=False)

    def set(self, name: str, value: torch.Tensor, what: str = "param") -> None:
        """Replace what `get` returns. All ranks call, with the same value, of the whole tensor's shape."""
        self._require_open()
        if what == "grad":
            self._sharded.gradients.prepare()
        self._before_change()
        if self._sharded.pipeline is None or self._sharded.pipeline.across.takes(name, value, what):
            self._sharded.access.write(name, value, what)
        if what == "grad":
            self._sharded.gradients.changed()  # on all ranks and stages: the norm is one of all

    def state_dict(self, *, rank_0_only: bool = False) -> dict[str, torch.Tensor]:
        """The plain model's `state_dict`, whole, on the CPU, for `model.load_state_dict` anywhere. All ranks call.

        Works unit by unit, so that no device holds more than one. With `rank_0_only` all other ranks get `{}`.
        """
        self._require_open()
        on_rank = not rank_0_only or self.world.rank == 0
        if self._is_arriving:
            return self._sharded.access.state_dict(on_rank=on_rank, is_alone=True)
        if self._sharded.pipeline is not None:
            whole = self._sharded.pipeline.across.merged(self._sharded.access.state_dict())
            return whole if on_rank else {}
        return self._asking(lambda: self._sharded.access.state_dict(on_rank=on_rank), is_small=False)

    def load_state_dict(self, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
        """Load a plain model's `state_dict`, the same on every rank. All ranks call.

        With `strict=False`, as in torch, what the state lacks keeps its value, and what only the state has is ignored.
        Raises `ModelError` if shapes or, with `strict`, names differ.
        """
        self._require_open()
        self._before_change()
        if self._sharded.pipeline is not None:
            state = self._sharded.pipeline.across.own_part(state, strict=strict)
        self._sharded.access.load_state_dict(state, strict=strict)

    def optimizer_state_dict(self, *, rank_0_only: bool = False) -> dict[str, Any]:
        """The plain optimizer's `state_dict()`, whole, on the CPU. All ranks call; see `state_dict`."""
        self._require_open()
        self._sharded.refuse_stages("optimizer_state_dict()", "Checkpoints have the states: engine.save(folder).")
        if self._is_arriving:
            raise arriving_error("optimizer_state_dict()")
        return self._asking(
            lambda: self._sharded.access.optimizer_state_dict(on_rank=not rank_0_only or self.world.rank == 0),
            is_small=False,
        )

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a plain optimizer's `state_dict()`, the same on every rank. All ranks call.

        `optimizer.load_state_dict` does the same.
        """
        self._require_open()
        self._sharded.refuse_stages("load_optimizer_state_dict()", "Checkpoints have them: engine.resume(folder).")
        self._sharded.unfreezing.replan_now()
        self._sharded.require_optimizer().load_state_dict(state)
