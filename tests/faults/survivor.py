"""Run by `test_survival.py` on real processes: a loop as anybody writes it, some of whose ranks are killed.

survivor.py OUT PLAN LOOP STEPS KILL...     OUT: a folder; PLAN: a preset or JSON; LOOP: engine, plain or train_step;
KILL: MEMBER:STEP:POINT, where POINT is forward, backward, step, or a number: of the collective that is next then; or
copyN: of the Nth portion that is sent to another host in that step; or cutN: nobody dies, but the connection to rank N
breaks; or disk: its disk cannot be written to any more

With HOSTS=aabb in the environment members are of these hosts, by number: each has a folder of its own, which goes with
it, and a kill is that of the whole host. With HOSTS=aabb/rank it is that of the rank alone. With CHANGED_FROM=4 the
members from that number on have a layer more, as after a change of the code.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import shardwise as sw
from shardwise.comm.transport.gloo import GlooTransport
from shardwise.comm.transport.shm import Neighbours
from shardwise.comm.watch.journal import FIRST_SIDE_TAG
from shardwise.elastic import copies
from shardwise.errors import TurnedAwayError
from shardwise.parallel.experts import MoE
from shardwise.system.disk import SystemCalls
from shardwise.testing import plant

ROWS, WIDTH, OUTPUTS = 12, 16, 8
NUM_HEADS, NUM_TOKENS = 4, 4


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, OUTPUTS))


class Attending(nn.Module):
    """Each row is cut into tokens, which attend to each other: what `sp` divides."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.out = nn.Linear(WIDTH // NUM_TOKENS, 3 * WIDTH), nn.Linear(WIDTH, OUTPUTS // NUM_TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        heads = self.mixed(tokens).unflatten(-1, (3, NUM_HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


def model_for(plan: str) -> nn.Module:
    """One that can be split along the axes of a plan's mesh."""
    if '"sp"' in plan:
        torch.manual_seed(0)
        return Attending()
    if '"ep"' in plan:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, 32), MoE(32, 24, num_experts=4, top_k=2), nn.Linear(32, OUTPUTS))
    return build()


