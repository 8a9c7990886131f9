"""Which modules are split and how: by the user's patterns, the model's own plan, or our rules for known models."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.errors import ConfigError, ModelError, nearest
from shardwise.parallel.library_model import LibraryModel, library_models
from shardwise.parallel.tensor.adapters import is_adapted, rules_inside, trained_copies
from shardwise.parallel.tensor.known_models import (
    EXPERTS_STYLE,
    KNOWN_TYPES,
    LEFT_OUT,
    STYLES,
    TensorRule,
    config_of,
    groups_of,
    heads_of,
    known_model,
)
from shardwise.plan import StyleName, TensorParallel
from shardwise.system.name_patterns import matches_end


@dataclass(frozen=True)
class SplitModule:
    """One module that is split, and how.

    `heads` is the number of attention heads among its features (in each fused part), `groups` the number of key and
    value heads of its attention. No head and no group is split in two. Without them the module may be split between any
    two features.
    """

    path: str
    module: nn.Module
    style: StyleName
    parts: int = 1
    heads: int | None = None
    groups: int | None = None
    wrapper: str = ""
    """The path of the wrapper with adapters around the module; "" without adapters."""

    @property
    def parent(self) -> str:
        """The path of the parent module."""
        return (self.wrapper or self.path).rpartition(".")[0]


def targets_for(model: nn.Module, options: TensorParallel, excluded: Collection[str]) -> list[SplitModule]:
    """The modules of `model` to split, in its order. Its own plan is not applied to modules named in `excluded`.

    Raises `ConfigError` for a pattern that matches no module, and `ModelError` for a model without any plan.
    """
    modules, parts = dict(model.named_modules()), library_models(model)
    if options.plan is not None:
        chosen = _matched(_user_rules(options.plan), modules, must_match=True)
    else:
        chosen = {
            part.paths[name]: rule
            for part in parts
            for name, rule in _matched(_model_rules(part, excluded), part.paths, must_match=False).items()
        }
    configs = {path: config_of(part.module) for part in parts for path in part.paths.values()}
    chosen |= _tied(chosen, modules)
    chosen, wrapper_of = _inside_wrappers(chosen, modules)
    if wrapper_of and options.sequence:
        wrapper = next(iter(wrapper_of.values()))
        raise ModelError(
            f"{wrapper} has adapters, which tensor.sequence does not support. Leave tensor.sequence out of the plan."
        )
    if options.cut_logits:
        chosen |= dict.fromkeys([_head_of(model)], TensorRule("vocabulary_cut"))
    targets = [
        _target(path, modules[path], chosen[path], configs.get(path), wrapper_of.get(path, ""))
        for path in modules
        if path in chosen
    ]
    targets = [target for target in targets if target.style != "replicated"]
    if not any(target.style not in ("summed", "mla_kv_a_proj") for target in targets):
        raise ModelError(
            f"The plan's tensor.plan splits no module of {type(model).__name__}; give it patterns of modules."
        )
    return targets


def _matched(rules: Mapping[str, TensorRule], modules: Collection[str], *, must_match: bool) -> dict[str, TensorRule]:
    """The rule of each module that a pattern matches. Later patterns override earlier ones."""
    chosen: dict[str, TensorRule] = {}
    for pattern, rule in rules.items():
        matching = list(_matching(pattern, modules))
        if must_match and not matching:
            raise ConfigError(
                f"The plan's tensor.plan has the pattern {pattern!r}, which matches no module. "
                f"{nearest(pattern, modules)}"
            )
        chosen |= dict.fromkeys(matching, rule)
    return chosen


def _inside_wrappers(
    chosen: Mapping[str, TensorRule], modules: Mapping[str, nn.Module]
) -> tuple[dict[str, TensorRule], dict[str, str]]:
    """The rules, in which a wrapper with adapters is replaced by the modules inside; and by module the wrapper that
    it is inside of."""
    rules: dict[str, TensorRule] = {}
    wrapper_of: dict[str, str] = {}
    for path, rule in chosen.items():
        inside = rules_inside(path, modules[path], rule) if is_adapted(modules[path]) else {}
        inside |= dict.fromkeys(trained_copies(path, modules[path]), rule)
        rules |= inside or {path: rule}
        wrapper_of |= dict.fromkeys(inside, path)
    return rules, wrapper_of


def _head_of(model: nn.Module) -> str:
    """The path of the head of a language model of transformers."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    path: str | None = next((path for path, module in model.named_modules() if module is head), None)
    if head is None or path is None:
        raise ModelError(
            f"tensor.cut_logits is for language models of transformers, whose head get_output_embeddings() returns; "
            f"{type(model).__name__} has none. Give the head the style vocabulary_cut in tensor.plan."
        )
    return path


