"""What integrations change in a model is undone with its engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_transformers import llama
from transformers.distributed.fsdp import is_fsdp_managed_module

import shardwise as sw
from shardwise.integrations.accelerate_coordination import Coordination
from shardwise.integrations.model_patches import patch_zero_grad, refuse_no_sync, remove_patches, synchronize_generation
from shardwise.testing import run_ranks


@pytest.mark.parametrize("plan", [{"preset": "zero3"}, {"preset": "ddp", "mesh": {"pp": 2}}])
def test_what_was_changed_is_as_before(plan: dict[str, Any]) -> None:
    """The model may be given to another library, and generate on one rank, which would wait for the others with the
    mark of a sharded one."""
    models = [llama() for _ in range(2)]

    def rank(world: sw.World) -> None:
        model = models[world.rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sw.shard(model, plan, optimizer=optimizer, world=world) as engine:
            before = parts_of(model)
            coordination = Coordination({model: engine})
            coordination.register(model, main_process_reads_alone=True, records=True)
            patch_zero_grad(model, engine)
            refuse_no_sync(model)
            synchronize_generation(model)
            assert is_fsdp_managed_module(model)
            remove_patches(model)
            coordination.unregister(model)
            assert not is_fsdp_managed_module(model)
            assert parts_of(model) == before

    run_ranks(2, rank)


def parts_of(model: torch.nn.Module) -> list[tuple[str, list[str], int, object]]:
    """By module: its own attributes, the number of its hooks, and what a call of it runs."""
    return [
        (name, sorted(vars(module)), len(module._forward_pre_hooks), vars(module).get("_compiled_call_impl"))
        for name, module in model.named_modules()
    ]
