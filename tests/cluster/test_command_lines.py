"""What people type after the launchers of others, on two hosts that are namespaces of this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

import shardwise
from tests.cluster.namespaces import Cluster, cluster, obstacle, processes_with
from tests.patience import wait_until
from tests.thorough import soak

ELASTIC = Path(__file__).parents[1] / "faults" / "horovod_elastic.py"
EXTRAS = Path(sys.prefix).with_name(".venv-extras") / "bin" / "python"
pytestmark = [pytest.mark.skipif(bool(obstacle()), reason=obstacle()), pytest.mark.timeout(400)]

PLAIN = """
    import os, socket, torch
    def build():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    torch.manual_seed(1)
    batches = torch.randn(4, 4, 6, 8)
    plain = build()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    for batch in batches:
        loss = plain(batch.flatten(0, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    def tell(rank, *words):
        said = " ".join(map(str, ("like the plain model on", socket.gethostname(), "as rank", rank, *words)))
        os.write(1, f"{said}\\n".encode())
"""
HOROVOD = """
    import horovod.torch as hvd
    hvd.init()
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for batch in batches:
        optimizer.zero_grad()
        model(batch[hvd.rank()]).square().mean().backward()
        optimizer.step()
    for mine, other in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(mine, other)
    assert hvd.size() == 4 and hvd.local_size() == 2 and hvd.cross_size() == 2
    assert os.environ["TOKEN"] == "s3cr3t"
    tell(hvd.rank(), "of", hvd.local_rank(), hvd.cross_rank())
    hvd.shutdown()
"""
DEEPSPEED = """
    import argparse, deepspeed
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    model = build()
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.01}},
    }
    engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model, config=config)
    rank = deepspeed.comm.get_rank()
    assert int(os.environ["LOCAL_RANK"]) == args.local_rank == rank % 2
    assert os.environ["TOKEN"] == "s3cr3t"
    for batch in batches:
        loss = engine(batch[rank]).square().mean()
        engine.backward(loss)
        engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        for mine, other in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(mine.detach(), other.detach())
    tell(rank)
