"""TensorBoard, W&B, MLflow and Comet are told what the record is told; each is read back with its own reader."""

from __future__ import annotations

import gc
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
import shardwise.integrations.deepspeed as deepspeed
from shardwise.errors import ConfigError
from shardwise.observe import Record, read_record

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


@pytest.fixture
def comet() -> Iterator[None]:
    """It leaves a socket of its own to the garbage collector, which is asked for it here."""
    pytest.importorskip("comet_ml")
    yield
    gc.collect()


leaves_a_socket = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


def metrics_of(folder: Path) -> list[tuple[str, int, float]]:
    """What an offline experiment of Comet was told, but what it finds out by itself."""
    (written,) = folder.glob("*.zip")
    with zipfile.ZipFile(written) as archive:
        messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
    told = [message["payload"]["metric"] for message in messages if message["type"] == "metric_msg"]
    found = [(one["metricName"], one["step"], one["metricValue"]) for one in told]
    return [one for one in found if "/" in one[0] or one[0] == "loss"]


@leaves_a_socket
@pytest.mark.usefixtures("comet")
def test_comet_has_them_offline(tmp_path: Path) -> None:
    model, run = torch.nn.Linear(4, 1), tmp_path / "compared"
    plan = {"run": str(run), "trackers": ["jsonl", {"comet": {"name": "mine", "log_code": False}}]}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sw.shard(model, plan, optimizer=optimizer, world=sw.World.join(environment={})) as engine:
        for _ in range(3):
            loss = engine.train_step(torch.randn(4, 4), loss_fn=lambda output: output.square().mean())
            engine.log({"loss": loss})
        engine.log({"loss": 2.0}, kind="validation")
    losses = [("loss", step, value) for step, value in record(run).column("loss")]
    assert metrics_of(run / "comet") == [*losses, ("validation/loss", 3, 2.0)]
    for options, words in (
        ({"api_key": "secret"}, "Set COMET_API_KEY"),
        ({"nmae": "x"}, "does not take these options"),
    ):
        with pytest.raises(ConfigError, match=words):
            sw.shard(model, {"run": str(run), "trackers": [{"comet": options}]}, world=sw.World.join(environment={}))


def trained_by(config: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses and rates of four steps on four samples each, by DeepSpeed's calls."""
    engine, *_ = deepspeed.initialize(
        model=torch.nn.Linear(4, 1),
        config={
            "train_batch_size": 4,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 4}},
            **config,
        },
        world=sw.World.join(environment={}),
    )
    losses, rates = [], []
    for _ in range(4):
        loss = engine(torch.randn(4, 4)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        rates += engine.get_lr()
    engine.destroy()
    return losses, rates


def test_the_monitors_of_a_deepspeed_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # it has read the environment before
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tensorboard = {"enabled": True, "output_path": "logs", "job_name": "first"}
    losses, rates = trained_by({"tensorboard": tensorboard, "wandb": {"enabled": True, "project": "much"}})
    events = accumulator.EventAccumulator("logs/first")
    events.Reload()
    for name, wanted in (("Train/Samples/train_loss", losses), ("Train/Samples/lr", rates)):
        told = [(event.step, event.value) for event in events.Scalars(name)]
        assert told == [(4 * step, pytest.approx(value, rel=1e-6)) for step, value in enumerate(wanted, 1)]
    wandb.teardown()  # its process writes the file, and has ended then
    (written,) = Path("wandb").glob("offline-run-*/run-*.wandb")
    data = written.read_bytes()
    assert b"much" in data
    assert all(str(loss).encode()[:12] in data for loss in losses)


@leaves_a_socket
@pytest.mark.usefixtures("comet")
def test_comet_is_told_after_so_many_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(tmp_path))
    losses, rates = trained_by({"comet": {"enabled": True, "online": False, "samples_log_interval": 8}})
    wanted = {("Train/Samples/train_loss", 4 * step, losses[step - 1]) for step in (1, 3)}
    wanted |= {("Train/Samples/lr", 4 * step, rates[step - 1]) for step in (1, 3)}
    assert set(metrics_of(tmp_path)) == wanted
