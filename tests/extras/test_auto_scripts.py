"""`preset: auto` under Trainer, Accelerate and unmodified scripts: the plan is chosen for a batch of the training
loader, and trains as theirs do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import accelerate_jobs
import fabric_jobs
import lightning_jobs
import pytest
import torch
import trainer_jobs
from rank_processes import begin, on_ranks
from test_takeover import ALIGNMENT, ARGUMENTS, SCRIPT, command, plain
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import shardwise as sw
from shardwise.errors import ConfigError, ModelError
from shardwise.integrations.sample_batch import sample_batch
from tests.thorough import sampled

pytestmark = pytest.mark.timeout(300)
IN_STAGES = {"preset": "auto", "mesh": {"pp": 2}}
"""A plan of which the stages, the preset and the activations are searched for."""


def test_an_unmodified_script_is_trained_by_a_plan_that_is_searched_for(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
    waited = begin(2, plain, [str(theirs / "told.json"), "--output_dir", str(theirs), *ARGUMENTS])
    words = ["shardwise", "launch", "--nproc", "2", "--shardwise", "auto", str(SCRIPT), str(ours / "told.json")]
    done = command(*words, "--output_dir", str(ours), *ARGUMENTS)
    assert done.returncode == 0, done.stderr[-3000:]
    waited()
    told, expected = (json.loads((folder / "told.json").read_text()) for folder in (ours, theirs))
    assert told["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert done.stderr.count("auto: ") == 2  # one for the Trainer, one for the Accelerator


@sampled
@pytest.mark.parametrize("method", ["sft", "dpo", "sft-lora"])
def test_trainers_of_trl_are_trained_by_a_plan_that_is_searched_for(tmp_path: Path, method: str) -> None:
    """They replace the forward of the model by one that calls the former."""
    race_of_trl(tmp_path, method, 2, "auto")


def race_of_trl(folder: Path, method: str, num_plain: int, plan: str) -> None:
    """TRL's trainer under `plan`, and on as many processes without."""
    ours, theirs = folder / "ours.json", folder / "theirs.json"
    waited = begin(num_plain, plain, [str(theirs), method], str(ALIGNMENT))
    done = command("shardwise", "launch", "--nproc", "2", "--shardwise", plan, str(ALIGNMENT), str(ours), method)
    assert done.returncode == 0, done.stderr[-3000:]
    waited()
    told, expected = json.loads(ours.read_text()), json.loads(theirs.read_text())
    assert told["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert told["grad_norm"] == pytest.approx(expected["grad_norm"], abs=1e-5)


def trained(plan: Any, **settings: Any) -> dict[str, Any]:
    """An evaluation comes first, with smaller batches."""
    trainer = trainer_jobs.make(plan, "gpt2", per_device_eval_batch_size=1, **settings)
    trainer.evaluate()
    trainer.train()
    engine = getattr(trainer, "engine", None)
    chosen = None if engine is None else engine.plan.model_dump(mode="json", exclude_unset=True)
    return trainer_jobs.told(trainer, engine) | {"plan": chosen}


def test_a_trainer_takes_the_same_plan_on_all_ranks_and_writes_it_down(tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.7, "max_steps": 5}
    waited = begin(1, trained, None, **settings, per_device_train_batch_size=4)
    runs = on_ranks(2, trained, {"preset": "auto", "run": str(tmp_path)}, **settings)
    (expected,) = waited()
    for run in runs:
        torch.testing.assert_close(torch.tensor(run["losses"]), torch.tensor(expected["losses"]), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.tensor(run["norms"]), torch.tensor(expected["norms"]), rtol=1e-5, atol=1e-5)
    assert runs[0]["plan"] == runs[1]["plan"]
    text = (tmp_path / "plan.yaml").read_text()
    assert "# auto: " in text
    assert "2 x 2 rows" in text  # accumulated micro-batches of the training loader
    assert sw.load_plan(tmp_path / "plan.yaml").preset == runs[0]["plan"]["preset"] != "auto"


def test_a_trainer_in_stages_takes_a_plan_that_is_searched_for() -> None:
    """With stages of its own choice, whether its steps are schedules or, of few micro-batches, calls of the model."""
    for num in (2, 1):
        settings = {"gradient_accumulation_steps": num, "max_grad_norm": 0.7, "max_steps": 5}
        waited = begin(1, trained, None, **settings)
        runs = on_ranks(2, trained, IN_STAGES, **settings)
        (expected,) = waited()
        require_equal(runs, expected)


def require_equal(runs: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for run in runs:
        assert run["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert run["norms"] == pytest.approx(expected["norms"], abs=1e-5)
        assert run["plan"]["preset"] != "auto"
        assert run["plan"]["mesh"] == {"pp": 2}
    assert runs[0]["plan"] == runs[1]["plan"]


def test_a_loop_of_accelerate_in_stages_takes_a_plan_that_is_searched_for() -> None:
    """Its calls of the model are foreseen, with as many micro-batches as it accumulates."""
    waited = begin(1, accelerated, None)
    runs = on_ranks(2, accelerated, IN_STAGES)
    (expected,) = waited()
    require_equal(runs, expected)


def accelerated(plan: Any) -> dict[str, Any]:
    loop = accelerate_jobs.Loop(plan)
    loop.train()
    engine = None if plan is None else loop.accelerator.engine_of(loop.model)
    chosen = None if engine is None else engine.plan.model_dump(mode="json", exclude_unset=True)
    return {"losses": loop.losses, "norms": loop.norms, "plan": chosen}


class Squares(nn.Module):
    """The loop computes the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def pairs(num: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.randn(num, 9, generator=torch.Generator().manual_seed(0))
    return [(row[:8], row[8:]) for row in made]


def fitted(plan: Any) -> list[float]:
    accelerator = accelerate_jobs.made(plan)
    torch.manual_seed(1)  # decides the order of the samples
    model = Squares()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(pairs(32), 4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()[None]).mean().item())
    return losses


def test_a_loop_of_accelerate_is_chosen_for_by_its_loader() -> None:
    waited = begin(2, fitted, None)
    assert on_ranks(2, fitted, "auto")[0] == pytest.approx(waited()[0], abs=1e-6)


def without_loader() -> str:
    accelerator = accelerate_jobs.made("auto")
    model = Squares()
    with pytest.raises(ConfigError) as raised:
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    given = accelerate_jobs.made("auto", batch=(torch.zeros(4, 8),))
    given.prepare(model, torch.optim.AdamW(model.parameters()))
    assert given.engine_of(model).plan.preset != "auto"
    return str(raised.value)


def test_without_a_loader_the_cure_is_named() -> None:
    said = on_ranks(1, without_loader)[0]
    assert "accelerator.prepare(model, optimizer, loader)" in said
    assert "Accelerator(plan='auto', batch=" in said


class Stream(IterableDataset[Any]):
    """Its file is read once."""

    def __init__(self, lines: Any) -> None:
        self.lines = lines

    def __iter__(self) -> Any:
        return iter(self.lines)


class Padded(nn.Module):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return ids


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    width = max(len(row["ids"]) for row in rows)
    return {
        "ids": torch.tensor([row["ids"] + [0] * (width - len(row["ids"])) for row in rows]),
        "index": torch.arange(len(rows)),
    }


def test_the_batch_is_of_the_longest_samples_and_nothing_else_changes() -> None:
    rows = [{"ids": [1] * length} for length in (3, 1, 9, 4)]
    loader = DataLoader(rows, 2, shuffle=True, collate_fn=padded)
    before = torch.get_rng_state()
    batch: Any = sample_batch(Padded(), loader)
    assert batch.keys() == {"ids"}
    assert batch["ids"].shape == (2, 9)
    assert torch.equal(torch.get_rng_state(), before)
    streamed: Any = sample_batch(Padded(), DataLoader(Stream(rows), 4, collate_fn=padded), num_parts=2)
    assert streamed["ids"].shape == (2, 9)
    with pytest.raises(ConfigError, match=r"can only be iterated, and not copied.*Accelerator"):
        sample_batch(Padded(), DataLoader(Stream(row for row in rows), 2, collate_fn=padded))
    with pytest.raises(ConfigError, match=r"cannot be a batch of the loader: .*shardwise plan"):
        sample_batch(Padded(), DataLoader([{"pixels": torch.zeros(3)}], 1))
    with pytest.raises(ConfigError, match="is empty"):
        sample_batch(Padded(), DataLoader([], 1))


class Stepped(lightning_jobs.Module):
    """Its step logs, and calls its own forward."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch["rows"])
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(self.all_gather(outputs["loss"]).mean().item())


class Loaded(lightning_jobs.Data):
    """Counts how often it is asked, and draws random numbers for it."""

    num_asked = 0

    def train_dataloader(self) -> Any:
        self.num_asked += 1
        order = torch.randperm(48).tolist()
        rows = lightning_jobs.Rows(48)
        return {"rows": DataLoader([rows[place] for place in order], batch_size=2)}


def stepped(
    plan: Any, folder: str, *, kind: type[Any] = Stepped, validates: bool = True, **settings: Any
) -> dict[str, Any]:
    """An evaluation comes first, unless it would put the module into stages for good."""
    torch.manual_seed(3)
    module, data = kind(), Loaded()
    arguments = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_epochs": 1}
    trainer = lightning_jobs.trainer_of(plan, folder, enable_checkpointing=False, settings=settings, **arguments)
    val = trainer.validate(module, data, verbose=False) if validates else [{"val": None}]
    trainer.fit(module, data)
    engine = getattr(trainer.strategy, "engine", None)
    chosen = None if engine is None else engine.plan.model_dump(mode="json", exclude_unset=True)
    assert not [name for name in vars(module) if name.startswith("_shardwise_own")]
    return {"losses": module.losses, "norms": module.norms, "val": val[0]["val"], "plan": chosen}


def test_trainer_of_lightning_takes_a_plan_for_its_training_step(tmp_path: Path) -> None:
    waited = begin(2, stepped, None, str(tmp_path))
    first, second = on_ranks(2, stepped, {"preset": "auto", "run": str(tmp_path / "run")}, str(tmp_path))
    expected = waited()[0]
    assert len(first["losses"]) == 12
    assert first["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert first["norms"] == pytest.approx(expected["norms"], abs=1e-5)
    assert first["val"] == pytest.approx(expected["val"], abs=1e-5)
    assert first["plan"] == second["plan"]
    assert first["plan"]["preset"] != "auto"
    assert "2 x 2 rows" in (tmp_path / "run" / "plan.yaml").read_text()


def test_trainer_of_lightning_in_stages_takes_a_plan_for_its_training_step(tmp_path: Path) -> None:
    waited = begin(1, stepped, None, str(tmp_path), validates=False)
    runs = on_ranks(2, stepped, IN_STAGES, str(tmp_path), validates=False)
    (expected,) = waited()
    require_equal(runs, expected)


class Talks(Stepped):
    """Its step needs its Trainer; its forward does not."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.trainer.strategy.reduce(loss.detach())
        return loss


def stepped_wrongly(folder: str) -> str:
    with pytest.raises(ModelError) as raised:
        stepped("auto", folder, kind=Talks)
    given = stepped("auto", folder, kind=Talks, batch=(torch.zeros(2, 4, dtype=torch.long),))
    assert len(given["losses"]) == 24
    return str(raised.value)


def test_a_step_that_cannot_be_rehearsed_has_a_cure(tmp_path: Path) -> None:
    said = on_ranks(1, stepped_wrongly, str(tmp_path))[0]
    assert "without a Trainer" in said
    assert "ShardwiseStrategy(plan='auto', batch=" in said


def by_fabric(plan: Any) -> list[float]:
    fabric = fabric_jobs.fabric_of(plan)
    loader = fabric.setup_dataloaders(DataLoader(lightning_jobs.Rows(24), batch_size=2))
    model, optimizer, _ = fabric_jobs.made(fabric, is_apart=True)
    losses = []
    for batch in loader:
        loss = fabric_jobs.loss_of(model, batch)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach()).item())
    return losses


def fabric_without_loader() -> str:
    fabric = fabric_jobs.fabric_of("auto")
    with pytest.raises(ConfigError) as raised:
        fabric_jobs.made(fabric)
    given = fabric_jobs.fabric_of("auto", settings={"batch": torch.zeros(2, 4, dtype=torch.long)})
    model, *_ = fabric_jobs.made(given)
    assert given.strategy.engine_of(model).plan.preset != "auto"
    return str(raised.value)


def test_a_loop_of_fabric_is_chosen_for_by_its_loader() -> None:
    waited = begin(2, by_fabric, None)
    ours = on_ranks(2, by_fabric, "auto")[0]
    assert ours == pytest.approx(waited()[0], abs=1e-5)
    assert "fabric.setup_dataloaders(loader) before" in on_ranks(1, fabric_without_loader)[0]


def test_a_loop_of_fabric_in_stages_is_chosen_for_by_its_loader() -> None:
    waited = begin(1, by_fabric, None)
    ours = on_ranks(2, by_fabric, IN_STAGES)[1]
    assert ours == pytest.approx(waited()[0], abs=1e-5)


@sampled
@pytest.mark.parametrize("method", ["sft-lora", "dpo"])
def test_trainers_of_trl_in_stages_are_trained_by_a_plan_that_is_searched_for(tmp_path: Path, method: str) -> None:
    race_of_trl(tmp_path, method, 1, json.dumps(IN_STAGES))
