"""Builds models of transformers without a whole copy on any rank, while a DeepSpeed config of stage 3 is alive.

With DeepSpeed, `from_pretrained`, `from_config` and those of `AutoModel` build inside `zero.Init`. Here they build
inside `shardwise.deferred_init`: constructors are recorded, and `shard` reads the files, each rank only its part.
Everything else works as in transformers without DeepSpeed, so initial values equal those of a model that was built
whole, bit for bit.

[Note: live configs] As in transformers, a config is active as long as an object references it: the script's
`HfDeepSpeedConfig`, `TrainingArguments`, or the plugin of an Accelerator.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import shardwise as sw
from shardwise.init import is_deferred

_WHOLE = (
    "quantization_config", "device_map", "distributed_config", "tp_plan", "tp_size", "device_mesh", "state_dict",
    "key_mapping", "gguf_file", "ignore_mismatched_sizes", "fusion_config",
)  # fmt: skip
"""With these arguments of `from_pretrained` a model is loaded whole, as without a config."""


class LiveConfigs:
    """The live DeepSpeed configs of this process."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[Any]] = []

    def note(self, config: Any) -> None:
        """Add a weak reference to a `HfDeepSpeedConfig`, or to a plugin of accelerate, whose stage may change."""
        self._known.append(weakref.ref(config))

    def has_stage3(self) -> bool:
        """Whether one with stage 3 is alive. See [Note: live configs]."""
        living = [config for known in self._known if (config := known()) is not None]
        return any(_is_stage3(config) for config in living)


LIVE = LiveConfigs()


def _is_stage3(config: Any) -> bool:
    flag = getattr(config, "zero3_init_flag", None)
    return bool(config.is_zero3() if flag is None else flag)


def take_over_models(module: Any) -> None:
    """Patch the class `PreTrainedModel` of transformers' `module`."""
    models = module.PreTrainedModel
    patches = _ModelPatches(module)
    for name in ("from_pretrained", "_from_config"):
        setattr(models, name, classmethod(_deferring(getattr(models, name).__func__, patches)))
    resize = models.resize_token_embeddings

    @functools.wraps(resize)
    def resize_token_embeddings(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(is_deferred(param) for param in model.parameters()):
            return resize(model, *args, **kwargs)
        with patches.hidden(), sw.deferred_init(model):
            return resize(model, *args, **kwargs)

    models.resize_token_embeddings = resize_token_embeddings


def _deferring(plain: Callable[..., Any], patches: _ModelPatches) -> Callable[..., Any]:
    @functools.wraps(plain)
    def build(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if patches.is_building or not patches.has_stage3() or any(kwargs.get(name) for name in _WHOLE):
            with patches.hidden():
                return plain(cls, *args, **kwargs)
        try:
            with patches.hidden(), patches.building():
                return plain(cls, *args, **kwargs)
        except _NeedsWholeLoadingError:
            with patches.hidden():
                return plain(cls, *args, **kwargs)

    return build


class _NeedsWholeLoadingError(Exception):
    """Parts of this model, or of its files, cannot be read separately."""


class _ModelPatches:
    """The patches of transformers while a model is built."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._models = module.PreTrainedModel
        self._is_zero3_enabled: Callable[[], bool] = module.is_deepspeed_zero3_enabled
        self._contexts = self._models.get_init_context.__func__
        self._load = self._models._load_pretrained_model
        self.is_building = False

    def has_stage3(self) -> bool:
        return LIVE.has_stage3() or self._is_zero3_enabled()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Inside, transformers behaves as without DeepSpeed."""
        before, self._module.is_deepspeed_zero3_enabled = self._module.is_deepspeed_zero3_enabled, lambda: False
        try:
            yield
        finally:
            self._module.is_deepspeed_zero3_enabled = before

    @contextmanager
    def building(self) -> Iterator[None]:
        """Inside, one model is built with deferred parameters."""
        drawn = torch.get_rng_state()
        with sw.deferred_init() as building:
            self.is_building = True
            self._models.get_init_context = classmethod(self._without_meta)
            self._models._load_pretrained_model = staticmethod(functools.partial(self._loaded, building, drawn))
            try:
                yield
            except _NeedsWholeLoadingError:
                torch.set_rng_state(drawn)  # it is built anew, with the random numbers of a model built only once
                raise
            finally:
                self.is_building = False
                self._models.get_init_context = classmethod(self._contexts)
                self._models._load_pretrained_model = staticmethod(self._load)

    def _without_meta(self, cls: Any, dtype: torch.dtype, is_quantized: bool, *args: Any, **kwargs: Any) -> list[Any]:
        """The contexts of a constructor, without the meta device: buffers need values."""
        from transformers.initialization import no_init_weights

        if is_quantized:
            raise _NeedsWholeLoadingError
        found = self._contexts(cls, dtype, is_quantized, *args, **kwargs)
        return [*(one for one in found if not isinstance(one, torch.device)), no_init_weights()]

    def _loaded(
        self,
        building: Any,
        drawn: torch.Tensor,
        model: Any,
        state_dict: Any,
        files: list[str] | None,
        config: Any,
        *_: Any,
    ) -> tuple[Any, Any]:
        """Replaces transformers' loading after a model is built: reports which of its names are in the files."""
        names = [Path(file) for file in files or ()]
        is_in_parts = bool(names) and all(one.suffix == ".safetensors" for one in names)
        if not is_in_parts or state_dict is not None or config.is_quantized or config.dtype_plan:
            raise _NeedsWholeLoadingError
        from transformers.utils.loading_report import LoadStateDictInfo

        torch.set_rng_state(drawn)  # a model that is loaded whole is constructed on meta, which draws nothing
        found = building.load(model, names, strict=False)
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name in found.names:
            tensors[name]._is_hf_initialized = True
        missing, unexpected = set(found.missing), set(found.unexpected)
        return LoadStateDictInfo(missing, unexpected, set(), [], {}, set()), None
