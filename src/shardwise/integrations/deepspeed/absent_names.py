"""Names of DeepSpeed that shardwise does not have, and what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import NoReturn

_FULL = "parts of a parameter cannot be read or written; use {}, which all ranks call"
_ESTIMATES = "use engine.shardwise.rehearse(batch), or `shardwise explain PLAN --world N --model FILE:CALLABLE`"
INSTEAD = {
    "deepspeed.init_inference": "use engine.shardwise.inference()",
    "deepspeed.tp_model_init": "set tensor_parallel.autotp_size in the config",
    "deepspeed.autotuning": "use `budget` in a plan and `shardwise explain`",
    "deepspeed.compression": "quantize after training",
    "deepspeed.inference": "use engine.shardwise.inference()",
    "deepspeed.profiling": "use torch.profiler, whose traces name shardwise's actions",
    "deepspeed.runtime.fp16": "compressing optimizers are not supported; use AdamW, Lamb or Lion of deepspeed.ops",
    "deepspeed.runtime.pipe.topology.PipelineParallelGrid": "use engine.shardwise.mesh, or model.topology()",
    "deepspeed.runtime.zero.stage3": _ESTIMATES,
    "deepspeed.runtime.zero.stage_1_and_2": _ESTIMATES,
    "deepspeed.sequence": "set sequence_parallel_size in the config",
    "deepspeed.utils.groups": "groups follow from the mesh; see engine.shardwise.mesh and engine.shardwise.data_ranks",
    "deepspeed.utils.safe_update_full_grad_vectorized": "use safe_get_full_grad and safe_set_full_grad",
    **{
        f"deepspeed.utils.safe_{verb}_local_{what}": _FULL.format(f"safe_{verb}_full_{what}")
        for verb in ("get", "set")
        for what in ("fp32_param", "grad", "optimizer_state")
    },
}
"""By name of a module, or of something in one."""


def refusal(name: str) -> str:
    return f"{name} is not supported by shardwise: {INSTEAD[name]}."


class RefusedImports(MetaPathFinder):
    """Refuses imports of the names in `INSTEAD`. `from deepspeed import name` asks for a submodule `deepspeed.name`."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname in INSTEAD:
            raise ImportError(refusal(fullname), name=fullname)


def attribute_errors(module: str) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a module."""

    def refuse(name: str) -> NoReturn:
        full = f"{module}.{name}"
        is_known = full in INSTEAD
        raise AttributeError(refusal(full) if is_known else f"module {module!r} has no attribute {name!r}")

    return refuse
