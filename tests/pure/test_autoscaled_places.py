"""Where the slots of a job with `--autoscale` come from, what its launcher asks for, and what its ranks tell it."""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.comm.members import MemberMessage, Pace
from shardwise.elastic.pace_meter import PaceMeter
from shardwise.errors import ConfigError, LaunchError
from shardwise.launch.autoscale import Fill, Gain, Schedule, Sizes
from shardwise.launch.elastic.chosen_hosts import ChosenHosts
from shardwise.launch.elastic.heir import _size_stays
from shardwise.launch.elastic.job_notes import FolderNotes
from shardwise.launch.elastic.mirror import HostsState
from shardwise.launch.elastic.on_hosts import _outlives_its_launcher
from shardwise.launch.elastic.scaling import Asking, Scaling
from shardwise.launch.job import Elastic, Job
from shardwise.launch.places.hosts import Host, shares
from shardwise.launch.places.slurm_hosts import NodesPlan
from shardwise.launch.places.slurm_more import Allocation, MoreNodes
from shardwise.launch.places.ssh import SshPlan, SshSettings
from tests.patience import PATIENCE

MONDAY = datetime(2026, 11, 30, tzinfo=UTC)


# -- lists of hosts ---------------------------------------------------------------------------------------


def test_of_a_list_of_hosts_the_first_slots_are_used_and_lost_hosts_last() -> None:
    listed = [Host("a", 4), Host("b", 4), Host("c", 2, devices=(1, 3))]
    place, lost = ChosenHosts(lambda: listed, 4, None), set[str]()
    place.lost = lambda: lost

    def used() -> dict[str, int]:
        return {share.host.name: share.num_ranks for share in shares(place.read())}

    assert (used(), place.room) == ({"a": 4}, 10)
    place.ask(9, ())
    assert used() == {"a": 4, "b": 4, "c": 1}
    assert place.read()[-1].devices == (1,)
    place.ask(4, ())
    lost.add("a")
    assert used() == {"b": 4}, "one that answers takes its place"
    lost.clear()
    assert used() == {"b": 4}, "and keeps it: ranks do not go to and fro"
    place.ask(6, ())
    assert used() == {"b": 4, "c": 2}
    listed[1:2] = []
    assert used() == {"c": 2, "a": 4}


def test_hosts_of_a_list_outlive_the_launcher_also_in_a_job_that_grows_whose_size_then_stays() -> None:
    elastic = Elastic(1, 3, launcher_timeout_seconds=60, autoscale=Gain(0.7))
    given: Any = Job((__file__,), 1, elastic=elastic), tuple(shares([Host("a", 1)])), SshSettings("/"), {}
    assert _outlives_its_launcher(SshPlan(*given))
    assert not _outlives_its_launcher(NodesPlan(*given)), "a step of Slurm ends with its srun"
    kept = HostsState.of_text(HostsState(SshPlan(*given), "run").as_text()).plan.job.elastic
    assert kept == elastic
    assert _size_stays(elastic).endswith("the size stays.")
    assert _size_stays(Elastic(1, 3)) == ""


def test_hosts_that_all_have_as_many_ranks() -> None:
    place = ChosenHosts(lambda: [Host("a"), Host("b", 8)], 6, 4)
    assert [(share.host.name, share.num_ranks) for share in shares(place.read())] == [("a", 4), ("b", 2)]
    assert place.room == 8


# -- nodes of Slurm ---------------------------------------------------------------------------------------


class Controller:
    """Slurm's, as far as it is asked: jobs wait until they are admitted."""

    def __init__(self) -> None:
        self.jobs: dict[str, str] = {}
        self.submitted: list[Sequence[str]] = []
        self.cancelled: list[str] = []
        self.refuses = ""

    def run(self, command: Sequence[str]) -> str:
        if self.refuses:
            raise ConfigError(self.refuses)
        match command[0]:
            case "sbatch":
                assert "--quiet" not in command, "it would not tell the number"
                self.submitted.append(command)
                number = str(100 + len(self.submitted))
                self.jobs[number] = ""
                return f"{number};cluster\n"
            case "scancel":
                self.cancelled += command[1:]
                for number in command[1:]:
                    self.jobs.pop(number, None)
                return ""
        assert command[0] == "squeue"
        (asked,) = re.findall(r"--jobs=(\S+)", " ".join(command))
        known = {job: self.jobs[job] for job in asked.split(",") if job in self.jobs}
        if not known:
            raise ConfigError("squeue has refused: slurm_load_jobs error: Invalid job id specified.")
        return "".join(f"{job} {'RUNNING ' + node if node else 'PENDING '}\n" for job, node in known.items())


