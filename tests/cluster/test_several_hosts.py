"""Ranks on hosts that are namespaces of this machine: what crosses their links, and what happens when one breaks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwise
from benchmarks.namespaces import Hosts, obstacle
from tests.patience import wait_until
from tests.thorough import soak

pytestmark = [pytest.mark.skipif(bool(obstacle()), reason=obstacle()), pytest.mark.timeout(400)]
NUM_LOCAL = 2
JOIN = """
    import json, os, pathlib, sys, time, torch, shardwise as sw
    torch.set_num_threads(1)
    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(*[torch.nn.Linear(160, 160) for _ in range(4)])
    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)
"""
COMPARE = """
    from tests import inside
    world = sw.World.join()
    torch.manual_seed(1)
    batches = torch.randn(3, 4, 4, 160)
    statistics = pathlib.Path("/sys/class/net/eth0/statistics/tx_bytes")
    found = {}
    for preset in ("ddp", "zero1", "zero3", "hsdp", "hpz"):
        plain, cut = model(), model()
        optimizer = sgd(plain)
        engine = sw.shard(cut, preset, optimizer=sgd(cut), world=world)
        ledger = world.collectives(torch.device("cpu")).ledger
        await_updates = inside.runner(engine).gathering.await_updates  # which zero1 and zero2 do after a step
        for number, batch in enumerate(batches):
            plain(batch.flatten(0, 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == len(batches) - 1:
                await_updates()
                world.barrier()
                before, told = int(statistics.read_text()), sum(ledger.crossed_bytes.values())
                world.barrier()
            engine.backward(engine(batch[world.rank]).square().mean())
            engine.step()
        await_updates()
        world.barrier()
        sent, told = int(statistics.read_text()) - before, sum(ledger.crossed_bytes.values()) - told
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(engine.get(name), parameter.detach(), rtol=1e-5, atol=1e-6)
        program = inside.program(engine)
        found[preset] = sent, told, program.sent_by_hosts(engine.mesh, world.local_size)
        engine.close()
    pathlib.Path(f"found{world.rank}").write_text(json.dumps(found))
    world.close()
"""
SPLIT = """
    world = sw.World.join()
    torch.manual_seed(1)
    batches = torch.randn(10, 2, 8, 160)
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(160)
            self.gate, self.up, self.down = (torch.nn.Linear(160, 160) for _ in range(3))
        def forward(self, x):
            read = self.norm(x)
            return x + self.down(torch.sigmoid(self.gate(read)) * self.up(read))
    class Blocks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x
    style = {"blocks.*.gate": "column", "blocks.*.up": "column", "blocks.*.down": "row"}
    for sequence in (False, True):
        plain, cut = Blocks(), Blocks()
        optimizer = sgd(plain)
        plan = {"preset": "zero1", "mesh": {"tp": 2, "dp": 2}, "tensor": {"plan": style, "sequence": sequence}}
        engine = sw.shard(cut, plan, optimizer=sgd(cut), world=world)
        place, number = engine.data_ranks
        for batch in batches:
            loss = plain(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            own = engine(batch.chunk(number)[place]).square().mean()
            engine.backward(own)
            engine.step()
            assert abs(world.mean(own.item()) - loss.item()) < 1e-5 * loss.item()
        assert engine.module.blocks[0].up.forward.line.overlaps_compute
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(engine.get(name), parameter.detach(), rtol=1e-5, atol=1e-6)
        engine.close()
    world.close()
"""
TRAIN = """
    import logging
    logging.basicConfig(level=logging.WARNING)
    world = sw.World.join(timeout_seconds=float(sys.argv[1]), patience_seconds=1)
    cut = model()
    engine = sw.shard(cut, "zero3", optimizer=sgd(cut), world=world)
    batch, stop = torch.randn(4, 160), pathlib.Path("stop")
    for number in range(100_000):
        engine.backward(engine(batch).square().mean())
        engine.step()
        pathlib.Path(f"step{world.rank}").write_text(str(number))
        time.sleep(0.02)
        if world.any_rank(stop.exists()):
            print("rank", world.rank, "is through", flush=True)
            break
    world.close()
"""


class Job:
    """A script on all ranks of two hosts, in a folder that both see."""

    def __init__(self, hosts: Hosts, folder: Path, text: str, *arguments: str) -> None:
        self.hosts, self.folder = hosts, folder
        (folder / "job.py").write_text(textwrap.dedent(JOIN) + textwrap.dedent(text))
        ours = [Path(shardwise.__file__).parents[1], Path(__file__).parents[2]]
        paths = os.pathsep.join([*map(str, ours), os.environ.get("PYTHONPATH", "")])
        variables = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        command = [sys.executable, str(folder / "job.py"), *arguments]
        self.processes: list[subprocess.Popen[bytes]] = []
        for host in range(hosts.num_hosts):
            with (folder / f"log{host}").open("wb") as log:
                self.processes.append(
                    hosts.start(host, command, variables, num_ranks=NUM_LOCAL, out=log.fileno(), folder=folder)
                )

    def said(self, host: int) -> str:
        return (self.folder / f"log{host}").read_text()

    def step(self, rank: int = 0) -> int:
        text = (self.folder / f"step{rank}").read_text() if (self.folder / f"step{rank}").exists() else ""
        return int(text or -1)

    def wait_for_step(self, number: int, rank: int = 0) -> None:
        def have_ended() -> bool:
            return any(process.poll() is not None for process in self.processes)

        wait_until(lambda: self.step(rank) >= number or have_ended(), lambda: self.said(0) + self.said(1))
        assert not have_ended(), self.said(0) + self.said(1)

    def end(self, *hosts: int, seconds: float = 120) -> list[int]:
        return [self.processes[host].wait(seconds) for host in hosts or range(len(self.processes))]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as made:
        yield made


def test_one_copy_crosses_and_training_is_the_plain_model_s(hosts: Hosts, tmp_path: Path) -> None:
    """By the interface's counters: what the program says, and not much beside it."""
    job = Job(hosts, tmp_path, COMPARE)
    assert job.end(seconds=240) == [0, 0], job.said(0) + job.said(1)
    found = [json.loads((tmp_path / f"found{rank}").read_text()) for rank in range(2 * NUM_LOCAL)]
    for preset, (sent, _, promised) in found[0].items():
        told = sum(found[rank][preset][1] for rank in range(NUM_LOCAL))
        assert promised[0] <= told < promised[0] + 4_000, preset  # barriers, too
        assert told < sent < 1.06 * told + 60_000, preset
    whole = 4 * (160 * 160 + 160) * 4
    assert found[0]["ddp"][0] < 1.2 * whole  # a ring of four sends half as much again
    assert found[0]["zero3"][0] < 1.7 * whole


def test_tensor_parallelism_between_hosts_is_the_plain_model_s(hosts: Hosts, tmp_path: Path) -> None:
    """Over ten steps, with collectives beside products, carried by threads over gloo's own."""
    job = Job(hosts, tmp_path, SPLIT)
    assert job.end(seconds=240) == [0, 0], job.said(0) + job.said(1)


@soak("cuts a link for six seconds")
def test_a_cable_that_is_out_for_seconds_ends_nothing(hosts: Hosts, tmp_path: Path) -> None:
    """Whoever is waited for is told meanwhile, and then all go on."""
    job = Job(hosts, tmp_path, TRAIN, "60")
    job.wait_for_step(5)
    hosts.link(1, "down")
    time.sleep(6)
    stuck = job.step()
    time.sleep(1)
    assert job.step() == stuck
    hosts.link(1, "up")
    job.wait_for_step(stuck + 5)
    (tmp_path / "stop").write_text("")
    assert job.end() == [0, 0], job.said(0) + job.said(1)
    assert job.said(0).count("is through") == job.said(1).count("is through") == NUM_LOCAL
    assert "has not been heard of" in job.said(0)
    assert "(ranks 2 and 3), which is down or cut off" in job.said(0)


@soak("how long a silent link is waited for")
def test_a_cable_that_is_out_for_good_ends_both_sides_in_time(hosts: Hosts, tmp_path: Path) -> None:
    job = Job(hosts, tmp_path, TRAIN, "10")
    job.wait_for_step(5)
    hosts.link(1, "down")
    started = time.monotonic()
    assert job.end(seconds=60) == [1, 1]
    assert 9 < time.monotonic() - started < 45
    assert "Timeout of 10 s" in job.said(0)
    assert "nothing is heard of host-1 (ranks 2 and 3), which is down or cut off" in job.said(0)
    assert re.search(r"Timeout of 10 s: rank [23] .*the store is gone", job.said(1)), job.said(1)


@soak("how long a silent host is waited for")
def test_a_host_that_vanishes_is_named_with_its_ranks(hosts: Hosts, tmp_path: Path) -> None:
    job = Job(hosts, tmp_path, TRAIN, "600")
    job.wait_for_step(5)
    hosts.kill(1)
    assert job.end(0, seconds=60) == [1]
    assert "Ranks 2 and 3, all that were on host-1, are gone without a word" in job.said(0)


ECHO = """
import socket, sys, time
if sys.argv[1] == "serve":
    with socket.create_server(("0.0.0.0", 5000)) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
        while said := connection.recv(100):
            connection.sendall(said)
else:
    with socket.create_connection((sys.argv[1], 5000)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begun = time.perf_counter()
        for _ in range(5):
            connection.sendall(b"x")
            assert connection.recv(1) == b"x"
        print(time.perf_counter() - begun)
"""


@soak("measures the delay of a link")
def test_links_with_a_delay_carry_what_is_sent_that_much_later() -> None:
    """What comes back has been delayed twice, whether links are shaped or not; and nothing stays behind."""
    delay = 0.02
    with Hosts(3, delay) as made:
        network = made._network
        serving = [*network.within("host-2"), sys.executable, "-c", ECHO, "serve"]
        for rate in (None, 1e8):
            made.shape(rate)
            with subprocess.Popen(serving, stdout=subprocess.PIPE, text=True) as server:
                assert server.stdout is not None
                assert server.stdout.readline() == "listening\n"
                before = made.counters(0)
                asking = [*network.within("host-0"), sys.executable, "-c", ECHO, made.address(2)]
                done = subprocess.run(asking, capture_output=True, text=True, check=True, timeout=60)
            assert float(done.stdout) >= 5 * 2 * delay
            assert all(after > count for after, count in zip(made.counters(0), before, strict=True))
    assert network.left() == []
