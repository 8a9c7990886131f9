"""Classification of lost ranks: the cause and the action, from how ranks ended."""

from __future__ import annotations

import json
import re
import signal
from typing import Any

import pytest

from shardwise.elastic.causes import Cause, Classifier, Disconnection, Policy
from shardwise.elastic.failure_signatures import End, sign_of

VALUE = "ValueError: expected 7 columns, found 8 in row 1523"
FAULT = "shardwise.errors.FaultError: Rank 2 raised RuntimeError: CUDA error: out of memory"
LEFT = "shardwise.errors.LostStateError: Rank 2 is gone, and no whole state is left: the survivors have versions [[4]]"


def end(rank: int, error: str = "", **more: Any) -> End:
    return End(rank, **{"error": error, "exit_code": 1 if error else 0, "step": 10, "host": f"h{rank // 2}", **more})


SIGNS = {
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB": "memory",
    "RuntimeError: [enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory": "memory",
    "MemoryError": "memory",
    "RuntimeError: std::bad_alloc": "memory",
    "OSError: [Errno 12] Cannot allocate memory, 2.2 MiB of this host's memory": "memory",
    "OSError: [Errno 28] No space left on device: 'run/step10/rank0.bin'": "disk",
    "shardwise.errors.TierError: rank 1: writing /nvme/x failed: [Errno 5] Input/output error": "disk",
    "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered": "gpu",
    "RuntimeError: CUDA error: unspecified launch failure": "gpu",
    "RuntimeError: CUDA error: device-side assert triggered": "exception",
    "torch.distributed.DistBackendError: NCCL error: unhandled system error, remote process exited": "connection",
    "RuntimeError: [gloo/transport/tcp/pair.cc:538] Connection reset by peer [10.0.0.2]:4711": "connection",
    "RuntimeError: Timed out waiting 5000ms for recv operation to complete": "connection",
    FAULT: "fault",
    LEFT: "left",
    "shardwise.errors.DataError: source (a Photos) failed at index 71304": "data",
    "shardwise.errors.DataError: Worker process 0 of the data loader was killed by SIGKILL (often: out of memory)": (
        "memory"
    ),
    "shardwise.errors.DataError: Worker process 1 of the data loader was killed by SIGSEGV before it": "exception",
    "shardwise.errors.DataError: Worker process 1 of the data loader ended with exit code 3 before it": "exception",
    "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. ": "memory",
    "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Bus error. It is possible that dataloader's "
    "workers are out of shared memory. Please try to raise your shared memory limit.": "memory",
    "shardwise.errors.CorruptionError: Rank 2 has wrong bits: parameter a.weight, changed since": "bits",
    VALUE: "exception",
}


def test_alike_failures_of_few_of_many_ranks_are_not_the_codes() -> None:
    ends = [end(rank, VALUE) for rank in (0, 1)]
    assert [Classifier().classify(ends, num_ranks, 0.0).kind for num_ranks in (2, 3, 4, 8)] == [
        "code",
        "code",
        "node",
        "node",
    ]


def test_what_ends_those_that_join_does_not_end_those_that_are_there() -> None:
    """A long step, in which one replacement after the other finds that its script was changed meanwhile."""
    classifier = Classifier()
    for _ in range(2):
        cause = classifier.classify([end(3, VALUE, is_new=True, host="")], 3, 0.0)
        assert (cause.kind, cause.action) == ("node", "shrink")
    cause = classifier.classify([end(rank, VALUE, is_new=True, host="") for rank in (1, 2)], 3, 0.0)
    assert (cause.kind, cause.action) == ("node", "shrink"), "two that join one"
    assert classifier.classify([end(3, VALUE, host="")], 3, 0.0).action == "shrink", "the first that had trained"
    assert classifier.classify([end(3, VALUE, host="")], 3, 0.0).action == "stop"


def test_ranks_that_have_nothing_to_go_on_from_are_no_fault_of_the_code() -> None:
    """They all raise the same, and a restart helps."""
    ends = [end(rank, LEFT) for rank in (0, 1)]
    killed = end(2, exit_code=-signal.SIGKILL)
    for together in ([*ends, killed], ends):
        cause = Classifier().classify(together, 3, 0.0)
        assert (cause.kind, cause.action) == ("node", "shrink")
        assert cause.ranks == ((2,) if killed in together else (0, 1))


def test_a_host_that_changes_bits_is_excluded_at_once_unless_nobody_knows_which() -> None:
    error = "shardwise.errors.CorruptionError: Rank 2 has wrong bits: parameter a.weight, changed since"
    fault = end(0, "shardwise.errors.FaultError: Rank 2 has wrong bits")
    cause = Classifier().classify([end(2, error), fault], 4, 0.0)
    assert (cause.kind, cause.action, cause.ranks, cause.hosts) == ("node", "exclude", (2,), ("h1",))
    assert Classifier().classify([end(rank, error) for rank in range(4)], 4, 0.0).action == "shrink"


