"""Models whose blocks are no single chain, in pipeline stages: encoder and decoder, image and language, skips."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipelined import race_in_inference
from small_transformers import VOCAB, library
from torch import nn
from twins import work_on_ranks

import shardwise as sw
from shardwise.testing import run_ranks
from tests.in_stages import SPLITS as LIKE_ANY
from tests.in_stages import Messages, optimizer_of, plain, race
from tests.thorough import sampled, thorough_only

pytestmark = [sampled, thorough_only("slow; test_skips_in_stages.py covers the same code")]

Tensor = torch.Tensor
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
BART = {
    **SPECIAL,
    **{"vocab_size": VOCAB, "d_model": 32, "encoder_layers": 3, "decoder_layers": 3, "dropout": 0.0},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
VISION |= {"image_size": 8, "patch_size": 4}
TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 32}


def t5(**changes: Any) -> nn.Module:
    sizes = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
    config = library().T5Config(**sizes, **SPECIAL, **{"dropout_rate": 0.0, **changes})
    return library().T5ForConditionalGeneration(config)


def bart(**changes: Any) -> nn.Module:
    config = library().BartConfig(**BART, max_position_embeddings=32, **changes)
    return library().BartForConditionalGeneration(config)


def whisper(**changes: Any) -> nn.Module:
    sizes = {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 32}
    return library().WhisperForConditionalGeneration(library().WhisperConfig(**BART, **sizes, **changes))


def llava(**changes: Any) -> nn.Module:
    config = library().LlavaConfig(
        vision_config=library().CLIPVisionConfig(**VISION),
        text_config=library().LlamaConfig(**TEXT),
        image_token_id=VOCAB - 1,
        **{"vision_feature_layer": -2, **changes},
    )
    return library().LlavaForConditionalGeneration(config)


def tokens(numbers: torch.Generator, rows: int = 2, length: int = 6) -> Tensor:
    return torch.randint(3, VOCAB - 1, (rows, length), generator=numbers)


def to_text(numbers: torch.Generator) -> dict[str, Tensor]:
    source = tokens(numbers, length=7)
    mask = torch.arange(7) < torch.randint(4, 8, (2, 1), generator=numbers)
    return {"input_ids": source, "attention_mask": mask.long(), "labels": tokens(numbers)}


def to_speech(numbers: torch.Generator) -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 8, 16, generator=numbers), "labels": tokens(numbers)}


def to_image(numbers: torch.Generator) -> dict[str, Tensor]:
    text = torch.cat([tokens(numbers, length=2), torch.full((2, 4), VOCAB - 1), tokens(numbers, length=3)], 1)
    labels = text.masked_fill(text == VOCAB - 1, -100)
    return {"input_ids": text, "pixel_values": torch.randn(2, 3, 8, 8, generator=numbers), "labels": labels}


T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4, "dropout_rate": 0.0}
MARIAN = {**BART, "max_position_embeddings": 32, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
MARIAN |= {"attention_dropout": 0.0, "activation_dropout": 0.0}
RELATIVES = {**dict.fromkeys(("mt5", "umt5"), T5), "longt5": {**T5, "local_radius": 3}}
RELATIVES |= dict.fromkeys(("mbart", "pegasus", "marian", "m2m_100", "blenderbot"), MARIAN)


def relative(kind: str) -> nn.Module:
    config = library().AutoConfig.for_model(kind, **{**RELATIVES[kind], **SPECIAL})
    return library().AutoModelForSeq2SeqLM.from_config(config)


SPEECH: dict[str, Any] = {
    **{"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32},
    **{"conv_dim": [8, 8], "conv_stride": [4, 4], "conv_kernel": [8, 8], "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "vocab_size": VOCAB, "layerdrop": 0.0},
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"), 0.0),
}
OF_SPEECH: dict[str, dict[str, Any]] = {
    "wav2vec2": SPEECH,
    "hubert": SPEECH,
    "wavlm": {**SPEECH, "num_buckets": 8, "max_bucket_distance": 16},
    "data2vec-audio": {**SPEECH, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 3},
    "unispeech": SPEECH,
}


def idefics3() -> nn.Module:
    text = library().LlamaConfig(**TEXT, pad_token_id=0)
    config = library().Idefics3Config(
        vision_config={**VISION, "num_channels": 3}, text_config=text, image_token_id=VOCAB - 1, scale_factor=2
    )
    return library().Idefics3ForConditionalGeneration(config)


def to_images(numbers: torch.Generator, *, has_empty: bool = False) -> dict[str, Tensor]:
    """One image for each row; with `has_empty` that of the first row is padding, which is all zero."""
    text = torch.cat([tokens(numbers, length=2), torch.full((2, 1), VOCAB - 1), tokens(numbers, length=3)], 1)
    images = torch.randn(2, 1, 3, 8, 8, generator=numbers)
    if has_empty:
        text[0, 2], images[0] = 1, 0.0
    return {"input_ids": text, "pixel_values": images, "labels": text}


Inputs = Callable[[torch.Generator], dict[str, Tensor]]
MODELS: dict[str, tuple[Callable[..., nn.Module], Inputs]] = {
    "t5": (t5, to_text),
    "bart": (bart, to_text),
    "whisper": (whisper, to_speech),
    "llava": (llava, to_image),
}
SPLITS = LIKE_ANY | {
    "gpipe-recompute": {"pp": 3, "pipeline": {"schedule": "gpipe"}, "activations": "recompute"},
}


def made(kind: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind][0](**changes).train()


def drawn(kind: str, num_steps: int = 3, micro_batches: int = 4) -> list[list[dict[str, Tensor]]]:
    numbers = torch.Generator().manual_seed(1)
    return [[MODELS[kind][1](numbers) for _ in range(micro_batches)] for _ in range(num_steps)]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", MODELS)
def test_they_train_as_in_a_plain_loop(kind: str, split: str) -> None:
    race(made(kind), drawn(kind), **SPLITS[split])


@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("kind", RELATIVES)
def test_relatives_of_t5_and_bart(kind: str, pp: int) -> None:
    numbers = torch.Generator().manual_seed(1)
    race(relative(kind).train(), [[to_text(numbers) for _ in range(2)] for _ in range(2)], pp=pp)


@pytest.mark.parametrize("kind", ["bart", "whisper", *(kind for kind in RELATIVES if RELATIVES[kind] is MARIAN)])
def test_bart_and_its_relatives_along_tp(kind: str) -> None:
    """By one plan of ours for all of them."""
    numbers = torch.Generator().manual_seed(1)
    model, inputs = (made(kind), MODELS[kind][1]) if kind in MODELS else (relative(kind).train(), to_text)
    batches = [inputs(numbers) for _ in range(2)]
    losses, _, params = plain(model, [[batch] for batch in batches], None)

    def work(engine: sw.Engine) -> None:
        mine = engine.module
        layer = mine.get_submodule("model.decoder.layers.0")
        assert layer.fc1.weight.numel() == model.get_submodule("model.decoder.layers.0").fc1.weight.numel() // 2
        for batch, expected in zip(batches, losses, strict=True):
            loss = mine(**batch).loss
            engine.backward(loss)
            engine.step()
            assert loss.item() == pytest.approx(expected, rel=1e-5)
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, params[name], rtol=1e-4, atol=1e-5, msg=name)

    work_on_ranks(2, work, {"mesh": {"tp": 2}}, model, optimizer_of)


@pytest.mark.parametrize("split", ["pp2", "pp2-dp2-zero3", "zb-h1"])
@pytest.mark.parametrize("kind", OF_SPEECH)
def test_models_of_speech_with_masked_frames(kind: str, split: str) -> None:
    """Their embedding is a parameter of the model itself, and is written into what a linear layer has returned."""
    model = library().AutoModel.from_config(library().AutoConfig.for_model(kind, **OF_SPEECH[kind])).train()
    assert any(name == "masked_spec_embed" for name, _ in model.named_parameters())
    numbers = torch.Generator().manual_seed(1)

    def batch() -> dict[str, Tensor]:
        mask = torch.rand(2, 23, generator=numbers) > 0.6
        return {"input_values": torch.randn(2, 400, generator=numbers), "mask_time_indices": mask}

    data = [[batch() for _ in range(4)] for _ in range(2)]
    race(model, data, loss_fn=lambda output: output.last_hidden_state.square().mean(), **SPLITS[split])


@pytest.mark.parametrize("num_empty", [0, 1, 4])
def test_a_model_that_reads_its_pixels_is_cut_anywhere(num_empty: int) -> None:
    """It leaves out images that are empty, so micro-batches have other numbers of images."""
    numbers, model = torch.Generator().manual_seed(1), idefics3().train()
    data = [[to_images(numbers, has_empty=2 * step + part < num_empty) for part in range(2)] for step in range(2)]
    tower = ["model.text_model.embed_tokens", "model.vision_model", "model.connector", "model.text_model.layers.0"]
    rest = ["model.text_model.layers.1", "model.text_model.layers.2", "model.text_model.norm", "lm_head"]
    for plan in ({"pp": 3}, {"pipeline": {"stages": [tower, rest]}}):
        race(model, data, **plan)


@pytest.mark.parametrize("kind", MODELS)
def test_calls_of_the_model_train_and_answer(kind: str) -> None:
    """In a loop of one's own, and without gradients."""
    model, [parts] = made(kind), drawn(kind, num_steps=1)
    batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    losses, norms, params = plain(model, [[batch]], None)
    after = copy.deepcopy(model).eval()
    after.load_state_dict(params)
    with torch.no_grad():
        logits = after(**batch).logits
    models = [copy.deepcopy(model) for _ in range(2)]

    def rank(world: sw.World) -> None:
        mine, plan = models[world.rank], {"preset": "zero1", "mesh": {"pp": 2}}
        with sw.shard(mine, plan, optimizer=optimizer_of(mine), world=world) as engine:
            loss = mine(**batch).loss
            engine.backward(loss)
            engine.step()
            assert loss.item() == pytest.approx(losses[0], rel=1e-5)
            assert float(engine.gradient_norm) == pytest.approx(norms[0], rel=1e-5)
            for name, value in engine.state_dict().items():
                torch.testing.assert_close(value, params[name], rtol=1e-4, atol=1e-5, msg=name)
            mine.eval()
            with engine.inference():
                torch.testing.assert_close(mine(**batch, use_cache=False).logits, logits, rtol=1e-4, atol=1e-5)

    run_ranks(2, rank)


