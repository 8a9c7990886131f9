"""A rank's environment, which rank failed first, and the report about it; no process is started."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from shardwise import launch
from shardwise.cli.main import main
from shardwise.errors import ConfigError, LaunchError
from shardwise.launch import Attempt, Job, StopRequest, rank_environment, ranks
from shardwise.launch.job_report import failure_summary, stop_line
from shardwise.launch.log_folder import Folder
from shardwise.launch.outcome import Outcome, first_failure, read_outcome
from shardwise.system import fast_exit


def test_names_of_the_package_are_not_its_modules() -> None:
    """An import leaves a module in its package under its own name, where the next look would find it."""
    for name in launch.__all__:
        first = getattr(launch, name)
        assert not isinstance(first, ModuleType)
        assert getattr(launch, name) is first


def environment(inherited: dict[str, str] | None = None, **options: object) -> dict[str, str]:
    settings = {"rank": 1, "nproc": 4} | options
    attempt = Attempt("127.0.0.1", 29500, number=2)
    return rank_environment(attempt=attempt, inherited=inherited or {}, **settings)


class TestEnvironment:
    def test_names_are_torchruns(self) -> None:
        given = environment()
        assert given["RANK"] == given["LOCAL_RANK"] == "1"
        assert given["WORLD_SIZE"] == given["LOCAL_WORLD_SIZE"] == "4"
        assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("127.0.0.1", "29500")
        assert given["TORCHELASTIC_RESTART_COUNT"] == "2"
        assert given["TORCHELASTIC_USE_AGENT_STORE"] == "True"

    def test_threads_share_the_cores(self) -> None:
        cores = len(os.sched_getaffinity(0))
        assert environment(nproc=1)["OMP_NUM_THREADS"] == str(cores)
        assert environment(nproc=1000)["OMP_NUM_THREADS"] == "1"

    def test_what_the_user_set_stays(self) -> None:
        given = environment({"OMP_NUM_THREADS": "7", "MALLOC_MMAP_THRESHOLD_": "5"})
        assert "OMP_NUM_THREADS" not in given
        assert "MALLOC_MMAP_THRESHOLD_" not in given
        assert environment({"OMP_NUM_THREADS": "7"}, threads=3)["OMP_NUM_THREADS"] == "3"

    def test_glibc_settings_are_for_cpus_only(self) -> None:
        assert environment()["MALLOC_MMAP_THRESHOLD_"] == "1000000"
        assert "MALLOC_MMAP_THRESHOLD_" not in environment(on_cpu=False)

    def test_segments_of_devices_are_expandable_unless_the_user_set_them(self) -> None:
        assert "PYTORCH_ALLOC_CONF" not in environment()
        assert environment(on_cpu=False)["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
            assert "PYTORCH_ALLOC_CONF" not in environment({name: "max_split_size_mb:128"}, on_cpu=False)


def raised(rank: int, time: float, **options: object) -> Outcome:
    fields = {"exit_code": 1, "sent": None, "summary": f"ValueError: {rank}", "recorded": True} | options
    return Outcome(rank=rank, time=time, traceback=f"Traceback of {rank}", **fields)


class TestFirstFailure:
    def test_is_the_earliest_not_the_lowest(self) -> None:
        first = first_failure([raised(0, 10.2), raised(1, 10.1), raised(2, 10.3)])
        assert first is not None
        assert first.rank == 1

    def test_a_rank_ended_by_the_launcher_did_not_fail(self) -> None:
        ended = Outcome(0, -signal.SIGTERM, signal.SIGTERM, 1.0)
        answered = Outcome(1, 143, signal.SIGTERM, 1.0)
        assert first_failure([ended, answered]) is None

    def test_a_slow_exit_does_not_hide_the_culprit(self) -> None:
        """It had recorded its exception, and was still cleaning up when its peers had failed."""
        culprit = raised(1, 10.0, exit_code=-signal.SIGTERM, sent=signal.SIGTERM)
        first = first_failure([raised(0, 10.1), culprit])
        assert first is culprit
        assert first.status == 1

    def test_native_code_that_aborts_on_the_way_out_is_not_the_cause(self) -> None:
        aborted = raised(0, 1.0, exit_code=-signal.SIGABRT)
        assert aborted.status == 1
        assert failure_summary([aborted]).startswith("rank 0 of 1 failed first, with exit code 1: it raised ValueError")

    def test_a_killed_rank_goes_before_its_peers(self) -> None:
        killed = Outcome(2, -signal.SIGKILL, None, 9.99)
        assert first_failure([raised(0, 10.0), killed]) is killed
        assert killed.status == 137

    def test_a_code_given_to_exit_counts_though_the_launcher_was_faster(self) -> None:
        """All ranks call sys.exit(3); one is gone when the launcher looks, and the other gets its SIGTERM."""
        leaving = raised(0, 10.0, exit_code=-15, sent=signal.SIGTERM, sent_at=10.1, wanted=3, summary="SystemExit: 3")
        gone = raised(1, 10.01, exit_code=3, wanted=3, summary="SystemExit: 3")
        assert first_failure([leaving, gone]) is leaving
        assert leaving.status == 3
        assert failure_summary([leaving, gone]).startswith("rank 0 of 2 failed first: it ended with exit code 3.")

    @pytest.mark.parametrize("code", [129, 130, 143])
    def test_an_answer_to_a_signal_is_no_failure_whichever_it_names(self, code: int) -> None:
        answer = raised(0, 10.2, exit_code=code, sent=signal.SIGTERM, sent_at=10.1, wanted=code)
        assert (answer.failed, answer.obeyed) == (False, True)
        before = raised(0, 10.0, exit_code=code, sent=signal.SIGTERM, sent_at=10.1, wanted=code)
        assert (before.failed, before.obeyed) == (True, False)

    def test_a_rank_named_by_a_peer_counts_as_first(self) -> None:
        """Its process took longer to end than the peer took to hear of it."""
        victim = raised(0, 10.0, summary="FaultError: Rank 1 raised KeyboardInterrupt", at_fault=(1,))
        interrupted = raised(1, 10.5, exit_code=-2, wanted=130, summary="KeyboardInterrupt")
        assert first_failure([victim, interrupted]) is interrupted
        assert interrupted.status == 130
        assert failure_summary([victim, interrupted]).startswith(
            "rank 1 of 2 failed first: it was interrupted by SIGINT."
        )
        killed = Outcome(1, -9, None, 10.5)
        assert first_failure([victim, killed]) is killed

    def test_a_rank_that_ended_early_is_named_before_its_victims(self) -> None:
        victims = [raised(rank, 10.0, summary="FaultError: Rank 1 has ended", at_fault=(1,)) for rank in (0, 2)]
        early = Outcome(1, 0, None, 9.0)
        assert first_failure([victims[0], early, victims[1]]) is early
        assert early.status == 1
        text = failure_summary([victims[0], early, victims[1]])
        assert text.startswith("rank 1 of 3 ended early: its script was over, but the others still needed it.\n")
        assert "ranks 0, 2 then raised FaultError: Rank 1 has ended." in text

    def test_ranks_that_name_each_other_or_themselves_are_ordered_by_time(self) -> None:
        both = [raised(rank, 10.0 + rank, at_fault=(0, 1)) for rank in (0, 1)]
        assert first_failure(both) is both[0]
        ended = Outcome(1, -15, signal.SIGTERM, 9.0, sent_at=8.0)
        assert first_failure([both[0], ended]) is both[0]

    def test_a_record_of_whole_seconds_is_understood(self, tmp_path: Path) -> None:
        """Written by elastic's own `record` in a user's script."""
        record = {"message": {"message": "KeyError: 1", "extraInfo": {"py_callstack": "T", "timestamp": "12"}}}
        path = tmp_path / "error.json"
        path.write_text(json.dumps(record))
        assert read_outcome(0, 1, None, 99.0, path) == Outcome(0, 1, None, 12.0, "KeyError: 1", "T", True)

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"message": "only a word"}'])
    def test_a_broken_record_counts_as_none(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "error.json"
        path.write_text(text)
        assert read_outcome(0, 3, None, 99.0, path) == Outcome(0, 3, None, 99.0)


class TestLetter:
    def test_names_the_first_and_accounts_for_all(self) -> None:
        text = failure_summary(
            [
                raised(0, 10.2),
                raised(1, 10.1),
                Outcome(2, 0, None, 1.0),
                Outcome(3, -15, signal.SIGTERM, 11.0),
                Outcome(4, -9, signal.SIGKILL, 11.0),
                Outcome(5, 4, signal.SIGTERM, 11.0),
            ]
        )
        assert text.splitlines() == [
            "rank 1 of 6 failed first, with exit code 1: it raised ValueError: 1.",
            "",
            "Traceback of 1",
            "",
            "rank 0 then raised ValueError: 0.",
            "rank 2 had finished.",
            "rank 3 was ended by the launcher (SIGTERM).",
            "rank 4 did not end when asked and had to be killed by the launcher.",
            "rank 5 ended with exit code 4 after the launcher's SIGTERM.",
        ]

    def test_those_with_one_fate_share_a_line(self) -> None:
        ended = [Outcome(rank, -15, signal.SIGTERM, 11.0) for rank in (0, 1, 2, 5)]
        text = failure_summary([*ended[:3], raised(3, 10.1), Outcome(4, 0, None, 1.0), ended[3]])
        assert text.splitlines()[-2:] == [
            "ranks 0, 1, 2, 5 were ended by the launcher (SIGTERM).",
            "rank 4 had finished.",
        ]
        assert "ranks 0 to 2 were ended" in failure_summary([*ended[:3], raised(3, 10.1)])

    def test_a_signal_has_its_name_and_a_hint(self) -> None:
        text = failure_summary([Outcome(0, -9, None, 1.0)])
        assert text.startswith("rank 0 of 1 failed first: it was killed by SIGKILL (out of memory?")

    def test_no_hint_at_a_signal_that_the_launcher_sent(self) -> None:
        """A second Ctrl-C kills a rank that was raising."""
        killed = raised(0, 1.0, exit_code=-9, sent=signal.SIGKILL, sent_at=2.0, summary="SystemExit: 5")
        text = stop_line([killed], signal.SIGINT, 1)
        assert "memory" not in text
        assert "rank 0 then was killed by SIGKILL." in text

    def test_a_headline_says_the_error_of_a_syntax_error_too(self) -> None:
        summary = 'File "train.py", line 3\n    x = = 1\n        ^\nSyntaxError: invalid syntax'
        assert failure_summary([raised(0, 1.0, summary=summary)]).startswith(
            "rank 0 of 1 failed first, with exit code 1: it raised SyntaxError: invalid syntax "
            '(File "train.py", line 3).\n'
        )

    def test_a_stop_is_one_line(self) -> None:
        outcomes = [Outcome(0, 0, signal.SIGINT, 1.0), Outcome(1, -9, signal.SIGKILL, 1.0)]
        assert stop_line(outcomes, signal.SIGINT, 1) == (
            "ended by SIGINT; 1 of 2 ranks ended by themselves, 1 had to be killed."
        )


class TestFolder:
    def test_only_folders_of_dead_launchers_are_removed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        (tmp_path / "shardwise-dead").mkdir()
        (tmp_path / "shardwise-dead" / "launcher.lock").touch()
        (tmp_path / "shardwise-of-the-user").mkdir()
        with Folder(None) as living:
            ours = living.files(0, 0).error.parents[2]
            assert not (tmp_path / "shardwise-dead").exists()
            with Folder(None):
                assert ours.exists()
                assert len(list(tmp_path.glob("shardwise-*"))) == 3
        assert [path.name for path in tmp_path.iterdir()] == ["shardwise-of-the-user"]


class TestJob:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"nproc": 0}, "--nproc is 0: a job needs at least one rank"),
            ({"max_restarts": -1}, "--max-restarts is -1"),
            ({"threads": 0}, "--threads is 0"),
            ({"port": 70000}, "from 1 to 65535"),
            ({"grace_seconds": -2.0}, "--timeout is -2"),
        ],
    )
    def test_impossible_options_are_refused(self, options: dict[str, object], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            Job(**({"command": (__file__,), "nproc": 1} | options)).check()

    def test_a_missing_script_names_the_nearest(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").touch()
        with pytest.raises(LaunchError, match=r"Did you mean '.*train\.py'"):
            Job((str(tmp_path / "trian.py"),), 1).check()

    def test_a_script_needs_no_suffix(self, tmp_path: Path) -> None:
        (tmp_path / "train").touch()
        Job((str(tmp_path / "train"),), 1).check()

    def test_a_missing_module_is_an_error_before_anything_starts(self) -> None:
        with pytest.raises(LaunchError, match=r"no module 'nosuch\.thing'"):
            Job(("nosuch.thing",), 1, is_module=True).check()


class TestStopRequest:
    def test_first_asks_second_interrupts(self) -> None:
        before = signal.getsignal(signal.SIGTERM)
        with StopRequest() as stop:
            assert not stop.requested
            signal.raise_signal(signal.SIGTERM)
            assert stop.requested
            assert stop.signal is signal.SIGTERM
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGTERM) is before
        assert stop.requested

    def test_install_and_close_may_be_asked_twice(self) -> None:
        before = signal.getsignal(signal.SIGINT)
        stop = StopRequest().install().install()
        stop.close()
        stop.close()
        assert signal.getsignal(signal.SIGINT) is before

    def test_is_inert_in_another_thread(self) -> None:
        before = signal.getsignal(signal.SIGINT)
        thread = threading.Thread(target=lambda: StopRequest().install())
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("ahead_seconds", [-3600, 3600])
def test_a_rank_that_has_failed_and_lives_on_is_given_its_time_whatever_the_clock_says(
    ahead_seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock was set meanwhile, or the file is on a server that has another one."""
    error = tmp_path / "error.json"
    living: Any = SimpleNamespace(pid=0, returncode=None, poll=lambda: None)
    now = [100.0]
    monkeypatch.setattr(ranks.time, "monotonic", lambda: now[0])
    rank = ranks._Rank(living, error, last_alive=0.0)
    assert not rank.lingers(10)
    error.touch()
    os.utime(error, (time.time() + ahead_seconds,) * 2)
    lingers = []
    for now[0] in (101.0, 107.0, 112.0):
        lingers.append(rank.lingers(10))
    assert lingers == [False, False, True]


