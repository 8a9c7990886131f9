"""Which module is cut how: by the user's patterns, the model's own plan, or a ready table."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.config import StyleName, TensorParallel
from shardwise.errors import ConfigError, ModelError, nearest
from shardwise.tensor.adapters import is_adapted, rules_inside, trained_copies
from shardwise.tensor.tables import (
    EXPERTS_STYLE,
    LEFT_OUT,
    READY,
    STYLES,
    TensorRule,
    config_of,
    groups_of,
    heads_of,
    ready_for,
)


@dataclass(frozen=True)
class Cut:
    """How one module is cut. `heads` are attention heads among its features (of each fused part), `groups` the key and
    value heads of the attention that it belongs to; neither is cut in two. Without them any feature is a boundary."""

    path: str
    module: nn.Module
    style: StyleName
    parts: int = 1
    heads: int | None = None
    groups: int | None = None
    wrapper: str = ""
    """The module that stands in its place in the model, if adapters are wrapped around it."""

    @property
    def parent(self) -> str:
        """The path of the module that it is a part of."""
        return (self.wrapper or self.path).rpartition(".")[0]


def cuts_for(model: nn.Module, wishes: TensorParallel, apart: Collection[str] = ()) -> list[Cut]:
    """The modules of `model` that are cut, in its order; those of the names `apart` are not, by its own plan.

    Raises `ConfigError` for a pattern that fits no module, and `ModelError` for a model without any plan.
    """
    rules = _own_rules(model, apart) if wishes.plan is None else _asked(wishes.plan)
    modules = dict(model.named_modules())
    chosen = _matched(rules, modules, must_fit=wishes.plan is not None)
    config = config_of(model)
    chosen |= _tied(chosen, modules)
    chosen, wrapper_of = _inside_wrappers(chosen, modules)
    if wrapper_of and wishes.sequence:
        wrapper = next(iter(wrapper_of.values()))
        raise ModelError(f"{wrapper} has adapters, which tensor.sequence cannot cut. Leave it out of the plan.")
    if wishes.cut_logits:
        chosen |= dict.fromkeys(head_of(model)[:1], TensorRule("vocabulary_cut"))
    cuts = [
        _cut(path, modules[path], chosen[path], config, wrapper_of.get(path, "")) for path in modules if path in chosen
    ]
    cuts = [cut for cut in cuts if cut.style != "replicated"]
    if not any(cut.style not in ("summed", "mla_kv_a_proj") for cut in cuts):
        raise ModelError(
            f"The plan's tensor.plan cuts no module of {type(model).__name__}; give it patterns of modules."
        )
    return cuts


def _matched(
    rules: Mapping[str, TensorRule], modules: Mapping[str, nn.Module], *, must_fit: bool
) -> dict[str, TensorRule]:
    """The rule of each module that a pattern fits, the last one."""
    chosen: dict[str, TensorRule] = {}
    for pattern, rule in rules.items():
        fitting = list(_fitting(pattern, modules))
        if must_fit and not fitting:
            raise ConfigError(
                f"The plan's tensor.plan has the pattern {pattern!r}, which fits no module. {nearest(pattern, modules)}"
            )
        chosen |= dict.fromkeys(fitting, rule)
    return chosen


def _inside_wrappers(
    chosen: Mapping[str, TensorRule], modules: Mapping[str, nn.Module]
) -> tuple[dict[str, TensorRule], dict[str, str]]:
    """The rules, with those of what is inside in the place of those of modules that adapters are wrapped around; and
    what is inside of which wrapper."""
    rules: dict[str, TensorRule] = {}
    wrapper_of: dict[str, str] = {}
    for path, rule in chosen.items():
        inside = rules_inside(path, modules[path], rule) if is_adapted(modules[path]) else {}
        inside |= dict.fromkeys(trained_copies(path, modules[path]), rule)
        rules |= inside or {path: rule}
        wrapper_of |= dict.fromkeys(inside, path)
    return rules, wrapper_of


def head_of(model: nn.Module) -> tuple[str, nn.Module]:
    """The head of a causal language model of transformers whose loss can be another, by path."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    path = next((path for path, module in model.named_modules() if module is head), None)
    if head is None or path is None or not hasattr(type(model), "loss_function") or not _is_causal(model):
        raise ModelError(
            f"tensor.cut_logits is for causal language models of transformers, and {type(model).__name__} is none. "
            f"Give the head the style vocabulary_cut, and call shardwise.tensor.cross_entropy(logits, targets, head)."
        )
    return path, head


def _is_causal(model: nn.Module) -> bool:
    return "CausalLM" in str(getattr(model, "loss_type", "")) or type(model).__name__.endswith(
        ("CausalLM", "LMHeadModel")
    )


