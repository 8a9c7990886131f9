"""Along `tp`, code in a forward that takes a weight of which each rank has a part: equal, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import small_transformers
import torch
from split_models import TENSOR, Transformer, tokens
from torch import nn
from torch.nn import functional
from twins import work_on_mesh

import shardwise as sw
from shardwise.errors import ModelError
from tests.ranks.test_head_counts import IN_STAGES, alone, run
from tests.thorough import sampled

Tensor = torch.Tensor
Take = Callable[[Any, Tensor], Tensor]
"""Something of a module and its output."""
OF_A_PART: dict[str, Take] = {
    "its norm": lambda module, made: made * module.weight.norm(),
    "its largest element": lambda module, made: made / module.weight.detach().abs().max(),
    "a mean, read": lambda module, made: made * (1 + module.weight.data.double().abs().mean().item()),
    "a row": lambda module, made: made + module.weight[0].sum(),
    "its products with itself": lambda module, made: made * (1 + (module.weight @ module.weight.mT).square().mean()),
}


def hooked(name: str, take: Take) -> Transformer:
    torch.manual_seed(0)
    built = Transformer()
    built.get_submodule(name).register_forward_hook(lambda module, _, made: take(module, made))
    return built


@sampled
@pytest.mark.parametrize("mesh", [{"tp": 2}, IN_STAGES], ids=["tp", "pp x tp"])
@pytest.mark.parametrize("name", ["blocks.0.up", "blocks.0.down"])
@pytest.mark.parametrize("take", OF_A_PART)
def test_a_hook_that_takes_a_part_for_the_whole_is_refused(take: str, name: str, mesh: dict[str, int]) -> None:
    with pytest.raises(ModelError, match=rf"^{name}, or a hook of it, takes \w+ of {name}.weight in its forward"):
        run(partial(hooked, name, OF_A_PART[take]), TENSOR, mesh=mesh)


def test_so_is_one_in_a_later_stage_of_a_rank() -> None:
    built = Transformer(num_blocks=4)
    built.blocks[2].up.register_forward_hook(lambda module, _, made: made * module.weight.norm())
    plan: dict[str, Any] = {"preset": "zero1", "mesh": IN_STAGES, "tensor": TENSOR, "accumulate": 2}
    stages = [["embed", "positions", "blocks.0"], ["blocks.1"], ["blocks.2"], ["blocks.3", "norm", "head"]]

    plan["pipeline"] = {"schedule": "interleaved", "stages": stages}
    with pytest.raises(ModelError, match=r"takes norm of blocks\.2\.up\.weight"):
        work_on_mesh(lambda engine: engine.train_step(tokens(0)), plan, built)


def test_what_is_right_by_parts_trains_as_without_a_split() -> None:
    build = partial(hooked, "blocks.0.up", lambda module, made: made * (1 + module.weight.norm(dim=1)))
    expected, _ = alone(build)
    for losses in run(build, TENSOR):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_a_hook_that_does_so_in_training_alone_is_refused_after_an_evaluation() -> None:
    def take(module: nn.Module, made: Tensor) -> Tensor:
        return made * module.weight.norm() if module.training else made

    def work(engine: sw.Engine) -> None:
        engine.module.eval()
        with torch.no_grad():
            engine(tokens(0))
        engine.module.train()
        with pytest.raises(ModelError, match=r"takes norm of blocks\.0\.up\.weight"):
            engine(tokens(0))

    work_on_mesh(work, {"preset": "zero1", "mesh": {"tp": 2}, "tensor": TENSOR}, hooked("blocks.0.up", take))


def fused(model: Any, input_ids: Tensor) -> Tensor:
    """The loss of a forward that is patched into a model, and multiplies with the head's weight by itself."""
    hidden = model.model(input_ids=input_ids).last_hidden_state
    logits = hidden.flatten(0, 1) @ model.lm_head.weight.t()
    return functional.cross_entropy(logits, input_ids.flatten())


def penalized(model: Any, input_ids: Tensor) -> Tensor:
    loss: Tensor = type(model).forward(model, input_ids=input_ids, labels=input_ids).loss
    return loss + 1e-3 * model.model.layers[0].self_attn.q_proj.weight.norm()


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (fused, r"The model computes with lm_head.weight, \[97, 32\], of which tensor.plan leaves"),
        (penalized, r"The model computes with model.layers.0.self_attn.q_proj.weight, \[32, 32\]"),
    ],
)
def test_a_forward_patched_into_a_model_with_a_plan_of_its_own_is_refused(forward: Any, said: str) -> None:
    built = small_transformers.llama()
    built.forward = MethodType(forward, built)

    def work(engine: sw.Engine) -> None:
        with pytest.raises(ModelError, match=said):
            engine(torch.arange(12).view(2, 6))

    work_on_mesh(work, {"preset": "zero1", "mesh": {"tp": 2}}, built)
