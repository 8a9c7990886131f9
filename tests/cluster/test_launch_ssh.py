"""`shardwise launch --where ssh` with real sshd, on hosts that are namespaces of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shardwise
from tests.cluster.namespaces import Cluster, cluster, obstacle, processes_with, words_of
from tests.cluster.training import TRAIN
from tests.patience import wait_until
from tests.thorough import soak

pytestmark = [pytest.mark.skipif(bool(obstacle()), reason=obstacle()), pytest.mark.timeout(400)]

READY = """
    import os, pathlib, signal, sys, time
    rank = os.environ["RANK"]
    def ready():
        pathlib.Path(f"ready{rank}").write_text("")
"""


class Site:
    """A folder that hosts share, and launchers started in it."""

    def __init__(self, folder: Path, hosts: Cluster) -> None:
        self.folder, self.hosts, self.network = folder, hosts, hosts.network
        self.started: list[subprocess.Popen[str]] = []

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(textwrap.dedent(text))

    def start(self, hosts: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        for old in self.folder.glob("ready*"):
            old.unlink()
        named = ["--hosts", hosts] if hosts else []
        launch = [sys.executable, "-m", "shardwise", "launch", *named, *self.hosts.options(), *arguments]
        environment = os.environ | {"PYTHONPATH": str(Path(shardwise.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        self.started.append(
            subprocess.Popen(
                launch,
                cwd=self.folder,
                env=environment | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return self.started[-1]

    def run(self, hosts: str, *arguments: str, **variables: str) -> tuple[int, str, str]:
        process = self.start(hosts, *arguments, **variables)
        out, err = process.communicate(timeout=300)
        return process.returncode, out, err

    def connect_within(self, host: str, address: str, port: int) -> None:
        """Raises `ConnectionRefusedError` if nobody listens there on `host`."""
        script = f"import socket; socket.create_connection(({address!r}, {port}), 5)"
        command = [*self.hosts.within(host), sys.executable, "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if "ConnectionRefusedError" in done.stderr:
            raise ConnectionRefusedError(address)
        assert done.returncode == 0, done.stderr

    def ranks(self) -> list[int]:
        return processes_with("shardwise.launch.worker", self.folder)

    def started_by_ssh(self) -> list[int]:
        """Every ssh to these hosts, and what it has started there. Another file of tests may run beside this one, with
        hosts of its own: to wait for an end of theirs is to wait for its tests."""
        return [pid for pid in processes_with("shardwise.launch.hosts") if f"{self.network}." in words_of(pid)]

    def end_all(self) -> None:
        """What was started here; returns when nothing of it is left."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        self.started.clear()
        wait_until(lambda: not self.ranks(), "ranks stay behind", 90)
        wait_until(lambda: not self.started_by_ssh(), "what ssh started stays behind", 90)

    def wait_for(self, *names: str) -> None:
        wait_until(lambda: all((self.folder / name).exists() for name in names), f"no sign of {names}")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    base = tmp_path_factory.mktemp("ssh")
    (base / "keys").mkdir()
    (base / "shared" / "run").mkdir(parents=True)
    with cluster(base / "keys") as hosts:
        for name in ("one", "two"):
            hosts.add(name)
        yield Site(base / "shared" / "run", hosts)


@pytest.fixture(autouse=True)
def nothing_stays(site: Site) -> Iterator[None]:
    yield
    site.end_all()


def test_two_hosts_train_like_one_process(site: Site) -> None:
    """Over their network: what they share, they cannot know, having each its own processes."""
    site.write("train.py", TRAIN)
    process = site.start(
        f"{site.network}.1:1,{site.network}.2:1", "-x", "TOKEN", "--log-dir", "logs", "train.py", TOKEN="s3cr3t"
    )
    wait_until(lambda: bool(site.ranks()) or process.poll() is not None, "no rank")
    assert not processes_with("s3cr3t")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "shardwise:" not in err  # torch warns that addresses have no names
    lines = [f"like the plain model on {name} as rank {rank}" for rank, name in enumerate(("one", "two"))]
    assert sorted(out.splitlines()) == lines
    for rank in range(2):
        assert (site.folder / f"logs/attempt-0/rank-{rank}/stdout.log").read_text() == f"{lines[rank]}\n"