@pytest.mark.parametrize(("elastic", "num_ranks"), [("2:8", 2), ("1:8", 1)])
def test_an_elastic_job_starts_with_enough_ranks_if_none_are_named(
    elastic: str, num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shardwise.launch.count_gpus", lambda: 0)
    script = tmp_path / "train.py"
    script.touch()
    assert main(["launch", "--elastic", elastic, "--dry-run", str(script)]) == 0
    assert capsys.readouterr().out.startswith(f"{num_ranks} rank")


class TestRanksThatDoNotEnd:
    """A process that waits in the kernel for a device does not end, even if it is killed."""

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        """Whoever sleeps sets it."""
        clock = SimpleNamespace(now=100.0)
        clock.time = clock.monotonic = lambda: clock.now
        clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
        monkeypatch.setattr(ranks, "time", clock)
        monkeypatch.setattr(ranks, "kill_session", lambda _: None)
        return clock

    def stuck(self, tmp_path: Path) -> ranks.Ranks:
        process = SimpleNamespace(pid=1, returncode=None, poll=lambda: None)
        return ranks.Ranks([ranks._Rank(process, tmp_path / "error.json", last_alive=100.0)])

    def test_one_that_was_killed_counts_as_ended_after_a_while(self, tmp_path: Path, clock: SimpleNamespace) -> None:
        both = self.stuck(tmp_path)
        clock.now += 1000
        assert both.code(0) is None, "nobody has killed it"
        both.kill_one(0)
        clock.now += ranks.STUCK_SECONDS
        assert both.code(0) is None
        clock.now += 1
        assert both.code(0) == both.outcome(0).exit_code == -signal.SIGKILL
        assert not both.any_alive()

    def test_the_end_of_a_job_does_not_wait_for_it(self, tmp_path: Path, clock: SimpleNamespace) -> None:
        began = clock.now
        assert self.stuck(tmp_path).kill() == 1
        assert 0 < clock.now - began - ranks.STUCK_SECONDS < 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("train.ipynb", "'train.ipynb' is a notebook. Ranks run a script, which `jupyter nbconvert"),
        ("train.sh", "'train.sh' is a shell script"),
        ("plan.yaml", "'plan.yaml' is no Python script. A plan, or a config, is an option before the script"),
        ("config.json", "'config.json' is no Python script"),
    ],
)
def test_what_is_no_script_is_refused(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("{}")
    assert main(["launch", name]) == 2
    assert words in capsys.readouterr().err


def test_a_preset_that_is_none_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--shardwise", "zero33", "--dry-run", __file__]) == 2
    assert "There is no preset 'zero33'. Did you mean 'zero3'?" in capsys.readouterr().err
    assert main(["launch", "--shardwise", "auto", "--dry-run", __file__]) == 0
    assert main(["launch", "--shardwise", '{"preset": "zero33"}', "--dry-run", __file__]) == 2
    assert "There is no preset 'zero33'. Did you mean 'zero3'?" in capsys.readouterr().err
    assert main(["launch", "--shardwise", '{"preset": ', "--dry-run", __file__]) == 2
    assert "this is not YAML" in capsys.readouterr().err
    assert main(["launch", "--shardwise", "{preset: zero1}", "--dry-run", __file__]) == 0


def test_the_last_collection_takes_place_where_nanobind_would_complain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its extensions print dozens of lines about what they still have at the end of the process."""
    frozen: list[bool] = []
    monkeypatch.setattr("gc.freeze", lambda: frozen.append(True))
    fast_exit._end()
    assert frozen == [True]
    function = type("nb_func", (), {"__module__": "nanobind"})()
    fast_exit._end()
    assert frozen == [True], function


def test_a_process_without_memory_for_a_list_ends_as_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory() -> list[object]:
        raise MemoryError

    monkeypatch.setattr("gc.get_objects", no_memory)
    fast_exit._end()
