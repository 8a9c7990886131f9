"""Twenty, fifty, a hundred ranks are killed in 500 steps, whatever they are doing, and others come in their place: the
job ends with the bits of one that was left alone."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint import checkpoints_in
from shardwise.testing import run_ranks
from tests.faults.campaign import ONE_AT_A_TIME, Campaign, is_alive
from tests.faults.campaign_rank import READ_EVERY
from tests.faults.exact_training import LEARNING_RATE, MULTIPLE, NUM_BLOCKS, Model, Samples, alone, loader, optimizer_of
from tests.patience import wait_until
from tests.thorough import EXHAUSTIVE, soak

Tensor = torch.Tensor
MOST = 2**24
"""Whole numbers that fp32 has."""
HPZ = '{"preset": "hpz", "mesh": {"node": 2, "local": 2}}'
FEW = [("zero3", "engine", 60, 6), ("zero1", "plain", 60, 6)]
SPLIT = '"tensor": {"plan": {"seen": "vocabulary", "blocks.*.more": "column_gathered"}}'
GROUPS = [
    (f'{{"preset": "zero1", "mesh": {{"dp": 2, "tp": 2}}, {SPLIT}}}', "engine"),
    (f'{{"preset": "zero3", "mesh": {{"tp": 2, "dp": 2}}, {SPLIT}}}', "plain"),
    (f'{{"preset": "zero2", "mesh": {{"tp": 4}}, {SPLIT}}}', "train_step"),
]
"""Plans whose ranks share the work in replica groups, or are a single one."""
MANY = [
    ("zero2", "train_step", 500, 20),
    ("ddp", "plain", 500, 20),
    ("zero1", "plain", 500, 50),
    (HPZ, "engine", 500, 50),
    ("zero3", "engine", 500, 100),
]


class Oracle:
    """The plain loop, of which nobody is killed."""

    def __init__(self, num_steps: int) -> None:
        zeros = {name: param.detach().double() for name, param in Model().named_parameters()}
        self.params = [zeros, *(params for _, params in alone(num_steps))]
        """Before each step, and after the last."""
        largest = max(param.abs().max().item() for param in self.params[-1].values())
        assert largest * 2 / LEARNING_RATE < MOST, "sums are not whole any more"
        self.samples = Samples()
        self.batches: list[set[int]] = []
        with loader((0, 1), 1) as batches:
            while len(self.batches) < num_steps:
                self.batches += [set(batch["index"].tolist()) for batch in batches]

    def loss(self, step: int, samples: list[int]) -> tuple[float, float]:
        """The mean loss of these samples in this step, and what it would be if nothing cancelled out."""
        params = self.params[step]
        rows = [self.samples[sample] for sample in samples]
        x = torch.stack([row["x"] for row in rows]).double()
        outputs, sums = params["seen.weight"][samples, 0], params["seen.weight"][samples, 0].abs()
        for number in range(NUM_BLOCKS):
            all_of_block = params[f"blocks.{number}.weight"] + params[f"blocks.{number}.more.weight"].sum(0)
            outputs = outputs + x.roll(number, -1) @ all_of_block
            sizes = params[f"blocks.{number}.weight"].abs() + params[f"blocks.{number}.more.weight"].abs().sum(0)
            sums = sums + x.roll(number, -1).abs() @ sizes
        weights = torch.stack([row["weight"] for row in rows]).double() * MULTIPLE
        return (outputs * weights).mean().item(), (sums * weights.abs()).mean().item()


def check(campaign: Campaign, said: str, num_steps: int) -> None:
    assert campaign.job.returncode == 0, said[-20000:]
    assert len(campaign.dead) == campaign.num_kills, said[-5000:]
    oracle = Oracle(num_steps)
    notes = campaign.notes()
    check_steps(oracle, notes, campaign)
    states = list(campaign.out.glob("state-*"))
    assert states, said[-5000:]
    for path in states:
        state = torch.load(path)
        for name, whole in oracle.params[-1].items():
            assert (state[name].double() == whole).all(), (path.name, name)
    check_checkpoints(oracle, campaign.out / "checkpoints")
    check_nothing_is_left(campaign)


def check_steps(oracle: Oracle, notes: dict[int, list[dict[str, object]]], campaign: Campaign) -> None:
    """What each member had in each step, of the dead ones too."""
    had: dict[int, dict[int, set[int]]] = {}
    """By step and place along the data axes: ranks of one replica group have the same samples."""
    noted: dict[int, set[int]] = {}
    num_ranks: dict[int, int] = {}
    wrong_means: set[int] = set()
    for member, lines in notes.items():
        for line in lines:
            step, samples = line["step"], line.get("samples")
            assert isinstance(step, int)
            if "read" in line:
                assert line["read"] == oracle.params[step + 1]["seen.weight"].sum().item(), (member, line)
            elif "mean" in line:
                if not is_mean_of(line["mean"], oracle, step, sorted(oracle.batches[step])):
                    wrong_means.add(step)
            else:
                ranks, place = line["ranks"], line["place"]
                assert isinstance(samples, list)
                assert isinstance(ranks, int)
                assert isinstance(place, int)
                assert not samples or is_mean_of(line["loss"], oracle, step, samples), (member, line)
                noted.setdefault(step, set()).add(member)
                same = had.setdefault(step, {}).setdefault(place, set(samples))
                assert same == set(samples), f"a replica group had different samples in step {step}"
                assert num_ranks.setdefault(step, ranks) == ranks, f"step {step} in two worlds"
    for step, shares in had.items():
        for (one, some), (other, others) in combinations(shares.items(), 2):
            assert not some & others, f"{one} and {other} of the data ranks both had some samples in step {step}"
        together = set().union(*shares.values())
        assert together <= oracle.batches[step], f"samples of another step in step {step}"
        if together != oracle.batches[step]:
            silent = num_ranks[step] - len(shares)
            assert 0 < silent <= len(campaign.dead - noted[step]), f"samples are missing in step {step}"
    assert sorted(had) == list(range(len(oracle.batches)))
    assert len(wrong_means) <= campaign.num_kills, f"a mean is short only of a rank that was lost in it: {wrong_means}"
    assert any("read" in line for lines in notes.values() for line in lines) or max(had) < READ_EVERY


def is_mean_of(found: object, oracle: Oracle, step: int, samples: list[int]) -> bool:
    assert isinstance(found, float)
    loss, size = oracle.loss(step, samples)
    return abs(found - loss) <= 1e-6 * max(size, 1.0)


def check_checkpoints(oracle: Oracle, folder: Path) -> None:
    found = checkpoints_in(folder)
    assert found
    for step, path in found.items():
        state = run_ranks(1, lambda world, path=path: resumed(world, path))[0]
        for name, whole in oracle.params[step].items():
            assert (state[name].double() == whole).all(), (path, name)


def resumed(world: sw.World, path: Path) -> dict[str, Tensor]:
    model = Model()
    with sw.shard(model, "ddp", optimizer=optimizer_of(model), world=world) as engine:
        found = engine.resume(path)
        assert found is not None
        assert found.state == {"of": found.step}
        return engine.state_dict()


def check_nothing_is_left(campaign: Campaign) -> None:
    wait_until(lambda: not any(map(is_alive, campaign.out.glob("pid-*"))), lambda: "a rank outlives the job")
    folders = {path.read_text() for path in campaign.out.glob("memory-*")}
    assert folders
    assert all(folder.startswith("/dev/shm/") for folder in folders)
    assert not [folder for folder in folders if Path(folder).exists()], "what outlives ranks goes with the job"


@soak("kills many processes at any moment")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("plan", "loop", "num_steps", "num_kills"), MANY if EXHAUSTIVE else FEW)
def test_ranks_are_killed_whatever_they_do(
    plan: str, loop: str, num_steps: int, num_kills: int, tmp_path: Path
) -> None:
    campaign = Campaign(tmp_path, plan, loop, num_steps, num_kills, seed=0)
    said = campaign.run()
    check(campaign, said, num_steps)


@soak("kills many processes at any moment")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("plan", "loop"), GROUPS)
def test_ranks_of_groups_are_killed_one_after_the_other(plan: str, loop: str, tmp_path: Path) -> None:
    """Of two at once, all that have some part of the model may be lost before its images have the last step: then all
    ranks restart."""
    steps, kills = (500, 50) if EXHAUSTIVE else (60, 6)
    campaign = Campaign(tmp_path, plan, loop, steps, kills, seed=0, situations=ONE_AT_A_TIME)
    said = campaign.run()
    check(campaign, said, steps)


@soak("kills processes at any moment for half an hour, in six parts")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("plan", "loop"),
    [
        ("zero3", "engine"),
        ("zero1", "plain"),
        (HPZ, "train_step"),
        ("ddp", "plain"),
        ("zero2", "engine"),
        (HPZ, "plain"),
    ],
)
def test_half_an_hour_of_kills_and_joins(plan: str, loop: str, tmp_path: Path) -> None:
    campaign = Campaign(tmp_path, plan, loop, 900, 900, seed=1, seconds=300)
    said = campaign.run()
    check(campaign, said, 900)
    assert campaign.num_kills >= 15
