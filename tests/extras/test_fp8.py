"""fp8 against torchao, whose recipes these are; and under Accelerate, whose settings become a plan's."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import yaml
from accelerate.commands.config import cluster
from accelerate.commands.launch import launch_command_parser
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import AORecipeKwargs, FP8RecipeKwargs, TERecipeKwargs
from accelerate.utils import dataclasses as accelerate_settings
from lightning.fabric.plugins.precision.precision import _PRECISION_INPUT_STR
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.config import CastConfig
from torchao.prototype.moe_training.mxfp8_linear import mx_mm
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

import shardwise as sw
from shardwise.errors import ConfigError, ModelError
from shardwise.integrations import accelerate_launch
from shardwise.integrations.accelerate import Accelerator
from shardwise.integrations.accelerate_config import read_accelerate_config
from shardwise.integrations.accelerate_fp8 import (
    Fp8Request,
    of_torchao,
    of_transformer_engine,
    request_of,
    variables_of,
)
from shardwise.integrations.lightning_parts.settings import PRECISIONS, plan_for
from shardwise.parallel.conversions import conversions_of, convert
from shardwise.parallel.fp8.linear import Fp8Linear
from shardwise.testing import run_ranks

Tensor = torch.Tensor
TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


class MxLinear(nn.Linear):
    """torchao's layer with MX blocks, as it computes without a GPU."""

    def forward(self, input: Tensor) -> Tensor:
        e4m3, by_torch = torch.float8_e4m3fn, MXFP8Dim1CastKernelChoice.TORCH
        made: Tensor = mx_mm.apply(
            input,
            self.weight,
            e4m3,
            e4m3,
            e4m3,
            32,
            KernelPreference.EMULATED,
            MXFP8Dim0CastKernelChoice.TORCH,
            by_torch,
            ScaleCalculationMode.RCEIL,
            False,
        )
        return made


def torchao_layer(layer: nn.Linear, recipe: str) -> nn.Module:
    copied = copy.deepcopy(layer)
    if recipe == "mxfp8":
        copied.__class__ = MxLinear
        return copied
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    converted: nn.Module = convert_to_float8_training(nn.Sequential(copied), config=config)[0]
    return converted


def results(layer: nn.Module, inputs: Tensor, grad: Tensor) -> list[Tensor]:
    given = inputs.clone().requires_grad_()
    made = layer(given)
    return [made, *torch.autograd.grad(made, [given, layer.weight], grad)]  # type: ignore[list-item]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", [*TORCHAO, "mxfp8"])
def test_layers_equal_torchao_s(recipe: str, dtype: torch.dtype) -> None:
    """Codes, scales, and what is saved and rounded again: all of it, or results would differ by 1e-2."""
    layer = nn.Linear(96, 64, bias=False).to(dtype)
    inputs, grad = torch.randn(2, 32, 96).to(dtype), torch.randn(2, 32, 64).to(dtype)
    ours = nn.Sequential(copy.deepcopy(layer))
    convert(ours, conversions_of(sw.Plan(fp8={"recipe": recipe, "skip": []}), ours))
    found, expected = results(ours[0], inputs, grad), results(torchao_layer(layer, recipe), inputs, grad)
    tolerance = 1e-6 if dtype == torch.float32 else 2.0**-7
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= tolerance * other.norm()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def of_blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), Block(), Block(), nn.Linear(32, 16))


def by_torchao(model: nn.Module) -> nn.Module:
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    return convert_to_float8_training(model, config=config)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("plan", [{"preset": "ddp"}, {"preset": "zero3", "fp8": {"recipe": "tensorwise", "skip": []}}])
def test_a_model_that_torchao_has_converted_trains_as_it_does_alone(plan: dict[str, Any]) -> None:
    """`fp8` in the plan leaves its layers alone. What is converted after `shard` is refused."""
    data = [torch.randn(16, 32, generator=torch.Generator().manual_seed(step)) for step in range(3)]
    plain, expected = by_torchao(of_blocks()), []
    optimizer = sgd(plain)
    for x in data:
        optimizer.zero_grad()
        losses = [(plain(part) - 1).square().mean() for part in x.chunk(2)]
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
        expected.append(torch.stack(losses).mean().item())
    models = [of_blocks() for _ in range(2)]

    def rank(world: sw.World) -> list[float]:
        model, found = by_torchao(models[world.rank]), []
        with sw.shard(model, plan, optimizer=sgd(model), world=world) as engine:
            for x in data:
                loss = (engine(x.chunk(2)[world.rank]) - 1).square().mean()
                engine.backward(loss)
                engine.step()
                found.append(engine.mean(loss.item()))
        return found

    for found in run_ranks(2, rank):
        assert found == pytest.approx(expected, rel=1e-5)
    late = of_blocks()

    def convert_late() -> None:
        with sw.shard(late, plan, optimizer=sgd(late)) as engine:
            by_torchao(late)
            engine(data[0])

    with pytest.raises(ModelError, match=r"was put into a model that is sharded.*before shard"):
        convert_late()


