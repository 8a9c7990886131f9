"""What others may send to ranks and launchers, forged, replayed or endless: nobody crashes, waits or believes it."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import io
import json
import os
import queue
import resource
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from shardwise.comm import StartupBarrier
from shardwise.comm.members import Announcement, LauncherChannel, MemberMessage, generation_prefix, scope_of
from shardwise.comm.members.channels import MemberChannel
from shardwise.comm.members.member_messages import reports_as_text, reports_of_text
from shardwise.comm.transport.mpi.address import Invitation
from shardwise.comm.watch.fault import Fault
from shardwise.comm.watch.status import Status
from shardwise.comm.watch.status_board import KEY, StoreStatusBoard, last_status
from shardwise.elastic.causes import Classifier
from shardwise.elastic.failure_signatures import End
from shardwise.errors import CommError, FaultError
from shardwise.integrations.horovod.links import Listener, connect
from shardwise.launch import Attempt, Job
from shardwise.launch.hosts import facts, host_messages
from shardwise.launch.hosts.connection import Connection
from shardwise.launch.hosts.gather import job_as_message
from shardwise.launch.hosts.host_agent import HostAgent
from shardwise.launch.hosts.members import MemberAgent
from shardwise.launch.hosts.pod import PodAgent
from shardwise.launch.job import Elastic
from shardwise.launch.outcome import Outcome
from shardwise.launch.places.hosts import Host, Share
from shardwise.launch.places.ssh import SshSettings, plan_ssh
from shardwise.system import plain_data
from shardwise.system.job_token import VARIABLE, ForgedError, Seal, new_token
from shardwise.system.listening import address_towards, listen_at, own_address
from tests.patience import PATIENCE
from tests.pure.test_diagnosis import status
from tests.thorough import drawn, varies

FUZZED = settings(max_examples=drawn(25, 300))

MARK = host_messages.packed({})[:1]
FAULT = Fault("lost", (1,), "Rank 1 is gone.", origin=0)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def damaged(data: st.DataObject, content: bytes) -> bytes:
    """Other bytes altogether, or these with some of them changed, lost or added."""
    if data.draw(st.booleans()):
        return data.draw(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
    changed = bytearray(content)
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=3)):
        changed[at] = data.draw(st.integers(0, 255))
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(changed))] * 2)))
    return bytes(changed[:start] + changed[stop:] if data.draw(st.booleans()) else changed[start:stop])


class TestPlainData:
    @varies
    @FUZZED
    @given(st.data())
    def test_statuses_and_faults_are_whole_or_refused(self, data: st.DataObject) -> None:
        for parse, good in ((Status.from_json, status(1, [1, 2], waits=2)), (Fault.from_json, FAULT)):
            try:
                found: Any = parse(damaged(data, good.to_json().encode()))
            except ValueError:
                continue
            assert json.loads(found.to_json())
            assert f"{found}".encode()
            if isinstance(found, Fault):
                assert isinstance(found.error(), FaultError)

    @pytest.mark.parametrize(
        "content",
        [b"[" * 10**6, b'{"a":' * 10**6, b'"\\ud800"', b"\xff", b"NaN", b"9" * 10**5, b"", b"x" * (2**24 + 1)],
        ids=lambda content: f"{content[:6]!r} of {len(content)}",
    )
    def test_what_is_refused(self, content: bytes) -> None:
        with pytest.raises(ValueError):  # noqa: PT011 whatever it says
            plain_data.read(content, plain_data.OneOf(str, int, float, [list], dict))

    @varies
    @FUZZED
    @given(JSON, JSON)
    def test_shapes_are_what_they_say(self, value: Any, other: Any) -> None:
        assert plain_data.fits({"a": value, "b": [value]}, {"a": object, "b": [object]})
        assert not plain_data.fits({"a": value, "c": other}, {"a": object})
        assert plain_data.fits([value, other], (object, object))
        assert not plain_data.fits(True, int)
        assert plain_data.fits(10**400, float) is False


class TestSeal:
    @varies
    @FUZZED
    @given(st.data(), st.binary(max_size=50))
    def test_only_what_was_closed_here_is_opened(self, data: st.DataObject, content: bytes) -> None:
        seal = Seal("token", "1")
        sealed = seal.close("name", content)
        assert seal.open("name", sealed) == content
        others = [Seal("token", "0"), Seal("other", "1"), Seal("", "1")]
        for wrong in [damaged(data, sealed), *(other.close("name", content) for other in others)]:
            if wrong != sealed:
                with pytest.raises(ForgedError):
                    seal.open("name", wrong)
        with pytest.raises(ForgedError):
            seal.open("name2", sealed)

    def test_tokens_are_new_each_time(self) -> None:
        assert len({new_token() for _ in range(100)}) == 100
        seal = Seal.of({VARIABLE: "t", "TORCHELASTIC_RESTART_COUNT": "3"})
        assert seal.open("n", Seal("t", "3").close("n", b"x")) == b"x"


def boards(token: str, size: int = 2) -> tuple[Store, list[StoreStatusBoard]]:
    store = HashStore()
    attempt = PrefixStore("attempt-0", store)
    return store, [StoreStatusBoard(attempt, size, Seal(token)) for _ in range(size)]


@varies
@pytest.mark.parametrize("token", ["token", ""])
def test_forged_entries_of_the_board(token: str) -> None:
    """Whatever they write: with a token nothing of it is believed, without one what is no message is not there."""
    store, (mine, theirs) = boards(token)
    theirs.publish(status(1, [1]))
    place = f"attempt-0/{KEY}/0"
    genuine = store.get(f"{place}/status/1")

    @FUZZED
    @given(st.data())
    def write(data: st.DataObject) -> None:
        stranger = Seal(data.draw(st.sampled_from(["", "guessed"])), "0")
        for key, text in (("status/1", status(1, [9]).to_json()), ("fault", FAULT.to_json())):
            forged = data.draw(st.sampled_from([text.encode(), stranger.close(f"{KEY}/0/{key}", text.encode())]))
            store.set(f"{place}/{key}", damaged(data, forged) if data.draw(st.booleans()) else forged)
        found, fault, words = mine.read(1), mine.fault(), last_status(store, 1, "attempt-0", Seal(token))
        if token:
            assert (found, fault, words) == (None, None, "")

    write()
    store.set(f"{place}/status/1", genuine)
    assert mine.read(1) == status(1, [1])
    assert "rank 1" in last_status(store, 1, "attempt-0", Seal(token))
    if not token:
        return
    store.set(f"{place}/status/0", genuine)  # a rank's own words in the mouth of another one
    assert mine.read(0) is None
    store.set(
        f"{place}/fault", Seal(token, "7").close(f"{KEY}/0/fault", FAULT.to_json().encode())
    )  # of another attempt
    assert mine.fault() is None
    assert mine.claim(FAULT) == FAULT
    assert theirs.fault() == FAULT
    store.set(f"{place}x/{KEY}/{'9' * 400}/status/1", b"")
    store.set(f"attempt-0/{KEY}/-1/status/1", b"")
    assert "rank 1" in last_status(store, 1, "attempt-0", Seal(token))


def test_a_generations_board_believes_nothing_of_another_generation() -> None:
    """A genuine fault that is copied to where the next generation looks would have its ranks give up a living one."""
    store = HashStore()
    places = [generation_prefix("0", generation) for generation in range(2)]
    before, after = (
        StoreStatusBoard(PrefixStore(place, store), 1, Seal("token").within(scope_of(generation)))
        for generation, place in enumerate(places)
    )
    before.claim(FAULT)
    before.publish(status(1, [1]))
    assert before.fault() == FAULT
    for key in ("fault", "status/1"):
        store.set(f"{places[1]}/{KEY}/0/{key}", store.get(f"{places[0]}/{KEY}/0/{key}"))
    assert (after.fault(), after.read(1)) == (None, None)
    assert last_status(store, 1, places[1], Seal("token").within(scope_of(1))) == ""
    assert "rank 1" in last_status(store, 1, places[0], Seal("token").within(scope_of(0)))


@varies
@FUZZED
@given(st.data())
def test_an_invitation_by_mpi_is_whole_or_refused(data: st.DataObject) -> None:
    invitation = Invitation(("10.0.0.1", "10.1.0.1"), 29_500, "host", "mark", "token")
    assert Invitation.from_bytes(invitation.to_bytes()) == invitation
    with contextlib.suppress(CommError):
        found = Invitation.from_bytes(damaged(data, invitation.to_bytes()))
        assert all(isinstance(text, str) for text in (*found.addresses, found.host, found.mark, found.token))
        assert type(found.port) is int


class TestMembers:
    """Between the members of an elastic job and their launcher."""

    READY = MemberMessage("ready", 2, 0, 5, "Rank 0 is gone.", (0,))

    @pytest.mark.parametrize("token", ["token", ""])
    @varies
    @FUZZED
    @given(data=st.data())
    def test_a_message_is_whole_or_refused(self, data: st.DataObject, token: str) -> None:
        store = HashStore()
        launcher = LauncherChannel(store, "0", Seal(token))
        MemberChannel(store, "0", 2, Seal(token)).send(self.READY)
        key = "shardwise/members-0/from/2/0"
        sent = bytes(store.get(key))
        store.set(key, damaged(data, sent))
        try:
            found = launcher.read([2])
        except CommError:
            return
        assert all(message.member == 2 for message in found)
        assert not token or found == [self.READY]

    @varies
    @FUZZED
    @given(st.data())
    def test_announcements_and_reports_are_whole_or_refused(self, data: st.DataObject) -> None:
        announcement = Announcement("entering", 1, (0, 2), (0, 1, 2), hosts=("a", "b"))
        for parse, good in (
            (Announcement.from_json, announcement.to_json()),
            (reports_of_text, reports_as_text([b"one", b""])),
        ):
            with contextlib.suppress(ValueError):
                parse(damaged(data, good.encode()))
        assert Announcement.from_json(announcement.to_json()) == announcement
        assert reports_of_text(reports_as_text([b"one", b""])) == (b"one", b"")

    def test_one_member_does_not_speak_for_another(self) -> None:
        store = HashStore()
        MemberChannel(store, "0", 1, Seal("token")).send(self.READY)
        with pytest.raises(CommError, match="member 1 has sent is not a message of a member: it speaks for 2"):
            LauncherChannel(store, "0", Seal("token")).read([1, 2])

    def test_a_copied_announcement_is_ignored(self, caplog: pytest.LogCaptureFixture) -> None:
        """Where the next one will be, until that comes; the job goes on."""
        store = TCPStore("127.0.0.1", 0, 1, True, datetime.timedelta(seconds=PATIENCE))
        launcher, member = LauncherChannel(store, "0", Seal("token")), MemberChannel(store, "0", 2, Seal("token"))
        heard: queue.Queue[Announcement] = queue.Queue()

        def read(announcement: Announcement) -> bool:
            heard.put(announcement)
            return announcement.kind != "end"

        place = "shardwise/members-0/news"
        store.set(f"{place}/0", Seal("guessed").close(f"{place}/0", b"x"))
        is_seen, is_overwritten = threading.Semaphore(0), threading.Semaphore(0)

        def pause() -> None:
            is_seen.release()
            assert is_overwritten.acquire(timeout=PATIENCE)

        thread = member.listen(0, read, pause)
        for number in range(3):
            said = Announcement("end" if number == 2 else "wanted", number)
            assert is_seen.acquire(timeout=PATIENCE)
            launcher.publish(said)
            is_overwritten.release()
            assert heard.get(timeout=PATIENCE) == said
            store.set(f"{place}/{number + 1}", store.get(f"{place}/{number}"))
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert heard.empty()
        assert "is no message of its members, or a copy of an earlier one" in caplog.text

    def test_a_forged_announcement_is_read_again_after_a_pause(self) -> None:
        """Until the launcher has written its own; here that happens in the pause."""
        store = TCPStore("127.0.0.1", 0, 1, True, datetime.timedelta(seconds=PATIENCE))
        launcher, member = LauncherChannel(store, "0", Seal("token")), MemberChannel(store, "0", 2, Seal("token"))
        store.set("shardwise/members-0/news/0", "forged")
        said, heard, pauses = Announcement("end", 1), list[Announcement](), list[int]()

        def pause() -> None:
            pauses.append(len(heard))
            if len(pauses) == 3:
                launcher.publish(said)

        def read(announcement: Announcement) -> bool:
            heard.append(announcement)
            return False

        member.listen(0, read, pause).join(PATIENCE)
        assert heard == [said]
        assert pauses == [0, 0, 0]

    def test_an_announcement_that_was_overwritten_ends_the_job(self) -> None:
        """Its successor is there, so it will not come again."""
        store = TCPStore("127.0.0.1", 0, 1, True, datetime.timedelta(seconds=PATIENCE))
        launcher, member = LauncherChannel(store, "0", Seal("token")), MemberChannel(store, "0", 2, Seal("token"))
        for number in range(2):
            launcher.publish(Announcement("wanted", number))
        store.set("shardwise/members-0/news/0", store.get("shardwise/members-0/news/1"))
        heard: queue.Queue[Announcement] = queue.Queue()
        member.listen(0, lambda announcement: heard.put(announcement) is not None).join(PATIENCE)
        ended = heard.get(timeout=PATIENCE)
        assert ended.kind == "end"
        assert "not written by a member" in ended.text

    def test_a_copied_message_is_ignored(self, caplog: pytest.LogCaptureFixture) -> None:
        store = HashStore()
        launcher, member = LauncherChannel(store, "0", Seal("token")), MemberChannel(store, "0", 2, Seal("token"))
        other = MemberChannel(store, "0", 3, Seal("token"))
        place = "shardwise/members-0/from/2"
        for number in range(3):
            said = replace(self.READY, generation=number)
            member.send(said)
            assert launcher.read([2, 3]) == [said]
            store.set(f"{place}/{number + 1}", store.get(f"{place}/{number}"))
            other.send(replace(self.READY, member=3))  # so that there is news to look for
            assert [one.member for one in launcher.read([2, 3])] == [3]
        assert "is no message of its members, or a copy of an earlier one" in caplog.text

    def test_an_old_report_is_not_taken_for_the_latest(self) -> None:
        """What a rank had reported of an earlier step would have the others restore what is no longer there."""
        store = HashStore()
        launcher, member = LauncherChannel(store, "0", Seal("token")), MemberChannel(store, "0", 2, Seal("token"))
        place = "shardwise/members-0/report-of/2"
        member.send(self.READY, b"step 5")
        old = bytes(store.get(f"{place}/0"))
        launcher.read([2])
        member.send(self.READY, b"step 9")
        member.send(self.READY)  # the generation in between was never formed
        launcher.read([2])
        launcher.share_reports(1, [2], [2])
        assert member.reports(1) == (b"step 9",)
        assert not store.check([f"{place}/0"])  # and what has been read is not kept there
        assert not store.check([f"{place}/1"])
        member.send(self.READY, b"step 10")
        store.set(f"{place}/3", old)
        with pytest.raises(CommError, match="not written by a member"):
            launcher.read([2])


@pytest.mark.parametrize("key", ["who/0", "size", "fault"])
def test_forged_entries_of_the_rendezvous(key: str) -> None:
    """They can keep ranks from meeting, but not have them blame one of their own."""
    store = HashStore()
    place = "shardwise/attempt-0/startup"
    text = FAULT.to_json() if key == "fault" else "2 1"
    store.set(f"{place}/{key}", Seal("guessed").close(f"{place}/{key}", text.encode()))
    with pytest.raises(CommError, match="was not written by a member of this job") as raised:
        StartupBarrier(store, "0", "me", Seal("token")).wait(
            0, 2, "here", timeout_seconds=PATIENCE, patience_seconds=PATIENCE, is_host=False
        )
    assert not isinstance(raised.value, FaultError)
    assert "SECURITY.md" in str(raised.value)


class TestWire:
    def test_each_order_is_carried_out_by_some_agent_that_takes_what_it_has(self) -> None:
        """An agent ignores an order that is not in its table, so nothing else would tell of a row that is missing."""
        tables = [object.__new__(kind)._orders() for kind in (HostAgent, MemberAgent, PodAgent)]
        between_hosts = {"elected"}
        assert {name for table in tables for name in table} == set(host_messages.ORDERS) - between_hosts
        for name, do in (row for table in tables for row in table.items()):
            inspect.signature(do).bind(**host_messages.ORDERS[name])

    @varies
    @FUZZED
    @given(st.data())
    def test_any_line_is_a_message_or_none(self, data: st.DataObject) -> None:
        key, shapes, read = data.draw(
            st.sampled_from(
                [
                    ("do", host_messages.ORDERS, host_messages.order),
                    ("kind", host_messages.REPORTS, host_messages.report),
                ]
            )
        )
        kind = data.draw(st.sampled_from(sorted(shapes)))
        fields = {name: data.draw(JSON) for name in shapes[kind]}
        line = damaged(data, json.dumps({key: kind, **fields}).encode())
        found = read(MARK + line)
        assert found is None or plain_data.fits(found, {key: str, **shapes[found[key]]})
        if found is not None and key == "kind":
            assert host_messages.is_about(found, range(0)) in (True, False)
            outcomes = [*found.get("outcomes", ()), *([found["outcome"]] if "outcome" in found else ())]
            for outcome in outcomes:
                host_messages.outcome_from(outcome, 0.0)

    def test_what_we_send_is_of_the_shape_that_is_read(self) -> None:
        """Of messages that are made of a class's fields, which may come to have more of them."""
        plan = plan_ssh(Job(("a.py",), 2, threads=1, port=2), [Share(Host("h"), 0, 2)], SshSettings("/"), {"A": "b"})
        job = job_as_message(plan, _Host(plan.shares[0]))  # type: ignore[arg-type]
        position = {"size": 2, "host": 0, "num_hosts": 1}
        verdict = Classifier().classify([End(1, "h", exit_code=-9)], 2, 0.0)
        sent: list[dict[str, Any]] = [
            {"do": "look", "directory": "/", "job": job},
            {
                "do": "start",
                "first_rank": 0,
                "position": position,
                "attempt": asdict(Attempt("h", 1)),
                "environment": {"A": "b"},
            },
            {"do": "record", "line": {"kind": "fault", **verdict.record()}},
        ]
        elastic = replace(plan, job=replace(plan.job, elastic=Elastic(1, 2)))
        job = job_as_message(elastic, _Host(plan.shares[0]))  # type: ignore[arg-type]
        sent.append({"do": "look", "directory": "/", "job": job})
        numbers = dict.fromkeys(("number", "rank", "size", "local"), 1)
        sent.append({"do": "member", **numbers, "attempt": asdict(Attempt("h", 1)), "environment": {"A": "b"}})
        for message in sent:
            assert host_messages.order(host_messages.packed(message)[:-1]) == json.loads(json.dumps(message))
        ended = [host_messages.outcome_as_message(Outcome(0, 1, None, 1.0, "E" * 10**6, "T" * 10**6))]
        member = {"kind": "member", "outcome": ended[0], "ran_out": False, "skips": False}
        for said in ({"kind": "over", "outcomes": ended, "killed": 0}, member, facts.look("/absent", plan.job)):
            assert host_messages.report(host_messages.packed(said)[:-1]) == json.loads(json.dumps(said))
        assert len(ended[0]["traceback"]) == host_messages.MAX_TRACEBACK_CHARS

    @varies
    @FUZZED
    @given(st.data())
    def test_orders_are_found_in_any_blocks(self, data: st.DataObject) -> None:
        orders = [{"do": "end", "number": number} for number in range(3)]
        noise = st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"") + b"\n")
        whole = b"".join(data.draw(noise) + host_messages.packed(one) for one in orders)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
        reading, writing = os.pipe()
        inbox, found = host_messages.Inbox(reading), []
        for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            os.write(writing, whole[start:stop])
            found += inbox.take(0)
        os.close(writing)
        while not inbox.closed:
            found += inbox.take(1)
        os.close(reading)
        assert found == orders

    def test_a_line_without_an_end_takes_no_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host_messages, "MAX_LINE_BYTES", 100)
        reading, writing = os.pipe()
        inbox = host_messages.Inbox(reading)
        for _ in range(50):
            os.write(writing, MARK + b"x" * 30_000)
            assert inbox.take(1) == []
            assert len(inbox._rest) < 2**17
        os.write(writing, b"\n" + host_messages.packed({"do": "bye"}))
        assert inbox.take(1) == [{"do": "bye"}]
        for descriptor in (reading, writing):
            os.close(descriptor)
        lines = io.BytesIO(b"a" * 100 + b"\n" + b"b" * 1000 + b"\nc\n" + b"d" * 101 + b"\ne")
        assert [len(line) for line in host_messages.bounded_lines(lines, 100)] == [101, 2, 102, 1]