def data_for(plan: str, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch as that model takes it."""
    if '"sp"' in plan:
        return x.unflatten(1, (NUM_TOKENS, -1)), y.unflatten(1, (NUM_TOKENS, -1))
    return x, y


def batch_of(step: int, place: int, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of the batch of a step, which are the same whoever asks."""
    generator = torch.Generator().manual_seed(1000 + step)
    x, y = torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, OUTPUTS, generator=generator)
    own = slice(place * ROWS // num_ranks, (place + 1) * ROWS // num_ranks)
    return x[own], y[own]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


class Hosts:
    """Pretended ones: of this machine, but with memory of their own."""

    def __init__(self, said: str, out: Path) -> None:
        self.names, _, self.what = said.partition("/")
        self.out = out

    def pretend(self, member: int) -> None:
        """Before the world is joined."""
        mine = self.names[member]
        folder = Path(os.environ["SHARDWISE_IMAGES"]) / mine
        folder.mkdir(exist_ok=True)
        (self.out / f"memory-{mine}").write_text(str(folder))
        os.environ["SHARDWISE_IMAGES"] = str(folder)
        belong = sw.World.belong

        def pretended(world: sw.World, generation: int, members: tuple[int, ...], *more: Any) -> None:
            belong(world, generation, members, *more)
            world.hosts = tuple(self.names[one] for one in members)

        sw.World.belong = pretended  # type: ignore[method-assign]
        meet = Neighbours.meet

        def met(rank: int, exchange: Any, host: str = "") -> Any:
            return meet(rank, exchange, mine)

        Neighbours.meet = met  # type: ignore[method-assign]

    def kill(self, member: int) -> None:
        """The host of this process, or it alone."""
        if self.what != "rank":
            shutil.rmtree(os.environ["SHARDWISE_IMAGES"], ignore_errors=True)
            for other, name in enumerate(self.names):
                pid = self.out / f"pid-{other}"
                if other != member and name == self.names[member] and pid.exists():
                    os.kill(int(pid.read_text()), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


class Deaths:
    """Kills this process where it is told to."""

    def __init__(self, kills: list[str], member: int, hosts: Hosts | None = None) -> None:
        self._hosts, self._member = hosts, member
        self._portions_left = -1
        mine = [kill.split(":") for kill in kills]
        self._at = {(int(step), point) for one, step, point in mine if int(one) == member}
        self._left = -1
        self._world: sw.World | None = None

    def befall(self, step: int, point: str) -> None:
        if (step, point) in self._at:
            self._die()

    def begin_step(self, step: int) -> None:
        for at, point in sorted(self._at):
            if at == step and point.startswith("cut"):
                self._at.remove((at, point))  # the step is repeated
                self._cut_off(int(point.removeprefix("cut")))
            if at == step and point == "disk":
                SystemCalls.write = _fails  # type: ignore[method-assign]
            if at == step and point.isdigit() and self._left < 0:
                self._left = int(point)
            if at == step and point.startswith("copy"):
                self._portions_left = int(point.removeprefix("copy"))

    def _cut_off(self, rank: int) -> None:
        """Break the connection to `rank`, as a network does that resets it."""
        assert self._world is not None
        assert isinstance(self._world.transport, GlooTransport)
        sockets = self._world.transport._sockets
        (descriptor,) = (one for one, other in sockets._ranks.items() if other == rank)
        with contextlib.closing(socket.socket(fileno=os.dup(descriptor))) as connection:
            connection.shutdown(socket.SHUT_RDWR)

    def watch(self, world: sw.World) -> None:
        self._world = world

        def counted(_: int, __: int, what: str) -> bool:
            if " of " in what:  # a collective
                if self._left == 0:
                    self._die()
                self._left -= self._left > 0
            return False

        plant(counted, world)
        send = world.transport.send

        def counted_portions(tensor: torch.Tensor, rank: int, tag: int) -> Any:
            if tag >= FIRST_SIDE_TAG and self._portions_left >= 0:
                self._portions_left -= 1
                if self._portions_left < 0:
                    self._die()
            return send(tensor, rank, tag)

        world.transport.send = counted_portions  # type: ignore[method-assign]

    def _die(self) -> None:
        if self._hosts is not None:
            self._hosts.kill(self._member)
        os.kill(os.getpid(), signal.SIGKILL)


def _fails(*_: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def finish_step(
    loop: str, engine: sw.Engine, optimizer: torch.optim.Optimizer, loss: torch.Tensor, between: Callable[[], None]
) -> None:
    """Backward and step, by the engine or plainly."""
    if loop == "engine":
        engine.backward(loss)
        between()
        engine.step()
    else:
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        between()
        optimizer.step()
        optimizer.zero_grad()


def main(out: Path, plan: str, loop: str, num_steps: int, kills: list[str]) -> None:
    logging.basicConfig(level="WARNING")
    torch.set_num_threads(1)
    hosts = Hosts(os.environ["HOSTS"], out) if "HOSTS" in os.environ else None
    if hosts is not None:
        hosts.pretend(int(os.environ["SHARDWISE_MEMBER"]))
        copies._PORTION_BYTES = 512
    world = sw.World.join(timeout_seconds=float(os.environ.get("TIMEOUT_SECONDS", "20")))
    member = world.membership.member if world.membership is not None else world.rank
    model = model_for(plan)
    if member >= int(os.environ.get("CHANGED_FROM", member + 1)):
        (out / f"changed-{member}").touch()
        model = nn.Sequential(*model.children(), nn.Linear(OUTPUTS, OUTPUTS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = sw.shard(model, json.loads(plan) if plan.startswith("{") else plan, optimizer=optimizer, world=world)
    resumed = engine.resume(out / "checkpoints")  # nobody saves there
    deaths = Deaths(kills, member, hosts)
    (out / f"pid-{member}").write_text(str(os.getpid()))
    losses: dict[int, float] = {}
    times: list[tuple[int, float]] = []
    generation = -1
    state: dict[str, Any] = {}
    generator = torch.Generator().set_state(torch.get_rng_state())
    expected = [torch.rand((), generator=generator).item() for _ in range(min(num_steps, 100))]
    drawn: dict[int, float] = {}
    while not state:
        is_told = engine.any_rank((out / "enough").exists())  # perhaps before the first step, on a busy machine
        if engine.num_steps >= num_steps or (is_told and engine.num_steps > 1):
            taken = engine.num_steps
            state = {name: value.tolist() for name, value in engine.state_dict().items()}
            if engine.num_steps < taken:
                state = {}  # whoever died took the last step along
            continue
        step = engine.num_steps
        time.sleep(float(os.environ.get("PAUSE_SECONDS", "0")))
        if generation != engine.world.generation:
            generation = engine.world.generation
            deaths.watch(engine.world)
        deaths.begin_step(step)
        x, y = engine.split_sequence(data_for(plan, *batch_of(step, *engine.data_ranks)))
        engine.weigh(len(x), ROWS)
        deaths.befall(step, "forward")
        if loop == "train_step":
            loss = engine.train_step(x, y, loss_fn=loss_of)
        else:
            loss = loss_of(model(x), y)
            drawn[step] = torch.rand(()).item()
            deaths.befall(step, "backward")
            finish_step(loop, engine, optimizer, loss, partial(deaths.befall, step, "step"))
        if engine.num_steps > step:
            losses[step] = engine.mean(loss.item())
            if '"run"' in plan:
                engine.log({"loss": losses[step]}, tokens=ROWS)
        times.append((engine.num_steps, time.time()))
    said = {"losses": losses, "state": state, "void": engine.num_void, "times": times, "world": engine.world.size}
    if world.membership is not None and world.membership.arrival is None and '"sp"' not in plan:
        said["drawn"] = [drawn[step] for step in sorted(drawn)][: len(expected)], expected[: len(drawn)]
    said["folder"] = str(world.membership.folder) if world.membership is not None else None
    said["resumed"] = None if resumed is None else (resumed.step, resumed.state)
    (out / f"member-{member}.json").write_text(json.dumps(said))
    engine.close()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5:])
    except TurnedAwayError as error:
        Path(sys.argv[1], f"away-{os.environ['SHARDWISE_MEMBER']}").write_text(str(error))
        raise
