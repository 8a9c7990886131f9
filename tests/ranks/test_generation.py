"""`generate` of transformers inside `engine.inference()`: the plain model's tokens, what a token sends, and training
that goes on as without it."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_transformers import VOCAB, gpt2, library, llama
from twins import adamw

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.testing import run_ranks
from tests import inside
from tests.thorough import sampled, thorough_only

Tensor = torch.Tensor
BELOW = {"param": {"tier": "host"}, "optim": {"tier": "host"}, "grad": {"tier": "host"}}
PLANS: dict[str, tuple[dict[str, Any], int | None]] = {
    "zero3, none kept": ({"preset": "zero3"}, 0),
    "zero1": ({"preset": "zero1"}, None),
    "zero2": ({"preset": "zero2"}, None),
    "zero3": ({"preset": "zero3"}, None),
    "zero3, some kept": ({"preset": "zero3"}, 30_000),
    "offload": ({"preset": "offload"}, None),
    "zero3-offload": ({"preset": "zero3-offload"}, 0),
    "all on the host": ({"preset": "zero3", "rows": BELOW}, None),
    "infinity": ({"preset": "infinity"}, 0),
    "tp": ({"mesh": {"tp": 2}}, None),
    "tp of shards": ({"preset": "zero3", "mesh": {"dp": 2, "tp": 2}}, 0),
}
"""Plans with what is kept."""


def prompts(place: int) -> list[dict[str, Tensor]]:
    """Batches of one data rank, of which ranks have different numbers, with prompts of different lengths."""
    numbers = torch.Generator().manual_seed(place)
    found = []
    for batch in range(1 + 2 * place):
        length = 2 + batch
        tokens = torch.randint(1, VOCAB, (2, length), generator=numbers)
        mask = torch.arange(length) >= torch.tensor([[0], [length // 2]])
        found.append({"input_ids": tokens.masked_fill(~mask, 0), "attention_mask": mask.long()})
    return found


def tokens_of(model: Any, place: int) -> list[Tensor]:
    """Greedy tokens for a rank's prompts, whose rows end at different tokens, with both kinds of caches."""
    ends = list(range(0, VOCAB, 5))
    settings = {"do_sample": False, "max_new_tokens": 5 + place, "eos_token_id": ends, "pad_token_id": 0}
    given = prompts(place)
    found = [model.generate(**prompt, **settings) for prompt in given]
    return [*found, model.generate(**given[0], **settings, cache_implementation="static")]


def num_data_ranks(mesh: dict[str, int]) -> int:
    return math.prod(size for axis, size in mesh.items() if axis != "tp")


@sampled
@pytest.mark.parametrize("build", [llama, gpt2])
@pytest.mark.parametrize("name", PLANS)
def test_tokens_are_those_of_the_plain_model(name: str, build: Any, tmp_path: Path) -> None:
    plan, keep_bytes = PLANS[name]
    plan = {"disk": str(tmp_path), **plan}
    mesh = plan.get("mesh", {"dp": 2})
    torch.manual_seed(0)
    plain = build().eval()
    replicas = [copy.deepcopy(plain) for _ in range(math.prod(mesh.values()))]
    expected = [tokens_of(plain, place) for place in range(num_data_ranks(mesh))]

    def rank(world: sw.World) -> tuple[int, list[Tensor]]:
        model = replicas[world.rank]
        with sw.shard(model, plan, optimizer=adamw(model), world=world) as engine:
            with engine.inference(keep_bytes):
                found = tokens_of(model, engine.data_ranks[0])
            assert inside.meter(engine).now["working"] == 0
            return engine.data_ranks[0], found

    for place, found in run_ranks(len(replicas), rank):
        assert all(map(torch.equal, found, expected[place]))


@pytest.mark.parametrize(("build", "num_gathers"), [(llama, {"some": 3, "none": 3}), (gpt2, {"some": 3, "none": 6})])
def test_what_a_token_sends(build: Any, num_gathers: dict[str, int]) -> None:
    """Nothing, if all is kept; otherwise each unit once and a single message. The embedding is used first and last, and
    is gathered once if no other unit comes in between: with GPT-2, a small one does."""
    plain = build().eval()
    replicas = [copy.deepcopy(plain) for _ in range(2)]
    keep = {"all": None, "some": 30_000, "none": 0}
    lengths = (3, 9)

    def rank(world: sw.World) -> None:
        engine = sw.shard(replicas[world.rank], "zero3", world=world)
        sent: dict[str, list[dict[tuple[str, str], int]]] = {}
        for name, keep_bytes in keep.items():
            inside.meter(engine).reset_peak()
            with engine.inference(keep_bytes):
                for length in (3, *lengths):  # the first ones are not foreseen
                    inside.ledger(engine).clear()
                    engine.module.generate(prompt, max_new_tokens=length, do_sample=False, eos_token_id=None)
                    sent.setdefault(name, []).append(dict(inside.ledger(engine).sent_bytes))
                    calls = inside.ledger(engine).calls["gather", "dp"]
            assert inside.meter(engine).peak["working"] <= engine.inference_bytes(keep_bytes)
            assert name == "all" or calls == num_gathers[name] * lengths[-1]
        assert sent["all"] == [{}, {}, {}]
        for name in ("some", "none"):
            few, many = sent[name][1:]
            assert (few["exchange", "world"], many["exchange", "world"]) == (64 * lengths[0], 64 * lengths[1])
            assert few["gather", "dp"] * lengths[1] == many["gather", "dp"] * lengths[0]
        assert sent["some"][1]["gather", "dp"] == lengths[0] * _bytes_of_blocks(engine) // 2

    prompt = torch.tensor([[5, 6, 7]])
    run_ranks(2, rank)