@pytest.mark.parametrize("error", SIGNS)
def test_words_of_exceptions_are_sorted(error: str) -> None:
    assert sign_of(end(0, error)) == SIGNS[error]


def test_why_a_worker_of_torchs_loader_has_ended_stands_in_the_exception_before() -> None:
    error = "RuntimeError: DataLoader worker (pid(s) 4711) exited unexpectedly"
    text = f"RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. \n\nThe above exception\n{error}"
    assert sign_of(end(0, error, text=text)) == "memory"
    assert sign_of(end(0, error, text=text.replace("Killed", "Segmentation fault"))) == "exception"
    assert sign_of(end(0, VALUE, text=text)) == "exception"


def test_signals_and_exit_codes_are_sorted() -> None:
    assert sign_of(end(0, exit_code=-signal.SIGKILL)) == "kill"
    assert sign_of(end(0, exit_code=-signal.SIGKILL, ran_out=True)) == "memory"
    assert sign_of(end(0, exit_code=-signal.SIGTERM)) == "asked"
    assert sign_of(end(0, exit_code=-signal.SIGSEGV)) == "crash"
    assert sign_of(end(0, exit_code=-signal.SIGABRT, text="NVRM: Xid (PCI:0000:3b:00): 79")) == "gpu"
    assert sign_of(end(0, exit_code=3)) == "exit"
    assert sign_of(end(0, is_alive=True)) == "connection"


