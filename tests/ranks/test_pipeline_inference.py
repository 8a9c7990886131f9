"""Inside `engine.inference()`, a model in pipeline stages answers calls, and generates, as the unsplit one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipelined import batches
from pipelined import race_in_inference as race
from small_transformers import VOCAB, library
from test_pipeline_transformers import build
from torch import nn

import shardwise as sw
from shardwise.errors import DataError, ModelError, StateError
from shardwise.testing import run_ranks
from tests.models import Decoder
from tests.thorough import sampled, thorough_only

Tensor = torch.Tensor
Plan = dict[str, Any]
NEW = 7
SLOW = thorough_only("slow; smaller tests beside it cover the same code")


def plan_of(mesh: dict[str, int], preset: str = "zero1", **changes: Any) -> Plan:
    return {"preset": preset, "mesh": mesh, "accumulate": 4, **changes}


def left_padded(rows: int = 2, length: int = 5) -> dict[str, Tensor]:
    """Prompts of several lengths, which end together."""
    numbers = torch.Generator().manual_seed(2)
    tokens = torch.randint(1, VOCAB, (rows, length), generator=numbers)
    mask = torch.arange(length) >= torch.arange(rows)[:, None]
    return {"input_ids": tokens.masked_fill(~mask, 0), "attention_mask": mask.long()}


def generate(model: Any, place: int = 0, cache: str = "", **changes: Any) -> Tensor:
    """`cache` is a class whose layers are made when they are first used."""
    prompt = left_padded(2 + place, 4 + place)
    if cache:
        changes["past_key_values"] = getattr(library(), cache)()
    found: Tensor = model.generate(**prompt, **{"max_new_tokens": NEW - place, "do_sample": False, **changes})
    return found


@sampled
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_generation(kind: str) -> None:
    race(build(kind), plan_of({"pp": 2}), generate)


def decode(model: Any, place: int = 0) -> list[Tensor]:
    """Logits of a loop of one's own: a prompt, one token, two tokens at once, and another prompt without a cache."""
    tokens = left_padded(2, 9)["input_ids"]
    first = model(tokens[:, :6])
    second = model(tokens[:, 6:7], past_key_values=first.past_key_values)
    third = model(input_ids=tokens[:, 7:], past_key_values=second.past_key_values)
    fourth = model(**left_padded(3, 4), labels=left_padded(3, 4)["input_ids"], use_cache=False)
    assert fourth.past_key_values is None
    (last,) = model(tokens[:1], return_dict=False, use_cache=False)
    return [first.logits, second.logits, third.logits, fourth.logits, fourth.loss, last]


@sampled
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_logits_of_a_loop_of_ones_own(kind: str) -> None:
    race(build(kind), plan_of({"pp": 2}), decode)


def test_any_model_answers_calls_of_any_length() -> None:
    data = batches(3, 3, lengths=(4, 9, 1))
    for plan in (plan_of({"pp": 2}, "zero3"), plan_of({"pp": 2}, pipeline={"schedule": "interleaved"})):
        race(Decoder(), plan, lambda model, _: [model(x) for x, _ in data] + [model(x, y) for x, y in data])


class Told(nn.Module):
    """Returns a nest of tensors, numbers and None, of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> dict[str, Any]:
        scores = self.layers(x)
        best = (scores.argmax(-1), scores > 0, scores.new_empty(0, 2))
        return {"scores": scores.t(), "best": best, "rest": [None, 2.5, True, scores.bfloat16(), scores.sum()]}


def test_outputs_may_be_nests_of_several_dtypes() -> None:
    race(Told(), plan_of({"pp": 2}), lambda model, _: model(torch.arange(20.0).view(5, 4) - 9))


class Wrapped(nn.Module):
    """As peft wraps a model: a method calls what is inside by itself, which the forward does in its own way."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inside(x.flip(0))


def from_inside(model: Any) -> list[Tensor]:
    (x, _), (y, _) = batches(2, 3)
    return [model.inside.inside(x), model.inside(x), model(x), model.inside.inside(y)]


