"""Models that only compute, split over ranks, in fewer bits: what they generate is what the plain model does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_transformers import gpt2, library, llama, mixtral
from torch import nn

import shardwise as sw
from shardwise.checkpoint import formats
from shardwise.errors import CheckpointError, ConfigError, ModelError
from shardwise.init.quantized import QuantizedWeight, linear_weights, quantized
from shardwise.testing import run_ranks
from tests.drawing import drawing
from tests.fixtures.deepspeed import model as fixture_model
from tests.models import Transformer
from tests.thorough import sampled, thorough_only

Tensor = torch.Tensor
PROMPT = torch.randint(97, (2, 5), generator=torch.Generator().manual_seed(1))


def lively(build: Callable[..., nn.Module], **changes: Any) -> Any:
    """A model that says different things: of random models as they are, answers repeat one token."""
    torch.manual_seed(0)
    model = build(**changes)
    for param in model.parameters():
        if param.dim() > 1:
            nn.init.normal_(param, std=0.3)
    return model.eval()


def said(model: Any, **how: Any) -> Tensor:
    return model.generate(PROMPT, max_new_tokens=8, pad_token_id=0, **({"do_sample": False} | how))


def stored_bytes(weight: QuantizedWeight) -> int:
    return sum(getattr(weight, name).nbytes for name in weight.__tensor_flatten__()[0])


def stored(model: nn.Module, folder: Path, form: str) -> Any:
    """`model` in one of the forms in which weights come."""
    if form == "hf":
        model.save_pretrained(folder)
        return folder
    if form == "files":
        halves = [dict(list(model.state_dict().items())[part::2]) for part in range(2)]
        for number, half in enumerate(halves):
            torch.save(half, folder / f"{number}.bin")
        return [folder / "0.bin", folder / "1.bin"]
    if form == "bin":
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        return folder

    def rank_of(world: sw.World) -> None:
        twin = copy.deepcopy(model)
        with sw.shard(twin, "zero3", optimizer=torch.optim.SGD(twin.parameters(), lr=0.1), world=world) as engine:
            engine.save(folder / "step")

    run_ranks(2, rank_of)
    return folder / "step"


@sampled
@pytest.mark.parametrize("build", [gpt2, llama, mixtral])
@pytest.mark.parametrize("form", ["", "hf", "bin", "files", "ours"])
@pytest.mark.parametrize("tp", [1, 2])
def test_says_what_the_plain_model_says(build: Any, form: str, tp: int, tmp_path: Path) -> None:
    plain = lively(build)
    expected = said(plain)
    assert len(set(expected[0].tolist())) > 3
    source = stored(plain, tmp_path, form) if form else None

    def rank_of(world: sw.World) -> None:
        given = copy.deepcopy(plain) if source is None else build()
        model = sw.load_for_inference(source, model=given, mesh={"tp": tp}, world=world)
        assert model is given
        assert not model.training
        assert not any(param.requires_grad for param in model.parameters())
        if world.rank < tp:  # the others need not call it
            assert torch.equal(said(model), expected)

    run_ranks(2, rank_of)


@sampled
@pytest.mark.parametrize("weights", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("tp", [1, 2])
def test_fewer_bits(weights: str, build: Any, tp: int) -> None:
    """The logits are those of the plain model with rounded weights, and as far from the exact ones as those of a plain
    model whose weights were moved at random by as much."""
    plain = lively(build)
    exact = plain(PROMPT).logits

    def rank_of(world: sw.World) -> Tensor:
        model = sw.load_for_inference(model=copy.deepcopy(plain), mesh={"tp": tp}, weights=weights, world=world)
        narrow = [one for one in model.parameters() if isinstance(one, QuantizedWeight)]
        assert len(narrow) == len(linear_weights(plain))
        assert sum(map(stored_bytes, narrow)) < sum(one.numel() for one in narrow) * 1.3
        with torch.inference_mode():
            again = model(PROMPT).logits
        found = model(PROMPT).logits
        assert torch.equal(found, again)
        return found

    found = run_ranks(tp, rank_of)
    assert all(torch.equal(one, found[0]) for one in found)
    rounded, moved = copy.deepcopy(plain), copy.deepcopy(plain)
    for one, other in zip(linear_weights(rounded).items(), linear_weights(moved), strict=True):
        narrow = quantized(one[0].detach(), weights, is_transposed=one[1])
        change = (narrow.values() - one[0]).detach()
        one[0].data = narrow.values()
        other.data += change.flatten()[torch.randperm(change.numel())].view_as(change)
    if tp == 1:
        torch.testing.assert_close(found[0], rounded(PROMPT).logits, rtol=1e-5, atol=1e-5)
    error, expected = (found[0] - exact).norm(), (moved(PROMPT).logits - exact).norm()
    assert expected / 3 < error < 3 * expected


def texts(rows: int, seed: int) -> Tensor:
    """Of 16 words, each of which makes some others likely as the next."""
    chances = (3 * torch.randn(97, 97, generator=torch.Generator().manual_seed(7))).softmax(-1)
    draw = torch.Generator().manual_seed(seed)
    words = [torch.randint(97, (rows,), generator=draw)]
    for _ in range(15):
        words.append(torch.multinomial(chances[words[-1]], 1, generator=draw)[:, 0])
    return torch.stack(words, 1)


@thorough_only("trains a model for seconds; the test before it compares logits")
def test_perplexity_of_a_trained_model() -> None:
    plain = llama()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(80):
        words = texts(32, step)
        plain(input_ids=words, labels=words).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    held_out = texts(128, 1000)

    def judged(model: nn.Module) -> tuple[float, Tensor]:
        with torch.no_grad():
            found = model(input_ids=held_out, labels=held_out)
        return float(found.loss.exp()), found.logits

    exact, logits = judged(plain.eval())
    assert exact < 30, "of 97 words"
    for weights, bound, of_logits in (("int8", 1e-3, 5e-3), ("fp8", 1e-3, 2e-2), ("int4", 1e-2, 6e-2)):

        def rank_of(world: sw.World, weights: str = weights) -> tuple[float, Tensor]:
            given = copy.deepcopy(plain)
            return judged(sw.load_for_inference(model=given, mesh={"tp": 2}, weights=weights, world=world))

        for perplexity, found in run_ranks(2, rank_of):
            assert perplexity == pytest.approx(exact, rel=bound)
            assert (found - logits).norm() < of_logits * logits.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("form", ["int8", "fp8", "int4"])
def test_a_value_moves_by_half_a_step_at_most(dtype: torch.dtype, is_transposed: bool, form: str) -> None:
    """A step is of one output, or of the value itself in fp8, and for outputs that are small as a whole it is small."""
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(2)).to(dtype)
    weight[3] = 0
    weight[4] = 0.25
    weight[5, 7] = 30
    weight[6] *= 1e-3
    given = weight.T.contiguous() if is_transposed else weight
    narrow = quantized(given, form, is_transposed=is_transposed)
    assert narrow is not None
    assert (narrow.shape, narrow.dtype) == (given.shape, dtype)
    rows = narrow.values().T if is_transposed else narrow.values()
    step = narrow.scales.float().expand(32, -1, 128 // narrow.scales.shape[1]).flatten(1)
    rounding = torch.finfo(dtype).eps * weight.float().abs().amax(1, keepdim=True)
    greatest = weight.float().abs().amax(1, keepdim=True)
    assert (step <= 2 * greatest.clamp_min(0.03) / {"int8": 127, "fp8": 448, "int4": 15}[form]).all()
    half = step / 2 if form != "fp8" else torch.maximum(weight.float().abs() / 16, step / 1024)
    assert ((rows.float() - weight.float()).abs() <= half + rounding).all()
    assert torch.equal(rows[3], weight[3])
    x = torch.randn(3, 128).to(dtype)
    plain = nn.Parameter(narrow, requires_grad=False)
    made = x @ plain if is_transposed else nn.functional.linear(x, plain)
    assert torch.equal(made, x @ narrow.values() if is_transposed else nn.functional.linear(x, narrow.values()))
    assert stored_bytes(narrow) < weight.numel() * dtype.itemsize * (0.6 if dtype.itemsize == 2 else 0.4)
    assert quantized(weight[:, :6], "int4", is_transposed=False) is None


@sampled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tp", [1, 2])
def test_another_dtype_is_that_of_from_pretrained(dtype: torch.dtype, tp: int, tmp_path: Path) -> None:
    """Frequencies of rotary positions stay in fp32, and what the library keeps in fp32."""
    source = lively(llama)
    source.save_pretrained(tmp_path)
    plain = library().LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    exact = plain(PROMPT).logits

    def rank_of(world: sw.World) -> None:
        model = sw.load_for_inference(tmp_path, mesh={"tp": tp}, dtype=dtype, world=world)
        assert {param.dtype for param in model.parameters()} == {dtype}
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
        found = model(PROMPT).logits
        if tp == 1:
            assert torch.equal(found, exact)
        assert (found - exact).abs().max() <= 8 * torch.finfo(dtype).eps * exact.abs().max()

    run_ranks(tp, rank_of)


THEIRS = Path(__file__).parent.parent / "fixtures" / "deepspeed"


@pytest.mark.parametrize("name", ["zero1", "zero3", "universal"])
def test_a_checkpoint_of_deepspeed(name: str) -> None:
    """Its model has no tensor-parallel plan, so both ranks have it whole."""
    source = formats.open_checkpoint(THEIRS / name)

    def rank_of(world: sw.World) -> None:
        with drawing(), sw.deferred_init():
            given = fixture_model.build()
        model = sw.load_for_inference(THEIRS / name, model=given, world=world, dtype=torch.bfloat16)
        found = model.state_dict()
        for spec in source.weights:
            stored = source.read(spec)
            assert torch.equal(found[spec.name], stored.to(torch.bfloat16) if stored.is_floating_point() else stored)

    run_ranks(2, rank_of)


def test_a_deferred_model_has_the_values_of_its_constructor() -> None:
    torch.manual_seed(3)
    plain, given = llama().eval(), []
    for _ in range(2):
        torch.manual_seed(3)
        with sw.deferred_init():
            given.append(llama())

    def rank_of(world: sw.World) -> None:
        model = sw.load_for_inference(model=given[world.rank], mesh={"tp": 2}, world=world)
        torch.testing.assert_close(model(PROMPT).logits, plain(PROMPT).logits, rtol=1e-5, atol=1e-5)

    run_ranks(2, rank_of)


def test_values_that_nobody_has() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"weight is on the meta device and has no values\. Build the model inside"):
        sw.load_for_inference(model=model)


def test_what_cannot_be_is_said_on_all_ranks(tmp_path: Path) -> None:
    plain = lively(llama)
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({}, ConfigError, "needs a folder with weights, or a model"),
        ({"model": plain, "weights": "int3"}, ConfigError, "it must be int8, fp8 or int4"),
        ({"model": plain, "mesh": {"tp": 2, "pp": 1}}, ConfigError, "splits along tp alone, and the mesh has pp"),
        ({"model": plain, "mesh": {"tp": 3}}, ConfigError, "mesh"),
        ({"model": Transformer(), "mesh": {"tp": 2}}, ModelError, "has no tensor-parallel plan of its own"),
        ({"folder": tmp_path}, CheckpointError, "has no config.json"),
        ({"folder": tmp_path / "none"}, CheckpointError, "There is no folder .*none to load a model from. Name one"),
        ({"folder": tmp_path, "model": plain}, ModelError, "weights of another model"),
        ({"folder": tmp_path / "nothing", "model": plain}, CheckpointError, "no such file"),
    ]

    def rank_of(world: sw.World) -> None:
        for given, kind, message in cases:
            with pytest.raises(kind, match=message):
                sw.load_for_inference(world=world, **given)
        mine = {} if world.rank else {"dtype": torch.float16}
        with pytest.raises(ConfigError, match=r"different arguments of load_for_inference.*dtype"):
            sw.load_for_inference(model=plain, world=world, **mine)

    run_ranks(2, rank_of)
    assert all(param.requires_grad for param in plain.parameters())