"""
ACCELERATE = """
    from accelerate import Accelerator
    accelerator = Accelerator()
    assert type(accelerator).__module__.startswith("shardwise"), type(accelerator)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in batches:
        accelerator.backward(model(batch[accelerator.process_index]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    whole = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        torch.testing.assert_close(whole, plain.state_dict())
    tell(accelerator.process_index, accelerator.local_process_index, accelerator.num_processes)
    accelerator.end_training()
"""


class Site:
    """A folder that two hosts share, `one` and `two`, and what is typed there."""

    def __init__(self, folder: Path, hosts: Cluster) -> None:
        self.folder, self.hosts = folder, hosts

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(textwrap.dedent(PLAIN) + textwrap.dedent(text))

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """On this machine, which reaches both hosts by ssh under their names."""
        return subprocess.run(
            [sys.executable, "-m", "shardwise", *words],
            cwd=self.folder,
            env=self._environment() | {"PATH": f"{self.folder}/bin:{os.environ['PATH']}"} | variables,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def start_on(self, host: str, log: IO[bytes], *words: str) -> subprocess.Popen[bytes]:
        """On a host itself."""
        names = self.folder / "names"  # torchrun's c10d asks what its own name means
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{a} {name}\n" for name, a in self.hosts.addresses.items()))
        script = f"mount --bind {names} /etc/hosts\ncd {self.folder} && exec {' '.join(words)}"
        return self.hosts.start(host, script, log, **self._environment())

    def _environment(self) -> dict[str, str]:
        source = str(Path(shardwise.__file__).parents[1])
        return dict(os.environ) | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    base = tmp_path_factory.mktemp("lines")
    (base / "keys").mkdir()
    (base / "shared" / "bin").mkdir(parents=True)
    with cluster(base / "keys") as hosts:
        for name in ("one", "two"):
            hosts.add(name)
        hosts.put_ssh(base / "shared" / "bin")
        yield Site(base / "shared", hosts)
        wait_until(lambda: not processes_with("shardwise.launch", base / "shared"), "ranks stay behind", 60)


def like_plain(text: str) -> list[str]:
    return sorted(re.findall("like the plain model on .*", text))


def test_horovodrun_on_two_hosts(site: Site) -> None:
    site.write("train.py", HOROVOD)
    done = site.run("horovodrun", "-np", "4", "-H", "one:2,two:2", "python", "train.py", TOKEN="s3cr3t")
    assert done.returncode == 0, done.stderr
    assert like_plain(done.stdout) == [
        f"like the plain model on {name} as rank {2 * host + local} of {local} {host}"
        for host, name in enumerate(("one", "two"))
        for local in range(2)
    ]
    assert not processes_with("s3cr3t")


def test_horovodrun_tells_the_first_failure_of_any_host(site: Site) -> None:
    site.write("train.py", HOROVOD.replace("torch.testing", "assert hvd.rank() != 3, 'a bad batch'; torch.testing"))
    (site.folder / "hosts").write_text("one slots=2  # first\ntwo slots=4\n")
    done = site.run("horovodrun", "-np", "4", "--hostfile", "hosts", "python", "train.py", TOKEN="s3cr3t")
    assert done.returncode == 1
    assert "rank 3 of 4 failed first, with exit code 1: it raised AssertionError: a bad batch." in done.stderr


@soak("kills processes at any moment")
@pytest.mark.parametrize(("options", "num_new", "faults", "left"), [
    (["--min-np", "2", "--reset-limit", "0"], 0, ["kill:0:5", "kill:1:9"], [2, 3]),  # then the first host has none
    (["--min-np", "1"], 2, ["kill:0:5", "kill:2:9"], [1, 3, 4, 5]),
], ids=("fewer", "others"))  # fmt: skip
def test_elastic_horovodrun_on_two_hosts(
    site: Site, options: list[str], num_new: int, faults: list[str], left: list[int]
) -> None:
    """The script of tests/faults, which compares its parameters with those of one process that never stopped."""
    out = site.folder / f"out{num_new}"
    out.mkdir()
    (site.folder / "train.py").write_text(ELASTIC.read_text())
    words = ["python", "train.py", str(out), "30", str(num_new), "sampler", *faults]
    done = site.run("horovodrun", "-np", "4", *options, "-H", "one:2,two:2", *words)
    assert done.returncode == 0, done.stderr
    found = {int(path.name[7:]): json.loads(path.read_text()) for path in out.glob("member-*")}
    assert sorted(found) == left, done.stderr
    assert all(one["size"] == len(left) for one in found.values())


def test_elastic_horovodrun_asks_a_script_for_hosts(site: Site) -> None:
    """Two ranks begin; others come to the host that the script names later, up to `--max-np`."""
    out = site.folder / "discovered"
    out.mkdir()
    step = "self.sizes.append(hvd.size())"
    (site.folder / "train.py").write_text(ELASTIC.read_text().replace(step, f"{step}; (self.out / 'begun').touch()"))
    (site.folder / "discover").write_text("#!/bin/sh\necho one:2\n[ ! -e discovered/begun ] || echo two:3\n")
    (site.folder / "discover").chmod(0o755)
    options = ["-np", "2", "--min-np", "2", "--max-np", "4", "--host-discovery-script", "./discover"]
    words = ["python", "train.py", str(out), "30", "2", "sampler"]
    done = site.run("horovodrun", *options, *words, TOKEN="s3cr3t")
    assert done.returncode == 0, done.stderr
    found = {int(path.name[7:]): json.loads(path.read_text()) for path in out.glob("member-*")}
    assert sorted(found) == [0, 1, 2, 3], done.stderr
    assert {one["size"] for one in found.values()} == {4}
    assert found[0]["sizes"][0] == 2
    assert "host two joins, with 3 slots." in done.stderr
    assert not processes_with("s3cr3t")


@soak("starts processes on hosts that come and leave, within deadlines")
def test_elastic_horovodrun_follows_a_list_that_grows_and_shrinks(site: Site) -> None:
    """A second host comes, then the first one leaves, with rank 0: the ranks of the second go on from what all had."""
    out = site.folder / "followed"
    out.mkdir()
    text = ELASTIC.read_text()
    step, end = "self.sizes.append(hvd.size())", "is_there = hvd.size() >= 4 if self.num_new else True"
    assert step in text
    assert end in text
    text = text.replace(step, f"{step}; (self.out / f'had{{hvd.size()}}').touch()")
    (site.folder / "train.py").write_text(text.replace(end, "is_there = 4 in self.sizes and self.sizes[-1] == 2"))
    (site.folder / "follow").write_text(
        "#!/bin/sh\n[ -e followed/had4 ] || echo one:2\n[ ! -e followed/had2 ] || echo two:2\n"
    )
    (site.folder / "follow").chmod(0o755)
    options = ["-np", "2", "--min-np", "2", "--max-np", "4", "--host-discovery-script", "./follow"]
    done = site.run("horovodrun", *options, "python", "train.py", str(out), "30", "2", "sampler", TOKEN="s3cr3t")
    assert done.returncode == 0, done.stderr
    found = {int(path.name[7:]): json.loads(path.read_text()) for path in out.glob("member-*")}
    assert sorted(found) == [2, 3], done.stderr
    assert all({2, 4} <= set(one["sizes"]) and one["size"] == 2 for one in found.values())
    assert sorted(one["rank"] for one in found.values()) == [0, 1]
    assert "host two joins, with 2 slots." in done.stderr
    assert "host one is no longer in the list of hosts: 2 ranks there leave after their step." in done.stderr
    assert not processes_with("s3cr3t")


def test_deepspeed_on_the_hosts_of_a_file(site: Site) -> None:
    site.write("train.py", DEEPSPEED)
    (site.folder / "hosts").write_text("one slots=2\ntwo slots=2\n")
    (site.folder / ".deepspeed_env").write_text("TOKEN=s3cr3t\n")
    try:
        done = site.run("deepspeed", "--hostfile", "hosts", "train.py", "--deepspeed")
    finally:
        (site.folder / ".deepspeed_env").unlink()
    assert done.returncode == 0, done.stderr
    lines = [f"like the plain model on {name} as rank {rank}" for rank, name in enumerate(("one", "one", "two", "two"))]
    assert like_plain(done.stdout) == lines


@pytest.mark.skipif(not EXTRAS.exists(), reason="needs .venv-extras (make extras)")
@pytest.mark.parametrize("options", ["--use_fsdp", "--rdzv_backend c10d --use_deepspeed --zero_stage 2"])
def test_accelerate_launch_on_each_of_two_hosts(site: Site, options: str) -> None:
    """Typed on both, with another machine_rank; the second comes first."""
    site.write("train.py", ACCELERATE)
    given = (
        f"--num_machines 2 --num_processes 4 --main_process_ip {site.hosts.addresses['one']} --main_process_port 29633"
    )
    started = []
    for rank, host in ((1, "two"), (0, "one")):
        words = f"{EXTRAS} -m shardwise accelerate launch --cpu {given} --machine_rank {rank} {options} train.py"
        with (site.folder / f"log{rank}").open("wb") as log:
            started.append(site.start_on(host, log, words))
    try:
        codes = [process.wait(240) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    said = "".join((site.folder / f"log{rank}").read_text() for rank in range(2))
    assert codes == [0, 0], said
    lines = [f"like the plain model on {name} as rank {2 * host + local} {local} 4"
             for host, name in enumerate(("one", "two")) for local in range(2)]  # fmt: skip
    assert like_plain(said) == lines
