"""Dynamic loss scaling for fp16: the rule of DeepSpeed and Megatron-LM (arXiv:1710.03740, section 3.2).

The loss, and so every gradient, is scaled up, so that small gradients are not rounded to zero. If a gradient overflows
on any rank, all ranks skip the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shardwise.errors import StateError
from shardwise.plan import LossScale

FACTOR = 2.0


class LossScaler:
    """The current scale. Every rank has its own scaler, and all see the same norms, so all stay equal.

    It doubles after `window` steps in a row without an overflow. An overflow uses up one of `hysteresis` chances, which
    are restored when the scale doubles; an overflow with no chance left halves the scale.
    """

    def __init__(self, settings: LossScale) -> None:
        self.settings = settings
        self.scale = settings.initial
        self.num_skipped = 0
        """Steps skipped because of an overflow."""
        self._good_steps = 0
        self._chances = settings.hysteresis

    def judge(self, norm: float) -> bool:
        """Process the norm of a step's gradients; returns whether the step may be taken."""
        overflowed = not math.isfinite(norm)
        if overflowed:
            self.num_skipped += 1
        if not self.settings.dynamic:
            return not overflowed
        if overflowed:
            self._shrink()
        else:
            self._grow()
        return not overflowed

    def state_dict(self) -> dict[str, float]:
        return {
            "scale": self.scale,
            "num_skipped": self.num_skipped,
            "good_steps": self._good_steps,
            "chances": self._chances,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale = float(state["scale"])
        self.num_skipped = int(state["num_skipped"])
        self._good_steps = int(state["good_steps"])
        self._chances = int(state["chances"])

    def _grow(self) -> None:
        self._good_steps += 1
        if self._good_steps % self.settings.window == 0:
            self.scale *= FACTOR
            self._chances = self.settings.hysteresis

    def _shrink(self) -> None:
        self._good_steps = 0
        if self._chances > 1:
            self._chances -= 1
            return
        if self.scale <= self.settings.minimum:
            raise StateError(
                f"The gradients overflow fp16 even at the smallest loss scale, {self.scale:g}. The loss or the "
                f"gradients are not finite by themselves: look at the data and the learning rate, or train in bf16."
            )
        self.scale = max(self.scale / FACTOR, self.settings.minimum)
