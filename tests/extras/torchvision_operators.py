"""Import this before anything that imports torchvision."""

from __future__ import annotations

import contextlib

import torch

# Let a torchvision be imported whose compiled operators do not fit this torch: no model here needs them.
for _name in ("nms", "qnms"):
    with contextlib.suppress(RuntimeError):  # it is declared already
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
