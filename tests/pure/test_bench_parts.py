"""What the benchmarks are made of, one part at a time: figures, results, the machine, tables, pictures, the verb."""

from __future__ import annotations

import io
import json
import re
import socket
import subprocess
import sys
import threading
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import shardwise as sw
from benchmarks import fresh, peers, planner_memory
from benchmarks.__main__ import PROGRAMS
from benchmarks.__main__ import main as bench_main
from benchmarks.bare import Bare
from benchmarks.commits import HERE, Ratio, ratios_of, source_at
from benchmarks.compiled import ENGINES as COMPILED_ENGINES
from benchmarks.compiled import PAIRS, faults_of
from benchmarks.compiled import summary_of as compiled_summary
from benchmarks.draw import draw_races
from benchmarks.echo import EchoTransport
from benchmarks.figures import read_figures, write_figures
from benchmarks.fresh import RunError, run_ranks
from benchmarks.generation import rates_over, slowest
from benchmarks.learning import VARIANTS, Pairs, lines_of, pairs_of
from benchmarks.machine import allocator_settings, header, processor
from benchmarks.model import batch_of, build_model
from benchmarks.overhead import summary_of as host_summary
from benchmarks.overhead_rank import Block, measure
from benchmarks.patience import Patience
from benchmarks.peers import Settings, race, runs_of
from benchmarks.planner import bars
from benchmarks.planner_models import MODELS
from benchmarks.results_file import read_result, write_result
from benchmarks.show import show_loss_verdict, show_race
from benchmarks.sizes import SIZES
from benchmarks.traffic import tcp_sent_bytes
from shardwise.cli.bench import find_checkout, python_of
from shardwise.cli.main import command_parser
from shardwise.errors import LaunchError
from shardwise.launch.environment import Attempt, rank_environment
from shardwise.system.neighbours import Neighbours, busy_seconds, own_seconds
from tests.patience import PATIENCE
from tests.thorough import thorough_only

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", SIZES)
def test_a_size_knows_its_parameters(name: str) -> None:
    size = SIZES[name]
    model = build_model(size, device="meta")
    assert sum(param.numel() for param in model.parameters()) == size.params
    assert sum(param.numel() for param in model.blocks[0].parameters()) == size.block_params


def test_the_small_size_is_what_it_is_called() -> None:
    assert round(SIZES["small"].params / 1e6) == 34
    assert (SIZES["tall"].num_blocks, SIZES["tall"].dim) == (48, 256)
    assert SIZES["ranks4"].num_ranks == 4


def test_all_begin_the_same_and_every_rank_has_data_of_its_own() -> None:
    size = SIZES["tiny"]
    one, other = build_model(size).state_dict(), build_model(size).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(batch_of(size, 0), batch_of(size, 0))
    assert not torch.equal(batch_of(size, 0), batch_of(size, 1))


# -- figures and results ------------------------------------------------------------------------------------


def test_figures_are_handed_over_by_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with write_figures(tmp_path) as figures:
        figures["loss"] = 0.5
    assert read_figures(tmp_path, 3) == [{}, {"loss": 0.5}, {}]


def test_an_error_is_handed_over_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="two"), write_figures(tmp_path):
        raise ValueError("one\n  two\n")
    assert read_figures(tmp_path, 1) == [{"error": "ValueError: two"}]


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = write_result(tmp_path / "deep" / "result.json", {"runs": [1.5, None]})
    assert read_result(file) == {"runs": [1.5, None]}
    write_result(file, {"runs": []})
    assert [each.name for each in file.parent.iterdir()] == ["result.json"]


# -- the machine --------------------------------------------------------------------------------------------


def test_the_header_describes_the_machine_and_names_nobody() -> None:
    facts = json.loads(json.dumps(header("a note")))
    assert facts["note"] == "a note"
    assert facts["machine"]["cores"] >= 1
    assert facts["versions"]["torch"] == metadata.version("torch")
    assert set(facts["machine"]) == {
        "processor",
        "cores",
        "memory_bytes",
        "system",
        "gpus",
        "load_average_at_start",
    }
    assert socket.gethostname() not in facts["machine"].values()


