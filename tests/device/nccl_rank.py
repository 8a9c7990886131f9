"""The only rank of a job with NCCL: every call that the library makes of it, one line of JSON for each check."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable

import torch

import shardwise as sw
from shardwise.comm.transport.nccl import NcclGroups
from shardwise.comm.transport.process_groups import ProcessGroup

Tensor = torch.Tensor


def main() -> None:
    first_world()
    check("join again", again)


def first_world() -> None:
    """At its end nothing keeps the world, and with it the store and its port: torch keeps groups until they are
    destroyed."""
    with sw.World.join(timeout_seconds=60) as world:
        assert world._on_device is not None
        groups = world._on_device._groups
        assert isinstance(groups, NcclGroups), type(groups)
        check("new_group", lambda: on_a_group_of_its_own(groups, lambda: groups.new_group((0,), is_urgent=True)))
        check("can_split", lambda: groups.can_split)
        if groups.can_split:
            check("split", lambda: on_a_group_of_its_own(groups, lambda: groups.split([(0,)], is_urgent=True)))
        check("world", lambda: every_collective(groups, groups.world()))
        check("train", lambda: train(world))
        check("abort", lambda: abort(groups))


def on_a_group_of_its_own(groups: NcclGroups, make: Callable[[], ProcessGroup]) -> str:
    group = make()
    told = every_collective(groups, group)
    groups.destroy(group)
    return told


def every_collective(groups: NcclGroups, by: ProcessGroup) -> str:
    """Each verb in each dtype that is sent, in place and not, and values as they were sent."""
    num = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64):
        own = torch.arange(8, device="cuda").to(dtype)
        for made in (
            lambda out, own: groups.all_gather(out, own, by),
            lambda out, own: groups.all_gather_coalesced([out], [own], by),
            lambda out, own: groups.reduce_scatter(out, own, by),
            lambda out, own: groups.all_to_all([out], [own], by),
            lambda out, own: groups.swap_chunks(out, own, by),
            lambda out, own: groups.all_reduce(out.copy_(own), by),
            lambda out, own: groups.broadcast(out.copy_(own), 0, by),
        ):
            out = torch.zeros_like(own)
            made(out, own).wait()
            assert torch.equal(out, own)
            num += 1
    full = torch.arange(8.0, device="cuda")
    groups.all_gather(full, full, by).wait()  # in place
    pairs = [torch.ones(4, device="cuda"), torch.full((6,), 2.0, device="cuda")]
    outs = [torch.zeros_like(one) for one in pairs]
    groups.all_gather_coalesced(outs, pairs, by).wait()
    assert all(torch.equal(out, one) for out, one in zip(outs, pairs, strict=True))
    return f"{num} collectives"


def train(world: sw.World) -> list[float]:
    torch.manual_seed(0)
    losses = []
    for preset in ("ddp", "zero3"):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).cuda()
        with sw.shard(model, preset, optimizer=torch.optim.AdamW(model.parameters()), world=world) as engine:
            for _ in range(3):
                loss = engine(torch.ones(2, 64, device="cuda")).square().mean()
                engine.backward(loss)
                engine.step()
            losses.append(loss.item())
            assert float(engine.mean(1.0)) == 1.0
    return losses


def abort(groups: NcclGroups) -> str:
    """As the watchdog does after a fault: all communicators at once. What is queued afterwards fails or does nothing;
    the process lives, and the device computes."""
    some = [groups.new_group((0,), is_urgent=True) for _ in range(3)]
    for group in some:
        groups.all_reduce(torch.ones(4, device="cuda"), group).wait()
    groups.abort([*some, groups.world()])
    torch.cuda.synchronize()
    assert torch.ones(4, device="cuda").sum().item() == 4
    told = "nothing"
    try:
        groups.all_reduce(torch.ones(4, device="cuda"), some[0]).wait()
    except RuntimeError as error:
        told = str(error).splitlines()[0][:120]
    for group in some:
        groups.destroy(group)
    return f"a collective after an abort raises: {told}"


def again() -> list[float]:
    """A second world in the same process, as after a recovery."""
    with sw.World.join(timeout_seconds=60) as world:
        return train(world)


def check(name: str, work: Callable[[], object]) -> None:
    try:
        line = {"check": name, "result": repr(work())}
    except BaseException:
        line = {"check": name, "error": traceback.format_exc()[-3000:]}
    print(json.dumps(line), file=sys.stdout, flush=True)


if __name__ == "__main__":
    main()