def divided(model: nn.Module, wishes: TensorParallel) -> Iterator[tuple[str, nn.Module, str]]:
    """Attributes that count what is cut: path, module and name of each."""
    modules = dict(model.named_modules())
    ready = ready_for(model) if wishes.plan is None else None
    for pattern, names in {**(ready.divide if ready is not None else {}), **wishes.divide}.items():
        fitting = list(_fitting(pattern, modules))
        if not fitting and pattern in wishes.divide:
            raise ConfigError(
                f"The plan's tensor.divide has the pattern {pattern!r}, which fits no module. "
                f"{nearest(pattern, modules)}"
            )
        for path in fitting:
            for name in names:
                value = getattr(modules[path], name, None)
                if pattern in wishes.divide and type(value) is not int:
                    raise ConfigError(
                        f"The plan's tensor.divide names {name} of {path}, which is {value!r} and not a whole number."
                    )
                if type(value) is int:
                    yield path, modules[path], name


def by_head(model: nn.Module, wishes: TensorParallel) -> Iterator[tuple[str, nn.Module, str]]:
    """Modules that are given something for every head: path, module and the name of the argument."""
    ready = ready_for(model) if wishes.plan is None and not getattr(model, "_tp_plan", None) else None
    modules = dict(model.named_modules())
    for pattern, argument in (ready.by_head if ready is not None else {}).items():
        for path in _fitting(pattern, modules):
            yield path, modules[path], argument


def _asked(plan: Mapping[str, Any]) -> dict[str, TensorRule]:
    """The user's, which the schema has checked."""
    return {
        pattern: TensorRule(**({"style": rule} if isinstance(rule, str) else rule)) for pattern, rule in plan.items()
    }


def _own_rules(model: nn.Module, apart: Collection[str]) -> Mapping[str, TensorRule]:
    """Those that the model brings, or that we have for it, but for modules `apart` and their parameters."""
    brought = brought_rules(model, apart)
    if brought:
        stacked = [pattern for pattern, style in brought.items() if style == EXPERTS_STYLE]
        return {
            pattern: TensorRule(_translated(model, pattern, style))
            for pattern, style in brought.items()
            if pattern not in stacked and pattern.rpartition(".")[0] not in stacked  # see `stacked.py`
        }
    ready = ready_for(model)
    if ready is not None:
        return ready.rules
    known = ", ".join(READY)
    raise ModelError(
        f"{type(model).__name__} brings no tensor-parallel plan, and shardwise has none for it (it has for {known}). "
        f"Say which modules are cut, by patterns of names: tensor: {{plan: {{h.*.mlp.up: column, h.*.mlp.down: row}}}}"
    )


def brought_rules(model: nn.Module, apart: Collection[str]) -> dict[str, str]:
    """The tensor-parallel plan that the model brings, without modules `apart` and their parameters."""
    brought: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
    if brought:
        brought |= LEFT_OUT.get(str(getattr(config_of(model), "model_type", "")), {})
    for pattern in list(brought):
        around = (pattern, pattern.rpartition(".")[0])
        if any(fits(path, one) for path in apart for one in around):
            del brought[pattern]
    return brought


def _translated(model: nn.Module, pattern: str, style: str) -> StyleName:
    if style not in STYLES:
        raise ModelError(
            f"{type(model).__name__}'s own tensor-parallel plan has the style {style!r} for {pattern}, which this "
            f"version does not have; it has {', '.join(STYLES)}. Give a plan of your own: tensor.plan."
        )
    return STYLES[style]


def _fitting(pattern: str, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Modules of that name, whatever they are in."""
    return (path for path in modules if path and fits(path, pattern))


def fits(path: str, pattern: str) -> bool:
    """Whether a module's path, or the end of it, matches a pattern."""
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, f"*.{pattern}")


def _tied(chosen: Mapping[str, TensorRule], modules: Mapping[str, nn.Module]) -> dict[str, TensorRule]:
    """What shares its weight with a module that is cut by words is cut by words too."""
    by_words = ("vocabulary", "vocabulary_cut", "column_gathered")
    weights = {
        id(modules[path].weight)
        for path, rule in chosen.items()
        if rule.style in by_words and _has_weight(modules[path])
    }
    return {
        path: TensorRule("vocabulary")
        for path, module in modules.items()
        if path not in chosen and _has_weight(module) and id(module.weight) in weights
    }


def _has_weight(module: nn.Module) -> bool:
    return isinstance(module._parameters.get("weight"), nn.Parameter)


def _cut(path: str, module: nn.Module, rule: TensorRule, config: object, wrapper: str) -> Cut:
    if (
        rule.heads is not None
        or config is None
        or rule.style in ("vocabulary", "vocabulary_cut", "summed", "replicated")
    ):
        return Cut(path, module, rule.style, rule.parts, rule.heads, rule.heads, wrapper)
    known = heads_of(config, wrapper or path) if rule.style in ("column", "row") else None
    if known is None:
        return Cut(path, module, rule.style, rule.parts, wrapper=wrapper)
    return Cut(path, module, rule.style, rule.parts, known[0], groups_of(config), wrapper)
