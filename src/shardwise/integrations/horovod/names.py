"""Horovod's public names: what has no effect here, what is refused, and what to use instead, one row each.

Docs (`page()`), the errors of absent names and arguments, and tests come from this table. The tests' fixture
horovod/surface.txt lists the names that Horovod has, found by machine; names without a row work.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from shardwise.errors import ConfigError
from shardwise.integrations.horovod.command_line import IGNORED, REFUSED
from shardwise.integrations.horovod.command_line_hosts import SSH_OPTIONS
from shardwise.integrations.name_table import (
    NameStatus,
    Row,
    printed,
    refusal_of,
    refused,
    row_in,
)

Called = TypeVar("Called", bound=Callable[..., Any])

_INSIDE = "it is a part of Horovod's own implementation; use the functions of hvd"
_SCRIPT = "put the function into a script: `shardwise launch --as-horovod -np 2 script.py`"
_COLLECTIVE = "use hvd's function of this name without `Horovod`, which has gradients"
_HANDLERS = "TorchState keeps models, optimizers and samplers by itself; for others subclass hvd.elastic.ObjectState"
_ELASTIC = (
    "elastic loops are those of horovod.torch; others resume from a checkpoint: `shardwise launch --max-restarts 3`"
)
_KERAS_BEST = "use keras.callbacks.ModelCheckpoint(path, save_best_only=True)"
_BROADCAST = "use hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank), or hvd.broadcast_variables"
_LOCAL = "every variable is averaged; train others with an optimizer of their own, which is not wrapped"
_NOT_COMPILED = "nothing is compiled"
_SESSIONS = "call it eagerly: TensorFlow 1's sessions do not exist here"
_SPARK = "start ranks by `shardwise launch`, and read the data in the script"
_RAY = "use Ray Train with shardwise.integrations.ray"
NAMES: dict[str, Row] = {
    **refused(_SPARK, "horovod", "spark"),
    **refused(_RAY, "horovod", "ray"),
    **refused("MXNet is not supported; PyTorch, TensorFlow, JAX and Keras are", "horovod", "mxnet"),
    **refused(_SCRIPT, "horovod", "runner"),
    **refused("use torch.utils.data.DataLoader(num_workers=...), or shardwise.data.Loader", "horovod", "data"),
    **refused(_INSIDE, "horovod.common", "basics util"),
    **refused("use hvd.elastic.run", "horovod.common.elastic", "run_fn"),
    **refused("`commit` and `check_host_updates` ask the launcher", "horovod.common.elastic", "notification_manager"),
    **refused(_INSIDE, "horovod.common.exceptions", "HorovodVersionMismatchError get_version_mismatch_message"),
    **refused(
        "use hvd.add_process_set and hvd.remove_process_set",
        "horovod.common.process_sets",
        "add_process_set remove_process_set",
    ),
    **refused(_NOT_COMPILED, "horovod.torch", "check_extension"),
    **refused("use hvd.elastic.run", "horovod.torch.elastic", "run_fn"),
    **refused(
        _HANDLERS,
        "horovod.torch.elastic.state",
        "ModelStateHandler OptimizerStateHandler SamplerStateHandler StateHandler get_handler_registry "
        "set_handler_registry",
    ),
    **refused(
        _COLLECTIVE,
        "horovod.torch.mpi_ops",
        "HorovodAllgather HorovodAllreduce HorovodAlltoall HorovodBroadcast HorovodGroupedAllgather "
        "HorovodGroupedAllreduce HorovodGroupedReducescatter HorovodReducescatter",
    ),
    **refused(_NOT_COMPILED, "horovod.tensorflow", "check_extension"),
    **refused(_INSIDE, "horovod.tensorflow", "check_num_rank_power_of_2 gpu_available split_list refs_to_vars util"),
    **refused(_INSIDE, "horovod.tensorflow", "vars_to_refs LocalGradientAggregationHelper gradient_aggregation"),
    **refused(_INSIDE, "horovod.tensorflow", "gradient_aggregation_eager"),
    **refused(_INSIDE, "horovod.tensorflow.keras", "is_version_greater_equal_than"),
    **refused(_INSIDE, "horovod.tensorflow.mpi_ops", "check_num_rank_power_of_2"),
    **refused(
        "use keras.layers.LayerNormalization or GroupNormalization, whose values need no other ranks",
        "horovod.tensorflow",
        "SyncBatchNormalization sync_batch_norm",
    ),
    **refused("read data in each rank; tf.data's own service works beside it", "horovod.tensorflow", "data"),
    **refused(_ELASTIC, "horovod.tensorflow", "elastic"),
    **refused(_ELASTIC, "horovod.tensorflow.keras", "elastic"),
    **refused(_ELASTIC, "horovod.keras", "elastic"),
    **refused(_BROADCAST, "horovod.tensorflow", "broadcast_global_variables BroadcastGlobalVariablesHook"),
    **refused(_BROADCAST, "horovod.tensorflow.keras", "broadcast_global_variables"),
    **refused(_BROADCAST, "horovod.keras", "broadcast_global_variables"),
    **refused(_LOCAL, "horovod.keras", "PartialDistributedOptimizer"),
    **refused(_LOCAL, "horovod.tensorflow", "PartialDistributedGradientTape"),
    **refused(_KERAS_BEST, "horovod.keras.callbacks", "BestModelCheckpoint"),
    **refused(_KERAS_BEST, "horovod.tensorflow.keras.callbacks", "BestModelCheckpoint"),
    **refused("any object with `compress` and `decompress` works", "horovod.tensorflow.compression", "Compressor"),
    **refused(
        "use hvd.Compression.none and hvd.Compression.fp16",
        "horovod.tensorflow.compression",
        "NoneCompressor FP16Compressor",
    ),
    **refused("use ProcessSet(ranks); there is no MPI communicator", "ProcessSet", "mpi_comm"),
    **refused(_INSIDE, "DistributedOptimizer", "find_duplicates"),
}
"""Modules, names in them, and members of their classes."""


@dataclass(frozen=True)
class Argument:
    """What becomes of an argument that is not `default`."""

    row: Row
    default: object = None


def _ignored(text: str) -> Argument:
    return Argument(Row(NameStatus.NO_EFFECT, text))


def _not_taken(text: str, default: object = None) -> Argument:
    return Argument(Row(NameStatus.REFUSED, text), default)


ARGUMENTS: dict[str, Argument] = {
    "device_dense": _ignored("results are where TensorFlow puts them"),
    "device_sparse": _ignored("results are where TensorFlow puts them"),
    "ignore_name_scope": _ignored("collectives are named by `name` alone"),
    "use_locking": _ignored("Keras 3's optimizers have no locks"),
    "inplace": _ignored("variables are always assigned"),
    "num_groups": _ignored("all gradients are sent as one message"),
    "groups": _ignored("all gradients are sent as one message"),
    "session": _not_taken(_SESSIONS),
    "gradient_predivide_factor": _not_taken("use op=hvd.Average; for another factor scale the loss", 1.0),
    "average_aggregated_gradients": _not_taken("use Keras's gradient_accumulation_steps, which averages", False),
    "scale_local_gradients": _not_taken(_LOCAL, True),
    "local_layers": _not_taken(_LOCAL),
    "sparse_as_dense": _not_taken("use hvd.DistributedGradientTape(sparse_as_dense=True)", False),
    "custom_optimizers": _not_taken("pass custom_objects: an optimizer is saved as one of the class that is wrapped"),
    "legacy_opts": _not_taken("Keras 3 has none", False),
    "compression": _not_taken("cast the tensor"),
}
"""Arguments that functions for TensorFlow and Keras have in Horovod and lack here."""


def takes_horovods_arguments(function: Called) -> Called:
    """For functions that lack some of `ARGUMENTS`: says which have no effect, and raises `ConfigError` for others."""
    own = inspect.signature(function).parameters
    called = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in [name for name in kwargs if name in ARGUMENTS and name not in own]:
            argument, value = ARGUMENTS[name], kwargs.pop(name)
            message = refusal_of(f"{called}({name}=)", argument.row)
            if message is not None and value != argument.default:
                raise ConfigError(message)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]  # it takes what `function` takes, and more


def row_of(name: str) -> Row | None:
    """The row of `name`, or of an argument, `name(argument)`; or else that of the innermost module that contains it;
    `None` if there is none."""
    name, _, of_call = name.rstrip(")").partition("(")
    row, argument = row_in(NAMES, name), ARGUMENTS.get(of_call)
    return row if row is not None or argument is None else argument.row


def refusal(name: str) -> str | None:
    """The message of the error for `name`, if its row refuses it."""
    return refusal_of(name, row_of(name))


def page() -> str:
    """The page docs/horovod-names.md."""
    arguments = {f"{name}=": argument.row for name, argument in ARGUMENTS.items()}
    ignored = {name: why for name, (_, why) in IGNORED.items() if name not in SSH_OPTIONS}
    options = {name: Row(NameStatus.NO_EFFECT, why) for name, why in ignored.items()}
    options |= {name: Row(NameStatus.REFUSED, why.rstrip(".")) for name, (_, why) in REFUSED.items()}
    lines = [
        _INTRODUCTION,
        *printed("Modules, functions and classes", NAMES),
        *printed("Arguments of functions for TensorFlow and Keras", arguments),
        *printed("Options of horovodrun", options),
    ]
    return "\n".join(lines) + "\n"


_INTRODUCTION = """# Horovod's names

What of Horovod's public interface has no effect under [shardwise's `horovod`](horovod.md), and what is refused, with
what to use instead; so says the `ImportError`, `AttributeError` or `ConfigError`, too. Everything else that the modules
`horovod.torch`, `horovod.tensorflow` and `horovod.keras` define works, and every option of `horovodrun` that is not
listed. A row for a module holds for what is in it. This page is made by
`shardwise.integrations.horovod.names.page()`."""
