"""`deepspeed.pipe`: pipeline parallelism for a model given as a list of layers, trained by `train_batch`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby, islice
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from shardwise.errors import ConfigError, DataError, StateError
from shardwise.integrations.deepspeed.engine import DeepSpeedEngine
from shardwise.integrations.deepspeed.monitor import EVAL_LOSS, TRAIN_LOSS
from shardwise.integrations.deepspeed.names import refusal
from shardwise.integrations.deepspeed.partition import Function, check_method, stages_of
from shardwise.integrations.deepspeed.topology import PipeDataParallelTopology, ProcessTopology, stages_in
from shardwise.system.module_modes import in_evaluation

Tensor = torch.Tensor
LossFunction = Callable[[Tensor, Any], Tensor]


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, numpy and torch."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def recompute(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, whose activations are recomputed in the backward."""
    return checkpoint(function, *args, use_reentrant=False)


class LayerSpec:
    """A layer that its `PipelineModule` builds: `LayerSpec(nn.Linear, 4, 4)`."""

    def __init__(self, typename: Callable[..., nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares `tied_weight_attr` with the other layers of the same `key`, on any stage.

    `forward_fn(layer, input)` replaces the layer's own forward.
    """

    def __init__(
        self,
        key: str,
        typename: Callable[..., nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | list[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else tied_weight_attr


class PipelineModule(nn.Sequential):
    """A sequence of layers: modules, specs or functions. Each gets the output of the one before.

    They are divided into `num_stages` pipeline stages (`mesh: {pp: ...}`), or those of a `topology`, by
    `partition_method`: with about equal numbers of parameters, or of layers (`uniform`), or of layers of some classes
    (`type:REGEX`). With `seed_layers`, the generators are seeded with `base_seed` plus a layer's number before it is
    built, by `seed_fn(seed)` if it is given. `loss_fn(output, label)`, a function or a module, computes the loss of a
    micro-batch; parameters of such a module are trained, and are on the last stage. With
    `activation_checkpoint_interval=N`, each run of N layers of a stage that has parameters keeps only its input, and is
    computed again in the backward: by `activation_checkpoint_func(function, *inputs)`, and only if the classes of all
    its layers are among `checkpointable_layers`, if these are given. Raises `ConfigError` for unsupported options.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module | LayerSpec | Callable[[Any], Any]],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: LossFunction | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], object] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = recompute,
        checkpointable_layers: Iterable[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        num_stages = _num_stages(num_stages, topology)
        check_method(partition_method)
        if activation_checkpoint_interval < 0:
            raise ConfigError(
                f"activation_checkpoint_interval is {activation_checkpoint_interval}; it must be a number of layers, "
                f"or 0 to recompute nothing."
            )
        first_of_key: dict[str, nn.Module] = {}
        built = []
        for number, layer in enumerate(layers):
            if seed_layers:
                (seed_fn or set_random_seed)(base_seed + number)
            built.append(_built_layer(layer, first_of_key))
        super().__init__(*built)
        inner: Any
        for inner in self.modules():
            if hasattr(inner, "is_in_stages"):  # layers of DeepSpeed's MoE
                inner.is_in_stages = True
        self._num_layers = len(built)
        self.num_stages = num_stages
        self.given_topology = topology
        self.stages = stages_of(self, partition_method, num_stages, loss_fn)
        self.loss_fn = loss_fn
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = None if checkpointable_layers is None else frozenset(checkpointable_layers)

    def __len__(self) -> int:
        """The number of layers. Other modules that are attributes, such as `loss_fn`, are no layers."""
        return self._num_layers

    def __iter__(self) -> Iterator[nn.Module]:
        return islice(self._modules.values(), self._num_layers)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise AttributeError(refusal(f"PipelineModule.{name}") or str(error)) from None

    def num_pipeline_stages(self) -> int:
        return self.num_stages

    def set_checkpoint_interval(self, interval: int) -> None:
        """Recompute runs of `interval` layers, or nothing for 0, in forwards from now on."""
        self.activation_checkpoint_interval = interval

    def topology(self) -> ProcessTopology:
        """The ranks by stage and copy: the topology that was given, or the one that `num_stages` makes of all ranks of
        torch's process group, which must be initialized."""
        if self.given_topology is not None:
            return self.given_topology
        return PipeDataParallelTopology(self.num_stages, max(1, dist.get_world_size() // self.num_stages))

    def forward(self, value: Any) -> Any:
        """The output of the last layer."""
        for layers in self._runs():
            if self._is_recomputed(layers):
                is_tuple = isinstance(value, tuple)
                inputs = value if is_tuple else (value,)
                value = self.activation_checkpoint_func(partial(_computed, layers, is_tuple), *inputs)
            else:
                value = _computed(layers, False, value)
        return value

    def _runs(self) -> Iterator[list[nn.Module]]:
        """The layers in runs of `activation_checkpoint_interval`, which begin anew where a pipeline stage begins."""
        for is_here, group in groupby(self, _is_here):
            layers = list(group)
            size = self.activation_checkpoint_interval if is_here else 0
            yield from (layers[at : at + size] for at in range(0, len(layers), size)) if size else [layers]

    def _is_recomputed(self, layers: list[nn.Module]) -> bool:
        if not self.activation_checkpoint_interval or not _is_here(layers[0]):
            return False
        if self.checkpointable_layers is not None:
            return all(type(layer).__name__ in self.checkpointable_layers for layer in layers)
        return any(True for layer in layers for _ in layer.parameters())


class PipelineEngine(DeepSpeedEngine):
    """A `PipelineModule` on shardwise's engine. `train_batch` does whole steps."""

    module: PipelineModule
    _data: Iterator[Any] | None = None
    _batch_fn: Callable[[Any], Any] | None = None
    _LABEL = "pipeline engine"

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One optimizer step over the next `gradient_accumulation_steps` pairs of input and label from `data_iter`.

        All ranks call; those of one pipeline with the same data. Returns the mean loss over micro-batches and ranks.
        Without `data_iter`, the training data given to `initialize` is read, repeatedly.
        """
        inputs, labels = self._pairs(data_iter)
        self.monitor.begin()
        loss = self.shardwise.train_step(inputs, labels, loss_fn=self.module.loss_fn)
        self.micro_steps += self.gradient_accumulation_steps()
        self.global_samples += self.train_batch_size()
        self._end_step(None, self.shardwise.gradient_norm)
        mean = self.shardwise.mean(loss.item())
        self._write_step_events([(TRAIN_LOSS, mean, self.global_samples)])
        return torch.tensor(mean, device=loss.device)

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Tensor:
        """The mean loss of as many pairs as `train_batch` reads, without gradients. All ranks call.

        Every rank gets the loss, whatever `bcast_loss` is. Raises `ConfigError` if the other arguments ask for anything
        else than this loss.
        """
        accumulate = self.gradient_accumulation_steps()
        is_refused = {
            "return_logits": return_logits,
            "compute_loss": not compute_loss,
            "reduce_output": reduce_output != "avg",
            "num_micro_batches": num_micro_batches not in (None, accumulate),
        }
        if any(is_refused.values()):
            raise ConfigError(
                f"eval_batch() does not support {', '.join(name for name, is_it in is_refused.items() if is_it)}: it "
                f"returns the mean loss over {accumulate} micro-batches. Leave them out; outputs are given to loss_fn, "
                f"which may keep them."
            )
        inputs, labels = self._pairs(data_iter)
        with in_evaluation(self.module):
            loss = self.shardwise.eval_step(inputs, labels, loss_fn=self.module.loss_fn)
        mean = self.shardwise.mean(loss.item())
        self.monitor.write_events([(EVAL_LOSS, mean, self.global_samples)])
        return torch.tensor(mean, device=loss.device)

    def training_loader(self, dataset: Dataset[Any]) -> DataLoader[Any]:
        """The data loader that `train_batch()` reads, repeatedly. As in DeepSpeed it does not shuffle."""
        loader = self.deepspeed_io(dataset, route="eval")
        self.set_dataloader(loader)
        return loader

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Let `train_batch()` read from `loader`, repeatedly."""
        self._data = _repeated(loader)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Let `train_batch()` read from `iterator`."""
        self._data = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Let `fn` turn what data loaders give into a pair of inputs and labels."""
        self._batch_fn = fn

    @property
    def num_stages(self) -> int:
        return self.module.num_stages

    @property
    def micro_batches(self) -> int:
        return self.gradient_accumulation_steps()

    @property
    def micro_batch_size(self) -> int:
        return self.train_micro_batch_size_per_gpu()

    def get_pipeline_parallel_rank(self) -> int:
        return self._stage()

    def reset_activation_shape(self) -> None:
        """Not needed: shapes may change from step to step."""

    def set_has_attention_mask(self, value: bool) -> None:
        """Not needed: a stage sends tensors of any dtype."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        raise StateError("A PipelineModule is trained by train_batch(), which does forward, backward and step.")

    backward = forward
    step = forward

    def is_first_stage(self) -> bool:
        return self._stage() == 0

    def is_last_stage(self) -> bool:
        return self._stage() == self.module.num_stages - 1

    def _stage(self) -> int:
        return self.shardwise.mesh.coordinate(self.global_rank)["pp"] if self.module.num_stages > 1 else 0

    def _pairs(self, data_iter: Iterator[Any] | None) -> tuple[list[Any], list[Any]]:
        """The inputs of the next micro-batches, each as the one argument of a `PipelineModule`, and their labels."""
        source = self._data if data_iter is None else data_iter
        if source is None:
            raise DataError("train_batch() has no data. Pass it an iterator, or pass training_data to initialize().")
        count = self.gradient_accumulation_steps()
        pairs = [pair for _, pair in zip(range(count), source, strict=False)]
        if len(pairs) < count:
            raise DataError(
                f"The data ended after {len(pairs)} of {count} micro-batches (gradient_accumulation_steps)."
            )
        if self._batch_fn is not None:
            pairs = [self._batch_fn(pair) for pair in pairs]
        pairs = [move_to_device(tuple(pair), self.device) for pair in pairs]
        return [(pair[0],) for pair in pairs], [pair[1] for pair in pairs]


def _num_stages(given: int | None, topology: ProcessTopology | None) -> int:
    if topology is None:
        if given is None:
            raise ConfigError("PipelineModule needs num_stages or a topology.")
        return given
    if given is not None and given != stages_in(topology):
        raise ConfigError(f"num_stages is {given}, but the topology has {stages_in(topology)}. Leave one of them out.")
    return stages_in(topology)


def _computed(layers: list[nn.Module], is_tuple: bool, *inputs: Any) -> Any:
    value = inputs if is_tuple else inputs[0]
    for layer in layers:
        value = layer(value)
    return value


def _is_here(layer: nn.Module) -> bool:
    """Whether a layer is in the running stage. What stands for one of another stage has that one's `__class__`."""
    return type(layer) is layer.__class__


def _built_layer(layer: nn.Module | LayerSpec | Callable[[Any], Any], first_of_key: dict[str, nn.Module]) -> nn.Module:
    if isinstance(layer, nn.Module):
        return layer
    if not isinstance(layer, LayerSpec):
        return Function(layer)
    made = layer.build()
    if isinstance(layer, TiedLayerSpec):
        first = first_of_key.setdefault(layer.key, made)
        if first is not made:
            for path in layer.tied_weight_attr:
                owner, _, name = path.rpartition(".")
                setattr(made.get_submodule(owner), name, first.get_parameter(path))
        if layer.forward_fn is not None:
            made.forward = partial(layer.forward_fn, made)
    return made


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """`item`, a tensor or lists, tuples and dicts of them, on `device`; only those that `criterion_func` accepts."""
    if isinstance(item, dict):
        return {key: move_to_device(value, device, criterion_func) for key, value in item.items()}
    if isinstance(item, list | tuple):
        moved = [move_to_device(value, device, criterion_func) for value in item]
        return type(item)(*moved) if hasattr(item, "_fields") else type(item)(moved)
    is_moved = hasattr(item, "to") if criterion_func is None else criterion_func(item)
    return item.to(device) if is_moved else item


def _repeated(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        is_empty = True
        for pair in loader:
            is_empty = False
            yield pair
        if is_empty:
            return
