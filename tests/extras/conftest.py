"""Settings of the tests that need other people's libraries."""

from __future__ import annotations

import torch

# torchvision's package for Linux is built for CUDA, and its kernels do not load beside a torch without CUDA. Its
# models need none of them, but it gives two of them a shape function while it is imported, and fails if there are no
# such operators. Then we declare them. A build whose kernels load is left alone.
try:
    import torchvision  # noqa: F401
except ModuleNotFoundError:
    pass  # tests beside DeepSpeed run without it
except RuntimeError as error:
    if "torchvision::nms" not in str(error):
        raise
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
