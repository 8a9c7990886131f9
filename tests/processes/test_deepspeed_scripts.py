"""Scripts in the forms of DeepSpeed's tutorials, unmodified under `shardwise launch --as-deepspeed`.

Each is compared with the same training in plain PyTorch, in one process.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler

import warm
from shardwise.integrations.deepspeed.schedules import WarmupLR
from tests.patience import PATIENCE
from tests.processes.deepspeed_scripts import nets
from tests.thorough import sampled

Tensor = torch.Tensor
SCRIPTS = Path(__file__).with_name("deepspeed_scripts")
Losses = list[list[float]]


def launched(folder: Path, script: str, *words: str, ranks: int = 2) -> str:
    command = [warm.python(), "-m", "shardwise", "launch", "--as-deepspeed", "--nproc", str(ranks)]
    done = subprocess.run(
        [*command, str(SCRIPTS / script), *words],
        cwd=folder,
        env=os.environ | {"TMPDIR": str(folder)} | warm.RANKS_TOO,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def told(output: str, word: str) -> Any:
    """What a rank printed after `word`."""
    return json.loads(next(line for line in output.splitlines() if line.startswith(f"{word} ")).partition(" ")[2])


def losses_of(output: str, ranks: int = 2) -> Losses:
    return [told(output, f"LOSSES{rank}") for rank in range(ranks)]


def shares(
    dataset: Any, ranks: int, micro: int, epochs: int, *, shuffle: bool = True
) -> list[list[tuple[Tensor, Tensor]]]:
    """The micro-batches of each rank: the same in every epoch, as DeepSpeed's loader has them."""
    samplers = [DistributedSampler(dataset, num_replicas=ranks, rank=rank, shuffle=shuffle) for rank in range(ranks)]
    orders = [list(sampler) for sampler in samplers]
    cut = [[order[at : at + micro] for at in range(0, len(order), micro)] * epochs for order in orders]

    def batch(rows: list[int]) -> tuple[Tensor, Tensor]:
        inputs, labels = zip(*(dataset[row] for row in rows), strict=True)
        return torch.stack(inputs), torch.stack([torch.as_tensor(label) for label in labels])

    return [[batch(rows) for rows in rank] for rank in cut]