def settled(place: MoreNodes) -> list[str]:
    for thread in threading.enumerate():
        if "_give_back" in thread.name:
            thread.join(PATIENCE)
    return [host.name for host in place.read()]


def test_nodes_are_added_by_jobs_of_their_own_and_given_back_when_their_ranks_have_left() -> None:
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_PARTITION": "gpu", "SLURM_CPUS_ON_NODE": "16", "SLURM_JOB_NAME": "train"}
    slurm = Controller()
    own = [Host("n1"), Host("n2")]
    place = MoreNodes(Allocation.of(env, gpus_per_node=4), 4, 8, slurm.run, lambda _: own)
    place.ask(8, ())
    assert slurm.submitted == []
    place.ask(16, ())
    assert len(slurm.submitted) == 2
    command = slurm.submitted[0]
    like_its_own = {"--partition=gpu", "--cpus-per-task=16", "--gpus-per-node=4", "--job-name=train-more"}
    assert {"--nodes=1", *like_its_own} <= set(command)
    assert "--jobs=7 " in command[-1], "it does not outlive the job of the launcher"
    assert "--exclude=n1,n2" in command
    assert settled(place) == ["n1", "n2"], "they wait"
    slurm.jobs["102"] = "n9"
    assert (settled(place), place.job_of("n9"), place.job_of("n1")) == (["n1", "n2", "n9"], "102", "")
    place.ask(12, ())
    assert slurm.cancelled == ["101"], "the one that waits"
    place.ask(8, ())
    assert (settled(place), slurm.cancelled) == (["n1", "n2"], ["101"]), "its ranks leave first"
    place.release("n9")
    assert (settled(place), slurm.cancelled) == (["n1", "n2"], ["101", "102"])
    place.release("n1")
    place.ask(12, ())
    slurm.jobs["103"] = "n5"
    assert settled(place) == ["n1", "n2", "n5"]
    slurm.jobs.clear()
    assert settled(place) == ["n1", "n2"], "its time was over"
    place.ask(12, ())
    place.close()
    assert slurm.cancelled[-1] == "104"


def test_two_jobs_that_got_the_same_node_are_not_two_nodes() -> None:
    slurm = Controller()
    place = MoreNodes(Allocation("7"), 1, 1, slurm.run, lambda _: [Host("n1")])
    place.ask(3, ())
    slurm.jobs |= {"101": "n5", "102": "n5"}
    assert settled(place) == ["n1", "n5"]
    assert slurm.cancelled == ["102"]
    assert "--exclude=n1,n5" in slurm.submitted[-1]
    slurm.jobs["103"] = "n6"
    assert settled(place) == ["n1", "n5", "n6"]


def test_a_node_of_the_allocation_that_is_lost_is_replaced_by_one_that_answers() -> None:
    place = MoreNodes(Allocation("7"), 1, 1, Controller().run, lambda _: [Host("n1"), Host("n2")])
    assert [host.name for host in place.read()] == ["n1"]
    place.lost = lambda: ["n1"]
    assert [host.name for host in place.read()] == ["n2"]


# -- asking -----------------------------------------------------------------------------------------------


class Refusing:
    """A place that refuses at first."""

    room = None

    def __init__(self, num_refusals: int) -> None:
        self.left, self.asked = num_refusals, list[int]()
        self.is_done = threading.Event()

    def ask(self, num_slots: int, hosts: Collection[str]) -> None:
        self.asked.append(num_slots)
        self.left -= 1
        if self.left >= 0:
            raise LaunchError("the API server refuses it: not now.")
        self.is_done.set()


def test_a_refusal_is_said_once_and_asked_again() -> None:
    place, said = Refusing(3), list[str]()
    asking = Asking(place, said.append, again_seconds=0.01)
    asking.ask(8, ())
    assert place.is_done.wait(PATIENCE)
    asking.close()
    assert set(place.asked) == {8}
    assert len(place.asked) == 4
    assert said == ["the number of ranks cannot be changed: the API server refuses it: not now. This is tried again."]


def scaling(policy: Any, said: list[str]) -> tuple[Scaling, Refusing]:
    """Of 2 to 16 ranks, two on each host."""
    place, sizes = Refusing(0), partial(Sizes.of, 2, 16, 2)
    return Scaling(policy, sizes, Asking(place, said.append), said.append, lambda: MONDAY, wanted=2), place


def training(size: int, **more: Any) -> Any:
    whole = {"state": "formed", "is_ending": False, "needs_all": False, "axes": {}, "step": 7, "members": range(size)}
    return SimpleNamespace(**({"fitting": 0} | whole | more))


class Record(FolderNotes):
    """What is written of a run."""

    def __init__(self) -> None:
        super().__init__(None)
        self.lines: list[dict[str, object]] = []

    def record(self, line: dict[str, object]) -> None:
        self.lines.append(line)


