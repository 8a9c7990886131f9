"""Settings of Megatron-LM and of a `ParallelismConfig`, in a file of `accelerate config` or on a command line of its
launcher: they choose another engine, so they are refused, by a sentence with the plan that does the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardwise.system.flags import says_yes

MEGATRON, PARALLELISM = "megatron_lm_", "parallelism_config_"
"""What the names of their settings begin with."""


def instead_of_megatron(settings: Mapping[str, Any]) -> str:
    """How to ask for the same, with a plan; names of `settings` may lack their prefix."""
    given = {name.removeprefix(MEGATRON): value for name, value in settings.items()}
    mesh = {
        "pp": _size(given.get("pp_degree")),
        "dp": -1,
        "ep": _size(given.get("expert_model_parallel_size")),
        "sp": _size(given.get("context_parallel_size")),
        "tp": _size(given.get("tp_degree")),
    }
    plan: dict[str, Any] = {"preset": "zero1" if says_yes(given.get("use_distributed_optimizer")) else "ddp"}
    plan["mesh"] = {axis: size for axis, size in mesh.items() if size != 1}
    if says_yes(given.get("sequence_parallelism")) and mesh["tp"] > 1:
        plan["tensor"] = {"sequence": True}
    if says_yes(given.get("recompute_activations")):
        plan["activations"] = "recompute"
    return _use("Megatron-LM is another engine for the same purpose", plan)


def splits_in(settings: Mapping[str, Any]) -> bool:
    """Whether a section `parallelism_config` asks for anything."""
    return any(_size(value) > 1 for name, value in settings.items() if name.endswith("_size"))


def instead_of_parallelism(settings: Mapping[str, Any]) -> str:
    """How to ask for the same as with a `ParallelismConfig`."""
    given = {name.removeprefix(PARALLELISM): _size(value) for name, value in settings.items() if name.endswith("_size")}
    copies, shards = given.get("dp_replicate_size", 1), given.get("dp_shard_size", 1)
    if copies > 1 and shards > 1:
        plan: dict[str, Any] = {"preset": "hsdp", "mesh": {"node": -1, "local": shards}}
    else:
        plan = {"preset": "zero3" if shards > 1 else "ddp", "mesh": {"dp": -1}}
    plan["mesh"] |= {"tp": given["tp_size"]} if given.get("tp_size", 1) > 1 else {}
    sequence = given.get("cp_size", 1) * given.get("sp_size", 1)
    plan["mesh"] |= {"sp": sequence} if sequence > 1 else {}
    return _use("a ParallelismConfig makes a mesh of torch's", plan)


def _use(why: str, plan: Mapping[str, Any]) -> str:
    return f"{why}. Use this plan instead: shardwise launch --shardwise '{json.dumps(plan)}' SCRIPT"


def _size(value: object) -> int:
    return max(1, int(str(value))) if str(value).isdecimal() else 1