# -- settings ------------------------------------------------------------------------------------------------

TE_SETTINGS: dict[str, tuple[dict[str, Any], str, int]] = {
    "defaults": ({}, "tensorwise", 0),
    "hybrid": ({"fp8_format": "HYBRID", "amax_history_len": 1024}, "tensorwise", 0),
    "delayed": ({"amax_history_len": 16, "amax_compute_algo": "max", "margin": 2}, "tensorwise", 3),
    "e4m3": ({"fp8_format": "E4M3"}, "tensorwise", 1),
    "weights": ({"override_linear_precision": (False, False, True)}, "rowwise_with_gw_hp", 0),
    "blocks": ({"use_mxfp8_block_scaling": True, "use_autocast_during_eval": False}, "mxfp8", 1),
}


@pytest.mark.parametrize("name", TE_SETTINGS)
def test_settings_of_transformer_engine_become_a_recipe(name: str) -> None:
    given, recipe, num_notes = TE_SETTINGS[name]
    found = of_transformer_engine(given)
    assert (found.recipe, len(found.notes)) == (recipe, num_notes)


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        ({"fp8_format": "E5M2"}, "take HYBRID"),
        ({"override_linear_precision": (True, False, False)}, "rowwise_with_gw_hp"),
        ({"use_mxfp8_block_scaling": True, "override_linear_precision": (False, False, True)}, "leave override"),
    ],
)
def test_settings_of_transformer_engine_that_no_recipe_has_are_refused(given: dict[str, Any], cure: str) -> None:
    with pytest.raises(ConfigError, match=cure):
        of_transformer_engine(given)


@pytest.mark.parametrize("recipe", TORCHAO)
def test_configs_of_torchao_become_their_recipe(recipe: str) -> None:
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True)
    assert of_torchao(config, None) == Fp8Request(recipe)
    odd = Float8LinearConfig(cast_config_grad_output=CastConfig(target_dtype=torch.float8_e4m3fn))
    with pytest.raises(ConfigError, match="rounds like none of torchao's recipes"):
        of_torchao(odd, None)


def test_a_file_and_a_command_line_say_which_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = {"backend": "TE", "fp8_format": "E4M3", "override_linear_precision": [False, False, True]}
    values = {"distributed_type": "MULTI_CPU", "mixed_precision": "fp8", "fp8_config": section}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    found = read_accelerate_config(tmp_path / "config.yaml")
    assert found.unsupported == []
    assert found.environment == {
        "ACCELERATE_MIXED_PRECISION": "fp8",
        "ACCELERATE_FP8_BACKEND": "TE",
        "ACCELERATE_FP8_FORMAT": "E4M3",
        "ACCELERATE_FP8_OVERRIDE_FPROP": "false",
        "ACCELERATE_FP8_OVERRIDE_DGRAD": "false",
        "ACCELERATE_FP8_OVERRIDE_WGRAD": "true",
    }
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    asked = request_of(_Without())
    assert asked.recipe == "rowwise_with_gw_hp"
    assert asked.notes == (IN_EVALUATION,)  # which accelerate does only where it is asked to
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "MSAMP")
    with pytest.raises(ConfigError, match="MS-AMP keeps gradients and optimizer states in 8 bits"):
        request_of(_Without())


