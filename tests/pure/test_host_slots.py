"""On which hosts processes are started when hosts join, leave and are excluded; no host is needed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.launch.elastic.budget import Budget
from shardwise.launch.elastic.changes import Change, change_report
from shardwise.launch.elastic.code_copy import CodeCopy
from shardwise.launch.elastic.host_list import HostList, hosts_by_script
from shardwise.launch.elastic.processes import Loss
from shardwise.launch.elastic.slots import Slot, Slots
from shardwise.launch.places.hosts import Host
from shardwise.launch.places.slurm_more import run_slurm
from tests.patience import wait_until


class Job:
    """Slots, and the processes that are started as they say."""

    def __init__(self, most: int, *hosts: tuple[str, int], retries: int = 9, can_add: bool = False) -> None:
        self.slots = Slots(most, Budget(retries, 600), can_add=can_add)
        self.living: dict[int, Slot] = {}
        self.num_started = 0
        for host, number in hosts:
            self.slots.ready(host, number, 0.0)
        self.slots.begin(0.0)
        self.start(0.0)

    def start(self, now: float) -> list[str]:
        started = []
        while (slot := self.slots.next(now)) is not None:
            assert slot not in self.living.values()
            self.living[self.num_started] = slot
            self.slots.started(self.num_started, slot)
            self.num_started += 1
            started.append(f"{slot.host}{slot.local}")
        return started

    def die(self, number: int, now: float) -> None:
        del self.living[number]
        self.slots.died(number, now)

    def lose(self, host: str, now: float) -> None:
        self.living = {number: slot for number, slot in self.living.items() if slot.host != host}
        self.slots.lost(host, now)

    def places(self) -> list[str]:
        return sorted(f"{slot.host}{slot.local}" for slot in self.living.values())


def test_a_job_begins_with_as_many_as_it_may_have_and_the_rest_is_spare() -> None:
    job = Job(3, ("a", 2), ("b", 2))
    assert job.places() == ["a0", "a1", "b0"]
    job.die(0, 1.0)
    assert job.start(1.0) == ["a0"], "in the place of the dead"
    job.lose("a", 2.0)
    assert job.start(2.0) == ["b1"], "the spare place; for the other two there is none"
    assert job.slots.can_come(2.0)
    assert not job.slots.can_come(2.0 + 601), "it has been waited for long enough"
    job.slots.ready("a", 2, 3.0)
    assert job.start(3.0) == ["a0"], "no more than the job may have"


def test_replacements_count_and_starts_on_a_new_host_do_not() -> None:
    job = Job(4, ("a", 2), retries=1)
    job.die(0, 1.0)
    assert job.start(1.0) == ["a0"]
    job.die(1, 2.0)
    assert job.start(2.0) == []
    assert not job.slots.can_come(2.0)
    job.slots.ready("b", 2, 3.0)
    assert job.start(3.0) == ["b0", "b1"]
    job.lose("b", 4.0)
    job.slots.ready("b", 2, 9.0)
    assert job.start(9.0) == ["b0", "b1"], "the loss of a host is not on the budget of single starts"


def test_nothing_is_started_on_an_excluded_host_before_its_time_is_over() -> None:
    job = Job(4, ("a", 2), ("b", 2))
    job.slots.exclude("b", 100.0)
    job.die(3, 1.0)
    assert job.start(1.0) == []
    assert job.slots.num_coming(1.0) == 0
    assert not job.slots.can_come(1.0), "too few do not wait for that"
    job.slots.ready("c", 1, 2.0)
    assert job.start(2.0) == ["c0"]
    job.die(2, 3.0)
    job.lose("b", 4.0)
    job.slots.ready("b", 2, 5.0)
    assert job.start(5.0) == []
    assert job.start(101.0) == ["b0"]


def test_a_host_that_leaves_is_left_by_its_processes_and_gets_no_others() -> None:
    job = Job(4, ("a", 2), ("b", 2), ("c", 1))
    assert job.places() == ["a0", "a1", "b0", "b1"]
    leaving = job.slots.leaves("b", 1.0)
    assert leaving == [2, 3]
    assert job.start(1.0) == ["c0"], "so that it can take the place of one that leaves"
    for number in leaving:
        job.slots.left(number)
        del job.living[number]
    assert job.start(2.0) == []
    assert not job.slots.numbers_on("b")
    job.slots.ready("b", 2, 3.0)  # it is named again
    assert job.start(3.0) == ["b0"]
    assert job.slots.leaves("b", 4.0, num_slots=1) == []
    assert job.slots.leaves("a", 4.0, num_slots=1) == [1]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_befalls_hosts_no_slot_is_taken_twice_and_all_there_is_room_for_come_back(seed: int) -> None:
    chance, now = random.Random(seed), 0.0
    job = Job(5, ("a", 3), ("b", 3), ("c", 3), retries=10**6)
    there = {"a", "b", "c"}
    for _ in range(60):
        now += 40.0  # longer than any pause
        match chance.choice(["die", "lose", "back", "leave", "exclude", "start"]):
            case "die" if job.living:
                job.die(chance.choice(sorted(job.living)), now)
            case "lose" if there:
                job.lose(host := chance.choice(sorted(there)), now)
                there.discard(host)
            case "back":
                host = chance.choice("abc")
                if host not in there:
                    job.slots.ready(host, 3, now)
                    there.add(host)
            case "leave" if len(there) > 1:
                host = chance.choice(sorted(there))
                for number in job.slots.leaves(host, now):
                    job.slots.left(number)
                    del job.living[number]
                there.discard(host)
            case "exclude":
                job.slots.exclude(chance.choice("abc"), now + 30.0)
        job.start(now)
        assert len(job.living) <= 5
        assert {slot.host for slot in job.living.values()} <= there
    now += 100
    for host in "abc":
        job.slots.ready(host, 3, now)
    job.start(now + 31)
    assert len(job.living) == 5


def test_the_report_of_a_lost_host_names_its_ranks() -> None:
    losses = tuple(Loss(n, n, "nothing was heard of it for 15 s", 3, 1.0, "gpu2") for n in (2, 3))
    change = Change(losses, {}, 0, 0, 2, 120, 0.4, 0, "0 of 3 within 600 s", 2, can_come=True)
    assert change_report(change) == (
        "host gpu2 is gone: ranks 2, 3 (nothing was heard of it for 15 s). 2 ranks continue after step 120, 0.40 s "
        "later. Replacements start as soon as a host has free slots."
    )


def test_commands_of_other_places_may_speak_in_other_encodings() -> None:
    assert hosts_by_script(r"""sh -c 'printf "\351t\351" >&2; echo a:2'""") == [Host("a", 2)]
    with pytest.raises(ConfigError, match=r"invalid partition: .t. specified"):
        run_slurm(["sh", "-c", r"printf 'invalid partition: \351t\351 specified' >&2; exit 1"])


def test_a_list_of_hosts_counts_when_it_was_read_twice_and_a_bad_one_does_not(tmp_path: Path) -> None:
    script = tmp_path / "discover"
    script.write_text(f"#!/bin/sh\ncat {tmp_path}/hosts\n")
    with pytest.raises(ConfigError, match="cannot be run: Permission denied"):
        hosts_by_script(str(script))
    script.chmod(0o755)
    with pytest.raises(ConfigError, match="ended with status 1: cat: "):
        hosts_by_script(str(script))
    (tmp_path / "hosts").write_text("a:2\nme@b slots=4 # ours\n")
    first = hosts_by_script(str(script))
    assert first == [Host("a", 2), Host("b", 4, "me")]
    said: list[str] = []
    answers = [first, [Host("a", 2)], first, ConfigError("What is this?"), [Host("c", 1)], [Host("c", 1)]]

    def read() -> list[Host]:
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(found, Exception):
            raise found
        return found

    hosts = HostList(read, first, said.append, every_seconds=0.001)
    changes: list[list[Host]] = []

    def has_changed() -> bool:
        found = hosts.change()
        changes.extend([found] if found is not None else [])
        return bool(changes)

    wait_until(has_changed, "no change", 20)
    hosts.close()
    assert changes == [[Host("c", 1)]], "what was said once only, as of a file that is half written, does not count"
    assert said == ["What is this? The list of hosts is unchanged."]


def test_changed_code_is_reported_once() -> None:
    listed, said = ["a 1", "a 1", "a 2", "a 2", ""], []
    code = CodeCopy(said.append, lambda: listed.pop(0))
    for host in ("one", "two", "three", "four"):
        code.compare(host).join()
    assert len(said) == 1
    assert said[0].startswith("this directory has changed since the job began: two gets the files that are here now")
