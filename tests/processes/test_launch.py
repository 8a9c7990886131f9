"""`shardwise launch` with real processes. Scripts avoid torch where they can: its import is the cost."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import warm
from tests.patience import PATIENCE, wait_until
from tests.thorough import sampled, soak, thorough_only


def command(*, is_warm: bool) -> list[str]:
    """The launcher imports torch, which takes two seconds; a fork of a process that has done so acts the same. Its
    ranks may take as long to end as it takes a busy machine, unless a test says otherwise."""
    return [warm.python() if is_warm else sys.executable, "-m", "shardwise", "launch", "--timeout", str(PATIENCE)]


class Bench:
    """A directory with scripts, and launchers started in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.started: list[subprocess.Popen[str]] = []

    def write(self, name: str, text: str) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_text(textwrap.dedent(text))

    def start(
        self, *arguments: str, is_warm: bool = True, ignored: tuple[signal.Signals, ...] = (), **variables: str
    ) -> subprocess.Popen[str]:
        """A launcher in a session of its own, which inherits the signals `ignored` as ignored, and no others."""
        with inherited({number: number in ignored for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}):
            process = subprocess.Popen(
                [*command(is_warm=is_warm), *arguments],
                cwd=self.path,
                env=os.environ | {"TMPDIR": str(self.path)} | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def run(self, *arguments: str, is_warm: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, is_warm=is_warm, **variables)
        out, err = process.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def end(self, number: signal.Signals, *arguments: str, num_ranks: int = 1) -> subprocess.CompletedProcess[str]:
        """Start this many ranks, and send the launcher a signal once all are ready."""
        process = self.start("--nproc", str(num_ranks), *arguments)
        self.wait_for(*(f"pid{rank}" for rank in range(num_ranks)))
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def wait_for(self, *names: str) -> None:
        """Until the ranks have left these files, as signs that they got that far."""
        wait_until(lambda: all((self.path / name).exists() for name in names), f"no sign of {names}")

    def pid(self, name: str) -> int:
        return int((self.path / name).read_text())

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.stdout = None if process.stdout is None or process.stdout.closed else process.stdout
            process.communicate()


@contextmanager
def inherited(ignored: dict[signal.Signals, bool]) -> Iterator[None]:
    """Processes started inside inherit these signals as ignored or not, whatever this one has inherited itself.

    Tests may be started by nohup, or in the background of a shell that ignores Ctrl-C there.
    """
    before = {
        number: signal.signal(number, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
        for number, is_ignored in ignored.items()
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


# Each rank writes its pid to a file of its name (whole, by renaming) when it is ready.
READY = """
    import os, pathlib, signal, sys, time
    rank = os.environ["RANK"]
    def ready():
        draft = pathlib.Path(f"draft{rank}")
        draft.write_text(str(os.getpid()))
        draft.rename(f"pid{rank}")
    def await_ready(*others):
        while not all(pathlib.Path(f"pid{other}").exists() for other in others):
            time.sleep(0.001)
"""


class TestSuccess:
    def test_environment_arguments_and_path(self, bench: Bench) -> None:
        bench.write(
            "code/show.py",
            """
            import json, os, sys, helper
            print(json.dumps({"env": dict(os.environ), "argv": sys.argv, "path": sys.path[0],
                              "torch": "torch" in sys.modules, "name": __name__, "file": __file__}))
            """,
        )
        bench.write("code/helper.py", "")
        options = ("--nproc", "2", "--threads", "3")
        result = bench.run(*options, "code/show.py", "--lr", "1", "--", "-m", "--nproc", "9", is_warm=False)
        assert (result.returncode, result.stderr) == (0, "")
        ranks = sorted(map(json.loads, result.stdout.splitlines()), key=lambda rank: rank["env"]["RANK"])
        assert [rank["env"]["RANK"] for rank in ranks] == ["0", "1"]
        for number, rank in enumerate(ranks):
            env = rank["env"]
            assert env["LOCAL_RANK"] == str(number)
            assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == "2"
            assert env["MASTER_ADDR"] == "127.0.0.1"
            assert int(env["MASTER_PORT"]) > 0
            assert env["OMP_NUM_THREADS"] == "3"
            assert env["TORCHELASTIC_USE_AGENT_STORE"] == "True"
            assert env["TORCHELASTIC_RESTART_COUNT"] == "0"
            assert "SHARDWISE_LAUNCHER_PID" not in env
            assert rank["argv"] == ["code/show.py", "--lr", "1", "--", "-m", "--nproc", "9"]
            assert rank["path"] == str(bench.path / "code")
            assert (rank["name"], rank["file"], rank["torch"]) == ("__main__", "code/show.py", False)

    @pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks with cores of their own need two cores")
    def test_ranks_are_bound_to_cores_of_their_own(self, bench: Bench) -> None:
        bench.write("show.py", "import os; print(sorted(os.sched_getaffinity(0)), 'SHARDWISE_CORES' in os.environ)")
        result = bench.run("--nproc", "2", "--bind", "cores", "show.py")
        assert (result.returncode, result.stderr) == (0, "")
        lines = [line.rpartition(" ") for line in result.stdout.splitlines()]
        bound = [json.loads(cores) for cores, _, _ in lines]
        assert sorted(bound[0] + bound[1]) == sorted(os.sched_getaffinity(0))
        assert all(bound)
        assert {is_left for _, _, is_left in lines} == {"False"}

    def test_module(self, bench: Bench) -> None:
        bench.write("pack/__init__.py", "")
        bench.write("pack/train.py", "import sys; print(sys.argv, __name__, __spec__.name, sys.path[0])")
        result = bench.run("-m", "pack.train", "--lr", "1")
        assert result.returncode == 0, result.stderr
        path = bench.path / "pack" / "train.py"
        assert result.stdout == f"[{str(path)!r}, '--lr', '1'] __main__ pack.train {bench.path}\n"

    def test_log_dir_keeps_what_the_screen_shows(self, bench: Bench) -> None:
        bench.write("talk.py", "import sys; print('out'); print('err', file=sys.stderr)")
        result = bench.run("--nproc", "2", "--log-dir", "logs", "talk.py")
        assert (result.returncode, result.stdout, result.stderr) == (0, "out\n" * 2, "err\n" * 2)
        for rank in (0, 1):
            place = bench.path / "logs" / "attempt-0" / f"rank-{rank}"
            assert (place / "stdout.log").read_text() == "out\n"
            assert (place / "stderr.log").read_text() == "err\n"

    @thorough_only("slow; smaller tests beside it cover the same code")
    def test_ranks_continue_when_the_output_has_no_reader(self, bench: Bench) -> None:
        bench.write("train.py", "print('a line', flush=True)\nopen('done', 'w').close()")
        launcher = bench.start("--log-dir", "logs", "train.py", is_warm=False)
        assert launcher.stdout is not None
        launcher.stdout.close()
        assert launcher.wait(timeout=PATIENCE) == 0
        assert launcher.stderr is not None
        assert launcher.stderr.read() == ""
        assert (bench.path / "done").exists()

    def test_plain_process_group(self, bench: Bench) -> None:
        bench.write(
            "sum.py",
            """
            import torch, torch.distributed as dist
            dist.init_process_group("gloo")
            total = torch.ones(1)
            dist.all_reduce(total)
            print(total.item())
            dist.destroy_process_group()
            """,
        )
        result = bench.run("--nproc", "2", "sum.py", **warm.RANKS_TOO)
        assert (result.returncode, result.stdout.split(), result.stderr) == (0, ["2.0", "2.0"], "")


class TestRefusal:
    def test_taken_port(self, bench: Bench) -> None:
        bench.write("train.py", "")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            result = bench.run("--port", str(port), "train.py")
        assert result.returncode == 2
        assert result.stderr.startswith(f"shardwise: Port {port} of 127.0.0.1 is taken")
        assert "--port" in result.stderr
        assert result.stderr.count("\n") == 1

    def test_missing_script(self, bench: Bench) -> None:
        bench.write("train.py", "")
        result = bench.run("--nproc", "2", "trian.py")
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr == "shardwise: There is no script 'trian.py'. Did you mean 'train.py'?\n"

    def test_dry_run_starts_nothing(self, bench: Bench) -> None:
        bench.write("train.py", "open('started', 'w')")
        result = bench.run("--nproc", "2", "--port", "29511", "--dry-run", "train.py", "--lr", "1")
        assert (result.returncode, result.stderr) == (0, "")
        assert "-m shardwise.launch.worker train.py --lr 1\n" in result.stdout
        assert "  MASTER_PORT=29511\n" in result.stdout
        assert re.search(r"rank 1:\n  LOCAL_RANK=1\n  RANK=1\n", result.stdout)
        assert not (bench.path / "started").exists()


class TestFailure:
    def test_the_report_names_the_first_rank_and_has_its_traceback(self, bench: Bench) -> None:
        """Rank 2 fails first but exits last; rank 0 fails when that is recorded, and exits at once."""
        bench.write(
            "train.py",
            READY
            + """
    import atexit
    def step():
        raise ValueError(f"bad batch at rank {rank}")
    if rank == "1":
        signal.pause()
    def is_running(pid):
        try:
            return pathlib.Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False
    def outlive(other):
        while not other.exists() or is_running(other.read_text()):
            time.sleep(0.01)
    if rank == "2":
        atexit.register(outlive, pathlib.Path("pid0"))
        atexit.register(ready)
        step()
    ready()
    await_ready(2)
    step()
    """,
        )
        result = bench.run("--nproc", "3", "train.py")
        assert (result.returncode, result.stdout) == (1, "")
        first, _, rest = result.stderr.partition("\n")
        assert first == (
            "shardwise: rank 2 of 3 failed first, with exit code 1: it raised ValueError: bad batch at rank 2."
        )
        assert rest.count("Traceback (most recent call last)") == 1
        assert ", in step\n" in rest
        assert "runpy" not in rest
        assert "shardwise/launch" not in rest
        assert "\nrank 0 then raised ValueError: bad batch at rank 0.\n" in rest
        assert rest.endswith("\nrank 1 was ended by the launcher (SIGTERM).\n")

    @pytest.mark.parametrize(
        ("last_line", "status", "words"),
        [
            ("sys.exit(3)", 3, "rank 1 of 2 failed first: it ended with exit code 3."),
            ("os._exit(4)", 4, "rank 1 of 2 failed first: it ended with exit code 4."),
            (
                "os.kill(os.getpid(), signal.SIGKILL)",
                137,
                "rank 1 of 2 failed first: it was killed by SIGKILL (out of memory?",
            ),
        ],
    )
    def test_exit_codes_and_signals(self, bench: Bench, last_line: str, status: int, words: str) -> None:
        bench.write(
            "train.py",
            f"import os, sys, signal, time\nif os.environ['RANK'] == '1': {last_line}\nsignal.pause()\n",
        )
        result = bench.run("--nproc", "2", "train.py")
        assert result.returncode == status
        assert result.stderr.startswith(f"shardwise: {words}")
        assert "rank 0 was ended by the launcher (SIGTERM).\n" in result.stderr

    @soak("one rank ends 0.2 s after the other")
    def test_all_ranks_exit_at_once(self, bench: Bench) -> None:
        """One of them is still on its way out when the launcher ends the job."""
        bench.write(
            "train.py",
            READY
            + """
    import atexit
    if rank == "0":
        atexit.register(time.sleep, 2)
        ready()
    await_ready(0)
    time.sleep(0.2 * (rank == "1"))
    sys.exit(3)
    """,
        )
        result = bench.run("--nproc", "2", "train.py")
        assert result.returncode == 3
        assert re.match(r"shardwise: rank \d of 2 failed first: it ended with exit code 3\.\n", result.stderr)
        assert "SIGTERM" not in result.stderr

    @soak("one rank fails 0.2 s after the other")
    @pytest.mark.parametrize(
        ("line", "status", "words"),
        [
            ("sys.exit(0)", 1, "rank 1 of 2 ended early: its script was over, but the others still needed it.\n"),
            (
                "atexit.register(time.sleep, 0.5); os.kill(os.getpid(), signal.SIGINT)",
                130,
                "rank 1 of 2 failed first: it was interrupted by SIGINT.\n",
            ),
        ],
    )
    def test_a_peer_that_fails_in_consequence_is_not_first(
        self, bench: Bench, line: str, status: int, words: str
    ) -> None:
        bench.write(
            "train.py",
            f"""
            import atexit, os, signal, sys, time
            from shardwise.errors import FaultError
            if os.environ["RANK"] == "1":
                open("ends", "w").close()
                {line}
            while not os.path.exists("ends"):
                time.sleep(0.01)
            time.sleep(0.2)
            raise FaultError("Rank 1 has ended.", kind="ended", ranks=(1,))
            """,
        )
        result = bench.run("--nproc", "2", "train.py")
        assert result.returncode == status
        assert result.stderr.startswith(f"shardwise: {words}")
        assert "rank 0 then raised" in result.stderr

    def test_a_script_that_is_no_python(self, bench: Bench) -> None:
        bench.write("train.py", "x = = 1\n")
        result = bench.run("train.py")
        assert result.returncode == 1
        assert "it raised SyntaxError: invalid syntax (File " in result.stderr.splitlines()[0]

    def test_log_dir_gets_every_traceback(self, bench: Bench) -> None:
        bench.write(
            "train.py",
            READY
            + """
    ready()
    await_ready(0, 1)
    raise ValueError('no data')
    """,
        )
        result = bench.run("--nproc", "2", "--log-dir", "logs", "train.py")
        place = bench.path / "logs" / "attempt-0"
        assert result.stderr.count("Traceback") == 1
        assert result.stderr.endswith(f"The output of each rank is in {place}.\n")
        assert "ValueError: no data" in (place / "rank-0" / "stderr.log").read_text()

    def test_a_rank_that_failed_but_does_not_end(self, bench: Bench) -> None:
        bench.write(
            "train.py",
            """
            import os, signal, threading
            if os.environ["RANK"] == "1":
                threading.Thread(target=threading.Event().wait).start()
                raise ValueError("a thread goes on")
            signal.pause()
            """,
        )
        result = bench.run("--nproc", "2", "--timeout", "0.3", "train.py")
        assert result.returncode == 1
        assert "rank 1 of 2 failed first, with exit code 1: it raised ValueError" in result.stderr

    def test_the_end_leaves_a_last_collection_out_but_no_line_of_a_file(self, bench: Bench) -> None:
        """The error is a cycle with the frame that holds the file, as many programs make one."""
        bench.write(
            "train.py",
            """
            import gzip
            class Garbage:
                def __init__(self):
                    self.itself = self
                def __del__(self):
                    print("collected")
            def main():
                log, packed, garbage = open("log.txt", "w"), gzip.open("log.gz", "wt"), Garbage()
                log.write("the last line")
                packed.write("the last line")
                try:
                    raise ValueError("no data")
                except ValueError as error:
                    cycle = error
                    raise
            main()
            """,
        )
        result = bench.run("train.py")
        assert (result.returncode, result.stdout) == (1, "")
        assert (bench.path / "log.txt").read_text() == "the last line"
        assert zlib.decompressobj(31).decompress((bench.path / "log.gz").read_bytes()) == b"the last line"

    def test_a_hook_of_the_script_is_called(self, bench: Bench) -> None:
        bench.write("train.py", "import sys\nsys.excepthook = lambda *_: print('my hook')\n1 / 0\n")
        result = bench.run("train.py")
        assert (result.returncode, result.stdout) == (1, "my hook\n")

    def test_crash_in_native_code_shows_the_python_stack(self, bench: Bench) -> None:
        bench.write("train.py", "import ctypes\ndef crash():\n    ctypes.string_at(0)\ncrash()\n")
        result = bench.run("train.py")
        assert result.returncode == 139
        assert "it was killed by SIGSEGV" in result.stderr
        assert "in crash" in result.stderr

    def test_children_of_a_failed_rank_go_too(self, bench: Bench) -> None:
        bench.write(
            "train.py",
            """
            import pathlib, subprocess, sys
            child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
            pathlib.Path("child").write_text(str(child.pid))
            sys.exit(1)
            """,
        )
        assert bench.run("train.py").returncode == 1
        wait_until(lambda: not is_alive(bench.pid("child")), "the child lives on")

    @sampled
    @pytest.mark.parametrize("group", ["prefixed", "plain"])
    def test_restart_comes_back(self, bench: Bench, group: str) -> None:
        """With a prefix per attempt, as this library does it, and as any script does it."""
        bench.write(
            "train.py",
            """
            import os, sys
            from datetime import timedelta
            import torch, torch.distributed as dist
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
            soon = timedelta(seconds=300)
            if sys.argv[1] == "plain":
                dist.init_process_group("gloo", timeout=soon)
            else:
                address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                store = dist.TCPStore(address, port, is_master=False, timeout=soon)
                store = dist.PrefixStore(f"shardwise/attempt-{attempt}", store)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=soon)
            total = torch.ones(1)
            dist.all_reduce(total)
            if attempt == "0" and rank == 1:
                raise RuntimeError("not this time")
            dist.all_reduce(total)
            sys.stdout.write(f"{rank} finished attempt {attempt} with {total.item()}\\n")
            dist.destroy_process_group()
            """,
        )
        result = bench.run("--nproc", "2", "--max-restarts", "2", "train.py", group, **warm.RANKS_TOO)
        assert result.returncode == 0, result.stderr
        assert sorted(result.stdout.splitlines()) == [f"{n} finished attempt 1 with 4.0" for n in (0, 1)]
        # gloo's threads abort at times when a process ends without destroying its group
        ours = [line for line in result.stderr.splitlines() if not line.startswith("terminate called")]
        assert ours == ["shardwise: rank 1 of 2 raised RuntimeError: not this time; restart 1 of 2 begins."]

    def test_restarts_are_counted(self, bench: Bench) -> None:
        bench.write("train.py", "import sys; sys.exit(5)")
        result = bench.run("--max-restarts", "1", "train.py")
        assert result.returncode == 5
        assert result.stderr == (
            "shardwise: rank 0 of 1 ended with exit code 5; restart 1 of 1 begins.\n"
            "shardwise: rank 0 of 1 failed first: it ended with exit code 5.\n"
        )


SAVES = (
    READY
    + """
    from shardwise.launch import StopRequest
    with StopRequest() as stop:
        ready()
        while not stop.requested:
            time.sleep(0.01)
        time.sleep(0.1)
        print(f"saved after {stop.signal.name}")
    """
)


class TestSignals:
    @sampled
    @pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
    @pytest.mark.parametrize("leave", ["", "sys.exit(130)"], ids=["plainly", "as-after-ctrl-c"])
    def test_ranks_end_by_themselves(self, bench: Bench, number: signal.Signals, status: int, leave: str) -> None:
        passed = signal.SIGTERM if number is signal.SIGHUP else number
        bench.write("train.py", SAVES + f"\n    {leave}")
        done = bench.end(number, "train.py", num_ranks=2)
        assert done.returncode == status
        assert done.stdout == f"saved after {passed.name}\n" * 2
        assert f"ended by {number.name}; 2 of 2 ranks ended by themselves." in done.stderr
        assert "Traceback" not in done.stderr

    @soak("0.3 s in which nothing may happen")
    def test_what_a_shell_ignores_for_it(self, bench: Bench) -> None:
        """Under nohup a closed terminal changes nothing. In the background of a script Ctrl-C is ignored at first, and
        yet whoever sends it to the launcher means it."""
        bench.write("train.py", SAVES)
        launcher = bench.start("--nproc", "2", "train.py", is_warm=False, ignored=(signal.SIGINT, signal.SIGHUP))
        bench.wait_for("pid0", "pid1")
        launcher.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert launcher.poll() is None
        launcher.send_signal(signal.SIGINT)
        out, err = launcher.communicate(timeout=PATIENCE)
        assert (launcher.returncode, out) == (130, "saved after SIGINT\n" * 2), err

    def test_ranks_that_know_nothing_of_signals_end_too(self, bench: Bench) -> None:
        bench.write("train.py", READY + "\n    ready()\n    signal.pause()")
        done = bench.end(signal.SIGINT, "train.py", num_ranks=2)
        assert done.returncode == 130
        assert "Traceback" not in done.stderr

    @soak("0.5 s in which nothing may happen")
    def test_a_signal_arrives_once(self, bench: Bench) -> None:
        bench.write(
            "train.py",
            READY
            + """
    seen = []
    signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
    ready()
    while not seen:
        time.sleep(0.01)
    time.sleep(0.5)
    print(len(seen))
    """,
        )
        done = bench.end(signal.SIGTERM, "train.py")
        assert (done.returncode, done.stdout) == (143, "1\n")

    @soak("0.3 s in which nothing may happen")
    def test_second_signal_kills_at_once(self, bench: Bench) -> None:
        bench.write(
            "train.py",
            READY + "\n    signal.signal(2, lambda *_: None)\n    ready()\n    while True: signal.pause()",
        )
        launcher = bench.start("--nproc", "2", "train.py")
        bench.wait_for("pid0", "pid1")
        launcher.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert launcher.poll() is None
        begin = time.monotonic()
        launcher.send_signal(signal.SIGINT)
        _, err = launcher.communicate(timeout=PATIENCE)
        assert time.monotonic() - begin < 5  # of the minutes that they would have had
        assert launcher.returncode == 130
        assert "2 had to be killed" in err
        assert not any(is_alive(bench.pid(name)) for name in ("pid0", "pid1"))

    def test_grace_has_an_end(self, bench: Bench) -> None:
        bench.write(
            "train.py",
            READY + "\n    signal.signal(15, lambda *_: None)\n    ready()\n    while True: signal.pause()",
        )
        done = bench.end(signal.SIGTERM, "--timeout", "0.3", "train.py")
        assert done.returncode == 143
        assert "1 had to be killed" in done.stderr

    def test_a_failure_to_save_is_reported(self, bench: Bench) -> None:
        bench.write("train.py", SAVES + "\n    raise OSError('disk full')")
        done = bench.end(signal.SIGTERM, "train.py")
        assert done.returncode == 1
        assert "rank 0 of 1 failed first, with exit code 1: it raised OSError: disk full." in done.stderr

    def test_no_orphans_when_the_launcher_is_killed(self, bench: Bench) -> None:
        bench.write("train.py", READY + "\n    ready()\n    signal.pause()")
        launcher = bench.start("--nproc", "2", "train.py", is_warm=False)
        bench.wait_for("pid0", "pid1")
        pids = [bench.pid("pid0"), bench.pid("pid1")]
        assert all(map(is_alive, pids))
        launcher.kill()
        wait_until(lambda: not any(map(is_alive, pids)), "ranks outlive their launcher")
        launcher.wait(timeout=PATIENCE)  # ranks die with its first thread, and its lock goes with its last
        (left,) = bench.path.glob("shardwise-*")
        bench.write("short.py", "import pathlib; print(len(list(pathlib.Path('.').glob('shardwise-*'))))")
        assert bench.run("short.py").stdout == "1\n"  # its own; that of the dead is gone
        assert not left.exists()
        assert not list(bench.path.glob("*shardwise-*"))
