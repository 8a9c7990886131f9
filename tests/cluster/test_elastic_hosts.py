"""`shardwise launch --elastic` on hosts that are namespaces of this machine: processes and whole hosts die and come."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.namespaces import cluster, obstacle, processes_with, words_of
from tests.cluster.test_launch_ssh import Site
from tests.faults import survivor
from tests.faults.test_survival import oracle
from tests.patience import wait_until
from tests.thorough import soak

pytestmark = [pytest.mark.skipif(bool(obstacle()), reason=obstacle()), pytest.mark.timeout(400)]
SCRIPT = Path(__file__).with_name("elastic_member.py")
SURVIVOR = Path(survivor.__file__)
SOON_SECONDS = 90


class Job:
    """A launcher, and what its ranks have noted."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.folder, self.process = folder, process

    @classmethod
    def start(cls, site: Site, hosts: str, *arguments: str, script: Sequence[object] = (SCRIPT,)) -> Job:
        for name in ("member-*", "enough", "pid-*"):
            for old in site.folder.glob(name):
                old.unlink()
        return cls(site.folder, site.start(hosts, "--timeout", "3", *arguments, *map(str, script)))

    def facts(self, what: str = "") -> list[dict[str, Any]]:
        lines = [line for path in self.folder.glob("member-*") for line in path.read_text().splitlines(keepends=True)]
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return sorted((one for one in found if what in ("", one["what"])), key=lambda one: one["time"])

    def require_alive(self) -> None:
        if self.process.poll() is not None:
            raise RuntimeError(f"it has ended: {self.process.communicate()}")

    def wait_for(self, what: str, number: int) -> list[dict[str, Any]]:
        def has_come() -> bool:
            self.require_alive()
            return len(self.facts(what)) >= number

        wait_until(has_come, f"no {number} {what}", SOON_SECONDS)
        return self.facts(what)

    def wait_for_members(self, *hosts: str) -> dict[str, Any]:
        """Until a generation is of ranks on these hosts, by rank; what its rank 0 has noted."""

        def last() -> list[dict[str, Any]]:
            found = [one for one in self.facts() if one["what"] in ("joined", "regrouped")]
            return [one for one in found if one["generation"] == found[-1]["generation"]]

        def has_come() -> bool:
            self.require_alive()
            found = last()
            return bool(found) and found[-1]["hosts"] == list(hosts) and len(found) == len(hosts)

        try:
            wait_until(has_come, "", SOON_SECONDS)
        except AssertionError:
            self.process.terminate()
            said = self.process.communicate(timeout=SOON_SECONDS)
            raise AssertionError(f"{[(o['what'], o['hosts']) for o in self.facts()[-6:]]}: {said}") from None
        return next(one for one in last() if one["rank"] == 0)

    def wait_for_loss(self, number: int) -> None:
        """Until so many generations have lost somebody."""

        def has_come() -> bool:
            self.require_alive()
            return len({tuple(one["members"]) for one in self.facts("regrouped") if one["lost"]}) >= number

        wait_until(has_come, f"no loss {number}", SOON_SECONDS)

    def end(self) -> str:
        """Well; what the launcher has said."""
        (self.folder / "enough").write_text("")
        out, err = self.process.communicate(timeout=SOON_SECONDS)
        assert self.process.returncode == 0, (out, err)
        return err

    def folders(self) -> set[str]:
        return {one["folder"] for one in self.facts("joined")}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    base = tmp_path_factory.mktemp("elastic")
    (base / "keys").mkdir()
    (base / "shared" / "run").mkdir(parents=True)
    with cluster(base / "keys") as hosts:
        for name in ("one", "two", "three"):
            hosts.add(name, "-t tmpfs none /dev/shm")  # a memory of its own, as hosts have
        yield Site(base / "shared" / "run", hosts)


@pytest.fixture(autouse=True)
def nothing_stays(site: Site) -> Iterator[None]:
    yield
    for name in ("one", "two", "three"):
        site.hosts.link(name, "up")
    site.end_all()


def memory_of(site: Site, host: str) -> set[str]:
    """What jobs have in a host's memory."""
    found = [pid for pid in processes_with(f"{site.hosts.folder}/sshd-{host}") if comm_of(pid) == "sshd"]
    return {f"/dev/shm/{path.name}" for path in Path(f"/proc/{found[0]}/root/dev/shm").glob("*shardwise-*")}


