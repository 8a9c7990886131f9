"""What the transport asks of process groups, once of fakes by several ranks and once of a real backend by one.

`recorded` trains on the fakes of `tests/ranks` and records the calls of rank 0. Run as a script, on the only rank of a
real job, it repeats such calls with tensors of one rank's size, and prints them as torch's flight recorder has them:
the backend's own record of what it was given, by which group, with which timeout. So what fakes accept, the backend
accepts, in place or not, in the dtypes and sizes of training, and makes of it what the fakes make of it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from fake_devices import Devices, FakeGroups, FakeWork, Group

import shardwise as sw
from shardwise.comm.bootstrap import LATER_SECONDS, world_group
from shardwise.comm.transport.nccl import NcclGroups
from shardwise.comm.transport.process_groups import ProcessGroup, ProcessGroups, TorchGroups
from shardwise.testing import run_ranks

Tensor = torch.Tensor
TIMEOUT_SECONDS = 47
TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Call:
    """One collective of one rank, in elements of a whole buffer: of all ranks of the group together."""

    verb: str
    group: int
    """0 is the world, others count in the order in which groups were made."""
    dtypes: list[str]
    numels: list[int]
    in_place: bool


# -- on fakes -------------------------------------------------------------------------------------------


def recorded(num_ranks: int, work: Callable[[sw.World], object]) -> tuple[int, list[Call]]:
    """How many groups rank 0 made, and its calls, while `num_ranks` ranks did `work` on devices that are pretended."""
    devices = Devices("early", can_split=False)
    calls: list[Call] = []

    class Recorded(FakeGroups):
        def _work(self, verb: str, group: Group, sources: Any, outs: Any, act: Any) -> FakeWork:
            if self.rank == 0:
                calls.append(_call(verb, group, list(sources), list(outs)))
            return super()._work(verb, group, sources, outs, act)

    def rank(world: sw.World) -> None:
        devices.join(world, Recorded)
        work(world)

    run_ranks(num_ranks, rank, shares_memory=False)
    return len(devices.made[0]), calls


def _call(verb: str, group: Group, sources: Sequence[Tensor], outs: Sequence[Tensor]) -> Call:
    whole = outs if verb.startswith("gather") else sources or outs
    numels = [tensor.numel() for tensor in whole]
    if verb == "all_to_all":
        numels = [sum(numels)]
    storages = {source.untyped_storage().data_ptr() for source in sources if source.numel()}
    in_place = any(out.untyped_storage().data_ptr() in storages for out in outs)
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in whole[: len(numels)]]
    return Call(verb, group.number, dtypes, numels, in_place)


# -- on a real backend ----------------------------------------------------------------------------------


def repeat(call: Call, groups: ProcessGroups, made: Sequence[ProcessGroup], device: torch.device) -> None:
    """Make `call` with one rank, for which its share is the whole, and see that values are those that were sent."""
    group = made[call.group]
    sent = [
        (torch.arange(numel, device=device) % 100).to(getattr(torch, dtype))
        for dtype, numel in zip(call.dtypes, call.numels, strict=True)
    ]
    expected = [tensor.clone() for tensor in sent]
    arrived = sent if call.in_place else [torch.zeros_like(tensor) for tensor in sent]
    verbs: dict[str, Callable[[], Any]] = {
        "gather": lambda: groups.all_gather(arrived[0], sent[0], group),
        "gather together": lambda: groups.all_gather_coalesced(arrived, sent, group),
        "reduce_scatter": lambda: groups.reduce_scatter(arrived[0], sent[0], group),
        "all_to_all": lambda: groups.all_to_all(arrived, sent, group),
        "swap_chunks": lambda: groups.swap_chunks(arrived[0], sent[0], group),
        "all_reduce": lambda: groups.all_reduce(sent[0], group),
        "broadcast": lambda: groups.broadcast(sent[0], 0, group),
    }
    verbs[call.verb]().wait()
    for tensor, value in zip(sent if call.verb in ("all_reduce", "broadcast") else arrived, expected, strict=True):
        assert torch.equal(tensor, value), call


def backend_record(backend: str) -> list[dict[str, Any]]:
    """The entries of torch's flight recorder, oldest first."""
    dumped = json.loads(getattr(torch._C._distributed_c10d, RECORDERS[backend])())
    told: list[dict[str, Any]] = dumped.get("entries", [])
    return sorted(told, key=lambda entry: entry["record_id"])


