"""A script of DeepSpeed, on DeepSpeed or on our engine by the same calls."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch.distributed as dist

from benchmarks.engines import adamw
from benchmarks.integrations_rank import CLIP, Script


def deepspeed(ours: bool, sharding: str, script: Script) -> None:
    """As in DeepSpeed's getting started, with buckets of a block so that there is something to overlap."""
    library: Any = importlib.import_module("shardwise.integrations.deepspeed" if ours else "deepspeed")
    if not ours:
        library.ops.__compatible_ops__ = {}  # or it compiles what it has for inference on CPUs
    library.init_distributed("gloo")
    model = script.model()
    block = sum(param.numel() for param in model.get_submodule("model.layers.0").parameters())
    stage: dict[str, Any] = {
        "stage": int(sharding[-1]), "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": block,
        "allgather_bucket_size": block,
    }  # fmt: skip
    if sharding == "zero3":
        few = 10 * script.size.dim
        stage |= {"stage3_prefetch_bucket_size": block, "stage3_param_persistence_threshold": few}
    config = {
        "train_micro_batch_size_per_gpu": script.size.batch, "gradient_clipping": CLIP, "zero_optimization": stage,
        "zero_allow_untested_optimizer": True, "steps_per_print": 1000,
    }  # fmt: skip
    engine, *_ = library.initialize(model=model, optimizer=adamw(model), config=config)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for batch in script.batches(rank, num_ranks):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        script.losses.append(total.item() / num_ranks)
        script.tick()


if importlib.util.find_spec("deepspeed"):  # once for all ranks, which are forked later
    importlib.import_module("deepspeed")
FORMS = {"deepspeed": deepspeed}