def trained(
    model: nn.Module,
    loss_of: Callable[..., Tensor],
    data: Sequence[Sequence[tuple[Tensor, Tensor]]],
    optimizer: torch.optim.Optimizer,
    schedule: Any = None,
    accumulate: int = 1,
    clip: float = 1.0,
) -> tuple[Losses, float]:
    """Each rank's losses in plain training, and the last gradient norm."""
    losses: Losses = [[] for _ in data]
    norm = 0.0
    for step in range(len(data[0]) // accumulate):
        made = [[loss_of(*batch) for batch in rank[step * accumulate : (step + 1) * accumulate]] for rank in data]
        torch.stack([loss for rank in made for loss in rank]).mean().backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        for own, ones in zip(losses, made, strict=True):
            own += [loss.item() for loss in ones]
    return losses, norm


def classified(model: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[Losses, list[int]]:
    """Losses of the classifier's training, computed in `dtype`, and of how many pictures it then knows the kind."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, betas=(0.8, 0.999), weight_decay=3e-7)
    schedule = WarmupLR(optimizer, warmup_min_lr=0, warmup_max_lr=0.01, warmup_num_steps=4)
    data = shares(nets.Pictures(48), 2, 8, epochs=2)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        rounded = {name: param.to(dtype) for name, param in model.named_parameters()}
        return nn.functional.cross_entropy(torch.func.functional_call(model, rounded, x.to(dtype)), y)

    losses, _ = trained(model, loss_of, data, optimizer, schedule)
    tested = nets.Pictures(10, seed=1)
    model.eval()
    right = model(tested.images).argmax(1) == tested.labels
    return losses, [int(right.sum()), len(tested)]


@sampled
@pytest.mark.parametrize(("dtype", "stage"), [("fp32", 2), ("bf16", 3), ("fp16", 1)])
def test_a_classifier_of_pictures(dtype: str, stage: int, tmp_path: Path) -> None:
    """Within four times what the plain model's own rounding changes."""
    output = launched(tmp_path, "image_classifier.py", "--deepspeed", "--dtype", dtype, "--stage", str(stage))
    torch.manual_seed(0)
    model = nets.Classifier()
    rounded, _ = classified(
        copy.deepcopy(model), {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
    )
    losses, correct = classified(model)
    rounding = (torch.tensor(rounded) / torch.tensor(losses) - 1).abs().max().item()
    assert (rounding > 1e-5) == (dtype != "fp32")
    for ours, exact in zip(losses_of(output), losses, strict=True):
        assert len(ours) == 6
        assert ours == pytest.approx(exact, rel=max(1e-5, 4 * rounding))
    assert told(output, "CORRECT") == correct or dtype != "fp32"


class PlainExperts(nn.Module):
    """The mixture of DeepSpeed's documentation without dropped tokens, in plain PyTorch."""

    def __init__(self, expert: nn.Module, num_experts: int, top_k: int, is_residual: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(copy.deepcopy(expert) for _ in range(num_experts))
        self.gate = nn.Linear(nets.WIDTH, num_experts, bias=False)
        self.top_k = top_k
        if is_residual:
            self.mlp, self.coefficient = expert, nn.Linear(nets.WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        chances, chosen = self.gate(x).softmax(-1).topk(self.top_k)
        weights = chances / chances.sum(-1, keepdim=True) if self.top_k > 1 else chances
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        mixed = (outputs.gather(1, chosen[..., None].expand(-1, -1, x.shape[-1])) * weights[..., None]).sum(1)
        if not hasattr(self, "mlp"):
            return mixed
        shares = self.coefficient(x).softmax(-1)
        return mixed * shares[..., :1] + self.mlp(x) * shares[..., 1:]


class PlainMoENet(nn.Module):
    def __init__(self, num_experts: list[int], top_k: int, is_residual: bool) -> None:
        super().__init__()
        self.features = nets.Features()
        fc3 = nn.Linear(nets.WIDTH, nets.WIDTH)
        self.mixtures = nn.Sequential(*(PlainExperts(fc3, count, top_k, is_residual) for count in num_experts))
        self.fc4 = nn.Linear(nets.WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc4(self.mixtures(self.features(x)))


@sampled
@pytest.mark.parametrize(("stage", "top_k", "kind"), [(0, 1, "standard"), (2, 2, "standard"), (1, 1, "residual")])
def test_a_classifier_with_experts(stage: int, top_k: int, kind: str, tmp_path: Path) -> None:
    words = ["--moe", "--moe-param-group", "--ep-world-size", "2", "--num-experts", "2", "4", "--top-k", str(top_k)]
    words += ["--mlp-type", kind, "--stage", str(stage), "--dtype", "fp32", "--deepspeed"]
    output = launched(tmp_path, "image_classifier.py", *words)
    torch.manual_seed(0)
    losses, correct = classified(PlainMoENet([2, 4], top_k, kind == "residual"))
    for ours, theirs in zip(losses_of(output), losses, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert told(output, "CORRECT") == correct


def language_model() -> nn.Module:
    """The model of `zero_init.py` with its initial values."""
    torch.manual_seed(1234)
    model = nets.LanguageModel()
    nn.init.normal_(model.head.weight, std=0.05)
    nn.init.uniform_(model.tokens.weight, -0.1, 0.1)
    return model


@sampled
@pytest.mark.parametrize("stages", [(3, 3), (2, 3), (3, 1)])
def test_a_model_built_in_parts_resumes_on_other_ranks(stages: tuple[int, int], tmp_path: Path) -> None:
    """Three steps of two ranks, then three of one rank, with the same global batch of eight samples."""
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = WarmupLR(optimizer, warmup_min_lr=0, warmup_max_lr=0.01, warmup_num_steps=4)
    on_two = shares(nets.Sentences(24), 2, 2, epochs=1)
    before, _ = trained(model, model, on_two, optimizer, schedule, accumulate=2, clip=0.5)
    on_one = [rank[6:] for rank in shares(nets.Sentences(24), 1, 4, epochs=2)]
    after, norm = trained(model, model, on_one, optimizer, schedule, accumulate=2, clip=0.5)
    for ranks, stage, steps in (2, stages[0], 3), (1, stages[1], 6):
        config = {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.5,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        }
        (tmp_path / "ds.json").write_text(json.dumps(config))
        words = ["--deepspeed", "--deepspeed_config", "ds.json", "--save", "saved", "--steps", str(steps)]
        words += ["--load_tag", "step3"] if ranks == 1 else []
        output = launched(tmp_path, "zero_init.py", *words, ranks=ranks)
        for ours, theirs in zip(losses_of(output, ranks), before if ranks == 2 else after, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
    assert told(output, "NORM") == pytest.approx(norm, rel=1e-4)
    assert told(output, "TOTAL") == pytest.approx(
        sum(float(p.detach().square().sum()) for p in model.parameters()), rel=1e-5
    )
    assert (tmp_path / "saved" / "latest").read_text() == "step6"


class PlainLayers(nn.Module):
    """The model of `layers_in_stages.py` as one module, with the same initial values; `is_seeded`: with its
    `--seed-layers`."""

    def __init__(self, is_seeded: bool) -> None:
        super().__init__()

        def built(number: int, layer: Callable[[], nn.Module]) -> nn.Module:
            if is_seeded:
                torch.manual_seed(1234 + number)
            return layer()

        self.tokens = built(0, lambda: nets.Tokens(nets.VOCAB, nets.WIDTH))
        self.layers = nn.Sequential(*(built(number, lambda: nets.Layer(nets.WIDTH)) for number in range(1, 5)))
        self.norm = nn.LayerNorm(nets.WIDTH, eps=1e-6)

    def forward(self, ids: Tensor) -> Tensor:
        return nets.logits_of(self.tokens, self.norm(self.layers(self.tokens(ids)) * 0.5))


@sampled
@pytest.mark.parametrize(
    ("stages", "zero", "partition", "is_seeded"),
    [(2, 1, "parameters", False), (2, 0, "type:layer", True), (2, 1, "uniform", False), (1, 2, "best", False)],
)
def test_layers_in_stages(stages: int, zero: int, partition: str, is_seeded: bool, tmp_path: Path) -> None:
    replicas = 2 // stages
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8}},
        "wall_clock_breakdown": False,
        "zero_optimization": {"stage": zero},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    words = ["--deepspeed", "--deepspeed_config", "ds.json", "-p", str(stages), "--partition", partition]
    words += ["--seed-layers"] if is_seeded else []
    output = launched(tmp_path, "layers_in_stages.py", *words)
    torch.manual_seed(1138)
    model = PlainLayers(is_seeded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)

    def loss_of(ids: Tensor, labels: Tensor) -> Tensor:
        return nets.next_token_loss(model(ids), labels)

    data = shares(nets.Sentences(32), replicas, 2, epochs=1, shuffle=False)
    losses, _ = trained(model, loss_of, data, optimizer, accumulate=4 // replicas)
    steps = torch.tensor(losses).view(replicas, 4, -1).mean((0, 2)).tolist()
    evaluated = nets.Sentences(16)
    with torch.no_grad():
        rows = [evaluated[row] for row in range(8)]
        last = loss_of(torch.stack([ids for ids, _ in rows]), torch.stack([labels for _, labels in rows])).item()
    for ours in losses_of(output):
        assert ours == pytest.approx([*steps, last], rel=1e-5)
    assert told(output, "FIRST0") is True
    assert told(output, "FIRST1") is (stages == 1)