def test_the_first_failure_is_told_and_all_end_together(site: Site) -> None:
    site.write(
        "fail.py",
        READY
        + """
    if rank == "2":
        while not all(pathlib.Path(f"ready{other}").exists() for other in "01"):
            time.sleep(0.01)
        [pathlib.Path(f"ready{other}").unlink() for other in "01"]
        print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"])
        raise ValueError("a bad batch")
    ready()
    signal.pause()
    """,
    )
    status, out, err = site.run(f"{site.network}.1:2,{site.network}.2:1", "--max-restarts", "1", "fail.py")
    assert status == 1
    assert out == "attempt 0 1 0\nattempt 1 1 0\n"
    assert "rank 2 of 3 raised ValueError: a bad batch; restart 1 of 1 begins." in err
    assert "rank 2 of 3 failed first, with exit code 1: it raised ValueError: a bad batch." in err
    assert 'raise ValueError("a bad batch")' in err
    assert "ranks 0, 1 were ended by the launcher (SIGTERM)." in err


def test_ctrl_c_lets_ranks_save(site: Site) -> None:
    site.write(
        "save.py",
        READY
        + """
    from shardwise.launch import StopRequest
    with StopRequest() as stop:
        ready()
        while not stop.requested:
            time.sleep(0.01)
        print(f"saved after {stop.signal.name}")
    """,
    )
    process = site.start(f"{site.network}.1:1,{site.network}.2:1", "save.py")
    site.wait_for("ready0", "ready1")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "saved after SIGINT\n" * 2), err
    assert "ended by SIGINT; 2 of 2 ranks ended by themselves." in err


SLEEPS = READY + "\n    ready()\n    signal.pause()"


def test_ranks_end_with_the_launcher(site: Site) -> None:
    site.write("sleep.py", SLEEPS)
    process = site.start(f"{site.network}.1:1,{site.network}.2:1", "sleep.py")
    site.wait_for("ready0", "ready1")
    process.kill()
    wait_until(lambda: not site.ranks(), "ranks outlive their launcher", 60)


@soak("how long a silent host is waited for")
def test_a_host_that_vanishes(site: Site) -> None:
    """Its cable is taken out: nothing says that the connection is over."""
    site.write("sleep.py", SLEEPS)
    process = site.start(f"{site.network}.1:1,{site.network}.2:1", "sleep.py")
    site.wait_for("ready0", "ready1")
    site.hosts.link("two", "down")
    try:
        _, err = process.communicate(timeout=120)
    finally:
        site.hosts.link("two", "up")
    assert process.returncode == 1
    assert f"{site.network}.2: the connection is lost" in err
    assert f"the job ended because of the loss of rank 1 on {site.network}.2." in err


