"""Models of transformers, diffusers, timm, torchvision and torch: small, with random weights, nothing downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torchvision_operators  # noqa: F401  # isort: skip
import diffusers
import timm
import torch
import torch.nn.functional as F
import torchvision
import transformers
from torch import nn

Tensor = torch.Tensor
LENGTH, VOCAB, IMAGE = 8, 99, 32


@dataclass(frozen=True)
class Case:
    """How to build a model, and what one half batch of it is."""

    name: str
    source: str
    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], dict[str, Any]]


CASES: dict[str, Case] = {}


def add(source: str, name: str, build: Callable[[], nn.Module], inputs: Callable[[torch.Generator], Any]) -> None:
    assert name not in CASES, name
    CASES[name] = Case(name, source, build, inputs)


def made(name: str) -> nn.Module:
    """The model, in training mode, all kinds of dropout off."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = CASES[name].build().float().train()
    for module in model.modules():
        for key, value in vars(module).items():
            if "drop" in key and isinstance(value, float):
                setattr(module, key, 0.0)
        if isinstance(module, nn.Dropout | nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0
    return model


def loss_of(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """The model's own loss, or the mean square of what it returns."""
    output = model(**inputs) if "args" not in inputs else model(*inputs["args"])
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    tensors = [tensor for tensor in _tensors(output) if tensor.is_floating_point() and tensor.requires_grad]
    total: Tensor = sum(F.mse_loss(tensor, torch.full_like(tensor, 0.5)) for tensor in tensors) / len(tensors)
    return total


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in _tensors(item)]


# -- transformers -------------------------------------------------------------------------------------------

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}


def config_of(kind: str, **settings: Any) -> Any:
    config = transformers.AutoConfig.for_model(kind, **settings)
    for one in [config, *(part for part in vars(config).values() if isinstance(part, transformers.PretrainedConfig))]:
        for key, value in list(vars(one).items()):
            if "drop" in key and isinstance(value, float):
                setattr(one, key, 0.0)
    return config


def tokens(numbers: torch.Generator, rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=numbers)


def images(numbers: torch.Generator, size: int = IMAGE, channels: int = 3, rows: int = 2) -> Tensor:
    return torch.randn(rows, channels, size, size, generator=numbers)


def text(numbers: torch.Generator) -> dict[str, Any]:
    ids = tokens(numbers)
    return {"input_ids": ids, "labels": ids}


def causal(kind: str, **settings: Any) -> None:
    """A language model by its `model_type`."""
    config = lambda: config_of(kind, **{**SMALL, **settings})  # noqa: E731
    add("transformers", kind, lambda: transformers.AutoModelForCausalLM.from_config(config()), text)


def masked(kind: str, **settings: Any) -> None:
    config = lambda: config_of(kind, **{**SMALL, **settings})  # noqa: E731
    add("transformers", kind, lambda: transformers.AutoModelForMaskedLM.from_config(config()), text)


def seq2seq(kind: str, **settings: Any) -> None:
    def inputs(numbers: torch.Generator) -> dict[str, Any]:
        return {"input_ids": tokens(numbers), "labels": tokens(numbers)}

    config = lambda: config_of(kind, **{**SMALL, **settings})  # noqa: E731
    add("transformers", kind, lambda: transformers.AutoModelForSeq2SeqLM.from_config(config()), inputs)