def comm_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def kill(word: str, variable: str, by: str = "SSH_CONNECTION", number: signal.Signals = signal.SIGKILL) -> None:
    """A process by what is on its command line and in its environment: its process id is one of its host's own."""
    for pid in processes_with(word):
        words = words_of(pid)
        if by in words and variable in words:
            os.kill(pid, number)
            return
    raise AssertionError(f"there is no {word} with {variable}")


def kill_member(number: int) -> None:
    kill("elastic_member", f"\0SHARDWISE_MEMBER={number}\0")


def test_a_rank_of_a_host_is_killed_and_another_one_comes_in_its_place(site: Site) -> None:
    net = site.network
    job = Job.start(site, f"{net}.1:2,{net}.2:2", "--elastic", "2:4")
    first = job.wait_for_members(*[f"{net}.1"] * 2, *[f"{net}.2"] * 2)
    assert (first["local_size"], first["ranks_of_host"]) == (2, [0, 1])
    joined = job.facts("joined")
    assert {(one["rank"], one["host"], one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"]) for one in joined} == {
        (0, "one", "0", "2"),
        (1, "one", "1", "2"),
        (2, "two", "0", "2"),
        (3, "two", "1", "2"),
    }
    victim = next(one for one in joined if one["rank"] == 2)
    kill_member(victim["member"])
    met = job.wait_for("regrouped", 3)[:3]
    assert {one["lost"][0] for one in met} == {2}
    assert met[0]["hosts"] == [f"{net}.1", f"{net}.1", f"{net}.2"]
    assert {one["local_size"] for one in met} == {0}, "hosts have different numbers of ranks, on all ranks alike"
    assert {(one["host"], tuple(one["ranks_of_host"])) for one in met} == {("one", (0, 1)), ("two", (2,))}
    job.wait_for_members(*[f"{net}.1"] * 2, *[f"{net}.2"] * 2)
    said = job.end()
    assert "rank 2 was killed by SIGKILL" in said
    assert "1 replacement starts (retries: 1 of 3 within 600 s)." in said
    (new,) = [one for one in job.facts("joined") if one["is_newcomer"]]
    assert (new["host"], new["LOCAL_RANK"], new["rank"]) == ("two", "0", 3)


@soak("how long a silent link is waited for")
def test_a_host_whose_cable_is_out_is_gone_with_all_its_ranks_and_comes_back(site: Site) -> None:
    net = site.network
    short = ["--host-timeout", "4", "--launcher-timeout", "1"]
    job = Job.start(site, f"{net}.1:1,{net}.2:2", "--elastic", "1:3", *short)
    job.wait_for_members(f"{net}.1", f"{net}.2", f"{net}.2")
    pids = site.ranks()
    site.hosts.link("two", "down")
    cut = time.time()
    (met, *_) = job.wait_for("regrouped", 1)
    assert met["time"] - cut < 4 + 10
    assert (met["hosts"], met["lost"], met["origins"]) == ([f"{net}.1"], [1, 2], [0])
    # on the host that is cut off nobody goes on, either
    wait_until(lambda: len([pid for pid in pids if Path(f"/proc/{pid}").exists()]) == 1, "they live on", 40)
    site.hosts.link("two", "up")
    job.wait_for_members(f"{net}.1", f"{net}.2", f"{net}.2")
    said = job.end()
    assert f"host {net}.2 is gone: ranks 1, 2 (nothing was heard of it for 4 s)." in said
    assert "Cause: network: Ranks 1, 2 could not be reached" in said
    assert "Replacements start as soon as a host has free slots." in said
    assert f"host {net}.2 answers, with 2 slots." in said


@soak("how long a silent link is waited for")
def test_a_host_that_is_cut_off_waits_takes_no_step_and_is_told_that_the_others_went_on(site: Site) -> None:
    """Its ranks may train without a launcher for longer than the link is down, but not alone: they wait for the others
    in the middle of a step. When the link is up, their host hears that these go on without them, ends them, and gets
    new ones."""
    net = site.network
    hosts = ",".join(f"{net}.{number}:1" for number in (1, 2, 3))
    job = Job.start(site, hosts, "--elastic", "1:3", "--host-timeout", "4", "--launcher-timeout", "120")
    job.wait_for_members(f"{net}.1", f"{net}.2", f"{net}.3")
    (there,) = (one for one in job.facts("joined") if one["host"] == "two")
    (pid,) = (pid for pid in site.ranks() if f"\0SHARDWISE_MEMBER={there['member']}\0" in words_of(pid))
    site.hosts.link("two", "down")
    met = job.wait_for_members(f"{net}.1", f"{net}.3")
    assert met["lost"] == [1]
    time.sleep(20)
    assert Path(f"/proc/{pid}").exists(), "it may be that the launcher is the one that was cut off"
    assert [one["what"] for one in job.facts() if one["member"] == there["member"]] in (["joined"], ["joined", "fault"])
    site.hosts.link("two", "up")
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "it lives on", 60)
    job.wait_for_members(f"{net}.1", f"{net}.3", f"{net}.2")
    said = job.end()
    assert f"host {net}.2 is gone: rank 1 (nothing was heard of it for 4 s)." in said
    assert f"host {net}.2 answers, with 1 slot." in said


