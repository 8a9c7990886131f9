"""Transformers' Trainer on our engine, compared with plain Trainer: losses, norms, evaluations, parameters, files."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_jobs as jobs
from rank_processes import begin, on_ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from shardwise.cli.main import main
from shardwise.observe import read_record
from tests.thorough import sampled, thorough_only

pytestmark = pytest.mark.timeout(300)

Run = dict[str, Any]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
IN_CHUNKS = {"logits": "chunked", "chunk": 4 * 5 * jobs.VOCABULARY}
"""Of five rows."""


def assert_same(ours: Run, plain: Run, **bounds: float) -> None:
    bounds = bounds or CLOSE
    for name in ("losses", "norms", "rates", "evaluations"):
        assert len(ours[name]) == len(plain[name]), name
        torch.testing.assert_close(torch.tensor(ours[name]), torch.tensor(plain[name]), **bounds, msg=name)
    assert ours["state"].keys() == plain["state"].keys()
    for name, value in plain["state"].items():
        torch.testing.assert_close(torch.tensor(ours["state"][name]), torch.tensor(value), **bounds, msg=name)


def test_a_run_is_that_of_ddp_and_of_one_process() -> None:
    """Tens of steps, with clipping, and accumulation over rows with different numbers of counted tokens."""
    settings = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.7, "max_steps": 20, "eval_strategy": "steps"}
    settings |= {"eval_steps": 7, "lr_scheduler_type": "cosine", "warmup_steps": 3}
    alone = begin(1, jobs.race, ["zero3", None], "gpt2", **settings, per_device_train_batch_size=4)
    plans = [None, "zero3", "zero1", "ddp", {"preset": "zero3", "loss": IN_CHUNKS}]
    plain, *ours = on_ranks(2, jobs.race, plans, "gpt2", **settings)[0]
    assert len(plain["losses"]) == 20
    assert any(norm > 0.7 for norm in plain["norms"])
    for run in (*ours, *alone()[0]):
        assert_same(run, plain | {"evaluations": run["evaluations"]})
    for run in ours:
        assert_same(run, plain)


IN_LAYERS = {"preset": "zero3", "mesh": {"dp": -1, "tp": 2}}
BY_EXPERTS = {"preset": "zero2", "mesh": {"ep": 2}}
SUCCESSIONS: list[tuple[str, int, list[Any]]] = [
    # model, ranks, plans: over those that split layers or sequences, two ranks have one batch
    ("gpt2", 2, ["zero3", "zero3", "zero3"]),
    ("gpt2", 2, ["zero2", "zero1", "ddp"]),
    ("llama", 4, [IN_LAYERS, {"preset": "zero2", "mesh": {"dp": -1, "sp": 2}}, IN_LAYERS]),
    ("gpt2", 4, [IN_LAYERS, {**IN_LAYERS, "preset": "zero1"}, IN_LAYERS]),
    ("mixtral", 2, [BY_EXPERTS, "zero3", BY_EXPERTS]),
]


@pytest.mark.parametrize(("model", "ranks", "plans"), SUCCESSIONS)
def test_a_model_is_passed_from_one_trainer_to_the_next(model: str, ranks: int, plans: list[Any]) -> None:
    """With another plan, and another learning rate; then to one that only evaluates."""
    settings = {"max_grad_norm": 0.7, "lr_scheduler_type": "cosine"}
    plain = begin(2, jobs.one_after_another, [None, None, None], model, **settings)
    ours, expected = on_ranks(ranks, jobs.one_after_another, plans, model, **settings), plain()[0]
    assert len(expected["losses"]) == 7
    for run in ours:
        assert_same(run, expected)


def test_a_model_in_bf16_is_passed_on_in_bf16() -> None:
    found = on_ranks(2, jobs.passed_on_in_bf16, "zero3")[0]
    assert found["dtypes"] == ["torch.bfloat16"]
    assert found["losses"][0] > found["losses"][-1]


SPLITS: list[tuple[str, int, int, dict[str, Any]]] = [
    # model, ranks, ranks of Trainer's own DDP, plan
    ("llama", 4, 2, {"preset": "zero3", "mesh": {"dp": -1, "tp": 2}}),
    ("mixtral", 2, 2, {"preset": "zero2", "mesh": {"ep": 2}}),
    ("llama", 2, 1, {"preset": "zero1", "mesh": {"dp": 1, "tp": 2}, "loss": IN_CHUNKS}),
]


@pytest.mark.parametrize(("model", "ranks", "peers", "plan"), SPLITS)
def test_a_split_model_is_trained_as_a_whole_one(model: str, ranks: int, peers: int, plan: dict[str, Any]) -> None:
    settings = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "max_steps": 6, "eval_strategy": "steps"}
    settings |= {"eval_steps": 3, "lr_scheduler_type": "cosine"}
    plain = begin(peers, jobs.race, [None], model, **settings)
    ours = on_ranks(ranks, jobs.race, [plan], model, **settings)[0]
    assert_same(ours[0], plain()[0][0])
    assert len(ours[0]["evaluations"]) == 2


STAGES: list[tuple[int, int, dict[str, Any], dict[str, Any]]] = [
    # ranks, ranks of Trainer's own DDP, plan, what else
    (2, 1, {"preset": "zero1", "mesh": {"pp": 2}}, {"gradient_accumulation_steps": 3, "max_steps": 8}),
    (2, 1, {"preset": "zero3", "mesh": {"pp": 2}}, {"kind": "overridden", "gradient_accumulation_steps": 3}),
    (2, 1, {"preset": "zero2", "mesh": {"pp": 2}}, {"kind": "classification", "label_smoothing_factor": 0.1}),
    (
        2,
        1,
        {"preset": "ddp", "mesh": {"pp": 2}},
        {"kind": "own loss", "gradient_accumulation_steps": 3, "max_steps": 6},
    ),
    (4, 2, {"preset": "zero3", "mesh": {"pp": 2, "dp": 2}}, {"gradient_accumulation_steps": 3}),
    (2, 1, {"preset": "zero3", "mesh": {"pp": 2}}, {"kind": "ragged", "gradient_accumulation_steps": 3}),
    (4, 1, {"preset": "zero1", "mesh": {"pp": 2, "sp": 2}}, {"gradient_accumulation_steps": 3}),
    (4, 1, {"preset": "zero2", "mesh": {"pp": 2, "sp": 2}}, {"kind": "own loss", "gradient_accumulation_steps": 3}),
    pytest.param(
        *(4, 1, {"preset": "zero3", "mesh": {"pp": 2, "sp": 2}}, {"gradient_accumulation_steps": 3, "max_steps": 8}),
        marks=thorough_only("a short last step, which the first case has without sp"),
    ),
    (4, 2, {"preset": "zero1", "mesh": {"pp": 2, "dp": 2}}, {"kind": "classification"}),
]


@pytest.mark.parametrize(("ranks", "peers", "plan", "settings"), STAGES)
def test_a_pipeline_is_trained_and_evaluated_as_a_whole_model(
    ranks: int, peers: int, plan: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Also where an epoch's last step has fewer micro-batches, and where a class computes its loss itself."""
    settings = {"max_grad_norm": 0.5, "max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, **settings}
    begun = begin(peers, jobs.in_stages, None, **settings)
    ours = on_ranks(ranks, jobs.in_stages, plan, **settings)
    plain = begun()[0]
    for run in ours:
        assert_same(run, plain)
        assert run["accuracy"] == pytest.approx(plain["accuracy"])
        assert_rows(run["predicted"], plain["predicted"])
        if peers == 1:
            assert run["of each"] == pytest.approx(plain["of each"], abs=1e-5)
        fills_stages = "gradient_accumulation_steps" in settings
        assert any(run["whole"]) == (fills_stages and settings.get("kind") != "overridden")
        if settings["max_steps"] > 14 // peers // settings.get("gradient_accumulation_steps", 1):
            assert not all(run["whole"])  # an epoch's last step has fewer micro-batches


def test_a_pipeline_is_saved_whole_and_resumed_with_other_stages(tmp_path: Path) -> None:
    folder, rest = str(tmp_path), {"load_best_model_at_end": False, "save_strategy": "no"}
    plain = begin(
        1, jobs.race, [None], "deep", **jobs.SAVING | {"save_strategy": "no", "load_best_model_at_end": False}
    )
    cut = {"preset": "zero2", "mesh": {"pp": 2}}
    whole = on_ranks(2, jobs.saved, cut, "deep", folder)[0]
    assert whole["losses"] == pytest.approx(plain()[0][0]["losses"], abs=1e-5)
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    for name, value in final.state_dict().items():
        torch.testing.assert_close(value, torch.tensor(whole["state"][name]), rtol=0, atol=0)
    checkpoint = str(tmp_path / "checkpoint-2")
    for num_ranks, plan in ((1, "zero3"), (4, {"preset": "zero1", "mesh": {"pp": 4}})):
        resumed = on_ranks(num_ranks, jobs.resumed, plan, "deep", folder, checkpoint, **rest)[0]
        assert resumed["losses"] == pytest.approx(whole["losses"], abs=1e-5)
        assert resumed["norms"] == pytest.approx(whole["norms"], abs=1e-5)


SEQUENCES: list[tuple[int, int, dict[str, Any], dict[str, Any]]] = [
    # ranks, ranks of Trainer's own DDP, plan, what else
    (2, 1, {"preset": "zero3", "mesh": {"sp": 2}}, {"length": 11, "gradient_accumulation_steps": 2}),
    (4, 2, {"preset": "zero2", "mesh": {"dp": -1, "sp": 2}, "sequence": {"attention": "ring"}}, {}),
    (2, 1, {"preset": "zero1", "mesh": {"dp": 1, "sp": 2}}, {"average": False, "label_smoothing_factor": 0.1}),
    (2, 1, {"preset": "zero1", "mesh": {"dp": 1, "sp": 2}}, {"average": False, "gradient_accumulation_steps": 2}),
    (
        2,
        1,
        {"preset": "zero3", "mesh": {"sp": 2}, "loss": IN_CHUNKS},
        {"average": False, "label_smoothing_factor": 0.1},
    ),
]


@pytest.mark.parametrize(("ranks", "peers", "plan", "settings"), SEQUENCES)
def test_split_sequences_are_trained_and_evaluated_as_whole_ones(
    ranks: int, peers: int, plan: dict[str, Any], settings: dict[str, Any]
) -> None:
    """With accumulation, padding, tokens that do not divide, label smoothing, and metrics of whole sequences."""
    settings = {"max_grad_norm": 0.5, "max_steps": 6, "eval_strategy": "steps", "eval_steps": 3, **settings}
    begun = begin(peers, jobs.over_split_sequences, None, **settings)
    ours = on_ranks(ranks, jobs.over_split_sequences, plan, **settings)
    plain = begun()[0]
    for run in ours:
        assert_same(run, plain)
        assert run["tokens"] == plain["tokens"] > 0
        assert run["accuracy"] == pytest.approx(plain["accuracy"])
        assert len(run["seen"]) == len(plain["seen"]) == 4
        for (logits, labels), (expected, their_labels) in zip(run["seen"], plain["seen"], strict=True):
            assert labels == their_labels
            assert_rows(logits, expected)
        assert_rows(run["predicted"], plain["predicted"])


def assert_rows(ours: list[Any], plain: list[Any]) -> None:
    for row, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(torch.tensor(row), torch.tensor(expected), **CLOSE)


def test_a_split_model_is_saved_whole_and_resumed_unsplit(tmp_path: Path) -> None:
    folder, rest = str(tmp_path), {"load_best_model_at_end": False, "save_strategy": "no"}
    cut = {"preset": "zero1", "mesh": {"dp": 1, "tp": 2}}
    whole = on_ranks(2, jobs.saved, cut, "llama", folder)[0]
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    for name, value in final.state_dict().items():
        torch.testing.assert_close(value, torch.tensor(whole["state"][name]), rtol=0, atol=0)
    checkpoint = str(tmp_path / "checkpoint-2")
    unsplit = on_ranks(1, jobs.resumed, "zero3", "llama", folder, checkpoint, **rest)[0]
    assert unsplit["losses"] == pytest.approx(whole["losses"], abs=1e-5)
    assert unsplit["norms"] == pytest.approx(whole["norms"], abs=1e-5)


def test_callbacks_and_the_users_optimizer() -> None:
    plain, ours = on_ranks(2, jobs.with_callbacks, None)[0], on_ranks(2, jobs.with_callbacks, {"preset": "zero2"})[0]
    assert_same(ours, plain)
    assert ours["seen"][1:] == plain["seen"]  # ours was evaluated by the same Trainer before
    for name in ("gradients", "before", "predictions", "test_loss"):
        torch.testing.assert_close(torch.tensor(ours[name]), torch.tensor(plain[name]), **CLOSE)


def test_layers_are_unfrozen_later() -> None:
    """DDP would not sum gradients of what was frozen when it was wrapped, so one process is what counts."""
    plain = begin(1, jobs.unfrozen, None, per_device_train_batch_size=4)
    ours = on_ranks(2, jobs.unfrozen, "zero3")[0]
    expected = plain()[0]
    assert_same(ours, expected)
    assert len(expected["losses"]) == 6


def test_rank_0_writes_its_trackers_and_our_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TensorBoard by report_to, a callback, and the run of the plan; then from a checkpoint at another size."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = tmp_path / "run"
    plan = {"preset": "zero3", "run": str(run), "trackers": ["jsonl", "csv"]}
    plain = begin(2, jobs.watched, None, str(tmp_path / "plain"))
    first, second = on_ranks(2, jobs.watched, plan, str(tmp_path / "ours"))
    told, expected = first["told"], plain()[0]
    assert second["told"] == []
    assert first["num_params"] == expected["num_params"]
    names = [sorted(name for name in one if not name.endswith(("runtime", "second"))) for one in told]
    assert names == [
        sorted(name for name in one if not name.endswith(("runtime", "second"))) for one in expected["told"]
    ]
    losses = {one["step"]: one["loss"] for one in told if "loss" in one}
    evaluations = {one["step"]: one["eval_loss"] for one in told if "eval_loss" in one}
    assert list(losses.values()) == pytest.approx([one["loss"] for one in expected["told"] if "loss" in one], abs=1e-5)

    (written,) = (tmp_path / "ours").glob("runs/**/events.out.tfevents.*")  # of rank 0 alone
    events = accumulator.EventAccumulator(str(written))
    events.Reload()
    for name, wanted in (("train/loss", losses), ("eval/loss", evaluations), ("train/mine", {3: 7.0})):
        assert {event.step: event.value for event in events.Scalars(name)} == pytest.approx(wanted, rel=1e-6)

    record = read_record(run / "record.jsonl")
    assert dict(record.column("loss")) == losses
    assert dict(record.column("loss", "validation")) == evaluations
    assert record.column("mine", "log") == [(3, 7.0)]
    assert [step for step, _ in record.column("loss", "train")] == [6]
    for name in ("grad_norm", "learning_rate", "epoch"):
        assert dict(record.column(name)) == {one["step"]: one[name] for one in told if "loss" in one}
    assert dict(record.column("norm")) == pytest.approx(dict(record.column("grad_norm")))
    assert all(seconds > 0 for _, seconds in record.column("seconds"))
    assert main(["top", str(run), "--once", "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert (state["status"], state["step"], state["loss"], len(state["ranks"])) == ("ended", 6, losses[6], 2)
    assert main(["report", str(run)]) == 0

    (again,) = on_ranks(1, jobs.watched, plan, str(tmp_path / "ours"), resumed=True)
    record = read_record(run / "record.jsonl")
    assert [step for step, _ in record.column("loss")] == [2, 4, 6]
    assert dict(record.column("loss"))[6] == again["told"][0]["loss"] != losses[6]
    with (run / "metrics.csv").open(newline="") as file:
        rows = [(int(row["step"]), row["loss"], row["validation/loss"]) for row in csv.DictReader(file)]
    assert rows[0] == (2, str(losses[2]), "")
    assert [step for step, loss, _ in rows if loss] == [2, 4, 6]
    evaluations |= {one["step"]: one["eval_loss"] for one in again["told"] if "eval_loss" in one}
    assert {step: float(loss) for step, _, loss in rows if loss} == evaluations
    assert dict(record.column("loss", "validation")) == evaluations


def test_resumed_at_the_same_and_at_another_world_size(tmp_path: Path) -> None:
    folder = str(tmp_path)
    plain = begin(
        2, jobs.race, [None], "gpt2", **{**jobs.SAVING, "save_strategy": "no", "load_best_model_at_end": False}
    )
    whole = on_ranks(2, jobs.saved, "zero3", "gpt2", folder)[0]
    assert_same({**whole, "state": {}, "evaluations": whole["evaluations"][:3]}, {**plain()[0][0], "state": {}})
    assert whole["bests_loss"] == pytest.approx(min(whole["evaluations"]), abs=1e-5)
    checkpoint = tmp_path / "checkpoint-2"
    assert {"config.json", "model.safetensors", "trainer_state.json", "scheduler.pt", "shardwise"} <= {
        path.name for path in checkpoint.iterdir()
    }
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    for name, value in final.state_dict().items():
        torch.testing.assert_close(value, torch.tensor(whole["state"][name]), rtol=0, atol=0)
    again = {"load_best_model_at_end": False, "save_strategy": "no"}
    shrunk = begin(1, jobs.resumed, "zero1", "gpt2", folder, str(checkpoint), per_device_train_batch_size=4, **again)
    same = on_ranks(2, jobs.resumed, "zero2", "gpt2", folder, str(checkpoint), eval_on_start=True, **again)[0]
    for run in (same, shrunk()[0]):
        assert run["losses"] == pytest.approx(whole["losses"], abs=1e-5)
        assert run["norms"] == pytest.approx(whole["norms"], abs=1e-5)
        assert run["rates"] == pytest.approx(whole["rates"])


@pytest.mark.parametrize("plan", ["zero3", {"preset": "zero3", "mesh": {"pp": 2}}], ids=str)
@sampled
def test_adapters(plan: Any, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    is_in_stages = plan != "zero3"
    plain = begin(1 if is_in_stages else 2, jobs.tuned, None, str(tmp_path / "plain"))
    ours = on_ranks(2, jobs.tuned, plan, str(tmp_path / "ours"))[0]
    expected = plain()[0]
    assert_same(ours, expected)
    assert_same(ours["resumed"], ours)
    if is_in_stages:
        assert_same(on_ranks(1, jobs.tuned, "zero3", str(tmp_path / "ours"), is_resumed=True)[0]["resumed"], ours)
    names = {path.name for path in (tmp_path / "ours" / "final").iterdir()}
    assert {path.name for path in (tmp_path / "plain" / "final").iterdir()} == names
    files = [load_file(tmp_path / who / "final" / "adapter_model.safetensors") for who in ("plain", "ours")]
    assert files[0].keys() == files[1].keys()
    for name, value in files[0].items():
        torch.testing.assert_close(files[1][name], value, **CLOSE)


IN_STAGES = {"preset": "zero1", "mesh": {"pp": 2}}


@pytest.mark.parametrize(
    ("kind", "plan"),
    [*((kind, "zero3") for kind in ("prompt", "prefix", "adalora", "vera", "vblora")), ("vera", IN_STAGES)],
    ids=str,
)
def test_adapters_that_are_computed_while_they_are_saved(kind: str, plan: Any, tmp_path: Path) -> None:
    plain = begin(2 if isinstance(plan, str) else 1, jobs.prompted, None, str(tmp_path / "plain"), kind)
    ours = on_ranks(2, jobs.prompted, plan, str(tmp_path / "ours"), kind)[0]
    expected = plain()[0]
    for name in ("losses", "norms"):
        torch.testing.assert_close(torch.tensor(ours[name]), torch.tensor(expected[name]), **CLOSE)
    for folder in ("final", "checkpoint-3"):
        files = [load_file(tmp_path / who / folder / "adapter_model.safetensors") for who in ("plain", "ours")]
        assert files[0].keys() == files[1].keys()
        for name, value in files[0].items():
            torch.testing.assert_close(files[1][name], value, **CLOSE)


@pytest.mark.parametrize("plan", ["zero3", {"preset": "zero2", "mesh": {"dp": 1, "tp": 2}}], ids=str)
def test_a_trainer_may_write_models_in_its_own_way(plan: Any, tmp_path: Path) -> None:
    plain = begin(2 if isinstance(plan, str) else 1, jobs.written_in_its_own_way, None, str(tmp_path / "plain"))
    on_ranks(2, jobs.written_in_its_own_way, plan, str(tmp_path / "ours"))
    plain()
    for folder in ("final", "checkpoint-2"):
        theirs, ours = (torch.load(tmp_path / who / folder / "own.pt") for who in ("plain", "ours"))
        assert theirs.keys() == ours.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, **CLOSE)
    assert not list((tmp_path / "ours").glob("**/model.safetensors"))


def test_a_loss_may_have_parameters_that_are_in_the_model() -> None:
    """DDP reduces no gradients of what its forward does not call, so one process with the rows of both is the twin."""
    plain = begin(1, jobs.with_a_head_of_the_loss, None, in_model=True, rows_of_a_rank=4)
    ours = on_ranks(2, jobs.with_a_head_of_the_loss, "zero3", in_model=True)[0]
    assert_same(ours, plain()[0])
    with pytest.raises(RuntimeError, match=r"not prepared with it.* model\.loss_head = loss\.head"):
        on_ranks(2, jobs.with_a_head_of_the_loss, "zero3", in_model=False)


def test_generation_in_evaluation() -> None:
    plain = begin(2, jobs.generated, None)
    ours = on_ranks(2, jobs.generated, "zero3")[0]
    expected = plain()[0]
    assert_same(ours, expected)
    assert ours["generated"] == expected["generated"]
    assert ours["generated"]


@pytest.mark.parametrize("kind", ["wav2vec2", "whisper"])
def test_each_rank_skips_layers_of_its_own(kind: str) -> None:
    plain = begin(2, jobs.skipping, None, kind)
    ours = on_ranks(2, jobs.skipping, "zero3", kind)[0]
    expected = plain()[0]
    assert len(expected["losses"]) == 8
    assert_same(ours, expected)


def test_ranks_along_tp_skip_the_same_layers() -> None:
    ours = on_ranks(2, jobs.skipping_alike, {"preset": "zero3", "mesh": {"dp": 1, "tp": 2}})
    assert ours[0]["called"] == ours[1]["called"]
    assert len({str(called) for called in ours[0]["called"]}) > 3
    assert_same(ours[0], on_ranks(1, jobs.skipping_alike, None, ours[0]["called"])[0])


def test_skipped_layers_are_refused_over_split_sequences() -> None:
    with pytest.raises(RuntimeError, match=r"skips layers at random .* ranks along sp need each other there"):
        on_ranks(2, jobs.skipping_alike, {"preset": "zero3", "mesh": {"dp": 1, "sp": 2}})


@pytest.mark.parametrize(
    "settings", [{"bf16": True}, {"optim": "sgd", "torch_compile_backend": "aot_eager"}, {"optim": "adafactor"}]
)
def test_other_training_arguments(settings: dict[str, Any]) -> None:
    first = "ddp" if "torch_compile_backend" in settings else None
    plain, ours = on_ranks(2, jobs.race, [first, "zero3"], "llama", **settings, max_steps=5)[0]
    if "bf16" in settings:
        assert ours["losses"] == pytest.approx(plain["losses"], rel=2e-3)
        assert ours["losses"] != plain["losses"]
    else:
        assert_same(ours, plain)


@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor"])
def test_checkpoints_of_plain_trainer_and_models_without_values(optim: str, tmp_path: Path) -> None:
    plain, *ours = on_ranks(1, jobs.from_elsewhere, str(tmp_path), optim)[0]
    for run in ours:
        assert_same(run, plain)


def test_steps_that_overflow_are_skipped() -> None:
    """The scheduler steps only with the optimizer."""
    good, bad = on_ranks(1, jobs.in_half, 1024.0)[0], on_ranks(1, jobs.in_half, 1e9)[0]
    assert (good["precision"], good["taken"], bad["taken"]) == ("fp16", 4, 0)
    assert good["rates"] == pytest.approx([3e-3, 2.25e-3, 1.5e-3, 0.75e-3])
    assert bad["rates"] == [3e-3] * 4


REFUSED = {
    "auto_find_batch_size": ({"auto_find_batch_size": True}, "zero3", "only on the rank that ran out of memory"),
    "bf16_full_eval": ({"bf16_full_eval": True}, "zero3", "bf16_full_eval casts the whole model"),
    "layerwise": ({"optim": "lomo"}, "zero3", "optim=lomo updates parameters during the backward"),
    "accumulation": ({}, {"preset": "zero3", "accumulate": 4}, "accumulate 4 .* is 1"),
    "clipping": ({}, {"preset": "zero3", "clip_grad_norm": 0.5}, "clip_grad_norm 0.5 .* is 1.0"),
    "size": ({}, {"preset": "zero3", "mesh": {"sp": -1}}, "Set the size of sp, and let a data axis take the rest"),
    "sizes": ({}, {"preset": "zero3", "mesh": {"pp": -1, "tp": -1}}, "Set the size of tp and pp"),
    "precision": ({"bf16": True}, {"preset": "zero3", "precision": "fp16"}, "precision fp16, but .* is set to bf16"),
    "compiler": (
        {"torch_compile_backend": "aot_eager"},
        {"preset": "zero3", "compile": "inductor"},
        "compile inductor, but .* is set to aot_eager",
    ),
    "no preset": ({}, "zero5", "no preset 'zero5'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_sentence(case: str) -> None:
    settings, plan, sentence = REFUSED[case]
    with pytest.raises(RuntimeError, match=f"(?s)(ConfigError|PlacementError|ModelError).*{sentence}"):
        on_ranks(1, refused, plan, settings)


def test_generation_over_split_sequences_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)ConfigError.*predict_with_generate produces one token at a time"):
        on_ranks(2, jobs.generated, {"preset": "zero3", "mesh": {"sp": 2}})


def refused(plan: Any, settings: dict[str, Any]) -> None:
    jobs.make(plan, "llama", **settings).evaluate()