def vision(kind: str, *, auto: str = "AutoModelForImageClassification", **settings: Any) -> None:
    def inputs(numbers: torch.Generator) -> dict[str, Any]:
        return {"pixel_values": images(numbers), "labels": torch.randint(0, 5, (2,), generator=numbers)}

    def build() -> nn.Module:
        common = {key: SMALL[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
        sizes = {**common, "num_attention_heads": 4, "image_size": IMAGE, "patch_size": 8, "num_labels": 5}
        config = config_of(kind, **{**sizes, **settings})
        model = getattr(transformers, auto)
        return model.from_config(config) if auto.startswith("Auto") else model(config)

    add("transformers", kind, build, inputs)


HEADS = {"head_dim": 8}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}

causal("llama")
causal("gpt2", n_embd=32, n_head=4, n_layer=2, n_positions=64)
causal("gpt_neox", rotary_pct=0.5)
causal("gpt_neo", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=4)
causal("gptj", n_embd=32, n_head=4, n_layer=2, n_positions=64, rotary_dim=4)
causal("gpt_bigcode", n_embd=32, n_head=4, n_layer=2, n_positions=64)
causal("opt", ffn_dim=48, word_embed_proj_dim=32)
causal("bloom", n_head=4, n_layer=2)
causal("falcon", alibi=False, new_decoder_architecture=False)
causal("mistral")
causal("qwen2")
causal("qwen3", **HEADS)
causal("qwen2_moe", **EXPERTS, shared_expert_intermediate_size=24)
causal("qwen3_moe", **EXPERTS, **HEADS)
causal("gemma", **HEADS)
causal("gemma2", **HEADS, query_pre_attn_scalar=8)
causal("gemma3_text", **HEADS, query_pre_attn_scalar=8)
causal("phi")
causal("phi3")
causal("mamba", state_size=4, conv_kernel=3, expand=2, time_step_rank=4)
causal("mamba2", state_size=4, conv_kernel=3, expand=2, num_heads=8, head_dim=8, n_groups=1, chunk_size=4)
causal("rwkv", attention_hidden_size=32, context_length=64)
causal("mixtral", **EXPERTS)
causal("olmo")
causal("olmo2")
causal("olmoe", **EXPERTS)
causal("deepseek_v2", **LATENT)
causal("deepseek_v3", **LATENT)
causal("stablelm")
causal("starcoder2")
causal("cohere")
causal("granite")
causal("mpt", d_model=32, n_heads=4, n_layers=2, max_seq_len=64)
causal("codegen", n_embd=32, n_head=4, n_layer=2, n_positions=64, rotary_dim=4)
causal("glm", **HEADS)
causal("smollm3")
causal("nemotron")
causal("xglm", d_model=32, ffn_dim=48, num_layers=2, attention_heads=4)
causal(
    "jamba",
    **EXPERTS,
    mamba_d_state=4,
    mamba_dt_rank=4,
    attn_layer_period=2,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
    use_mamba_kernels=False,
)
causal("ctrl", n_embd=32, n_head=4, n_layer=2, n_positions=64, dff=48)
masked("bert")
masked("roberta")
masked("albert", embedding_size=16)
masked("electra", embedding_size=16)
masked("distilbert", dim=32, hidden_dim=48, n_layers=2, n_heads=4)
masked("deberta-v2", relative_attention=True, pos_att_type=["p2c", "c2p"])
masked("mobilebert", embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16)
masked("modernbert", local_attention=4)
masked("fnet")
seq2seq("t5", **T5)
seq2seq("mt5", **T5)
seq2seq("bart", **BART)
seq2seq("mbart", **BART)
seq2seq("pegasus", **BART)
vision("vit")
vision("deit", auto="DeiTForImageClassification")
vision("beit")
vision("dinov2")
vision("convnext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)
vision("convnextv2", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)
vision("resnet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
vision("mobilevit", image_size=64, hidden_sizes=[8, 12, 16], neck_hidden_sizes=[4, 4, 8, 8, 12, 16, 16])
vision("poolformer", hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1])
vision("mobilenet_v2")


def _two_towers(kind: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        words = {key: SMALL[key] for key in SMALL if key not in ("num_key_value_heads", "use_cache")}
        seeing = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = config_of(
            kind, text_config=words, vision_config={**seeing, "image_size": IMAGE, "patch_size": 8}, projection_dim=16
        )
        return transformers.AutoModel.from_config(config)

    return build


def _pairs(numbers: torch.Generator) -> dict[str, Any]:
    return {"input_ids": tokens(numbers), "pixel_values": images(numbers), "return_loss": True}


add("transformers", "clip", _two_towers("clip"), _pairs)
add("transformers", "siglip", _two_towers("siglip"), _pairs)


def _detector() -> nn.Module:
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 5}
    config = config_of(
        "detr", **sizes, **heads, use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
        backbone_config=backbone,
    )  # fmt: skip
    return transformers.DetrForObjectDetection(config)


def _segmenter() -> nn.Module:
    config = config_of(
        "segformer", hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 2],
        decoder_hidden_size=16, num_labels=5,
    )  # fmt: skip
    return transformers.SegformerForSemanticSegmentation(config)


add("transformers", "detr", _detector, lambda numbers: {"pixel_values": images(numbers)})
add("transformers", "segformer", _segmenter, lambda numbers: {"pixel_values": images(numbers)})


def _whisper() -> nn.Module:
    sizes = {**BART, "vocab_size": VOCAB, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    config = config_of("whisper", **sizes, **special, suppress_tokens=None, begin_suppress_tokens=None)
    return transformers.WhisperForConditionalGeneration(config)


def _speech() -> nn.Module:
    config = config_of(
        "wav2vec2", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        conv_dim=[8, 8], conv_stride=[4, 4], conv_kernel=[8, 8], num_feat_extract_layers=2,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, vocab_size=VOCAB, apply_spec_augment=False,
    )  # fmt: skip
    return transformers.Wav2Vec2ForCTC(config)


def _hubert() -> nn.Module:
    config = config_of(
        "hubert", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        conv_dim=[8, 8], conv_stride=[4, 4], conv_kernel=[8, 8], num_feat_extract_layers=2,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, apply_spec_augment=False,
    )  # fmt: skip
    return transformers.HubertModel(config)


add(
    "transformers",
    "whisper",
    _whisper,
    lambda numbers: {"input_features": torch.randn(2, 8, 32, generator=numbers), "labels": tokens(numbers)},
)
add(
    "transformers",
    "wav2vec2",
    _speech,
    lambda numbers: {"input_values": torch.randn(2, 400, generator=numbers), "labels": tokens(numbers, length=4)},
)
add("transformers", "hubert", _hubert, lambda numbers: {"input_values": torch.randn(2, 400, generator=numbers)})

# -- diffusers ----------------------------------------------------------------------------------------------


def _times(numbers: torch.Generator) -> Tensor:
    return torch.randint(0, 100, (2,), generator=numbers)


def _noise(numbers: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=numbers)


def _unet_2d() -> nn.Module:
    return diffusers.UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8, attention_head_dim=8,
    )  # fmt: skip


def _unet_conditioned(kind: Any) -> Callable[[], nn.Module]:
    downs = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "block_out_channels": (16, 32)}
    ups = {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "out_channels": 4, "sample_size": 16}
    more = ups if kind is diffusers.UNet2DConditionModel else {"conditioning_embedding_out_channels": (8, 8)}
    return lambda: kind(
        in_channels=4, layers_per_block=1, cross_attention_dim=16, norm_num_groups=8, attention_head_dim=8,
        **downs, **more,
    )  # fmt: skip