@soak("kills processes at any moment")
def test_a_host_whose_agent_is_killed_comes_back_at_once_and_leaves_nothing_in_its_memory(site: Site) -> None:
    net = site.network
    job = Job.start(site, f"{net}.1:1,{net}.2:1", "--elastic", "1:2")
    job.wait_for_members(f"{net}.1", f"{net}.2")
    folders = memory_of(site, "two")
    assert folders == {one["folder"] for one in job.facts("joined") if one["host"] == "two"}
    kill("shardwise.launch.hosts", f"{net}.2 2222\0")
    killed = time.time()
    (met, *_) = job.wait_for("regrouped", 1)
    assert met["time"] - killed < 10, "not after a silence"
    job.wait_for_members(f"{net}.1", f"{net}.2")
    assert len(memory_of(site, "two")) == 1
    assert not memory_of(site, "two") & folders
    said = job.end()
    assert f"host {net}.2 is gone: rank 1 (the connection is lost: ssh ended with status " in said
    wait_until(lambda: not memory_of(site, "one") | memory_of(site, "two"), "something stays in memory", 20)


@soak("kills processes at any moment")
def test_hosts_agree_on_another_launcher_when_theirs_is_killed(site: Site) -> None:
    """The cable of the one that has it is taken out then, and the two others agree on the next."""
    net = site.network
    hosts = ",".join(f"{net}.{number}:1" for number in (1, 2, 3))
    job = Job.start(site, hosts, "--elastic", "1:3", "--host-timeout", "4", "--launcher-timeout", "60")
    job.wait_for_members(f"{net}.1", f"{net}.2", f"{net}.3")
    job.process.kill()
    log = site.folder / "shardwise-launcher.log"
    said = f"on {net}.1 has taken over, with 3 of 3 hosts."
    wait_until(lambda: log.exists() and said in log.read_text(), "nobody takes over", SOON_SECONDS)
    site.hosts.link("one", "down")
    said = f"on {net}.2 has taken over, with 2 of 3 hosts."
    wait_until(lambda: said in log.read_text(), "nobody takes over again", SOON_SECONDS)
    wait_until(lambda: [one["lost"] for one in job.facts("regrouped")] == [[0], [0]], "no loss", SOON_SECONDS)
    site.hosts.link("one", "up")
    (site.folder / "enough").write_text("")
    wait_until(lambda: "the job has ended with status 0." in log.read_text(), "it does not end", SOON_SECONDS)
    log.unlink()


def test_nothing_stays_on_any_host_when_the_launcher_is_killed(site: Site) -> None:
    net = site.network
    job = Job.start(site, f"{net}.1:1,{net}.2:1", "--elastic", "1:2", "--launcher-timeout", "0")
    job.wait_for_members(f"{net}.1", f"{net}.2")
    assert memory_of(site, "one")
    assert memory_of(site, "two")
    job.process.kill()
    wait_until(lambda: not site.ranks(), "ranks live on", 20)
    wait_until(lambda: not memory_of(site, "one") | memory_of(site, "two"), "something stays in memory", 20)