RECORDERS = {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}
VERBS = {
    "allgather": "gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
}
DTYPES = {"Float": "float32", "BFloat16": "bfloat16", "Half": "float16", "Byte": "uint8", "Long": "int64"}
SAME = {"gather together": "gather", "swap_chunks": "all_to_all"}
"""What backends call by one name."""
ON_GLOO = {"reduce_scatter": "all_reduce"}
"""Of which it keeps a part."""


def as_told(call: Call, backend: str) -> dict[str, Any]:
    """What the flight recorder should have of `call`."""
    verb = SAME.get(call.verb, call.verb)
    return {
        "verb": ON_GLOO.get(verb, verb) if backend == "gloo" else verb,
        "group": call.group,
        "dtypes": call.dtypes,
        "numels": call.numels,
        "timeout_ms": (TIMEOUT_SECONDS + LATER_SECONDS) * 1000,  # our watchdog comes first
    }


def told(entries: Sequence[dict[str, Any]], used: Sequence[int]) -> list[dict[str, Any]]:
    """Those entries in our words; `used` are the numbers of the groups that took part, in the order of their making,
    which is also that of torch's numbers."""
    numbers = dict(zip(sorted({entry["pg_id"] for entry in entries}), used, strict=True))
    return [
        {
            "verb": next(ours for word, ours in VERBS.items() if word in entry["profiling_name"].replace("_", "")),
            "group": numbers[entry["pg_id"]],
            "dtypes": [DTYPES.get(dtype, dtype) for dtype in entry["input_dtypes"]],
            "numels": [torch.Size(size).numel() for size in entry["input_sizes"]],
            "timeout_ms": entry["timeout_ms"],
        }
        for entry in entries
    ]


def main() -> None:
    """`recorded_calls.py BACKEND FILE`: repeat the calls in the file, print what the backend has recorded of them."""
    backend, file = sys.argv[1:]
    asked = json.loads(Path(file).read_text())
    calls = [
        Call(**{**call, "dtypes": tuple(call["dtypes"]), "numels": tuple(call["numels"])}) for call in asked["calls"]
    ]
    with sw.World.join(timeout_seconds=TIMEOUT_SECONDS) as world:
        groups = groups_of(world, backend)
        made = [groups.world(), *(groups.new_group((0,), is_urgent=True) for _ in range(asked["num_groups"]))]
        before = len(backend_record(backend))
        for call in calls:
            repeat(call, groups, made, world.device)
        if backend == "nccl":
            torch.cuda.synchronize()
        used = sorted({call.group for call in calls})
        print(json.dumps(told(backend_record(backend)[before:], used)))


def groups_of(world: sw.World, backend: str) -> ProcessGroups:
    if backend == "gloo":
        return TorchGroups("gloo", torch.device("cpu"), TIMEOUT_SECONDS + LATER_SECONDS, world_group())
    assert world._on_device is not None
    assert isinstance(world._on_device._groups, NcclGroups)
    return world._on_device._groups


def asked_of(num_groups: int, calls: Sequence[Call]) -> str:
    return json.dumps({"num_groups": num_groups, "calls": [asdict(call) for call in calls]})


def environment_of(port: int) -> dict[str, str]:
    """Of the only rank of a job."""
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    host = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCH_FR_BUFFER_SIZE": "10000"}
    folders = (str(TESTS / "ranks"), str(TESTS.parent), os.environ.get("PYTHONPATH", ""))  # as pytest has them
    paths = os.pathsep.join(filter(None, folders))
    return {**os.environ, **rank, **host, "PYTHONPATH": paths}


if __name__ == "__main__":
    main()