def _conditioned(numbers: torch.Generator) -> dict[str, Any]:
    return {
        "sample": _noise(numbers, 2, 4, 16, 16),
        "timestep": _times(numbers),
        "encoder_hidden_states": _noise(numbers, 2, 6, 16),
    }


def _flux() -> nn.Module:
    return diffusers.FluxTransformer2DModel(
        in_channels=8, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(4, 2, 2),
    )  # fmt: skip


def _flux_inputs(numbers: torch.Generator) -> dict[str, Any]:
    return {
        "hidden_states": _noise(numbers, 2, 16, 8),
        "encoder_hidden_states": _noise(numbers, 2, 6, 16),
        "pooled_projections": _noise(numbers, 2, 16),
        "timestep": torch.rand(2, generator=numbers),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(6, 3),
    }


def _sd3() -> nn.Module:
    return diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4,
    )  # fmt: skip


def _sd3_inputs(numbers: torch.Generator) -> dict[str, Any]:
    return {
        "hidden_states": _noise(numbers, 2, 4, 8, 8),
        "encoder_hidden_states": _noise(numbers, 2, 6, 16),
        "pooled_projections": _noise(numbers, 2, 16),
        "timestep": _times(numbers),
    }


def _dit() -> nn.Module:
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10,
    )  # fmt: skip


