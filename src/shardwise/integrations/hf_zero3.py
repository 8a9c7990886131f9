"""Models that transformers builds while a DeepSpeed config of stage 3 is alive: no rank ever has one whole.

There `from_pretrained`, `from_config` and `AutoModel`'s build inside DeepSpeed's `zero.Init`. Here they build inside
`shardwise.deferred_init`: constructors are recorded, files are read by `shard`, each rank its part, and transformers
does all else as it does without DeepSpeed. So first values are those of a model that was built whole, bit for bit.

[Note: alive] As in transformers, a config counts as long as somebody holds it: the script its `HfDeepSpeedConfig`,
`TrainingArguments` or the plugin of an Accelerator theirs.
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
"""Arguments of `from_pretrained` with which a model is loaded whole, as without a config."""


class LiveConfigs:
    """What says that models are to be built so."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[Any]] = []

    def note(self, config: Any) -> None:
        """As long as `config` lives: a `HfDeepSpeedConfig`, or a plugin of accelerate, which may change its mind."""
        self._known.append(weakref.ref(config))

    def ask(self) -> bool:
        """Whether one of stage 3 lives. See [Note: alive]."""
        living = [config for known in self._known if (config := known()) is not None]
        return any(_asks(config) for config in living)


LIVE = LiveConfigs()


def _asks(config: Any) -> bool:
    flag = getattr(config, "zero3_init_flag", None)
    return bool(config.is_zero3() if flag is None else flag)


def take_over_models(module: Any) -> None:
    """Let the class `PreTrainedModel` of transformers' `module` build models so."""
    models = module.PreTrainedModel
    seam = _Seam(module)
    for name in ("from_pretrained", "_from_config"):
        setattr(models, name, classmethod(_replaced(getattr(models, name).__func__, seam)))
    resize = models.resize_token_embeddings

    @functools.wraps(resize)
    def resize_token_embeddings(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(is_deferred(param) for param in model.parameters()):
            return resize(model, *args, **kwargs)
        with seam.hidden(), sw.deferred_init(model):
            return resize(model, *args, **kwargs)

    models.resize_token_embeddings = resize_token_embeddings


def _replaced(plain: Callable[..., Any], seam: _Seam) -> Callable[..., Any]:
    @functools.wraps(plain)
    def build(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if seam.is_building or not seam.asks() or any(kwargs.get(name) for name in _WHOLE):
            with seam.hidden():
                return plain(cls, *args, **kwargs)
        try:
            with seam.hidden(), seam.building():
                return plain(cls, *args, **kwargs)
        except _ToBeReadWholeError:
            with seam.hidden():
                return plain(cls, *args, **kwargs)

    return build


class _ToBeReadWholeError(Exception):
    """The model, or its files, are of a kind of which no parts can be read."""


class _Seam:
    """What of transformers is another while a model is built."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._models = module.PreTrainedModel
        self._is_asked: Callable[[], bool] = module.is_deepspeed_zero3_enabled
        self._contexts = self._models.get_init_context.__func__
        self._load = self._models._load_pretrained_model
        self.is_building = False

    def asks(self) -> bool:
        return LIVE.ask() or self._is_asked()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Inside, transformers does not see that DeepSpeed is asked for."""
        before, self._module.is_deepspeed_zero3_enabled = self._module.is_deepspeed_zero3_enabled, lambda: False
        try:
            yield
        finally:
            self._module.is_deepspeed_zero3_enabled = before

    @contextmanager
    def building(self) -> Iterator[None]:
        """Inside, one model is built, and its parameters wait for `shard`."""
        drawn = torch.get_rng_state()
        with sw.deferred_init() as building:
            self.is_building = True
            self._models.get_init_context = classmethod(self._without_meta)
            self._models._load_pretrained_model = staticmethod(functools.partial(self._loaded, building, drawn))
            try:
                yield
            finally:
                self.is_building = False
                self._models.get_init_context = classmethod(self._contexts)
                self._models._load_pretrained_model = staticmethod(self._load)

    def _without_meta(self, cls: Any, dtype: torch.dtype, is_quantized: bool, *args: Any, **kwargs: Any) -> list[Any]:
        """The contexts of a constructor: parameters have a device, and buffers their values."""
        from transformers.initialization import no_init_weights

        if is_quantized:
            raise _ToBeReadWholeError
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
        """What transformers asks for once a model is built: which of its names are in the files."""
        names = [Path(file) for file in files or ()]
        is_in_parts = bool(names) and all(one.suffix == ".safetensors" for one in names)
        if not is_in_parts or state_dict is not None or config.is_quantized or config.dtype_plan:
            raise _ToBeReadWholeError
        from transformers.utils.loading_report import LoadStateDictInfo

        torch.set_rng_state(drawn)  # a constructor on meta, as of a model that is loaded whole, draws nothing
        found = building.load(model, names, strict=False)
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name in found.names:
            tensors[name]._is_hf_initialized = True
        missing, unexpected = set(found.missing), set(found.unexpected)
        return LoadStateDictInfo(missing, unexpected, set(), [], {}, set()), None