@soak("starts processes on hosts that come and leave, within deadlines")
def test_a_script_names_a_host_that_comes_and_then_leaves_after_its_step(site: Site) -> None:
    net = site.network
    site.write("discover", "#!/bin/sh\ncat hosts\necho >> read\n")
    (site.folder / "discover").chmod(0o755)
    site.write("hosts", f"{net}.1:1\n")
    job = Job.start(site, "", "--host-discovery-script", "./discover", "--elastic", "1:3")
    job.wait_for_members(f"{net}.1")
    site.write("hosts", f"{net}.1:1\n{net}.2:2\n")
    job.wait_for_members(f"{net}.1", f"{net}.2", f"{net}.2")
    site.write("hosts", "what is this?\n")
    read = site.folder / "read"
    before = len(read.read_text())
    wait_until(lambda: len(read.read_text()) >= before + 3, "nobody reads it", SOON_SECONDS)
    site.write("hosts", f"{net}.1:1\n")
    met = job.wait_for_members(f"{net}.1")
    assert met["lost"] == [1, 2]
    left = job.wait_for("left", 2)
    assert {(one["host"], one["has_asked"]) for one in left} == {("two", True)}
    said = job.end()
    assert f"host {net}.2 joins, with 2 slots." in said
    assert "'is' is not understood" in said
    assert "The list of hosts is unchanged." in said
    assert f"host {net}.2 is no longer in the list of hosts: 2 ranks there leave after their step." in said
    assert "2 ranks left on request. 1 rank continues" in said


@soak("signals at any moment")
def test_a_host_that_is_asked_to_end_is_left_and_the_job_ends_where_it_needs_its_ranks(site: Site) -> None:
    net = site.network
    job = Job.start(site, f"{net}.1:1,{net}.2:1", "--elastic", "1:2")
    job.wait_for_members(f"{net}.1", f"{net}.2")
    kill("shardwise.launch.hosts", f"{net}.2 2222\0", number=signal.SIGTERM)
    job.wait_for_members(f"{net}.1")
    assert [one["has_asked"] for one in job.facts("left")] == [True]
    kill("shardwise.launch.hosts", f"{net}.1 2222\0", number=signal.SIGTERM)
    _, said = job.process.communicate(timeout=SOON_SECONDS)
    assert job.process.returncode == 143, said
    assert f"host {net}.2 received SIGTERM: 1 rank there leaves after its step." in said
    assert f"host {net}.1 received SIGTERM; the job needs its ranks, so all ranks are told to end." in said


@soak("kills processes at any moment")
def test_a_host_with_faults_of_its_own_gets_no_process_for_a_while_and_another_one_does(site: Site) -> None:
    net = site.network
    many = ["--elastic", "1:4", "--retries", "9", "--cooldown", "600"]
    job = Job.start(site, f"{net}.1:1,{net}.2:3,{net}.3:1", *many)
    job.wait_for_members(f"{net}.1", *[f"{net}.2"] * 3)
    victims = [one["member"] for one in job.facts("joined") if one["host"] == "two"]
    for count, member in enumerate(victims, start=1):
        kill_member(member)
        job.wait_for_loss(count)
    wait_until(lambda: any(one["host"] == "three" for one in job.facts("joined")), "nobody on three", SOON_SECONDS)
    said = job.end()
    assert f"That is fault 3 of {net}.2 in a short time." in said
    assert f"No process is started on {net}.2 for 600 s (until " in said


@soak("cuts links at any moment")
def test_a_host_whose_link_breaks_again_and_again_is_left_out_and_the_others_finish(site: Site) -> None:
    net, out = site.network, site.folder
    cuts = ["1:3:cut0", "0:5:cut1", "1:7:cut0"]
    script = [SURVIVOR, out, "zero2", "engine", 14, *cuts]
    job = Job.start(site, f"{net}.1:1,{net}.2:1,{net}.3:1", "--elastic", "1:3", "--retries", "9", script=script)
    _, said = job.process.communicate(timeout=SOON_SECONDS)
    assert job.process.returncode == 0, said
    assert said.count("Cause: network: Ranks 0 and 1 could not reach each other") == 3, said
    assert "That is fault 3 of this connection within 600 s." in said
    assert f"No process is started on {net}.2" in said
    found = [json.loads(path.read_text()) for path in out.glob("member-*.json")]
    assert [one["world"] for one in found] == [2, 2], said
    losses = oracle(14)
    for one in found:
        assert {step: pytest.approx(losses[int(step)], rel=1e-5) for step in one["losses"]} == one["losses"]