CASES: dict[str, tuple[list[End], str, str, tuple[int, ...], str]] = {
    "the same exception everywhere": (
        [end(rank, VALUE.replace("1523", str(rank))) for rank in range(4)],
        "code",
        "stop",
        (0, 1, 2, 3),
        "The same happened everywhere: it raised ValueError: expected 7 columns.* on all ranks",
    ),
    "out of memory everywhere": ([end(rank, "MemoryError") for rank in range(4)], "code", "stop", (0, 1, 2, 3), "all"),
    "one is out of memory": (
        [end(1, exit_code=-9, ran_out=True), end(0, FAULT), end(2, FAULT)],
        "node",
        "shrink",
        (1,),
        "^h0 ran out of memory: rank 1 was killed by the kernel, out of memory",
    ),
    "killed": ([end(2, exit_code=-9)], "node", "shrink", (2,), "Rank 2 was killed by SIGKILL"),
    "a host is gone": (
        [end(2, exit_code=-9), end(3, exit_code=-9)],
        "node",
        "shrink",
        (2, 3),
        r"Ranks 2, 3 were killed by SIGKILL, 2 of 4 ranks at once \(all on h1\)",
    ),
    "a full disk": (
        [end(3, "OSError: [Errno 28] No space left on device"), end(0, FAULT)],
        "node",
        "shrink",
        (3,),
        "h1 has a disk that is full or fails",
    ),
    "a device": ([end(0, "RuntimeError: CUDA error: ECC error")], "node", "shrink", (0,), "device that fails"),
    "a sample": (
        [end(1, "DataError: source failed at index 7", batch="it had samples 3, 7 of source, of step 10")],
        "data",
        "stop",
        (1,),
        "failed at index 7. It had samples 3, 7 of source, of step 10",
    ),
    "a broken link": (
        [end(2, is_alive=True, text="ranks 0 and 1 wait for it since 12 s"), end(0, FAULT)],
        "network",
        "retry",
        (2,),
        "Rank 2 could not be reached: ranks 0 and 1 wait",
    ),
    "connections only": (
        [end(0, "RuntimeError: Connection reset by peer"), end(1, FAULT)],
        "network",
        "retry",
        (0,),
        "no rank had died before",
    ),
    "preempted": ([end(1, exit_code=-15), end(0, FAULT)], "node", "shrink", (1,), "was asked to end, by SIGTERM"),
    "one alone raises": ([end(1, VALUE), end(0, FAULT), end(2, FAULT)], "node", "shrink", (1,), "Rank 1 raised ValueE"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_sorted_with_evidence(case: str) -> None:
    ends, sort, action, ranks, words = CASES[case]
    verdict = Classifier().classify(ends, 4, now=0.0)
    assert (verdict.kind, verdict.action, verdict.ranks) == (sort, action, ranks)
    assert re.search(words, verdict.evidence), verdict.evidence
    assert json.loads(json.dumps(verdict.record()))["cause"] == sort
    assert str(verdict).startswith(f"{sort}: ")


def judged(faults: list[End], policy: Policy | None = None, *, every: float = 1.0) -> list[Cause]:
    classifier = Classifier(policy or Policy())
    return [classifier.classify([one], 4, now=number * every) for number, one in enumerate(faults)]


def test_what_comes_again_with_the_samples_is_their_fault() -> None:
    first, again = judged([end(1, VALUE), end(2, VALUE, batch="it had samples 4, 5 of step 11")])
    assert (first.kind, first.action) == ("node", "shrink")
    assert (again.kind, again.action) == ("data", "stop")
    assert "as rank 1 had at the same step with the same samples. It had samples 4, 5" in again.evidence
    assert judged([end(1, VALUE), end(2, VALUE)], Policy(data="skip"))[1].action == "skip"
    own = judged([end(0, VALUE), end(0, VALUE)])[1]  # what one rank alone does, such as logging, whoever it is
    assert (own.kind, own.action) == ("code", "stop")


def test_what_comes_again_everywhere_is_the_codes_fault_and_what_stays_at_a_host_the_hosts() -> None:
    verdicts = judged([end(rank, VALUE, step=rank) for rank in range(3)])
    assert [verdict.kind for verdict in verdicts] == ["node", "node", "code"]
    assert "after steps 0, 1" in verdicts[2].evidence
    kills = judged([end(2, exit_code=-9, step=step) for step in range(3)])
    assert [verdict.action for verdict in kills] == ["shrink", "shrink", "exclude"]
    assert "fault 3 of h1" in kills[2].evidence
    links = judged([end(3, is_alive=True, step=step) for step in range(3)])
    assert [verdict.action for verdict in links] == ["retry", "retry", "exclude"]


def cut(hosts: tuple[str, ...] = ("h0", "h1"), members: tuple[int, ...] = (1, 2)) -> Disconnection:
    return Disconnection(members, members, hosts, "Ranks 1 and 2 could not reach each other.", step=7)


def test_one_broken_connection_is_retried_and_the_third_of_a_pair_excludes_a_host_or_stops_the_job() -> None:
    def third(cuts: list[Disconnection], *, spares: bool = True, every: float = 1.0) -> Cause:
        classifier = Classifier()
        first, second, last = (
            classifier.classify_disconnection(one, number * every, lambda _: spares) for number, one in enumerate(cuts)
        )
        assert first.action == "retry"
        assert str(first) == "network: Ranks 1 and 2 could not reach each other. The step is repeated."
        assert first.record() | {"evidence": ""} == {
            "cause": "network",
            "action": "retry",
            "ranks": [1, 2],
            "hosts": list(dict.fromkeys(filter(None, cuts[0].hosts))),
            "evidence": "",
            "at_step": 7,
        }
        assert second.action == "retry"
        return last

    excluded = third([cut(), cut(members=(0, 3)), cut()])  # hosts count, whichever ranks have found it
    assert (excluded.kind, excluded.action, excluded.hosts) == ("network", "exclude", ("h1",))
    assert "That is fault 3 of this connection within 600 s." in excluded.evidence
    assert third([cut()] * 3, spares=False).action == "stop"
    assert third([cut(hosts=("", ""))] * 3).action == "stop", "on one host, nothing else can be used"
    assert third([cut(hosts=("", ""))] * 2 + [cut(("", ""), (0, 3))]).action == "retry", "another connection"
    assert third([cut()] * 3, every=400).action == "retry", "in the course of time"


def test_of_two_hosts_the_one_with_more_broken_connections_is_excluded() -> None:
    classifier = Classifier()
    for hosts in (("h0", "h2"), ("h0", "h1"), ("h0", "h1")):
        assert classifier.classify_disconnection(cut(hosts), 0.0, lambda _: True).action == "retry"
    last = classifier.classify_disconnection(cut(), 0.0, lambda _: True)
    assert (last.action, last.hosts) == ("exclude", ("h0",))


def test_broken_connections_count_among_all_faults_of_a_time() -> None:
    classifier = Classifier(Policy(faults=1))
    assert classifier.classify([end(1, exit_code=-9)], 4, now=0.0).action == "shrink"
    last = classifier.classify_disconnection(cut(), 1.0)
    assert last.action == "stop"
    assert "It is fault 2 within 600 s; 1 are allowed." in last.evidence


def test_faults_are_borne_within_a_budget_of_time() -> None:
    policy = Policy(faults=3, seconds=100.0, host_faults=99)
    soon = judged([end(number % 4, exit_code=-9, step=number) for number in range(4)], policy)
    assert [verdict.action for verdict in soon] == ["shrink", "shrink", "shrink", "stop"]
    assert "fault 4 within 100 s; 3 are allowed" in soon[3].evidence
    late = judged([end(number % 4, exit_code=-9, step=number) for number in range(9)], policy, every=40.0)
    assert {verdict.action for verdict in late} == {"shrink"}
    asked = judged([end(number % 4, exit_code=-15) for number in range(9)], policy)
    assert {verdict.action for verdict in asked} == {"shrink"}


def test_a_host_that_was_lost_is_one_fault_however_many_ranks_it_had() -> None:
    classifier = Classifier()
    found = []
    for moment in (0.0, 10.0, 20.0):
        ends = [End(rank, "gpu2", text="no word", is_alive=True) for rank in range(8)]
        found.append(classifier.classify(ends, 16, moment).action)
    assert found == ["retry", "retry", "exclude"]
    classifier = Classifier()
    kills = [[End(rank, "gpu2", exit_code=-9) for rank in range(2)] for _ in range(3)]
    assert [classifier.classify(ends, 16, 1.0 * at).action for at, ends in enumerate(kills)] == [
        "shrink",
        "shrink",
        "exclude",
    ]