def test_all_hosts_that_cannot_take_part_are_named_at_once(site: Site, tmp_path: Path) -> None:
    """Before anything starts: nobody there, no sshd, no key, no folder, no script, another shardwise, another torch."""
    package = Path(shardwise.__file__).parent
    (tmp_path / "version.py").write_text('__version__ = "0.0.1"\n')
    (metadata,) = Path(torch.__file__).parents[1].glob("torch-*.dist-info/METADATA")
    (tmp_path / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.0.0\n")
    hosts = site.hosts
    addresses = [
        f"{site.network}.1",
        f"{site.network}.99",
        hosts.add("mute", has_sshd=False),
        hosts.add("strict", keys="none"),
        hosts.add("bare", f"-t tmpfs none {site.folder.parent}"),
        hosts.add("empty", f"-t tmpfs none {site.folder}"),
        hosts.add("old", f"--bind {tmp_path}/version.py {package}/version.py"),
        hosts.add("older", f"--bind {tmp_path}/METADATA {metadata}"),
    ]
    site.write("never.py", "open('never', 'w')")
    status, _, err = site.run(",".join(f"{address}:1" for address in addresses), "never.py")
    assert status == 2
    told = {line.partition(":")[0]: line for line in err.splitlines()}
    assert f"{site.network}.1" not in told
    for address, words in zip(
        addresses[1:],
        (
            "there is no route to it",
            "nothing answers at its ssh port",
            "it refuses the key",
            f"it has no folder {site.folder}",
            f"There is no script 'never.py', nor any other Python file in '{site.folder}'",
            "it has shardwise 0.0.1, and this machine",
            f"it has torch 2.0.0, and {site.network}.1 has 2.",
        ),
        strict=True,
    ):
        assert words in told[address], err
    assert not (site.folder / "never").exists()


def test_a_first_host_that_others_do_not_reach(site: Site) -> None:
    site.hosts.ip("one", "address", "add", "10.99.0.1/32", "dev", "lo")
    site.write("never.py", "open('never', 'w')")
    options = ("--master-addr", "10.99.0.1", "--port", "29555", "never.py")
    status, _, err = site.run(f"{site.network}.1:1,{site.network}.2:1", *options)
    assert status == 2
    assert f"{site.network}.2: it does not reach {site.network}.1 at 10.99.0.1, port 29555 (" in err
    assert "is the port blocked?" in err
    status, _, err = site.run(f"{site.network}.1:1", "--python", "/absent/python", "never.py")
    assert status == 2
    assert "there is no /absent/python; name the interpreter with --python" in err
    assert not (site.folder / "never").exists()


def test_the_code_is_sent_first(site: Site, tmp_path: Path) -> None:
    """To hosts that do not share a folder; what git ignores stays here, and a dry run says what goes."""
    there = site.folder.parent / "sent"
    there.mkdir()
    private = site.hosts.add("far", f"-t tmpfs none {there}")
    (tmp_path / "package").mkdir()
    for name, text in (
        ("train.py", "import package.words, os; print(package.words.TEXT, sorted(os.listdir()))"),
        ("package/words.py", "TEXT = 'sent'"),
        ("big.bin", "x" * 5000),
        (".gitignore", "*.bin\n/runs/\n"),
        (".git", "not a folder, but named so"),
    ):
        (tmp_path / name).write_text(text)
    options = ("--rsync", "--chdir", str(there), "train.py")
    home, site.folder = site.folder, tmp_path
    try:
        status, out, _ = site.run(f"{private}:1", "--dry-run", *options)
        assert status == 0
        assert "sent to each host: 3 files, " in out
        assert "big.bin" not in out
        status, out, err = site.run(f"{private}:1", *options)
    finally:
        site.folder = home
    assert (status, out) == (0, "sent ['.gitignore', 'package', 'train.py']\n"), err
    assert not any(there.iterdir())


STRANGER = """
    import json, sys, time
    from torch._C._distributed_c10d import TCPStore
    store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False, wait_for_workers=False)
    fault = {"kind": "lost", "ranks": [1], "text": "Rank 1 is gone.", "unit": "", "action": "", "origin": 0}
    keys = [key for key in store.list_keys() if "/shardwise-watch/" in key]
    places = {key.rpartition("/shardwise-watch/")[0] for key in keys}
    assert places
    for place in places:
        for world in range(3):
            store.set(f"{place}/shardwise-watch/{world}/fault", json.dumps(fault))
            for rank in range(2):
                store.set(f"{place}/shardwise-watch/{world}/status/{rank}", b"\\x80garbage")
"""


@soak("a second in which nothing may happen")
def test_a_stranger_at_the_store_is_not_believed(site: Site) -> None:
    """It tells both ranks that one of them is gone; they see the token of the job is not on it, and go on."""
    site.write("stranger.py", STRANGER)
    site.write(
        "meet.py",
        READY
        + """
    import shardwise as sw, torch
    world = sw.World.join(patience_seconds=0.2)
    pathlib.Path(f"at{rank}").write_text(f"{os.environ['MASTER_ADDR']} {os.environ['MASTER_PORT']}")
    ready()
    while not pathlib.Path("go").exists():
        world.exchange(b"x" * 100)
        time.sleep(0.05)
    time.sleep(1.5 if rank == "0" else 0)
    world.barrier()
    world.close()
    print("done")
    """,
    )
    (site.folder / "go").unlink(missing_ok=True)
    process = site.start(f"{site.network}.1:1,{site.network}.2:1", "meet.py")
    site.wait_for("ready0", "ready1")
    address, port = (site.folder / "at0").read_text().split()
    assert address == f"{site.network}.1"
    with pytest.raises(ConnectionRefusedError):  # nobody listens at another address of the first host
        site.connect_within("one", "127.0.0.1", int(port))
    stranger = [sys.executable, str(site.folder / "stranger.py"), address, port]
    done = subprocess.run(stranger, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    time.sleep(1)  # in which the watches of both ranks look at the board
    (site.folder / "go").touch()
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "done\n" * 2), err