class _Host:
    def __init__(self, share: Share) -> None:
        self.share = share


HOSTILE = """
import json, sys, time
def say(**message):
    sys.stdout.write("\\x1e" + json.dumps(message) + "\\n")
say(kind="output", rank=0, is_error=False, text="of another host")
say(kind="ended", ranks=[0])
say(kind="lost")
say(kind=["a"])
print("Welcome")
say(kind="output", rank=1, is_error=False, text="mine")
sys.stderr.write("\\x1b]0;title\\x07\\n")
for _ in range(40):
    sys.stdout.write("\\x1e" + "x" * 2**20)
    sys.stderr.write("y" * 2**20)
print()
for letter in "\\x1e" + json.dumps({"kind": "failed"}) + "\\n":
    print(letter, end="", flush=True)
    time.sleep(0.005)
"""


def test_a_host_that_lies_and_floods(capsys: pytest.CaptureFixture[str]) -> None:
    """It speaks for its own ranks alone, fills no memory, and may be slow."""
    arrivals: Any = queue.Queue(2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    host = Connection(Share(Host("h"), 1, 1), [sys.executable, "-c", HOSTILE], arrivals)
    heard = [arrivals.get(timeout=PATIENCE)[1] for _ in range(3)]
    host.close(5)
    assert [message["kind"] for message in heard] == ["output", "failed", "lost"]
    assert heard[0]["text"] == "mine"
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 4 * host_messages.MAX_LINE_BYTES
    assert len(host.complaints) < 2**22
    assert "\x1b" not in host.complaints
    assert "\x1b" not in capsys.readouterr().err


LYING = """
import json, sys
for message in (
    {"kind": "member", "outcome": OUTCOME | {"rank": 4}, "ran_out": False, "skips": True},
    {"kind": "output", "rank": 4, "is_error": False, "text": "of another host"},
    {"kind": "stopped", "number": 4, "is_so": True},
    {"kind": "member", "outcome": OUTCOME | {"rank": 7}, "ran_out": 1, "skips": True},
    {"kind": "member", "outcome": OUTCOME | {"rank": 7, "lost_with": "h"}, "ran_out": False, "skips": False},
    {"kind": "stopped", "number": 7, "is_so": False},
):
    sys.stdout.write("\\x1e" + json.dumps(message) + "\\n")
"""


def test_a_host_of_an_elastic_job_speaks_for_the_members_alone_that_were_started_there() -> None:
    outcome = host_messages.outcome_as_message(Outcome(0, 1, None, 1.0))
    script = LYING.replace("OUTCOME", repr(outcome))
    arrivals: Any = queue.Queue()
    numbers: set[int] = {7}
    host = Connection(Share(Host("h"), 4, 1), [sys.executable, "-c", script], arrivals, numbers)
    heard = [arrivals.get(timeout=PATIENCE)[1] for _ in range(3)]
    host.close(5)
    assert [message["kind"] for message in heard] == ["member", "stopped", "lost"]
    assert heard[0]["outcome"]["lost_with"] == "h"


@contextmanager
def admitting(listener: Listener, size: int) -> Iterator[dict[str, Any]]:
    admitted: dict[str, Any] = {}

    def admit() -> None:
        admitted["links"] = listener.admit(size, PATIENCE)

    thread = threading.Thread(target=admit)
    thread.start()
    yield admitted
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_unauthenticated_connections_to_horovods_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the token they are closed, even if they know all that is in the store, and so is one that is too slow."""
    monkeypatch.setattr("shardwise.integrations.horovod.links._PROOF_SECONDS", 0.3)
    monkeypatch.setenv(VARIABLE, "token")
    listener = Listener("127.0.0.1")
    port, name = listener.address.split()
    with admitting(listener, 1) as admitted:
        for said in (b"", b"\xff" * 36, Seal("guessed").word(name) + bytes(4), Seal("").word(name) + bytes(4)):
            with socket.create_connection(("127.0.0.1", int(port))) as stranger:
                stranger.sendall(said)
        with socket.create_connection(("127.0.0.1", int(port))) as slow:
            slow.sendall(b"x")
            link = connect("127.0.0.1", listener.address, 0, PATIENCE)
            slow.settimeout(PATIENCE)
            assert slow.recv(1) == b""
    assert list(admitted["links"]) == [0]
    link.send(b"hello")
    assert admitted["links"][0].receive() == [b"hello"]
    for one in (link, admitted["links"][0]):
        one.close()


@pytest.mark.parametrize(
    ("host", "known_as", "address"),
    [
        ("localhost", ["127.0.0.1", "::1"], "127.0.0.1"),
        ("localhost", ["::1"], "::1"),
        ("ip6-localhost", ["::1"], "::1"),
        ("ip6-localhost", [], "127.0.0.1"),
    ],
)
def test_listening_is_where_those_connect_who_know_the_name(
    host: str, known_as: list[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def getaddrinfo(name: str, *_: Any, **__: Any) -> list[Any]:
        if not known_as:
            raise OSError("Name or service not known")
        return [(None, None, None, "", (one, 0)) for one in known_as]

    if address == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this system has no IPv6")
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with listen_at(host, 0) as listener:
        assert listener.getsockname()[0] == own_address(listener) == address


def test_listening_is_at_the_named_address_alone() -> None:
    for host, address in (("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("127.0.0.2", "127.0.0.2")):
        with listen_at(host, 0) as listener:
            assert listener.getsockname()[0] == address
    for host in ("", "192.0.2.1", "no.such.host.invalid"):  # nothing of ours: by way of another machine, perhaps
        with listen_at(host, 0) as listener:
            assert listener.getsockname()[0] in ("::", "0.0.0.0")
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("not a name") == ""
    with listen_at("127.0.0.1", 0) as listener, pytest.raises(OSError, match="in use"):
        listen_at("127.0.0.1", listener.getsockname()[1])


def test_no_token_on_a_command_line(tmp_path: Path) -> None:
    """What is on it, everybody on a host can read."""
    plan = plan_ssh(Job(("a.py",), 1), [Share(Host("h"), 0, 1)], SshSettings("/", copies=True), {VARIABLE: "s3cr3t"})
    shown = [plan.text(), *plan.connection(plan.shares[0]), *plan.copy(plan.shares[0]), *plan.job.rank_command()]
    assert not any("s3cr3t" in word for word in shown)