def test_the_processor_is_the_kernels_word_for_it(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: Quick 9000: X\nmodel name\t: Other\n")
    assert processor(file) == "Quick 9000: X"
    file.write_text("processor\t: 0\n")
    assert processor(file) == "unknown"


def test_the_settings_on_record_are_those_that_ranks_get() -> None:
    given = rank_environment(0, 2, Attempt("127.0.0.1", 1), {}, threads=1)
    recorded = allocator_settings({})
    assert recorded == {name: given[name] for name in recorded}
    assert allocator_settings({"MALLOC_TRIM_THRESHOLD_": "7"})["MALLOC_TRIM_THRESHOLD_"] == "7"


def test_neighbours_used_what_was_busy_and_not_ours() -> None:
    busy, own, clock = iter([100.0, 105.0]), iter([10.0, 13.0]), iter([50.0, 54.0])
    neighbours = Neighbours(lambda: next(busy), lambda: next(own), lambda: next(clock))
    assert neighbours.cores() == 0.5


def test_a_child_that_worked_is_ours_once_it_has_ended() -> None:
    before = own_seconds()
    burn = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert own_seconds() - before >= 0.5
    assert busy_seconds() > 0


def test_patience_waits_for_calm_and_ends() -> None:
    seen = iter([1.5, 0.9, 0.0, 1.5, 1.5, 1.5])
    patience = Patience(8, look=lambda: next(seen))
    patience.wait_for_calm()  # looks three times, of which two cost patience
    assert patience.allows_another(1.0)
    patience.wait_for_calm()  # runs out after two more
    assert list(seen) == [1.5]
    assert not patience.allows_another(1.0)


def test_sent_bytes_are_counted_by_the_kernel() -> None:
    before = tcp_sent_bytes()
    if before is None:
        pytest.skip("this kernel does not tell")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        peer, _ = server.accept()
        with peer:
            reader = threading.Thread(target=lambda: peer.recv(100_000, socket.MSG_WAITALL))
            reader.start()
            client.sendall(bytes(100_000))
            reader.join()
            assert 100_000 <= (tcp_sent_bytes() or 0) - before < 110_000


# -- a race without ranks -----------------------------------------------------------------------------------


def figures_of(engine: str, num_ranks: int) -> list[dict[str, Any]]:
    loss = 7.0 if engine == "shardwise-zero2" else 2.0
    one = {"step_seconds": [0.1], "cpu_seconds": 0.1, "sent_bytes": 2.0**20, "loss": loss, "peak_bytes": 2**20}
    return [one] * num_ranks


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A race in which ddp always fails and shardwise-zero2 trains something else."""

    def run(module: str, arguments: list[str], *, num_ranks: int, **_: object) -> list[dict[str, Any]]:
        engine = arguments[0].removeprefix("--engine=")
        if engine == "ddp":
            raise RunError("ValueError: it broke")
        return figures_of(engine, num_ranks)

    monkeypatch.setattr(peers, "run_ranks", run)
    engines = ("single", "ddp", "fsdp2", "shardwise-zero2", "shardwise-zero3")
    return race(
        Settings(("tiny",), ("fp32",), engines, rounds=2), tmp_path / "peers.json", "shared", tell=lambda _: None
    )


def test_a_race_is_on_disk_as_it_is_in_memory(result: dict[str, Any], tmp_path: Path) -> None:
    assert read_result(tmp_path / "peers.json") == json.loads(json.dumps(result))
    runs = runs_of(read_result(tmp_path / "peers.json"))
    assert [asdict(run) for run in runs] == result["runs"]
    assert len(runs) == 1 + 2 * 5
    assert {len(run.ranks) for run in runs if run.engine in ("single", "reference")} == {1}
    assert {len(run.ranks) for run in runs if run.engine == "fsdp2"} == {2}


def test_the_tables_show_rows_ratios_failures_and_disagreements(result: dict[str, Any]) -> None:
    page = io.StringIO()
    console = Console(file=page, width=150)
    for each in result["summary"]:
        show_race(runs_of(result), each, console)
    assert not show_loss_verdict(runs_of(result), result["summary"], console)
    said = page.getvalue()
    assert "134.9 K parameters, 2 ranks" in said
    assert "ddp failed in round 2: ValueError: it broke" in said
    assert "7.00000 (differs)" in said
    assert "These did not train the same as one process on all the data: shardwise-zero2 (tiny fp32)." in said
    assert [line.split()[2:] for line in said.splitlines() if line.startswith("shardwise-zero3  fsdp2")] == [
        ["1.00", "1.00", "1.00"]
    ]


def test_a_picture_is_drawn(result: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png = draw_races(result["summary"], result["note"], tmp_path / "pictures" / "race.png")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_the_tables_of_steps_have_the_figures_of_the_results() -> None:
    """Of README.md and docs/benchmarks.md: milliseconds, multiples of one process, MiB."""
    told: dict[str, list[str]] = {"README.md": [], "docs/benchmarks.md": []}
    measured: dict[str, list[str]] = {"README.md": [], "docs/benchmarks.md": []}
    columns = []
    for name, dtype in (("peers-2-cores", "fp32"), ("peers-small-2-cores-bf16", "bf16")):
        races = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["summary"]
        (race_of_dtype,) = (one for one in races if (one["size"], one["dtype"]) == ("small", dtype))
        columns.append({row["engine"]: row for row in race_of_dtype["rows"]})
    for page, lines in told.items():
        for line in (ROOT / page).read_text().splitlines():
            engine, *cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
            figures = [re.findall(r"\d[\d,.]*", cell) for cell in cells]
            if engine not in columns[0] or [len(one) for one in figures] not in ([2, 2], [3, 3]):
                continue
            lines.append(f"{engine} {figures}")
            rows = [column[engine] for column in columns]
            found = [[f"{row['seconds'] * 1e3:,.0f}", f"{row['peak_bytes'] / 2**20:.0f}"] for row in rows]
            if len(figures[0]) == 3:
                for one, row in zip(found, rows, strict=True):
                    one.insert(1, f"{row['over_single']:.2f}")
            measured[page].append(f"{engine} {found}")
    assert told == measured
    assert [len(lines) for lines in told.values()] == [8, 11]


def test_host_time_is_what_comes_on_top_of_the_plain_model_in_the_same_round() -> None:
    runs = [
        {"dtype": "fp32", "engine": engine, "round": number, "passes_seconds": passes, "update_seconds": 0.1}
        for number, pace in enumerate([1.0, 1.0, 5.0])
        for engine, passes in (("plain", pace), ("fsdp2", pace + 0.5))
    ]
    plain, fsdp2 = host_summary(runs, "fp32")
    assert plain["over_plain"] == {"passes_seconds": 0.0, "update_seconds": 0.0}
    assert fsdp2["over_plain"]["passes_seconds"] == pytest.approx(0.5)
    assert fsdp2["whole_seconds"] == pytest.approx(1.6)


def test_among_fake_ranks_steps_follow_their_program() -> None:
    """Or what is measured is how long it takes to record one; `measure` raises then."""
    measured = measure("shardwise-zero3", "fp32", 24, 2)
    assert measured["passes_seconds"] > 0
    assert measured["calls"] > measure("plain", "fp32", 24, 1)["calls"] > 24


def test_commits_are_compared_within_a_round() -> None:
    runs = [
        {"figure": "step", "commit": commit, "round": number, "value": pace * over}
        for number, pace in enumerate([1.0, 2.0, 8.0])
        for commit, over in ((HERE, (1.0, 0.5, 1.5)[number]), ("old", 1.0))
    ]
    assert ratios_of(runs) == [Ratio("step", there=2.0, here=1.0, over=1.0, least=0.5, most=1.5)]


def test_a_commit_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no-such-commit is no commit"):
        source_at("no-such-commit", tmp_path)


def test_the_floor_of_host_time_trains_as_the_engine_does() -> None:
    x = torch.randn(4, 16)
    models = [nn.Sequential(Block(), Block()) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    sgd = torch.optim.SGD(models[0].parameters(), lr=0.1)
    engine = sw.shard(models[0], "zero3", optimizer=sgd, world=sw.World(0, 8, EchoTransport()))
    transport = EchoTransport()
    bare = [Bare(block, 8, transport) for block in models[1]]
    optimizer = torch.optim.SGD([unit.shard for unit in bare], lr=0.1)
    for _ in range(3):
        loss, same_loss = engine(x).square().sum(), models[1](x).square().sum()
        torch.testing.assert_close(loss, same_loss)
        engine.backward(loss)
        engine.step()
        same_loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# -- fresh processes ----------------------------------------------------------------------------------------


def test_a_run_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh, "launcher", lambda _: [sys.executable])
    with pytest.raises(RunError, match=r"No module named benchmarks\.missing"):
        run_ranks("benchmarks.missing", [], num_ranks=1, timeout_seconds=PATIENCE)


def test_a_run_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh, "launcher", lambda _: [sys.executable, "-c", "import signal; signal.pause()"])
    with pytest.raises(RunError, match="not done after 1 s"):
        run_ranks("any", [], num_ranks=1, timeout_seconds=1)


# -- the verb -----------------------------------------------------------------------------------------------


def test_the_verb_finds_this_checkout_and_its_peers(tmp_path: Path) -> None:
    assert find_checkout([tmp_path, ROOT]) == ROOT
    assert python_of(tmp_path) == Path(sys.executable)
    peers_python = tmp_path / ".venv-bench" / "bin" / "python"
    peers_python.parent.mkdir(parents=True)
    peers_python.touch()
    assert python_of(tmp_path) == peers_python


def test_without_a_checkout_the_verb_says_that_it_needs_one(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="need a source checkout"):
        find_checkout([tmp_path, tmp_path / "not there"])


@thorough_only("slow; smaller tests beside it cover the same code")
def test_the_verb_hands_on_what_it_is_given() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "bench", "peers", "--sizes", "huge"],
        env=fresh.environment(on_cpu=True),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert (
        "'huge' is not a list of tiny, small, large, tall, few-tokens, tall-few-tokens, wires, hosts, ranks4"
        in done.stderr
    )


def test_compiled_runs_are_compared_with_the_same_engine_of_the_same_round() -> None:
    def run(engine: str, number: int) -> dict[str, Any]:
        seconds = (number + 1) * (0.9 if engine in PAIRS else 1.0)  # the second round is disturbed, all of it
        figures = {"cpu_seconds": seconds, "loss": 2.0, "num_graphs": 1, "num_graph_breaks": 0}
        return {"engine": engine, "round": number, "seconds": seconds, **figures}

    rows = compiled_summary([run(engine, number) for number in range(2) for engine in COMPILED_ENGINES])
    assert {row["engine"]: row["over_uncompiled"] for row in rows} == {
        engine: pytest.approx(0.9 if engine in PAIRS else 1.0) for engine in COMPILED_ENGINES
    }
    assert faults_of(rows) == []
    compiled = next(row for row in rows if row["engine"] == "shardwise-zero3, compiled")
    assert faults_of([{**row, "loss": 2.001} if row is compiled else row for row in rows]) == [
        "shardwise-zero3, compiled: the loss is 2.001000, uncompiled it is 2.000000."
    ]
    assert faults_of([{**row, "num_graph_breaks": 2} if row is compiled else row for row in rows]) == [
        "shardwise-zero3, compiled: 2 graph breaks."
    ]


def test_of_each_round_the_slower_rank_counts_and_rates_are_compared_within_rounds() -> None:
    ranks = [{"whole": [1.0, 2.0, 4.0], "ours": [2.0, 2.0, 4.0]}, {"whole": [2.0, 1.0, 3.0], "ours": [1.0, 1.0, 5.0]}]
    times = slowest(ranks)
    assert times == {"whole": [2.0, 2.0, 4.0], "ours": [2.0, 2.0, 5.0]}
    assert rates_over(times, "whole") == {"ours": 1.0}
    assert rates_over(times, "ours") == {"whole": 1.0}


def test_the_verbs_help_and_the_page_name_every_program(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_parser("bench").parse_args(["--help"])
    said = set(re.findall(r"\w+", capsys.readouterr().out))
    assert set(PROGRAMS) <= said
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert set(PROGRAMS) - {"peers"} <= set(re.findall(r"^shardwise bench (\w+)", page, re.MULTILINE))  # make bench


def test_the_planner_says_which_bars_are_met() -> None:
    row = {"predicted": 1.0, "measured": 1.0, "predicted_peak_bytes": 100, "share_bytes": 100}
    rows = [row | {"predicted": one, "measured": one} for one in (1.0, 2.0, 3.0, 4.0)]
    best = {"chosen": {"measured": 1.04}, "best": {"measured": 1.0}}
    met = ["memory within 5%: 4 of 4", "time within 15%: 4 of 4"]
    met += ["rank correlation of predicted and measured time at least 0.9: 1.00"]
    met += ["what is chosen at most 5% slower than the fastest drawn plan: 1 of 1, at most +4%"]
    assert bars(rows, [best]) == [f"met     {line}" for line in met]
    rows[0] |= {"share_bytes": 94, "predicted": 5.0}
    lines = bars(rows, [best, {"chosen": {"measured": 1.2}, "best": {"measured": 1.0}}])
    assert all(line.startswith("NOT MET ") for line in lines)
    assert [line[8:].partition(": ")[2] for line in lines] == ["3 of 4", "3 of 4", "-0.20", "1 of 2, at most +20%"]
    assert bars(rows, [])[-1].startswith("NOT MET "), "nothing was measured"


def test_the_planners_memory_is_measured_in_rounds_that_go_on_where_they_were_cut_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = [{"preset": name, "accumulate": 1, "mesh": {"dp": 2}} for name in ("ddp", "zero3")]
    foreseen = [planner_memory.foresee(MODELS["tiny"], plan, MODELS["tiny"].samples).peak_bytes for plan in plans]
    held = iter([*foreseen, foreseen[0], 3 * foreseen[1], *foreseen])
    measured: list[str] = []

    def measure(module: str, options: list[str], **_: object) -> list[dict[str, int]]:
        assert "--steps=0" in options
        if len(measured) == 2:
            measured.append("cut off")
            raise KeyboardInterrupt
        measured.append(options[1])
        return [{"share_bytes": 1}, {"share_bytes": next(held)}]

    monkeypatch.setattr(planner_memory, "run_ranks", measure)
    monkeypatch.setattr(planner_memory, "drawn", lambda *_: [("tiny", plan) for plan in plans])
    command = ["benchmarks", "planner", "--quick", "--memory-only", "--out", str(tmp_path), "--rounds"]
    monkeypatch.setattr(sys, "argv", [*command, "2"])
    assert bench_main() == 130
    assert bench_main() == 0
    assert "NOT MET memory within 5%: 1 of 2" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*command, "3"])
    assert bench_main() == 0
    assert "\nmet     memory within 5%: 2 of 2" in capsys.readouterr().out
    first, second = (f"--plan={json.dumps(plan)}" for plan in plans)
    assert measured == [first, second, "cut off", *2 * [first, second]]
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "7")  # other settings: rounds of their own
    held = iter(3 * foreseen)
    assert bench_main() == 0
    assert measured[7:] == 3 * [first, second]


# -- learning ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shares", "verdict"),
    [
        ((0.001, 0.0012, 0.0008, 0.001), "yes"),
        ((-0.001, 0.001, 0.0005, -0.0005), "yes"),
        ((0.002, 0.003, 0.002, 0.003), "undecided"),
        ((0.001,), "undecided"),
        ((0.004, 0.0041, 0.0039), "no"),
        ((-0.004, -0.0041, -0.0039), "no"),
    ],
)
def test_a_difference_is_within_the_bar_if_its_whole_interval_is(shares: tuple[float, ...], verdict: str) -> None:
    assert Pairs("blockwise", shares, 0.01, 0.0025).verdict == verdict


def test_the_interval_of_pairs_is_students() -> None:
    pairs = Pairs("blockwise", (0.0, 0.001, 0.002), 0.01, 0.0025)
    assert pairs.mean == pytest.approx(0.001)
    assert pairs.margin == pytest.approx(4.30 * 0.001 / 3**0.5)


def test_runs_are_compared_with_those_of_their_own_seed(tmp_path: Path) -> None:
    """And lines of other settings are no runs of these."""
    file, settings = tmp_path / "learning.jsonl", {"steps": 1000, "width": 128}
    runs = [("bf16", 0, 2.0), ("bf16", 1, 4.0), ("blockwise", 1, 4.04), ("blockwise", 0, 2.0), ("bf16", 2, 3.0)]
    lines = [{"variant": name, "seed": seed, "loss": loss, **settings} for name, seed, loss in runs]
    lines.append({"variant": "blockwise", "seed": 2, "loss": 9.0, "steps": 20, "width": 128})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = pairs_of("blockwise", lines_of(file, settings))
    assert found.shares == pytest.approx((0.0, 0.01))
    assert found.seeds_apart == pytest.approx(1 / 3)


def test_every_variant_is_compared_with_one_that_is_not() -> None:
    """And all but chance and another library's have a bar."""
    compared = [one for one in VARIANTS.values() if one.beside]
    assert all(not VARIANTS[one.beside].beside for one in compared)
    assert all(bool(one.bar) != bool(one.nudge or one.hook_factors) for one in compared)


@thorough_only("trains four times; the tests beside it have its parts")
def test_a_command_that_is_repeated_makes_the_runs_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["benchmarks", "learning", "--quick", "--width", "32", "--out", str(tmp_path), "--variants"]
    monkeypatch.setattr(sys, "argv", [*command, "nudged"])
    assert bench_main() == 0
    monkeypatch.setattr(sys, "argv", [*command, "nudged,int8"])
    assert bench_main() == 0
    lines = [json.loads(line) for line in (tmp_path / "learning.jsonl").read_text().splitlines()]
    assert [line["variant"] for line in lines] == ["bf16", "nudged", "fp32", "int8"]
    assert all(2 < line["loss"] < 5.5 for line in lines)  # less than of uniform bytes
    losses = {line["variant"]: line["loss"] for line in lines}
    assert losses["nudged"] != losses["bf16"]
    assert losses["int8"] != losses["fp32"]
    assert "undecided" in capsys.readouterr().out