def test_no_fewer_ranks_are_wanted_than_the_budget_needs() -> None:
    for fitting, wanted in ((0, 2), (5, 6)):
        job, _ = scaling(Schedule(((0, 2),)), list[str]())
        for now in (0.0, 60.0):
            job.look(now, training(8, fitting=fitting), ["a"], Record())
        assert job.state.wanted == wanted


def test_what_is_decided_is_said_recorded_and_asked_for() -> None:
    said, record = list[str](), Record()
    job, place = scaling(Gain(0.5), said)
    job.look(0.0, training(2), ["a"], record)
    pace = Pace(2, 0.5, 0.01, {1: 0.9, 2: 0.5, 4: 0.3, 16: 0.25})
    for now in (20.0, 25.0):
        job.hear(MemberMessage("pace", 0, text=pace.to_text()), now)
        job.look(now, training(2), ["a"], record)
    for now in (31.0, 31.5):
        job.look(now, training(2), ["a"], record)
    assert place.is_done.wait(PATIENCE)
    job.close()
    assert place.asked == [4]
    why = "2 ranks train at 2 steps/s; with 4 each is expected to do 75% of what one would alone"
    assert said == [f"autoscale: 4 ranks instead of 2: {why}."]
    ((line),) = record.lines
    assert {name: line[name] for name in ("kind", "step", "ranks", "wanted", "why")} == {
        "kind": "scale", "step": 7, "ranks": 2, "wanted": 4, "why": why
    }  # fmt: skip


@pytest.mark.parametrize("state", [{"state": "gathering"}, {"state": "entering"}, {"is_ending": True}])
def test_nothing_is_asked_for_while_ranks_come_together_or_end(state: dict[str, Any]) -> None:
    said = list[str]()
    job, _ = scaling(Fill(), said)
    for now in range(0, 2000, 10):
        job.look(float(now), training(2, **state), ["a"], FolderNotes(None))
    job.close()
    assert said == []


def test_what_cannot_change_its_size_is_told_once() -> None:
    said = list[str]()
    job, _ = scaling(Fill(), said)
    for now in range(0, 2000, 10):
        job.look(float(now), training(2, needs_all=True), ["a"], FolderNotes(None))
    job.close()
    (line,) = said
    assert line.startswith("autoscale: the number of ranks stays: a rank of this job cannot join or leave without")
    said.clear()
    job, _ = scaling(Fill(), said)
    for now in (0.0, 5.0):
        job.look(now, training(2, axes={"dp": 2, "tp": 32}), ["a"], FolderNotes(None))
    job.close()
    assert said == [
        "autoscale: the number of ranks stays: --elastic 2:16 has no multiple of 32, which are whole hosts of whole "
        "replica groups."
    ]


# -- what ranks measure -----------------------------------------------------------------------------------


def test_the_pace_is_that_of_the_median_step_in_windows_that_grow() -> None:
    now = 0.0
    meter = PaceMeter(lambda: now)
    found = []
    for step in range(400):
        now += 5.0 if step % 50 == 49 else 0.9 if step % 2 else 1.1  # a checkpoint now and then
        if (pace := meter.step(generation=0)) is not None:
            found.append((step, pace))
    assert [step for step, _ in found][:3] == [10, 20, 40]
    for _, pace in found:
        assert pace.step_seconds == pytest.approx(1.0, abs=0.11)
        assert 0 < pace.error < 0.2
    assert found[-1][1].error < found[0][1].error
    told = []
    for seconds in (30.0, 30.0, 30.0, *[2.0] * 8):  # the first steps of a generation do not count
        now += seconds
        told.append(meter.step(generation=1))
    assert [pace.step_seconds for pace in told if pace is not None] == [2.0]


def test_what_is_no_pace_is_refused() -> None:
    whole = Pace(4, 0.25, 0.01, {1: 0.9, 4: 0.25})
    assert Pace.from_text(whole.to_text()) == whole
    message = MemberMessage("pace", 3, text=whole.to_text())
    assert MemberMessage.from_json(message.to_json()) == message
    for text in (
        "", "{}", '{"size": 0, "step_seconds": 1, "error": 0, "predicted": {}}',
        '{"size": 1, "step_seconds": 0, "error": 0, "predicted": {}}',
        '{"size": 1, "step_seconds": 1, "error": -1, "predicted": {}}',
        '{"size": 1, "step_seconds": 1, "error": 0, "predicted": {"x": 1}}',
        '{"size": 1, "step_seconds": 1, "error": 0, "predicted": {"0": 1}}',
        '{"size": 1, "step_seconds": 1, "error": 0, "predicted": {"1": 0}}',
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"."):
            MemberMessage.from_json(MemberMessage("pace", 0, text=text).to_json())