def _dit_inputs(numbers: torch.Generator) -> dict[str, Any]:
    labels = torch.randint(0, 5, (2,), generator=numbers)
    return {"hidden_states": _noise(numbers, 2, 4, 8, 8), "timestep": labels, "class_labels": labels}


def _pixart() -> nn.Module:
    return diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2, sample_size=8,
        patch_size=2, cross_attention_dim=16, caption_channels=16, use_additional_conditions=False,
    )  # fmt: skip


def _pixart_inputs(numbers: torch.Generator) -> dict[str, Any]:
    return {
        "hidden_states": _noise(numbers, 2, 4, 8, 8),
        "encoder_hidden_states": _noise(numbers, 2, 6, 16),
        "timestep": _times(numbers),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def _vae() -> nn.Module:
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, latent_channels=4, sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


def _vq() -> nn.Module:
    return diffusers.VQModel(
        block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, latent_channels=4, num_vq_embeddings=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


add(
    "diffusers",
    "UNet2DModel",
    _unet_2d,
    lambda numbers: {"sample": _noise(numbers, 2, 3, 16, 16), "timestep": _times(numbers)},
)
add("diffusers", "UNet2DConditionModel", _unet_conditioned(diffusers.UNet2DConditionModel), _conditioned)
add(
    "diffusers",
    "ControlNetModel",
    _unet_conditioned(diffusers.ControlNetModel),
    lambda numbers: {**_conditioned(numbers), "controlnet_cond": _noise(numbers, 2, 3, 32, 32)},
)
add("diffusers", "FluxTransformer2DModel", _flux, _flux_inputs)
add("diffusers", "SD3Transformer2DModel", _sd3, _sd3_inputs)
add("diffusers", "DiTTransformer2DModel", _dit, _dit_inputs)
add("diffusers", "PixArtTransformer2DModel", _pixart, _pixart_inputs)
add("diffusers", "AutoencoderKL", _vae, lambda numbers: {"sample": images(numbers, 16)})
add("diffusers", "VQModel", _vq, lambda numbers: {"sample": images(numbers, 16)})
add(
    "diffusers",
    "AutoencoderTiny",
    lambda: diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    ),
    lambda numbers: {"sample": images(numbers, 16)},
)

# -- timm ---------------------------------------------------------------------------------------------------


def picture(name: str, *, size: int = IMAGE, **settings: Any) -> None:
    """A model of timm by its name, made smaller where its constructor lets us."""
    kwargs = {"pretrained": False, "num_classes": 5, **settings}
    add(
        "timm",
        f"timm-{name}",
        lambda: timm.create_model(name, **kwargs),
        lambda numbers: {"args": (images(numbers, size),)},
    )


TINY = """
    test_byobnet test_coatnet test_convnext test_convnext2 test_convnext3 test_efficientnet
    test_efficientnet_evos test_efficientnet_gn test_efficientnet_ln test_mambaout test_maxvit test_nfnet
    test_resnet test_vit test_vit2 test_vit3 test_vit4 test_vit_relpos
"""
for _name in TINY.split():
    picture(_name, size=160 if "vit" in _name or "coatnet" in _name else 64)
picture("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=32, num_heads=4)
picture("deit_tiny_distilled_patch16_224", img_size=32, depth=2, embed_dim=32, num_heads=4)
picture("beit_base_patch16_224", img_size=32, depth=2, embed_dim=32, num_heads=4)
picture("swin_tiny_patch4_window7_224", img_size=32, embed_dim=16, depths=(1, 1), num_heads=(2, 4), window_size=4)


def shaped(name: str, build: Callable[[], nn.Module]) -> None:
    add("timm", f"timm-{name}", build, lambda numbers: {"args": (images(numbers),)})


MIXING = {"num_classes": 5, "img_size": IMAGE, "patch_size": 8, "num_blocks": 2, "embed_dim": 32}
shaped("MlpMixer", lambda: timm.models.mlp_mixer.MlpMixer(**MIXING))
MLPS = timm.models.mlp_mixer
shaped(
    "gMLP",
    lambda: MLPS.MlpMixer(**MIXING, mlp_ratio=4, block_layer=MLPS.SpatialGatingBlock, mlp_layer=timm.layers.GatedMlp),
)
shaped("ResMLP", lambda: MLPS.MlpMixer(**MIXING, mlp_ratio=4, block_layer=MLPS.ResBlock))
shaped("ConvMixer", lambda: timm.models.convmixer.ConvMixer(dim=16, depth=2, num_classes=5))
shaped(
    "MetaFormer", lambda: timm.models.metaformer.MetaFormer(depths=(1, 1, 1, 1), dims=(8, 16, 16, 16), num_classes=5)
)
picture("pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(8, 16, 16, 16), num_heads=(1, 2, 2, 2))
picture("regnetx_002")
picture("mobilenetv3_small_050")
picture("ghostnet_050")
picture("edgenext_xx_small", size=64)
picture("resnet10t")

# -- torchvision --------------------------------------------------------------------------------------------

tv = torchvision.models


def seen(name: str, build: Callable[[], nn.Module], size: int = IMAGE) -> None:
    add("torchvision", f"torchvision-{name}", build, lambda numbers: {"args": (images(numbers, size),)})


seen("resnet18", lambda: tv.ResNet(tv.resnet.BasicBlock, [1, 1, 1, 1], num_classes=5, width_per_group=64))
seen("mobilenet_v2", lambda: tv.mobilenet_v2(num_classes=5, width_mult=0.25))
seen("mobilenet_v3_small", lambda: tv.mobilenet_v3_small(num_classes=5))
seen("efficientnet_b0", lambda: tv.efficientnet_b0(num_classes=5, stochastic_depth_prob=0.0))
seen("shufflenet_v2", lambda: tv.shufflenet_v2_x0_5(num_classes=5))
seen("squeezenet", lambda: tv.squeezenet1_1(num_classes=5), 64)
seen("mnasnet", lambda: tv.mnasnet0_5(num_classes=5))
seen("densenet", lambda: tv.DenseNet(8, (2, 2), 16, num_classes=5))
seen(
    "vision_transformer",
    lambda: tv.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=48, num_classes=5
    ),
)
seen(
    "swin",
    lambda: tv.SwinTransformer([4, 4], 16, [1, 1], [2, 4], [2, 2], stochastic_depth_prob=0.0, num_classes=5),
)
seen(
    "convnext",
    lambda: tv.ConvNeXt(
        [tv.convnext.CNBlockConfig(8, 16, 1), tv.convnext.CNBlockConfig(16, None, 1)],
        stochastic_depth_prob=0.0,
        num_classes=5,
    ),
)

# -- torch --------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A language model over a recurrent layer."""

    def __init__(self, kind: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.cells = kind(16, 24, num_layers=2, batch_first=True, **settings)
        self.head = nn.Linear(48 if settings.get("bidirectional") else 24, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(self.embed(x))[0])


class Translator(nn.Module):
    """`nn.Transformer` between two embeddings and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.transformer = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.transformer(self.embed(source), self.embed(target)))


class Encoder(nn.Module):
    """`nn.TransformerEncoder` over embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.embed(x))


def _one(numbers: torch.Generator) -> dict[str, Any]:
    return {"args": (tokens(numbers),)}


add("torch", "LSTM", lambda: Recurrent(nn.LSTM), _one)
add("torch", "GRU", lambda: Recurrent(nn.GRU), _one)
add("torch", "LSTM-bidirectional", lambda: Recurrent(nn.LSTM, bidirectional=True), _one)
add("torch", "RNN", lambda: Recurrent(nn.RNN), _one)
add("torch", "Transformer", Translator, lambda numbers: {"args": (tokens(numbers), tokens(numbers))})
add("torch", "TransformerEncoder", Encoder, _one)
