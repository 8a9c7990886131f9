"""What Accelerate's `mixed_precision="fp8"` and its settings mean under a plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.errors import ConfigError
from shardwise.system.flags import says_yes

PREFIX = "ACCELERATE_FP8_"
_DELAYED = {"margin": 0, "interval": 1, "amax_history_len": 1024, "amax_compute_algo": "most_recent"}
"""Settings of TransformerEngine's delayed scaling, with Accelerate's defaults."""
_PRODUCTS = ("fprop", "dgrad", "wgrad")
_TORCHAO_IGNORED = ("enable_fsdp_float8_all_gather", "pad_inner_dim", "emulate", "force_recompute_fp8_weight_in_bwd")
"""Fields of a `Float8LinearConfig` that say nothing about how factors are rounded."""


@dataclass(frozen=True)
class Fp8Request:
    """What was asked for: a recipe of the plan's `fp8`, and which layers, if a function says that."""

    recipe: str
    chooses: Callable[[nn.Module, str], bool] | None = None
    """Accelerate's `module_filter_func`, of a module and its name: whether it multiplies in fp8."""
    notes: tuple[str, ...] = ()
    """What was asked for beside that and means something else here."""

    def settings(self, model: nn.Module) -> dict[str, Any]:
        """The plan's `fp8` for `model`."""
        if self.chooses is None:
            return {"recipe": self.recipe}
        linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        return {"recipe": self.recipe, "skip": [name for name, module in linear if not self.chooses(module, name)]}


def backend_asked_for(environment: Mapping[str, str]) -> str:
    """`AO`, `TE`, `MSAMP`, or `NO` if nothing says which."""
    return environment.get(f"{PREFIX}BACKEND", "NO").upper()


def request_of(accelerator: Any) -> Fp8Request:
    """What an `Accelerator` was given, in arguments or in its environment. Raises `ConfigError` for what a plan has no
    equivalent of."""
    older, engine = accelerator.fp8_recipe_handler, accelerator.te_recipe_handler
    backend = backend_asked_for(os.environ)
    if accelerator.msamp_recipe_handler is not None or backend == "MSAMP" or getattr(older, "backend", "") == "MSAMP":
        raise ConfigError(
            "MS-AMP keeps gradients and optimizer states in 8 bits, which no plan does. For products in fp8 take "
            "AORecipeKwargs() or fp8: tensorwise in the plan; for smaller states sw.optim.AdamW(state_dtype='bf16')."
        )
    given = engine if engine is not None else older
    if given is not None:
        return of_transformer_engine({name: getattr(given, name, None) for name in (*_NAMES, *_DELAYED)})
    if backend == "TE":
        return of_transformer_engine(_in_environment(os.environ))
    chosen = accelerator.ao_recipe_handler
    return Fp8Request("tensorwise") if chosen is None else of_torchao(chosen.config, chosen.module_filter_func)


_NAMES = ("fp8_format", "override_linear_precision", "use_mxfp8_block_scaling", "use_autocast_during_eval")


def of_transformer_engine(given: Mapping[str, Any]) -> Fp8Request:
    """The request that the fields of `TERecipeKwargs` make; those that are `None` have their defaults."""
    known = {name: value for name, value in given.items() if value is not None}
    kind = str(known.get("fp8_format", "HYBRID")).upper()
    if kind not in ("HYBRID", "E4M3"):
        raise ConfigError(f"fp8_format {kind} is for evaluation. For training take HYBRID.")
    fprop, dgrad, wgrad = (bool(one) for one in known.get("override_linear_precision", (False, False, False)))
    if fprop or dgrad:
        raise ConfigError(
            "override_linear_precision keeps the forward's product or that of input gradients out of fp8, and no "
            "recipe of a plan does. (False, False, True) is fp8: rowwise_with_gw_hp."
        )
    notes = [
        f"{name} {known[name]} is of delayed scaling; scales are those of the tensors themselves, as in torchao"
        for name, usual in _DELAYED.items()
        if known.get(name, usual) != usual
    ]
    if known.get("use_autocast_during_eval") is False:
        notes.append("use_autocast_during_eval False: evaluation computes in fp8 too, as training does")
    if known.get("use_mxfp8_block_scaling"):
        if wgrad:
            raise ConfigError("use_mxfp8_block_scaling rounds weight gradients: leave override_linear_precision out.")
        return Fp8Request("mxfp8", notes=tuple(notes))
    if kind == "E4M3" and not wgrad:
        notes.append("fp8_format E4M3: gradients are in E5M2, as with HYBRID; fp8: rowwise in the plan has E4M3 alone")
    return Fp8Request("rowwise_with_gw_hp" if wgrad else "tensorwise", notes=tuple(notes))


def of_torchao(config: Any, chooses: Callable[[nn.Module, str], bool] | None) -> Fp8Request:
    """The request that a `Float8LinearConfig` of torchao makes. Raises `ConfigError` if it is none of its recipes."""
    from torchao.float8 import Float8LinearConfig

    names = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    for name in names:
        if _rounds_like(config, Float8LinearConfig.from_recipe_name(name)):
            return Fp8Request(name, chooses)
    raise ConfigError(
        f"This Float8LinearConfig rounds like none of torchao's recipes, which a plan has: {', '.join(names)}. Make it "
        f"with Float8LinearConfig.from_recipe_name(...), or set fp8 in the plan."
    )


def _rounds_like(config: Any, other: Any) -> bool:
    return all(getattr(config, name) == value for name, value in vars(other).items() if name not in _TORCHAO_IGNORED)


def _in_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The fields that `accelerate launch` has put into the environment of ranks."""

    def flag(name: str) -> bool:
        return says_yes(environment.get(f"{PREFIX}{name}"))

    found: dict[str, Any] = {
        "fp8_format": environment.get(f"{PREFIX}FORMAT"),
        "override_linear_precision": tuple(flag(f"OVERRIDE_{name.upper()}") for name in _PRODUCTS),
        "use_mxfp8_block_scaling": flag("USE_MXFP8_BLOCK_SCALING"),
        "use_autocast_during_eval": flag("USE_AUTOCAST_DURING_EVAL"),
        "amax_compute_algo": environment.get(f"{PREFIX}AMAX_COMPUTE_ALGO", "most_recent").lower(),
    }
    for name in ("margin", "interval", "amax_history_len"):
        value = environment.get(f"{PREFIX}{name.upper()}")
        found[name] = None if value is None else int(value)
    return found


def variables_of(section: Mapping[str, Any]) -> dict[str, str]:
    """The environment of ranks for the section `fp8_config` of a file of `accelerate config`."""
    found: dict[str, str] = {}
    for key, value in section.items():
        name = _LONGER.get(key, key.removeprefix("fp8_"))
        if name == "override_linear_precision":
            flags = value.split(",") if isinstance(value, str) else value
            found |= {
                f"{PREFIX}OVERRIDE_{product.upper()}": str(one).strip().lower()
                for product, one in zip(_PRODUCTS, flags, strict=True)
            }
        elif value is not None:
            found[f"{PREFIX}{name.upper()}"] = str(value)
    return found


_LONGER = {
    "amax_history_length": "amax_history_len",
    "amax_compute_algorithm": "amax_compute_algo",
    "optimization_level": "opt_level",
}
"""As `accelerate config` writes them."""