def _bytes_of_blocks(engine: sw.Engine) -> int:
    blocks = [unit for unit in inside.units(engine) if unit.name[-1].isdigit()]
    return sum(flat.spec.full_bytes for unit in blocks for flat in unit.flats)


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_what_a_token_sends_between_parts(axis: str) -> None:
    """No parameters: with `tp` a sum for the embedding and two for each block, and the logits; with `pp` what stages
    pass on (a layout and two tensors), and the logits."""
    replicas = [llama() for _ in range(2)]
    expected = {"tp": {"all_reduce": 1 + 2 * 3, "gather": 1}, "pp": {"send": 3, "broadcast": 1}}[axis]

    def rank(world: sw.World) -> dict[str, list[int]]:
        plan = {"preset": "zero1", "mesh": {axis: 2}, "accumulate": 2}
        engine = sw.shard(replicas[world.rank], plan, world=world)
        ledger, sent = inside.ledger(engine), []
        with engine.inference():
            for length in (2, 3, 7):
                ledger.clear()
                engine.module.generate(
                    torch.tensor([[5, 6, 7]]), max_new_tokens=length, do_sample=False, eos_token_id=None
                )
                sent.append(dict(ledger.sent_bytes))
        if world.rank == 0:
            assert {verb: number for (verb, _), number in ledger.calls.items()} == {
                verb: 7 * number for verb, number in expected.items()
            }
        return {verb: [each.get((verb, axis), 0) for each in sent] for verb in expected}

    first, _ = run_ranks(2, rank)
    if axis == "tp":
        assert first["gather"][2] == 7 * 4 * -(-VOCAB // 2)
        assert (first["all_reduce"][2] - first["all_reduce"][1]) == 4 * 7 * 4 * 32


@sampled
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "zero3, none kept", "offload", "infinity"])
def test_training_goes_on_as_without_generation(name: str, tmp_path: Path) -> None:
    """As in GRPO: generate, train on what was generated, and again. Bit for bit."""
    plan, keep_bytes = PLANS[name]
    torch.manual_seed(0)
    start = llama()
    data = torch.randint(1, VOCAB, (4, 2, 7))

    def losses(*, generates: bool) -> list[list[Tensor]]:
        replicas = [copy.deepcopy(start) for _ in range(2)]

        def rank(world: sw.World) -> list[Tensor]:
            model, found = replicas[world.rank], []
            folder = str(tmp_path / str(generates))
            with sw.shard(model, {"disk": folder, **plan}, optimizer=adamw(model), world=world) as engine:
                for step in range(4):
                    if generates:
                        with engine.inference(keep_bytes):
                            model.eval()
                            for _ in range(world.rank + step % 2):
                                model.generate(data[step][:, :3], max_new_tokens=4, do_sample=False)
                        assert all(module.training for module in model.modules())
                    loss = model(data[step], labels=data[step]).loss
                    engine.backward(loss)
                    engine.step()
                    found.append(loss.detach())
            return found

        return run_ranks(2, rank)

    for with_generation, without in zip(losses(generates=True), losses(generates=False), strict=True):
        assert all(map(torch.equal, with_generation, without))


def by_batches(model: Any, given: list[list[int]]) -> list[list[int]]:
    """What `generate_batch` says to each prompt."""
    settings = library().GenerationConfig(do_sample=False, max_new_tokens=4, eos_token_id=-1, pad_token_id=0)
    sizes = library().ContinuousBatchingConfig(page_size=16, num_blocks=16, max_batch_tokens=32, seed=0)
    found = model.generate_batch(given, settings, continuous_batching_config=sizes, warmup=False)
    return [one.generated_tokens for one in found.values()]


@pytest.mark.parametrize(
    "keep_bytes",
    [0, pytest.param(None, marks=thorough_only("slow; the other has all that this one has"))],
)
def test_continuous_batching(keep_bytes: int | None) -> None:
    """Ranks have different numbers of prompts. It generates in a thread, and leaves the model in evaluation mode."""
    given = [[5, 6, 7], [8, 9], [11]]
    torch.manual_seed(0)
    plain = llama()
    expected = [
        plain.generate(torch.tensor([one]), max_new_tokens=4, do_sample=False, eos_token_id=None)[
            0, len(one) :
        ].tolist()
        for one in given
    ]
    replicas = [copy.deepcopy(plain) for _ in range(2)]

    def rank(world: sw.World) -> list[list[int]]:
        engine = sw.shard(replicas[world.rank], "zero3", world=world)
        with engine.inference(keep_bytes):
            found = by_batches(engine.module, given[: 1 + 2 * world.rank])
        assert engine.module.training
        return found

    assert run_ranks(2, rank) == [expected[:1], expected]


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_continuous_batching_of_parts_is_refused(axis: str) -> None:
    replicas = [llama() for _ in range(2)]

    def rank(world: sw.World) -> None:
        engine = sw.shard(replicas[world.rank], {"mesh": {axis: 2}, "accumulate": 2}, world=world)
        with engine.inference():
            with pytest.raises(ModelError, match=rf"(?s)'{axis}' has a part. Call generate\(\)"):
                by_batches(engine.module, [[5, 6, 7]])
            engine.module.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)
        assert "init_continuous_batching" not in vars(engine.module)

    run_ranks(2, rank)
