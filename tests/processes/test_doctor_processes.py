"""`shardwise doctor` with real processes on this machine, none of which may be left over."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import warm
from shardwise.cli import loopback_rank
from shardwise.cli.checks import check_loopback
from shardwise.cli.loopback import run_loopback
from shardwise.cli.main import main
from shardwise.cli.nccl import examine_gpus, examine_nccl
from shardwise.cli.remote import Remote
from shardwise.cli.several_hosts import check_links, examine_hosts, measure_links
from tests.thorough import thorough_only


def children() -> set[psutil.Process]:
    """Other tests may have left helpers of the interpreter, such as the tracker of shared memory."""
    return set(psutil.Process().children())


@pytest.mark.slow
def test_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json", "--timeout", "60", "--plan", "zero3"])
    report = json.loads(capsys.readouterr().out)
    statuses = {check["name"]: check["status"] for check in report["checks"]}
    assert statuses["python"] == statuses["torch"] == statuses["distributed"] == statuses["loopback"] == "ok"
    assert report["healthy"] == ("fail" not in statuses.values()) == (status == 0)
    everything = {"cores", "memory", "/dev/shm", "shared memory", "allocator", "threads", "gpus", "temp folder"}
    assert everything | {"limits", "network", "mpi", "clock", "versions", "leftovers", "plan"} <= set(statuses)
    assert any(name.startswith("disk ") for name in statuses)


SHELL = """#!/bin/sh
if [ "$1" = nowhere ]; then echo "ssh: connect to host nowhere port 22: Connection refused" >&2; exit 255; fi
if [ "$1" = stranger ]; then echo "me@stranger: Permission denied (publickey)." >&2; exit 255; fi
exec sh -c "$2"
"""
"""In the place of ssh: two names of this machine, one host that does not answer, and one that lets nobody in."""


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    shell = tmp_path / "shell"
    shell.write_text(SHELL)
    shell.chmod(0o755)
    return Remote((str(shell),), warm.python(), timeout_seconds=60)


@thorough_only("eight processes that import torch")
def test_two_hosts_are_asked_and_what_lies_between_them_is_measured(remote: Remote, tmp_path: Path) -> None:
    """Real processes and real gloo, on two names of this machine."""
    found = {one.name: one for one in examine_hosts(["127.0.0.1", "localhost"], remote, [str(tmp_path)], 0)}
    assert list(found) == ["hosts", "same versions", "folders", "between hosts", "clock skew"]
    assert {name: one.found for name, one in found.items() if one.status == "fail"} == {}
    assert f"torch {torch.__version__.partition('+')[0]}" in found["same versions"].found
    assert "127.0.0.1 to localhost" in found["between hosts"].found
    assert found["clock skew"].status == "ok"  # they have one clock


def test_ranks_of_the_check_of_nccl_sum_and_measure(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that tries NCCL, with gloo: one rank on each of two hosts, and what they may say against it."""
    names, have_gpus = ["127.0.0.1", "localhost"], {"127.0.0.1": True, "localhost": True}
    (check,) = examine_nccl(names, have_gpus, remote, 0, backend="gloo")
    assert check.status in ("ok", "warn"), check.found  # a machine may be slow
    assert re.fullmatch(r"NCCL gloo, all-reduce of each pair: 127.0.0.1 to localhost [\d.]+ .iB/s, \d+ us", check.found)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=nowhere0")
    (check,) = examine_nccl(names, have_gpus, remote, 0, backend="gloo")
    assert (check.status, check.found) == ("fail", "NCCL_SOCKET_IFNAME==nowhere0 names no interface of 127.0.0.1")


@thorough_only("three processes that import torch")
def test_every_pair_of_devices_is_measured() -> None:
    (check,) = examine_gpus(3, 60.0, backend="gloo")
    assert check.status in ("ok", "warn"), check.found
    assert [f"GPU {one} to GPU {two} " in check.found for one, two in ((0, 1), (0, 2), (1, 2))] == [True] * 3


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_a_torch_without_nccl_is_told_by_its_rank(remote: Remote) -> None:
    (check,) = examine_nccl(["127.0.0.1", "localhost"], {"127.0.0.1": True, "localhost": True}, remote, 0)
    assert (check.status, check.found) == ("warn", "torch has no NCCL on 127.0.0.1, localhost")


def test_hosts_that_do_not_answer_are_named_at_once(remote: Remote, tmp_path: Path) -> None:
    hosts = ["nowhere", "127.0.0.1", "stranger"]
    reached, folders = examine_hosts(hosts, remote, [str(tmp_path / "missing")], 0)
    assert reached.status == folders.status == "fail"
    assert "nowhere: nothing answers at its ssh port" in reached.found
    assert "stranger: it refuses the key" in reached.found
    assert "--ssh 'ssh -p PORT'" in reached.cure
    assert "ssh-copy-id" in reached.cure
    assert folders.found == f"missing or not writable: {tmp_path / 'missing'} on 127.0.0.1"


def test_a_port_that_is_taken_is_the_reason(remote: Remote) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        trouble = measure_links(["127.0.0.1", "localhost"], remote, taken.getsockname()[1])
    assert isinstance(trouble, str)
    assert trouble.startswith("127.0.0.1: ")
    assert check_links(["127.0.0.1", "localhost"], trouble).status == "fail"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ranks are processes of their own")
def test_one_import_of_torch_serves_doctor_and_both_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import takes a second or two, and far longer on a busy machine."""

    def start(*_: object, **__: object) -> None:
        raise AssertionError("another process was started, which has to import torch")

    before = children()
    monkeypatch.setattr(subprocess, "Popen", start)
    meeting = run_loopback(60)
    assert (meeting.trouble, check_loopback(meeting).status) == ("", "ok")
    monkeypatch.setattr(loopback_rank, "run_rank", lambda *_: sys.exit("no route to loopback"))
    assert run_loopback(60).trouble.endswith("ended with status 1: no route to loopback")
    assert children() <= before


@thorough_only("slow; smaller tests beside it cover the same code")
def test_ranks_that_never_connect_are_ended() -> None:
    started, before = time.monotonic(), children()
    meeting = run_loopback(0.5, (sys.executable, "-c", "import signal; signal.pause()"))
    assert meeting.trouble == "two processes did not start within 0.5 s"
    assert "--timeout" in check_loopback(meeting).cure  # a busy machine is not one whose ranks cannot talk
    apart = "import pathlib, signal, sys; pathlib.Path(sys.argv[2], 'started-' + sys.argv[1]).touch(); signal.pause()"
    meeting = run_loopback(5, (sys.executable, "-S", "-c", apart))
    assert meeting.trouble == "the two processes did not connect in time"
    assert check_loopback(meeting).status == "fail"
    assert time.monotonic() - started < 30
    assert children() <= before


def test_a_rank_that_fails_is_quoted_and_the_other_is_ended() -> None:
    program = "import signal, sys\nif sys.argv[1] == '0': signal.pause()\nsys.exit('no route to loopback')"
    before = children()
    meeting = run_loopback(60, (sys.executable, "-c", program))
    assert meeting.trouble == "rank 1 ended with status 1: no route to loopback"
    assert children() <= before
