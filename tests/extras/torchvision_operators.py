"""Import this before anything that imports torchvision, which PyPI has for Linux as a build for CUDA alone.

Its operators do not load beside a torch without CUDA. Its models need none of them, but it gives two of them a shape
function while it is imported, and fails if there are no such operators: then we declare them. Only `make zoo` has
torchvision, in an environment of its own, so that no other test passes by this.
"""

from __future__ import annotations

import torch

try:
    import torchvision  # noqa: F401
except RuntimeError as error:
    if "torchvision::nms" not in str(error):
        raise
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