@soak("kills processes at any moment")
@pytest.mark.parametrize("plan", ["ddp", "zero3"])
def test_an_engine_takes_the_step_again_when_a_host_is_lost_and_again_when_it_is_back(site: Site, plan: str) -> None:
    """The losses are those of the plain model, whoever was there."""
    net, out = site.network, site.folder
    script = [SURVIVOR, out, plan, "engine", 10**6]
    slowly = ["--env", "PAUSE_SECONDS=0.05"]  # in many steps what is rounded otherwise would add up
    job = Job.start(site, f"{net}.1:1,{net}.2:2", "--elastic", "1:3", *slowly, script=script)
    wait_until(lambda: len([path for path in out.glob("pid-*") if path.read_text()]) == 3, "not begun", SOON_SECONDS)
    time.sleep(1)
    kill("shardwise.launch.hosts", f"{net}.2 2222\0")
    wait_until(lambda: len([path for path in out.glob("pid-*") if path.read_text()]) == 5, "none came", SOON_SECONDS)
    time.sleep(3)
    (out / "enough").write_text("")
    _, said = job.process.communicate(timeout=SOON_SECONDS)
    assert job.process.returncode == 0, said
    found = [json.loads(path.read_text()) for path in out.glob("member-*.json")]
    assert len(found) == 3, said
    steps = max(int(step) for one in found for step in one["losses"]) + 1
    losses = oracle(steps)
    for one in found:
        assert one["world"] == 3, said
        assert one["state"] == found[0]["state"]
        wrong = [step for step, loss in one["losses"].items() if abs(loss - losses[int(step)]) > 1e-5 * loss]
        assert len(wrong) <= 2, (wrong, said)


WITH_WORDS = """
    import os, runpy, socket, sys, words
    shared, member = sys.argv[1:3]
    os.chdir(shared)
    with open(f"words-{socket.gethostname()}", "a") as notes:
        notes.write(words.TEXT + chr(10))
    sys.argv = [member]
    runpy.run_path(member, run_name="__main__")
"""


@soak("kills processes at any moment")
def test_hosts_that_come_later_get_the_code_and_get_it_again_when_it_is_gone(site: Site, tmp_path: Path) -> None:
    """Each host has a folder of its own for it; and it is told if the code is not what the job began with."""
    there = site.folder.parent / "sent"
    there.mkdir()
    mounts = (f"-t tmpfs none {there}", "-t tmpfs none /dev/shm")
    near, far = (site.hosts.add(name, *mounts) for name in ("near", "far"))
    shared, site.folder = site.folder, tmp_path
    try:
        site.write("train.py", WITH_WORDS)
        site.write("words.py", "TEXT = 'first'")
        listed = shared / "listed"
        listed.write_text(f"{near} slots=1\n")
        options = ("--hostfile", str(listed), "--elastic", "1:2", "--rsync", "--chdir", str(there))
        script = ("train.py", shared, SCRIPT)
        job = Job(shared, Job.start(site, "", *options, script=script).process)
    finally:
        site.folder = shared
    for old in (*shared.glob("member-*"), shared / "enough"):
        old.unlink(missing_ok=True)
    job.wait_for_members(near)
    (tmp_path / "words.py").write_text("TEXT = 'changed since'")
    listed.write_text(f"{near} slots=1\n{far} slots=1\n")
    job.wait_for_members(near, far)
    agents = [pid for pid in processes_with("shardwise.launch.hosts") if f"{far} 2222" in words_of(pid)]
    for path in Path(f"/proc/{agents[0]}/root{there}").iterdir():
        path.unlink() if path.is_file() else shutil.rmtree(path)
    kill("shardwise.launch.hosts", f"{far} 2222\0")
    job.wait_for_loss(1)
    job.wait_for("regrouped", 3)
    job.wait_for_members(near, far)
    said = job.end()
    assert (shared / "words-near").read_text() == "first\n"
    assert (shared / "words-far").read_text() == "changed since\n" * 2
    assert said.count(f"this directory has changed since the job began: {far} gets the files that are here now") == 1
    assert f"host {far} cannot be used: There is no script 'train.py'" in said


@soak("how long a silent link is waited for")
def test_a_job_that_uses_a_part_of_its_hosts_takes_another_one_when_one_of_them_is_lost(site: Site) -> None:
    net = site.network
    hosts = ",".join(f"{net}.{number}:1" for number in (1, 2, 3))
    policy = ["--autoscale", "schedule:00:00 2"]
    job = Job.start(site, hosts, "--elastic", "1:3", "--host-timeout", "4", *policy)
    job.wait_for_members(f"{net}.1", f"{net}.2")
    site.hosts.link("two", "down")
    job.wait_for_members(f"{net}.1", f"{net}.3")
    site.hosts.link("two", "up")
    time.sleep(10)
    job.wait_for_members(f"{net}.1", f"{net}.3")
    said = job.end()
    assert f"host {net}.3 joins, with 1 slot." in said
    assert said.count(" joins, with") == 1
