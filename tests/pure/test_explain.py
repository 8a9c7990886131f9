"""`shardwise explain`: what it prints, what it counts, what it refuses, and that it does so without torch."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.cli import explain
from shardwise.cli import model_file as model_files
from shardwise.errors import ConfigError, ModelError, PlacementError, ShardwiseError
from shardwise.fit.hardware import Hardware, hardware
from shardwise.fit.measured_work import OperatorClock
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import PRESETS
from shardwise.program import parse, shortened
from tests.patience import PATIENCE

MODEL = """
from dataclasses import dataclass

import torch
from torch import nn

import sizes  # a file beside this one


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(sizes.WIDTH, sizes.WIDTH)

    def forward(self, x):
        return self.linear(x)


class Tiny(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.wte = nn.Embedding(500, sizes.WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(sizes.WIDTH, 500)
        self.head.weight.requires_grad_(False)

    def forward(self, tokens):
        hidden = self.wte(tokens)
        for block in self.h:
            hidden = block(hidden)
        return self.head(hidden)


def batch():
    return torch.zeros(8, 16, dtype=torch.long)


def named_batch():
    return {"tokens": batch()}


def listed_batch():
    return [batch()]


def no_batch():
    raise FileNotFoundError("data.bin")


class Curious(Tiny):
    def forward(self, tokens):
        hidden = self.wte(tokens)
        if hidden.max() > 0:
            return self.head(hidden)


def tiny():
    return Tiny()


def deep():
    return Tiny(depth=12)


def sized(width, *rest, depth=2, **others):
    return Tiny()


def reads_values():
    return nn.Linear(int(torch.ones(1).item()), 1)


def text():
    return "a model"


def hollow():
    return nn.Identity()


number = 7
"""


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    (tmp_path / "sizes.py").write_text("WIDTH = 64\n")
    path = tmp_path / "tiny_model.py"
    path.write_text(MODEL)
    return path


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    explain.add_arguments(parser)
    return explain.run(parser.parse_args(arguments))


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(*arguments) == 0
    out = capsys.readouterr().out
    return "\n".join(line.rstrip() for line in out.splitlines())


def test_images_are_explained_if_the_plan_keeps_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("preset: zero3\nsurvive: host\n")
    mib = 2**20
    assert as_json(capsys, str(plan), "--world", "4")["image_bytes"] == {
        "live": 8 * mib,
        "copy": 12 * mib,
        "on_disk": 0,
    }
    shown = " ".join(said(capsys, str(plan), "--world", "4").split())
    assert (
        "image on the host 12.0 MiB a copy of its shards, to restore it; 20.0 MiB with states kept there, and 40.0 MiB "
        "while ranks recover" in shown
    )
    assert "image_bytes" not in as_json(capsys, "zero3", "--world", "4")


def test_copies_on_other_hosts_are_explained_if_the_plan_keeps_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("preset: zero3\nsurvive: buddy\n")
    mib = 2**20
    told = as_json(capsys, str(plan), "--world", "4", "--per-host", "2")
    assert told["image_bytes"] == {"live": 8 * mib, "copy": 12 * mib, "on_disk": 0}
    assert told["copy_bytes"] == {"sent": 12 * mib, "sent_once": 0, "kept": 24 * mib, "kept_on_disk": 0}
    shown = " ".join(said(capsys, str(plan), "--world", "4", "--per-host", "2").split())
    assert "copies for other hosts 24.0 MiB 12.0 MiB sent to another host, during each next step" in shown
    plan.write_text("preset: hsdp\nsurvive: buddy\n")
    told = as_json(capsys, str(plan), "--world", "4", "--per-host", "2")
    assert set(told["copy_bytes"].values()) == {0}, "the other host has all of it"


def test_versions_on_a_disk_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("preset: infinity\ndisk: /scratch\nsurvive: buddy\n")
    told = as_json(capsys, str(plan), "--world", "4", "--per-host", "2")
    mib = 2**20
    assert told["image_bytes"] == {"live": 0, "copy": 0, "on_disk": 12 * mib}
    assert told["copy_bytes"] == {"sent": 12 * mib, "sent_once": 0, "kept": 0, "kept_on_disk": 24 * mib}
    shown = " ".join(said(capsys, str(plan), "--world", "4", "--per-host", "2").split())
    assert "image on the disk 12.0 MiB what was there before the last update, to restore it" in shown
    assert "copies for other hosts, on the disk 24.0 MiB of what they have on theirs" in shown


@pytest.mark.parametrize(
    ("said_by_plan", "why"),
    [
        ("preset: zero1\nmesh: {ep: 2, sp: 2}", "splits models or samples along ep, sp"),
        ("preset: zero1\nmesh: {tp: 4}", "splits models or samples along tp, and the remaining ranks cannot form it"),
        ("preset: zero3\nsurvive: checkpoint", "the plan says survive: checkpoint"),
    ],
)
def test_explain_says_if_a_lost_rank_restarts_the_job(
    said_by_plan: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"{said_by_plan}\n")
    shown = " ".join(said(capsys, str(plan), "--world", "4").split())
    assert "An elastic job restarts from its last checkpoint, because " in shown
    assert why in shown
    assert why in as_json(capsys, str(plan), "--world", "4")["restarted_because"]
    for goes_on in ("zero3", "zero3-offload", "infinity"):
        assert "restarts from its last checkpoint" not in said(capsys, goes_on, "--world", "4")
        assert "restarted_because" not in as_json(capsys, goes_on, "--world", "4")
        assert "if a rank is lost" not in said(capsys, goes_on, "--world", "4")


def test_explain_says_which_ranks_leave_with_a_lost_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("preset: zero1\nmesh: {dp: 3, tp: 2}\n")
    shown = " ".join(said(capsys, str(plan), "--world", "6").split())
    assert "goes on without its replica group, 2 of 6 ranks, until that is complete again" in shown
    assert as_json(capsys, str(plan), "--world", "6")["ranks_that_leave"] == 2


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads(said(capsys, *arguments, "--json"))


def refused(*arguments: str) -> str:
    with pytest.raises(ShardwiseError) as caught:
        run(*arguments)
    return str(caught.value)


# --- what is printed ---------------------------------------------------------------------------------


def test_gradients_as_factors_and_momenta_as_signs(capsys: pytest.CaptureFixture[str]) -> None:
    factors = ("ddp", "--world", "8", "--set", "powersgd.rank=2")
    later, now = said(capsys, *factors), said(capsys, *factors, "--set", "powersgd.start_step=0")
    assert "sends gradients in fp32, of matrices later as factors of 2 columns\n" in later
    assert "sends gradients in fp32, of matrices as factors of 2 columns\n" in now
    assert "sent per rank and step\n  28.0 MiB" in later
    assert "sent per rank and step\n  112.1 KiB" in now
    assert "sent per rank and step\n  896.3 KiB" in said(capsys, "ddp", "--world", "8", "--optimizer", "onebit-adam")
    assert "Take the preset ddp" in refused("zero1", "--world", "8", "--optimizer", "onebit-adam")
    assert "Take the preset ddp" in refused("zero3", *factors[1:])


def test_codes_of_frozen_parameters_and_what_codes_lose(capsys: pytest.CaptureFixture[str]) -> None:
    plain = ("hpz", "--world", "4", "--per-host", "2", "--set", "wire.grad=int4", "--set", "wire.frozen=int8")
    shown, fed_back = (" ".join(said(capsys, *plain, *more).split()) for more in ((), ("--set", "wire.feedback=0.8")))
    codes = "frozen parameters as int8/256 along node, gradients in fp32 as int4/128 along node"
    assert f"sends {codes}; vectors" in shown
    assert f"sends {codes}, with error feedback (0.8, forgotten every 1024 steps); vectors" in fed_back
    without, told = as_json(capsys, *plain), as_json(capsys, *plain, "--set", "wire.feedback=0.8")
    assert told["codes"]["grad"]["feedback"] == {"beta": 0.8, "reset_steps": 1024}
    assert told["bytes"]["optim"] - without["bytes"]["optim"] == 2 * 4 * 2**20 / 2  # for a host's share of four units


def test_codes_of_gradients_are_along_one_axis(capsys: pytest.CaptureFixture[str]) -> None:
    plain = ("zero2", "--world", "4", "--set", "mesh={dp: 2, sp: 2}", "--set", "wire={param: int8, grad: int4}")
    shown = " ".join(said(capsys, *plain).split())
    assert "sends parameters in fp32 as int8/256, gradients in fp32 as int4/128 along dp; vectors" in shown
    told = as_json(capsys, *plain)["codes"]
    assert (told["param"]["along"], told["grad"]["along"]) == (["dp", "sp"], ["dp"])


def test_a_preset_on_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, "zero3", "--world", "4", "--set", "precision=bf16")
    assert out.startswith("zero3 on dp=4, 4 ranks\nknown from ZeRO stage 3 (arXiv:1910.02054), FSDP")
    assert "  preset          zero3            argument\n" in out
    assert "  precision       bf16             override 'precision=bf16'\n" in out
    assert "  held   shard(dp)  bf16   device  parameters, from forward to backward\n" in out
    assert "computes in bf16; sends gradients in bf16\n" in out
    assert "No model given (--model): 4 units of 1.0 M parameters each are assumed." in out
    assert "  param     2.0 MiB     8.0 MiB  parameters, between steps\n" in out
    assert "      gather          h.0  param  dp  bf16  1572864 B  @gather\n" in out


def test_islands_are_explained(model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the program of a step, which says nothing of other islands."""
    arguments = ["zero3", "--world", "4", "--set", "mesh={island: 2, dp: 2}", "--set", "islands.every=50"]
    text = " ".join(said(capsys, *arguments).split())
    assert "island 2 0, 2 islands: ranks have their own batches and, between outer steps, their own model" in text
    assert "anchor shard(dp) fp32 host what islands have in common, and the momentum" in text
    assert "after steps 50, 100, ... a rank sends 8388608 B to other islands in 50 steps, 167772 B per step" in text
    assert "subtract h.0 outer all_reduce h.0 outer island fp32 2097152 B @reduce" in text
    assert "An elastic job goes on without its island, 2 of 4 ranks, until that is complete again" in text
    found = as_json(capsys, *arguments)
    assert found["sent_bytes_by_axis"].keys() == {"dp"}
    assert "after steps 50, 100, ..." in found["outer_steps"]
    model = ["--model", f"{model_file}:tiny", "--batch", f"{model_file}:batch", "--time", "--hardware", "h100-sxm"]
    taken = next(line for line in as_json(capsys, *arguments, *model)["outer_steps"] if line.startswith("takes"))
    assert "s in 50 steps if nothing overlaps, " in taken
    assert 0 < float(taken.split()[-4].rstrip("%")) < 100
    assert "Add an axis" in refused("zero3", "--world", "4", "--set", "islands.every=50")


def test_stages_are_timed_on_the_machine_that_explains(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere, and where an operator cannot be run by itself, their time is predicted."""
    plan, mesh = Plan(preset="zero1", mesh={"pp": 2}, accumulate=2), Mesh.of({"pp": 2}, 2)
    loss = model_file.with_name("loss.py")
    loss.write_text(
        f"{model_file.read_text()}\n\nclass Lossy(Tiny):\n    def forward(self, tokens):\n"
        "        return super().forward(tokens).mean()\n\n\ndef lossy():\n    return Lossy()\n"
    )

    def told(*on: Hardware | OperatorClock) -> str:
        model = model_files.build_model(f"{loss}:lossy")
        converted = model_files.converted(model, plan)
        return model_files.stage_times(model, f"{loss}:batch", plan, mesh, converted, on)

    here, foreseen = model_files.clock_here(), hardware("cpu")
    monkeypatch.setattr(OperatorClock, "seconds", lambda *_: 0.5)
    assert told(here, foreseen).count("(measured)") == 2
    assert told(foreseen).count("(predicted)") == 2

    def fails(*_: object) -> float:
        raise ModelError("no time")

    monkeypatch.setattr(OperatorClock, "seconds", fails)
    assert told(here, foreseen).count("(predicted)") == 2
    assert told(here) == ""


def test_ranks_that_share_in_a_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = ("--set", "mesh={dp: 2, sp: 4}")
    out = said(capsys, "zero3", "--world", "8", *mesh)
    assert out.startswith("zero3 on dp=2 x sp=4, 8 ranks\n")
    assert "  param  shard(dp+sp)  fp32   device  parameters, between steps\n" in out
    assert "  38.5 MiB: 5.5 MiB along dp, 33.0 MiB along sp\n" in out
    assert "ulysses sends 3/4 of a rank's queries" in " ".join(out.split())
    assert "ring sends a rank's keys and values 3 times each way" in " ".join(out.split())
    alone = " ".join(said(capsys, "zero3", "--world", "8", *mesh, "--set", "sequence.attention=ring").split())
    assert "ring sends" in alone
    assert "ulysses sends" not in alone
    beside_tensor = said(capsys, "zero3", "--world", "4", "--set", "mesh={tp: 2, sp: 2}")
    assert "sequence parallelism: ranks share samples, and split their tokens" in beside_tensor
    told = json.loads(said(capsys, "zero3", "--world", "8", *mesh, "--json"))
    assert sum(told["sent_bytes_by_axis"].values()) == told["sent_bytes_per_step"]
    assert set(told["sent_bytes_by_axis"]) == {"dp", "sp"}


def test_an_update_waits_for_copies_of_states_that_take_longer_than_the_passes(
    model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", f"{model_file}:tiny", "--batch", f"{model_file}:batch", "--time"]
    plan = tmp_path / "plan.yaml"

    def told(survive: str, memory: float, network: float) -> dict[str, Any]:
        plan.write_text(f"preset: zero3\n{survive}")
        given = yaml.safe_load(Path(inspect.getfile(Hardware)).with_name("profiles").joinpath("cpu.yaml").read_text())
        given["host"]["memory_bytes_per_second"] = memory
        given["network"] = {"bytes_per_second": network, "share": 1.0, "latency_seconds": 0.0}
        (hardware := tmp_path / "slow.yaml").write_text(yaml.safe_dump(given))
        words = ("--world", "4", "--per-host", "2", "--hardware", str(hardware), "--json")
        return dict(json.loads(said(capsys, str(plan), *model, *words)))

    plain = told("", 1e15, 1e15)["time"]["step_seconds"]
    quick = told("survive: buddy", 1e15, 1e15)
    assert quick["time"]["step_seconds"] == plain, "behind the passes"
    for memory, network in ((1e3, 1e15), (1e15, 1e3), (1e3, 1e3)):
        before, after = (told(survive, memory, network) for survive in ("", "survive: buddy"))
        plain, time = before["time"], after["time"]
        assert "copying_seconds" not in plain
        by_hand = 2 * after["image_bytes"]["copy"] / memory + after["copy_bytes"]["sent"] / network
        assert time["copying_seconds"] == pytest.approx(by_hand)
        waiting = max(0.0, by_hand - (plain["step_seconds"] - plain["update_seconds"]))
        assert time["step_seconds"] == pytest.approx(plain["step_seconds"] + waiting)
        assert time["seconds"].get("waiting for copies of states", 0.0) == pytest.approx(waiting)
        assert (waiting > 0) == (memory == 1e3), "gathers take as long, where the network is slow"


def test_what_ranks_of_a_host_read_in_place(capsys: pytest.CaptureFixture[str]) -> None:
    def told(*words: str) -> dict[str, Any]:
        return dict(json.loads(said(capsys, *words, "--world", "8", "--json")))

    within, apart = told("zero3", "--per-host", "8"), told("zero3", "--per-host", "4")
    shared = within["bytes_in_shared_memory"]
    assert shared["working"] < within["bytes"]["working"]
    assert {**shared, "working": 0, "total": 0} == {**within["bytes"], "working": 0, "total": 0}
    assert "bytes_in_shared_memory" not in apart, "each line has ranks of two hosts"
    assert "bytes_in_shared_memory" not in told("ddp", "--per-host", "8"), "whole on every rank"
    assert "bytes_in_shared_memory" in told("zero2", "--per-host", "8"), "others' gradients are not received"
    text = " ".join(said(capsys, "zero3", "--world", "8", "--per-host", "8").split())
    assert "share memory (CPUs), parameters and the others' gradients are read in place: working" in text


def test_what_leaves_a_host(capsys: pytest.CaptureFixture[str]) -> None:
    """One copy crosses: between two hosts half of each whole, and for `hsdp` gradients' sums alone."""

    def told(*words: str) -> dict[str, Any]:
        return dict(json.loads(said(capsys, *words, "--world", "8", "--json")))

    one = told("zero3")
    assert "sent_bytes_by_host" not in one
    assert told("zero3", "--per-host", "8")["sent_bytes_by_host"] == [0]
    alone = told("zero3", "--per-host", "1")["sent_bytes_by_host"]
    assert alone == [one["sent_bytes_per_step"]] * 8
    two = told("zero3", "--per-host", "4")["sent_bytes_by_host"]
    assert two == [alone[0] * 4 // 7] * 2
    assert told("hsdp", "--per-host", "4")["sent_bytes_by_host"][0] < 0.75 * two[0]
    assert "leave each host of 4 ranks" in " ".join(said(capsys, "zero3", "--world", "8", "--per-host", "4").split())
    with pytest.raises(ConfigError, match=r"--per-host is 3, which does not divide --world 8\. Give a divisor"):
        told("zero3", "--per-host", "3")


def test_ranks_of_other_hosts_have_memory_of_their_own(model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For the budget and for the time that tiers take; and a frozen unit says where it rests."""
    arguments = ["zero2", "--world", "4", "--model", f"{model_file}:deep", "--set", "budget.device=700KiB"]
    whole = as_json(capsys, *arguments)
    (needed,) = (line for line in whole["budget"] if "a host holds" in line)
    assert "to its 4 ranks" in needed
    of_one = sum(as_json(capsys, *arguments, "--per-host", "1")["bytes_on_host"][kind] for kind in ("total",))
    limit = ["--set", f"budget.host={2 * of_one}"]
    with pytest.raises(ConfigError, match=r"4 ranks would take"):
        run(*arguments, *limit)
    with pytest.raises(ConfigError, match=r"4 ranks would take"):
        run(*arguments, *limit, "--per-host", "4")
    two = as_json(capsys, *arguments, *limit, "--per-host", "2")
    assert two["bytes_on_host"]["total"] == of_one
    assert any("to its 2 ranks" in line for line in two["budget"])


def test_what_a_host_holds_without_one_of_its_ranks(
    model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With images and copies of the other host's ranks. There is what the hardware has, or this machine."""
    arguments = ["zero1", "--world", "4", "--per-host", "2", "--optimizer", "adamw", "--model", f"{model_file}:deep"]
    own = as_json(capsys, *arguments)["room_after_a_loss"]
    assert re.fullmatch(
        r"with 3 ranks left, a host holds up to \S+ \SiB, with images and copies and without activations, and \S+ \SiB "
        r"more while ranks recover; this machine has \S+ GiB",
        own,
    )
    known = json.loads(hardware("cpu").model_dump_json())
    said = {}
    for room in ("1KiB", "1GiB"):
        known["host"]["memory_bytes"] = room
        (tmp_path / "hardware.yaml").write_text(json.dumps(known))
        timed = ["--time", "--batch", f"{model_file}:batch", "--hardware", f"{tmp_path}/hardware.yaml"]
        said[room] = as_json(capsys, *arguments, *timed)["room_after_a_loss"]
    assert said["1GiB"] == own.partition("; ")[0] + "; it has 1.0 GiB"
    assert said["1KiB"].endswith("; it has 1.0 KiB. That is too little: the system may end ranks for lack of memory")
    budget = {"device": as_json(capsys, *arguments)["bytes"]["total"], "host": 1}
    needed = as_json(capsys, *arguments, *[word for key in budget for word in ("--set", f"budget.{key}={budget[key]}")])
    assert needed["room_after_a_loss"].endswith(". The budget needs 4 ranks, so the job waits for others, or ends")


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("world", ["1", "8"])
def test_every_preset_can_be_explained(name: str, world: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, name, "--world", world)
    assert out.startswith(f"{name} on ")
    assert PRESETS[name].known_from in out
    assert max(map(len, out.splitlines())) <= 100


def test_an_axis_of_one_rank_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing is split over node, which has one rank" in said(capsys, "hsdp", "--world", "4")


def test_a_plan_file_is_named_with_its_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("preset: zero2\naccumulate: 4\nrows:\n  grad:\n    dtype: bf16\n")
    values = as_json(capsys, str(plan), "--world", "2")["plan"]
    assert values["preset"] == {"value": "zero2", "from": f"{plan}:1"}
    assert values["rows.grad.dtype"] == {"value": "bf16", "from": f"{plan}:5"}
    assert "in 4 micro-batches" in said(capsys, str(plan), "--world", "2")


def test_long_programs_are_shortened_in_the_middle_unless_asked(
    model_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["zero3", "--world", "4", "--model", f"{model_file}:deep", "--set", "precision=bf16"]
    short, full = said(capsys, *arguments), said(capsys, *arguments, "--full")
    assert "program of one step (--full prints all)\n" in short
    assert "  # ... 19 moments ...\n  after forward h.11\n" in short
    assert "      # ... 5 actions ...\n" in short
    assert "..." not in full.partition("program of one step\n")[2]


@pytest.mark.parametrize("num_moments", range(1, 12))
def test_what_is_left_of_a_program_parses(num_moments: int, capsys: pytest.CaptureFixture[str]) -> None:
    text = as_json(capsys, "hpz", "--world", "4", "--set", "mesh={node: 2, local: 2}")["program"]
    blocks, kept = parse(text), parse(shortened(text, num_moments))
    assert [kept[0], kept[-1]] == [blocks[0], blocks[-1]]
    assert [block.moment for block in kept] == [one.moment for one in blocks if one in kept]
    assert "before backward h.3" in [str(block.moment) for block in kept] or num_moments == 1


def test_the_list_has_every_preset_and_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, "--list")
    for name, one in PRESETS.items():
        assert f"  {name}" in out
        assert one.known_from in out
    assert as_json(capsys, "--list") == {name: one.known_from for name, one in PRESETS.items()}


# --- what is counted ---------------------------------------------------------------------------------


def test_bytes_are_what_one_counts_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    told = as_json(capsys, "zero2", "--world", "4", "--set", "precision=bf16", "--optimizer-states", "1")
    numel = 4 * 2**20
    assert told["bytes"]["param"] == 2 * numel
    assert told["bytes"]["grad"] == 4 * numel // 4
    assert told["bytes"]["optim"] == (4 + 4) * numel // 4
    assert told["replicated_bytes"]["optim"] == (4 + 4) * numel
    verdict = 2 * 3 * 2 * 4  # an all-reduce of five fp32, in chunks of two, among four
    assert told["sent_bytes_per_step"] == 2 * numel * 2 * 3 // 4 + verdict


def test_an_optimizer_can_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    numel = 4 * 2**20
    kept = {"sgd": 0, "lion": 4, "adamw": 8, "adamw-bf16": 4, "adamw-int8": 2 + 8 / 256, "lamb": 8, "muon": 4}
    for name, num_bytes in kept.items():
        told = as_json(capsys, "zero3", "--world", "4", "--optimizer", name)
        assert told["optimizer"] == name
        assert told["bytes"]["optim"] == num_bytes * numel / 4
        assert ("during step" in told["program"]) == (name in ("lamb", "muon"))
    assert "8-bit" in said(capsys, "zero3", "--world", "2", "--optimizer", "adamw-int8").lower()


def test_the_optimizer_of_a_model_is_asked_parameter_by_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    model = "tests/models.py:Transformer"
    told = as_json(capsys, "zero2", "--world", "2", "--optimizer", "muon", "--model", model)
    assert "orthogonalize  blocks.0" in told["program"]
    assert "orthogonalize  head" not in told["program"]


def test_ddp_needs_what_replicated_training_needs(capsys: pytest.CaptureFixture[str]) -> None:
    told = as_json(capsys, "ddp", "--world", "3")
    assert told["bytes"] == told["replicated_bytes"]


def test_micro_batches_are_counted_where_they_send(capsys: pytest.CaptureFixture[str]) -> None:
    def sent(name: str, num: int) -> int:
        told = as_json(capsys, name, "--world", "2", "--set", f"accumulate={num}")
        return int(told["sent_bytes_per_step"])

    assert sent("zero1", 5) == sent("zero1", 1)
    assert sent("zero3", 5) > 4 * sent("zero3", 1)


# --- a real model ------------------------------------------------------------------------------------


def test_a_real_model_is_chosen_into_units(model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = as_json(capsys, "zero3", "--world", "2", "--model", f"{model_file}:tiny")
    block = 64 * 64 + 64
    assert told["units"] == [
        {"name": "wte", "numel": 500 * 64, "frozen_numel": 0},
        *({"name": f"h.{index}", "numel": block, "frozen_numel": 0} for index in range(3)),
        {"name": "head", "numel": 500 * 64 + 500, "frozen_numel": 500 * 64},
    ]
    assert "gather          head:frozen" in told["program"]
    out = said(capsys, "zero3", "--world", "2", "--model", f"{model_file}:tiny")
    assert "  h.0 ... h.2       4.2 K  each of 3\n" in out
    assert "  head             32.5 K  32.0 K frozen\n" in out
    assert "No model given" not in out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tniy", "has no callable 'tniy'. Did you mean 'tiny'?"),
        ("number", "has no callable 'number'."),
        ("sized", "has the required arguments width. Give a callable without required arguments, such as `def build"),
        ("reads_values", "failed on the meta device, where tensors have shapes but no values: "),
        ("text", "text in {file} returns str; it must return a torch.nn.Module."),
        ("hollow", "builds a Identity without parameters"),
    ],
)
def test_a_callable_that_gives_no_model_is_refused(name: str, message: str, model_file: Path) -> None:
    assert message.format(file=model_file) in refused("zero3", "--world", "2", "--model", f"{model_file}:{name}")


def test_a_file_that_gives_no_module_is_refused(model_file: Path) -> None:
    def refusal(source: object) -> str:
        return refused("zero3", "--world", "2", "--model", str(source))

    assert "Did you mean 'tiny_model.py'?" in refusal(model_file.with_name("tinymodel.py:tiny"))
    assert "There is no Python file in that folder." in refusal(model_file.parent / "nowhere" / "a.py:b")
    assert "write FILE:CALLABLE, such as train.py:build_model." in refusal("tiny_model.py")
    model_file.write_text("import no_such_thing")
    assert "could not be imported: ModuleNotFoundError: No module named 'no_such_thing'." in refusal(
        f"{model_file}:tiny"
    )
    model_file.write_text("raise SystemExit(3)")
    assert "under `if __name__ == '__main__':`" in refusal(f"{model_file}:tiny")
    plain = model_file.with_name("notes")
    plain.write_text("")
    assert "its name must end in .py." in refusal(f"{plain}:tiny")


def test_a_refused_model_leaves_the_path_as_it_was(model_file: Path) -> None:
    before = list(sys.path)
    with pytest.raises(ModelError):
        run("zero3", "--world", "2", "--model", f"{model_file}:number")
    assert sys.path == before


# --- a batch -----------------------------------------------------------------------------------------


def test_the_activations_of_a_batch_are_counted(model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["zero3", "--world", "2", "--model", f"{model_file}:tiny"]
    without = as_json(capsys, *arguments)
    told = as_json(capsys, *arguments, "--batch", f"{model_file}:batch")
    assert (without["batch"], without["peak_at"]) == (None, None)
    assert "activations" not in without["bytes"]
    # in the order of the rehearsal: with a frozen weight the head is through once its input's gradient has gone out
    assert sorted(told["program"].splitlines()) == sorted(without["program"].splitlines())
    held = told["bytes"]
    assert held.pop("total") == sum(held.values())
    # The most is held when the embedding's gradient is handed over: it, what it was made of, and the model's output.
    tokens, hidden, logits, table = 8 * 16 * 8, 8 * 16 * 64 * 4, 8 * 16 * 500 * 4, 500 * 64 * 4
    assert told["peak_at"] == "after backward wte"
    assert held["activations"] == tokens + hidden + logits + table + 2 * 4  # its sum, and the sum's gradient
    assert held["param"] == without["bytes"]["param"]


def test_a_batch_may_have_names_and_the_peak_has_a_moment(model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["zero3", "--world", "2", "--model", f"{model_file}:tiny", "--batch"]
    assert (
        as_json(capsys, *arguments, f"{model_file}:named_batch")["bytes"]
        == (as_json(capsys, *arguments, f"{model_file}:batch")["bytes"])
    )
    out = said(capsys, *arguments, f"{model_file}:batch")
    assert "  activations  " in out
    assert "The total is the peak of a step, at or just before '" in out
    assert "Activations are not included; --batch counts them" in said(capsys, "zero3", "--world", "2")


def test_narrow_numbers_make_narrow_activations(model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["ddp", "--world", "2", "--model", f"{model_file}:tiny", "--batch", f"{model_file}:batch"]
    wide = as_json(capsys, *arguments)["bytes"]["activations"]
    narrow = as_json(capsys, *arguments, "--set", "precision=bf16")["bytes"]["activations"]
    assert narrow == pytest.approx(wide / 2, rel=0.05)


def test_a_batch_that_cannot_be_rehearsed_is_refused(model_file: Path) -> None:
    def refusal(batch: str, model: str = "tiny") -> str:
        return refused("zero3", "--world", "2", "--model", f"{model_file}:{model}", "--batch", f"{model_file}:{batch}")

    assert "batch is of type list; it must be what the model is called with" in refusal("listed_batch")
    assert "failed to make a batch: FileNotFoundError: data.bin. It is called here without" in refusal("no_batch")
    assert "has no callable 'btch'. Did you mean 'batch'?" in refusal("btch")
    assert "in forward, 'if hidden.max() > 0:', asks for the value" in refusal("batch", "Curious")
    assert "--batch is 'batch'; write FILE:CALLABLE" in refused(
        "zero3", "--world", "2", "--model", f"{model_file}:tiny", "--batch", "batch"
    )
    without_model = refused("zero3", "--world", "2", "--batch", f"{model_file}:batch")
    assert without_model == "--batch needs a model. Add --model FILE:CALLABLE."


# --- what is refused ---------------------------------------------------------------------------------


def test_what_cannot_be_explained_is_refused() -> None:
    assert refused("zero4", "--world", "2").startswith("There is no preset 'zero4'. Did you mean 'zero")
    assert refused("--world", "2").startswith("Name a plan: a preset such as zero3, or a file.")
    assert refused("zero3") == "The number of ranks is unknown. Give --world N, at least 1."
    assert refused("zerro3") == "There is no preset 'zerro3'. Did you mean 'zero3'?"  # before it asks for ranks
    assert refused("zero3", "--world", "0") == "The number of ranks is unknown. Give --world N, at least 1, not 0."
    assert "makes 3 ranks, but the world has 4" in refused("zero3", "--world", "4", "--set", "mesh={dp: 3}")
    assert "--optimizer-states is -1; give 0 or more" in refused("zero3", "--world", "2", "--optimizer-states", "-1")
    assert refused("zero3", "--world", "2", "--expert-load", "2").startswith("--expert-load is for --batch")
    assert refused("zero3", "--world", "2", "--hardware", "") == "--hardware is for --time. Add --time."
    assert "there is no such file" in refused("zero3", "--world", "2", "--calibration", "absent.json")
    with pytest.raises(PlacementError):
        run("ddp", "--world", "2", "--set", "rows.param.shard=[dp]")
    with pytest.raises(ConfigError, match="Did you mean 'accumulate'"):
        run("ddp", "--world", "2", "--set", "acumulate=2")


def test_torch_is_imported_only_for_a_model() -> None:
    script = (
        "import sys; from shardwise.cli.main import main; "
        "assert main(['explain', 'zero3', '--world', '4']) == 0; "
        "assert main(['explain', '--list']) == 0; "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr


def test_a_pipeline_is_shown_as_who_has_what_and_as_a_grid(
    tmp_path: Path, model_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "pp.yaml"
    plan.write_text("preset: zero1\nmesh: {pp: 2, dp: 2}\naccumulate: 2\n")
    shown = said(capsys, str(plan), "--world", "4", "--model", f"{model_file}:Tiny")
    assert "pipeline, schedule 1f1b" in shown
    assert "  pp 0: stage 0 (wte, h.0, h.1)\n  pp 1: stage 1 (h.2, head)\n" in shown
    assert "  rank 0 | F0 F1  .  . B0 B0  . B1 B1\n  rank 1 |  . F0 B0 B0 F1 B1 B1  .  .\n" in shown
    assert "33% of the time is spent waiting" in shown
    told = as_json(capsys, str(plan), "--world", "4", "--set", "preset=zero3-kept")
    assert told["program"].count("\n    gather ") == 4  # each of the example units, once a step
    assert "\nbefore forward h.3 #1\n" in told["program"]
    assert told["schedule"].startswith("1f1b: 2 ranks, 2 stages, 2 micro-batches\n")
    assert told["bubble"] == pytest.approx(1 / 3)


def test_activations_of_stages_are_those_of_the_rank_with_most_parameters(
    model_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPipe holds those of all micro-batches, one process alone those of one."""
    arguments = ["zero1", "--model", f"{model_file}:tiny", "--batch", f"{model_file}:batch", "--set", "accumulate=4"]
    alone = as_json(capsys, *arguments, "--world", "1")["bytes"]
    stages = ["--world", "2", "--set", "mesh={pp: 2}", "--set"]
    gpipe, one_f_one_b = (
        as_json(capsys, *arguments, *stages, f"pipeline.schedule={name}")["bytes"] for name in ("gpipe", "1f1b")
    )
    assert gpipe["param"] < alone["param"]
    assert one_f_one_b["activations"] < gpipe["activations"]
    assert gpipe["activations"] > 1.2 * one_f_one_b["activations"]
    assert alone["activations"] < gpipe["activations"] < 4 * alone["activations"]
    cut = ["--world", "4", "--set", "mesh={pp: 2, tp: 2}", "--set", "tensor.plan={h.*.linear: column_gathered}"]
    halves = as_json(capsys, *arguments, *cut)
    assert halves["bytes"]["param"] < one_f_one_b["param"]
    assert "expert-load is 0.5; give a multiple of an even share" in refused(*arguments, *cut, "--expert-load", "0.5")
    halved = as_json(
        capsys,
        *arguments,
        "--world",
        "4",
        "--set",
        "mesh={pp: 2, dp: 2}",
        "--set",
        "preset=zero2",
        "--set",
        "pipeline={schedule: zb-h1, stages: [[wte], [h.0, h.1, h.2, head]]}",  # the first has whole backwards
    )
    assert "\nbefore backward_weights " in halved["program"]
    assert halved["peak_at"]


def test_activations_of_split_sequences_are_those_of_a_part(
    model_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Over four ranks, a quarter of the tokens: ulysses and a ring hold less than the whole does, and not the same."""
    attending = tmp_path / "attending.py"
    attending.write_text(
        "import torch\n"
        "from torch.nn.functional import scaled_dot_product_attention as attention\n\n"
        "class Attending(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)\n"
        "    def forward(self, hidden):\n"
        "        heads = self.qkv(hidden).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)\n"
        "        return self.out(attention(*heads, is_causal=True).transpose(1, 2).flatten(2)).square().mean()\n\n"
        "def whole(): return torch.ones(2, 256, 32)\n"
        "def part(): return torch.ones(2, 64, 32)\n"
    )
    arguments = ["zero1", "--world", "4", "--model", f"{attending}:Attending", "--batch"]
    whole = as_json(capsys, *arguments, f"{attending}:whole")["bytes"]["activations"]
    split = ["--set", "mesh={sp: 4}", "--set"]
    ulysses, ring = (
        as_json(capsys, *arguments, f"{attending}:part", *split, f"sequence.attention={kind}")["bytes"]["activations"]
        for kind in ("ulysses", "ring")
    )
    assert 0.2 * whole < min(ulysses, ring) < max(ulysses, ring) < 0.5 * whole
    assert ulysses != ring