def test_methods_may_call_a_module_that_has_all_stages() -> None:
    for plan in (plan_of({"pp": 2}), plan_of({"pp": 2}, pipeline={"schedule": "interleaved"})):
        race(Wrapped(Wrapped(Decoder())), plan, lambda model, _: from_inside(model))


@SLOW
def test_training_goes_on_after_inference_as_without() -> None:
    start = build("llama").train()
    data = left_padded(8, 6)["input_ids"]
    models = [copy.deepcopy(start) for _ in range(4)]

    def rank(world: sw.World, *, uses: bool) -> list[float]:
        mine, losses = models[2 * uses + world.rank], []
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        with sw.shard(mine, plan_of({"pp": 2}), optimizer=optimizer, world=world) as engine:
            for _ in range(4):
                if uses:
                    mine.eval()
                    with engine.inference():
                        generate(mine)
                        engine.eval_step({"input_ids": data, "labels": data})
                    mine.train()
                losses.append(engine.train_step({"input_ids": data, "labels": data}).item())
        return losses

    expected = run_ranks(2, lambda world: rank(world, uses=False))
    assert run_ranks(2, lambda world: rank(world, uses=True)) == expected


def refused(
    build_model: Callable[[], nn.Module], use: Callable[[Any, int], Any], error: type[Exception], text: str
) -> None:
    """`use` raises the `error` on both ranks of a pipeline."""
    torch.manual_seed(0)
    models = [build_model().eval() for _ in range(2)]

    def rank(world: sw.World) -> None:
        engine = sw.shard(models[world.rank], plan_of({"pp": 2}), world=world)
        with pytest.raises(error, match=text), engine.inference():
            use(engine, world.rank)
        engine.close()

    run_ranks(2, rank)


def test_ranks_that_call_with_different_inputs_are_told() -> None:
    data = batches(2, 3)
    refused(
        Decoder,
        lambda engine, rank: engine.module(data[rank][0]),
        DataError,
        r"Ranks 0 and 1 share .* argument 0 differ",
    )


def test_a_rank_that_calls_more_often_is_told() -> None:
    (x, _), *_ = batches(1, 3)

    def use(engine: sw.Engine, rank: int) -> None:
        for _ in range(1 + rank):
            engine.module(x)

    refused(Decoder, use, StateError, r"Rank 0 has left engine.inference\(\), and rank 1 of the same pipeline calls")


def test_ranks_that_call_different_modules_are_told() -> None:
    (x, _), *_ = batches(1, 3)

    def use(engine: Any, rank: int) -> None:
        (engine.module.inside if rank else engine.module)(x)

    asked = r"Rank 0 calls the Wrapped, and rank 1 of the same pipeline the Decoder\. All ranks"
    refused(lambda: Wrapped(Decoder()), use, StateError, asked)


def test_what_inference_in_stages_does_not_do_is_refused() -> None:
    (x, _), *_ = batches(1, 3)

    def head(engine: Any, rank: int) -> None:
        engine.module.head(x) if rank == 0 else engine.module.tokens(x)

    refused(Decoder, head, StateError, r"Rank 0 calls head, and rank 1 of the same pipeline tokens\. All ranks")

    def with_gradients(engine: Any, rank: int) -> None:
        with torch.enable_grad():
            engine.module(x)

    refused(Decoder, with_gradients, StateError, r"called with gradients enabled inside engine.inference")

    def hidden(engine: Any, rank: int) -> None:
        engine.module(**left_padded(), output_hidden_states=True)

    refused(lambda: build("llama"), hidden, ModelError, r"output_hidden_states collects something of all layers")