@pytest.mark.parametrize("is_asked_for", [True, False])
def test_evaluation_in_fp8_is_what_the_option_asks_for_and_is_noted_without_it(
    is_asked_for: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = argparse.ArgumentParser()
    accelerate_launch.add_options(parser, ())
    (tmp_path / "config.yaml").write_text("distributed_type: MULTI_CPU\nmixed_precision: fp8\n")
    options = ["--config_file", str(tmp_path / "config.yaml"), "--fp8_backend", "te"]
    option = ["--fp8_use_autocast_during_eval"] if is_asked_for else []
    found, _ = accelerate_launch.read_options(parser.parse_args([*options, *option, "train.py"]))
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    assert request_of(_Without()).notes == (() if is_asked_for else (IN_EVALUATION,))


IN_EVALUATION = "use_autocast_during_eval False: evaluation computes in fp8 too, as training does"


class _Without:
    """An Accelerator to which no handler was passed."""

    fp8_recipe_handler = te_recipe_handler = msamp_recipe_handler = ao_recipe_handler = None


def test_lightning_says_where_fp8_is_set() -> None:
    trainer = SimpleNamespace(accumulate_grad_batches=1, gradient_clip_algorithm="norm", gradient_clip_val=None)
    with pytest.raises(ConfigError, match="use bf16-mixed, and set fp8: tensorwise in the plan"):
        plan_for(sw.Plan(), trainer, Net(), "transformer-engine")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("chooses", [None, lambda module, name: name != "layers.2"], ids=["all", "some"])
def test_accelerator_trains_in_fp8(chooses: Any) -> None:
    AcceleratorState._reset_state()
    PartialState._reset_state()
    torch.manual_seed(0)
    model = Net()
    config = Float8LinearConfig.from_recipe_name("rowwise")
    handler = AORecipeKwargs(config=config, module_filter_func=chooses)
    plan = "zero3" if chooses is not None else {"preset": "zero3", "fp8": {"recipe": "rowwise", "skip": []}}
    accelerator = Accelerator(plan=plan, cpu=True, mixed_precision="fp8", kwargs_handlers=[handler])
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    in_fp8 = [isinstance(layer, Fp8Linear) for layer in model.layers]
    assert in_fp8 == ([True] * 4 if chooses is None else [True, True, False, True])
    before = accelerator.get_state_dict(prepared)["layers.1.weight"].clone()
    accelerator.backward(prepared(torch.randn(4, 32)))
    optimizer.step()
    after = accelerator.get_state_dict(prepared)["layers.1.weight"]
    assert after.dtype == torch.float32
    assert not torch.equal(before, after)
    accelerator.free_memory()
    AcceleratorState._reset_state()
    PartialState._reset_state()


# -- every name of the installed versions --------------------------------------------------------------------


OF_TRANSFORMER_ENGINE: dict[str, Any] = {
    "use_autocast_during_eval": False,
    "margin": 3,
    "interval": 2,
    "fp8_format": "E4M3",
    "amax_history_len": 8,
    "amax_compute_algo": "max",
    "override_linear_precision": (False, False, True),
    "use_mxfp8_block_scaling": True,
}
"""Each field of `TERecipeKwargs`, with another value than its default."""


def test_no_field_of_transformer_engines_settings_is_ignored_silently() -> None:
    """Each changes the recipe, or is named in a note."""
    assert OF_TRANSFORMER_ENGINE.keys() == {field.name for field in dataclasses.fields(TERecipeKwargs)}
    for name, value in OF_TRANSFORMER_ENGINE.items():
        found = of_transformer_engine({name: value})
        assert found.recipe != "tensorwise" or any(name in note for note in found.notes), name
    fields = {field.name for field in dataclasses.fields(AORecipeKwargs)}
    assert fields == {"config", "module_filter_func", "pad_inner_dim", "enable_fsdp_float8_all_gather"}


def test_fields_of_the_older_handler_are_those_of_transformer_engine_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What `FP8RecipeKwargs` has beside them: `backend`, and `opt_level`, which only its MS-AMP reads."""
    monkeypatch.setattr(accelerate_settings, "is_transformer_engine_available", lambda: True)
    other = {**OF_TRANSFORMER_ENGINE, "backend": "TE", "opt_level": "O1"}
    assert other.keys() == {field.name for field in dataclasses.fields(FP8RecipeKwargs)}

    def asked(**given: Any) -> Fp8Request:
        with pytest.warns(FutureWarning, match="deprecated"):
            handler = FP8RecipeKwargs(**{"use_autocast_during_eval": True, **given})
        AcceleratorState._reset_state()
        PartialState._reset_state()
        try:
            found = Accelerator(plan="zero3", cpu=True, mixed_precision="fp8", kwargs_handlers=[handler])._fp8
        finally:
            AcceleratorState._reset_state()
            PartialState._reset_state()
        assert found is not None
        return found

    for name, value in OF_TRANSFORMER_ENGINE.items():
        found = asked(**{name: value})
        assert found.recipe != "tensorwise" or any(name in note for note in found.notes), name
    assert asked() == asked(backend="TE") == asked(opt_level="O1") == Fp8Request("tensorwise")
    with pytest.raises(ConfigError, match="take AORecipeKwargs"):
        asked(backend="MSAMP")


def test_every_option_and_key_of_accelerate_about_fp8_is_known() -> None:
    ours = argparse.ArgumentParser()
    accelerate_launch.add_options(ours, ())
    known = {option for action in ours._actions for option in action.option_strings}
    theirs = {option for action in launch_command_parser()._actions for option in action.option_strings}
    of_fp8 = {option for option in theirs if option.startswith("--fp8")}
    assert len(of_fp8) > 10
    assert of_fp8 <= known
    keys = set(re.findall(r'fp8_config\["(\w+)"\]', inspect.getsource(cluster)))
    read = set(re.findall(r'env_prefix \+ "(\w+)"', inspect.getsource(accelerate_settings)))
    assert len(keys) > 8
    for key in keys:
        value = "false,false,true" if key == "override_linear_precision" else "1"
        for name in variables_of({key: value}):
            assert name.removeprefix("ACCELERATE_FP8_") in read, f"{key} becomes {name}, which accelerate never reads"


@pytest.mark.parametrize("precision", get_args(_PRECISION_INPUT_STR))
def test_lightning_has_each_precision_or_says_what_to_take(precision: str) -> None:
    trainer = SimpleNamespace(accumulate_grad_batches=1, gradient_clip_algorithm="norm", gradient_clip_val=None)
    if precision in PRECISIONS:
        plan_for(sw.Plan(), trainer, Net(), precision)
    else:
        with pytest.raises(ConfigError, match=r"Use '32-true', .*set fp8: tensorwise in the plan"):
            plan_for(sw.Plan(), trainer, Net(), precision)
