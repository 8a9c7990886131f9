"""TensorBoard, W&B and MLflow are told what the record is told; each is read back with its own reader."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.monitor import Record, read_record

NAMES = ("tensorboard", "wandb", "mlflow")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that all trackers were told of."""
    for name in NAMES:
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("runs") / "tracked"
    model = torch.nn.Linear(4, 1)
    plan = {"run": str(folder), "trackers": ["jsonl", "tensorboard", "wandb", {"mlflow": {"experiment": "mine"}}]}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_SILENT", "true")
        with sw.shard(model, plan, optimizer=optimizer, world=sw.World.join(environment={})) as engine:
            for _ in range(4):
                loss = engine.train_step(torch.randn(4, 4), loss_fn=lambda output: output.square().mean())
                engine.log({"loss": loss}, samples=4)
            engine.log({"loss": 2.0}, kind="validation")
    return folder


def record(run: Path) -> Record:
    return read_record(run / "record.jsonl")


def test_tensorboard_has_every_number(run: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for name in ("loss", "norm", "lr", "samples_per_second"):
        told = [(event.step, event.value) for event in events.Scalars(name)]
        assert told == [(step, pytest.approx(value, rel=1e-6)) for step, value in record(run).column(name)]
    assert [event.value for event in events.Scalars("validation/loss")] == [2.0]


def test_mlflow_has_every_number_the_plan_and_the_end(run: Path) -> None:
    client = pytest.importorskip("mlflow.tracking").MlflowClient(tracking_uri=(run / "mlruns").as_uri())
    (told,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    history = client.get_metric_history(told.info.run_id, "loss")
    assert sorted((one.step, one.value) for one in history) == record(run).column("loss")
    assert told.data.params["preset"] == "zero3"
    assert told.info.status == "FINISHED"


def test_wandb_has_them_offline(run: Path) -> None:
    (written,) = (run / "wandb").glob("offline-run-*/run-*.wandb")
    data = written.read_bytes()
    for step, loss in record(run).column("loss"):
        assert str(loss).encode()[:12] in data, step


def test_options_that_a_tracker_does_not_take_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    plan = {"run": str(tmp_path), "trackers": [{"mlflow": {"experimnet": "mine"}}]}
    with pytest.raises(ConfigError, match="mlflow does not take these options"):
        sw.shard(torch.nn.Linear(4, 1), plan, world=sw.World.join(environment={}))