GENERATED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "no cache": {"use_cache": False},
    "static": {"cache_implementation": "static"},
}
MESHES: dict[str, dict[str, Any]] = {
    "pp2": {"mesh": {"pp": 2}},
    "pp4": {"mesh": {"pp": 4}},
    "interleaved": {"mesh": {"pp": 2}, "pipeline": {"schedule": "interleaved"}},
    "pp2-dp2": {"mesh": {"pp": 2, "dp": 2}},
    "pp2-tp2": {"mesh": {"pp": 2, "tp": 2}},
    "gathered": {"mesh": {"pp": 2, "dp": 2}},
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("asked", GENERATED)
@pytest.mark.parametrize("kind", ["t5", "bart", "whisper"])
def test_encoder_decoders_generate(kind: str, asked: str, mesh: str) -> None:
    """`generate` calls the encoder by itself, and then the whole model with what that returned."""
    plan = {"preset": "zero3", "accumulate": 4, **MESHES[mesh]}
    keep_bytes = 0 if mesh == "gathered" else None
    race_in_inference(
        made(kind), plan, lambda model, place: generated(kind, model, place, **GENERATED[asked]), keep_bytes
    )


def generated(kind: str, model: Any, place: int, **asked: Any) -> Tensor:
    prompt = MODELS[kind][1](torch.Generator().manual_seed(place))
    del prompt["labels"]
    found: Tensor = model.generate(**prompt, **{"max_new_tokens": 5 + place, "do_sample": False, **asked})
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_an_encoder_and_a_decoder_are_called_by_themselves(mesh: str) -> None:
    """And the whole model with the encoder's states, which its last stages alone compute with, also in a loop of one's
    own; and without them, where it makes no cache."""

    def use(model: Any, place: int) -> list[Tensor]:
        batch = MODELS["t5"][1](torch.Generator().manual_seed(place))
        mask, labels = batch["attention_mask"], batch["labels"]
        states = model.encoder(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
        rest = {"attention_mask": mask, "decoder_input_ids": labels}
        decoded = model.decoder(input_ids=labels, encoder_hidden_states=states, encoder_attention_mask=mask)
        logits = model(encoder_outputs=(states,), **rest, use_cache=False).logits
        head = model.lm_head(decoded.last_hidden_state)
        return [states, decoded.last_hidden_state, head, logits, model(input_ids=batch["input_ids"], **rest).logits]

    plan = {"preset": "zero3", "accumulate": 4, **MESHES[mesh]}
    race_in_inference(made("t5"), plan, use, 0 if mesh == "gathered" else None)


def test_a_frozen_tower_gets_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what passes from the tower's stage on, only embedded tokens are trained."""
    messages, model, data = Messages(monkeypatch), made("llava"), drawn("llava")
    model.model.vision_tower.requires_grad_(False)
    rest = ["model.multi_modal_projector", "model.language_model.layers.*", "model.language_model.norm", "lm_head"]
    race(model, data, pipeline={"stages": [["model.language_model.embed_tokens", "model.vision_tower"], rest]})
    embedded = sum(part["input_ids"].numel() for parts in data for part in parts) * 32 * 4
    assert messages.of("gradient") == embedded
    assert messages.of("activation") > embedded