def divided_attributes(model: nn.Module, options: TensorParallel) -> Iterator[tuple[str, nn.Module, str]]:
    """Attributes that count split heads or features: path, module and name of each."""
    modules = dict(model.named_modules())
    for part in library_models(model) if options.plan is None else ():
        known = known_model(part.module)
        for pattern, names in known.divide.items() if known is not None else ():
            for path in (part.paths[one] for one in _matching(pattern, part.paths) if pattern not in options.divide):
                counts = (name for name in names if type(getattr(modules[path], name, None)) is int)
                yield from ((path, modules[path], name) for name in counts)
    for pattern, names in options.divide.items():
        matching = list(_matching(pattern, modules))
        if not matching:
            raise ConfigError(
                f"The plan's tensor.divide has the pattern {pattern!r}, which matches no module. "
                f"{nearest(pattern, modules)}"
            )
        for path in matching:
            for name in names:
                value = getattr(modules[path], name, None)
                if type(value) is not int:
                    raise ConfigError(
                        f"The plan's tensor.divide names {name} of {path}, which is {value!r} and not an integer."
                    )
                yield path, modules[path], name


def per_head_arguments(model: nn.Module, options: TensorParallel) -> Iterator[tuple[str, nn.Module, str]]:
    """Modules with an argument that has values per head: path, module and name of the argument."""
    modules = dict(model.named_modules())
    for part in library_models(model) if options.plan is None else ():
        known = known_model(part.module) if not plan_of(part, ()) else None
        for pattern, argument in known.per_head_arguments.items() if known is not None else ():
            for path in (part.paths[one] for one in _matching(pattern, part.paths)):
                yield path, modules[path], argument


def _user_rules(plan: Mapping[str, Any]) -> dict[str, TensorRule]:
    """The rules of the user's plan, which the schema has checked."""
    return {
        pattern: TensorRule(**({"style": rule} if isinstance(rule, str) else rule)) for pattern, rule in plan.items()
    }


def _model_rules(part: LibraryModel, excluded: Collection[str]) -> Mapping[str, TensorRule]:
    """The rules of the model's own plan, or ours for it, without those for modules `excluded` and their parameters."""
    model, own_plan = part.module, plan_of(part, excluded)
    if own_plan:
        stacked = [pattern for pattern, style in own_plan.items() if style == EXPERTS_STYLE]
        return {
            pattern: TensorRule(_translated(model, pattern, style))
            for pattern, style in own_plan.items()
            if pattern not in stacked and pattern.rpartition(".")[0] not in stacked  # see `stacked_experts.py`
        }
    known = known_model(model)
    if known is not None:
        return known.rules
    raise ModelError(
        f"{type(model).__name__} has no tensor-parallel plan of its own, and shardwise has none for it (only for "
        f"{', '.join(KNOWN_TYPES)}). Name the modules to split by patterns: "
        f"tensor: {{plan: {{h.*.mlp.up: column, h.*.mlp.down: row}}}}"
    )


def plan_of(part: LibraryModel, excluded: Collection[str]) -> dict[str, str]:
    """The model's own tensor-parallel plan, without modules `excluded`, by their paths in the whole, and their
    parameters."""
    own_plan: dict[str, str] = dict(getattr(part.module, "_tp_plan", None) or {})
    if own_plan:
        own_plan |= LEFT_OUT.get(str(getattr(config_of(part.module), "model_type", "")), {})
    here = [name for name, path in part.paths.items() if path in excluded]
    for pattern in list(own_plan):
        around = (pattern, pattern.rpartition(".")[0])
        if any(matches_end(name, one) for name in here for one in around):
            del own_plan[pattern]
    return own_plan


def _translated(model: nn.Module, pattern: str, style: str) -> StyleName:
    if style not in STYLES:
        raise ModelError(
            f"The tensor-parallel plan of {type(model).__name__} has the style {style!r} for {pattern}, which this "
            f"version does not support; it supports {', '.join(STYLES)}. Set your own tensor.plan."
        )
    return STYLES[style]


def _matching(pattern: str, modules: Iterable[str]) -> Iterator[str]:
    """The paths that a pattern matches, at any depth."""
    return (path for path in modules if path and matches_end(path, pattern))


def _tied(chosen: Mapping[str, TensorRule], modules: Mapping[str, nn.Module]) -> dict[str, TensorRule]:
    """The rules of modules that share their weight with one split by vocabulary: they are split in the same way."""
    by_vocabulary = ("vocabulary", "vocabulary_cut", "column_gathered")
    weights = {
        id(modules[path].weight)
        for path, rule in chosen.items()
        if rule.style in by_vocabulary and _has_weight(modules[path])
    }
    return {
        path: TensorRule("vocabulary")
        for path, module in modules.items()
        if path not in chosen and _has_weight(module) and id(module.weight) in weights
    }


def _has_weight(module: nn.Module) -> bool:
    return isinstance(module._parameters.get("weight"), nn.Parameter)


def _target(path: str, module: nn.Module, rule: TensorRule, config: object, wrapper: str) -> SplitModule:
    if (
        rule.heads is not None
        or config is None
        or rule.style in ("vocabulary", "vocabulary_cut", "summed", "replicated")
    ):
        return SplitModule(path, module, rule.style, rule.parts, rule.heads, rule.heads, wrapper)
    known = heads_of(config, wrapper or path) if rule.style in ("column", "row") else None
    if known is None:
        return SplitModule(path, module, rule.style, rule.parts, wrapper=wrapper)
    return SplitModule(path, module, rule.style, rule.parts, known[0], groups_of(config), wrapper)