@pytest.mark.skipif(
    torch.backends.cuda.is_built() and not torch.cuda.is_available(),
    reason="such a cache makes a stream of the accelerator for which torch was built, and there is none",
)
def test_a_cache_on_the_host_is_refused() -> None:
    def other_cache(engine: Any, rank: int) -> None:
        cache = library().DynamicCache(config=engine.module.config, offloading=True)
        engine.module(**left_padded(), past_key_values=cache)

    refused(
        lambda: build("llama"), other_cache, ModelError, r"A DynamicCache with layers on the host .* use_cache=False"
    )


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_modules_of_stages_are_called_by_themselves(schedule: str) -> None:
    def use(model: Any, _: int) -> list[Tensor]:
        (x, _), *_ = batches(1, 3)
        hidden = model.inside.tokens(x)
        for block in model.inside.blocks:
            hidden = block(hidden)
        return [hidden, model.inside.head(model.inside.norm(hidden)), model.inside(x)]

    torch.manual_seed(0)
    race(Wrapped(Decoder()), plan_of({"pp": 2}, "zero3", pipeline={"schedule": schedule}), use, keep_bytes=0)


class Unsendable(Decoder):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        return {"logits": super().forward(x), "model": self}


def test_outputs_that_cannot_be_sent_are_refused_on_all_ranks() -> None:
    (x, _), *_ = batches(1, 3)
    refused(
        Unsendable,
        lambda engine, _: engine.module(x),
        ModelError,
        r"Unsendable returns a Unsendable, which .* cannot send",
    )


@SLOW
@pytest.mark.parametrize(
    ("kind", "mesh", "changes"),
    [
        ("llama", {"pp": 4}, {}),
        ("llama", {"pp": 2, "tp": 2}, {}),
        ("gpt2", {"pp": 2, "tp": 2}, {"pipeline": {"schedule": "interleaved"}}),
        ("llama", {"pp": 2, "dp": 2}, {"preset": "zero3"}),
        ("gpt2", {"pp": 2, "dp": 2}, {"preset": "zero2"}),
        ("llama", {"pp": 2}, {"pipeline": {"schedule": "interleaved"}}),
        ("llama", {"pp": 2}, {"pipeline": {"schedule": "zb-h1"}}),
        (
            "llama",
            {"pp": 2},
            {"pipeline": {"stages": [["model.embed_tokens"], ["model.layers.*", "*.norm", "lm_head"]]}},
        ),
        (
            "gpt2",
            {"pp": 2},
            {"pipeline": {"stages": [["transformer.w*", "transformer.h.*", "transformer.ln_f"], ["lm_head"]]}},
        ),
        ("llama", {"pp": 2, "sp": 2}, {}),
        ("qwen3", {"pp": 2}, {}),
        ("gemma2", {"pp": 3}, {}),
        ("gemma2", {"pp": 2}, {"pipeline": {"schedule": "interleaved"}}),
        ("mixtral", {"pp": 2}, {}),
        ("mixtral", {"pp": 2, "ep": 2}, {}),
        ("phi3", {"pp": 2}, {}),
        ("opt", {"pp": 2}, {}),
        ("bloom", {"pp": 2}, {}),
        ("falcon", {"pp": 2}, {}),
        ("bert", {"pp": 3}, {}),
        ("llama4_text", {"pp": 2}, {}),
    ],
)
def test_generation_of_families_over_meshes(kind: str, mesh: dict[str, int], changes: Plan) -> None:
    same = "ep" in mesh  # their ranks call the model equally often
    race(build(kind), plan_of(mesh, **changes), lambda model, place: generate(model, 0 if same else place))


@SLOW
def test_a_pipeline_may_generate_while_another_has_nothing_to_do() -> None:
    plan = plan_of({"pp": 2, "dp": 2}, "zero3")
    race(build("gpt2"), plan, lambda model, place: None if place else generate(model))


@SLOW
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize(
    "asked",
    [
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2, "length_penalty": 0.5},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"cache": "DynamicCache"},
        {"repetition_penalty": 1.3, "min_new_tokens": 3, "eos_token_id": 5},
    ],
    ids=["beams", "several", "no cache", "static", "own cache", "penalty"],
)
def test_ways_to_generate(kind: str, schedule: str, asked: dict[str, Any]) -> None:
    plan = plan_of({"pp": 2}, pipeline={"schedule": schedule})
    race(build(kind), plan, lambda model, place: generate(model, place, **asked))
