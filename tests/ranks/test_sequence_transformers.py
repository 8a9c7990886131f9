"""Unchanged models of transformers train with split sequences, with their own loss."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from sequences import TOKENS, Batch, assert_trains_as_whole, split_run, whole_run
from small_transformers import VOCAB, gpt2, library, llama
from torch import nn
from torch.nn import functional
from twins import adamw, assert_alike, work_on_ranks

import shardwise as sw
from shardwise.errors import ConfigError, ModelError
from shardwise.testing import run_ranks
from tests.thorough import sampled, thorough_only

pytestmark = sampled

IGNORED = -100


def own_loss(model: Any, batch: Batch) -> torch.Tensor:
    return model(**batch, use_cache=False).loss


def mistral() -> nn.Module:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 5}
    return library().MistralForCausalLM(library().MistralConfig(**sizes, **heads))


SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def qwen3() -> nn.Module:
    return library().Qwen3ForCausalLM(library().Qwen3Config(**SIZES, **HEADS, head_dim=8))


def phi3() -> nn.Module:
    return library().Phi3ForCausalLM(library().Phi3Config(**SIZES, **HEADS, pad_token_id=0))


def opt() -> nn.Module:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "dropout": 0.0}
    return library().OPTForCausalLM(library().OPTConfig(**sizes, num_attention_heads=4, word_embed_proj_dim=32))


def gemma2() -> nn.Module:
    """Its scores are capped, which only its eager attention does; every other layer has a window."""
    settings = {"head_dim": 8, "attn_logit_softcapping": 0.5, "sliding_window": 5, "attn_implementation": "eager"}
    return library().Gemma2ForCausalLM(library().Gemma2Config(**SIZES, **HEADS, **settings))


def mixtral(**settings: Any) -> nn.Module:
    return library().MixtralForCausalLM(library().MixtralConfig(**SIZES, **HEADS, num_local_experts=4, **settings))


def deepseek(version: str) -> nn.Module:
    """Queries, keys and values are compressed, and values are narrower than keys."""
    heads = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 1}
    sizes = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1}
    config = getattr(library(), f"Deepseek{version}Config")(**sizes, **heads, **experts)
    return getattr(library(), f"Deepseek{version}ForCausalLM")(config)


def deepseek_v2() -> nn.Module:
    return deepseek("V2")


def deepseek_v3() -> nn.Module:
    return deepseek("V3")


def moe(kind: str) -> nn.Module:
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    if kind.startswith("Qwen"):
        experts["moe_intermediate_size"] = 8
    if kind == "Qwen2Moe":
        experts["shared_expert_intermediate_size"] = 8
    if kind == "GraniteMoe":
        experts["num_local_experts"] = experts.pop("num_experts")
    config = getattr(library(), f"{kind}Config")(**SIZES, **HEADS, **experts)
    return getattr(library(), f"{kind}ForCausalLM")(config)


def apertus() -> nn.Module:
    return library().ApertusForCausalLM(library().ApertusConfig(**SIZES, **HEADS, pad_token_id=0))


def jetmoe() -> nn.Module:
    settings = {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8, "num_key_value_heads": 2}
    return library().JetMoeForCausalLM(library().JetMoeConfig(**SIZES, **settings))


def batches(num_steps: int, *, tokens: int = TOKENS) -> list[Batch]:
    """Some labels do not count, more of them at the end."""
    numbers = torch.Generator().manual_seed(5)
    drawn = [torch.randint(0, VOCAB, (4, tokens), generator=numbers) for _ in range(num_steps)]
    made = [{"input_ids": one, "labels": one.clone()} for one in drawn]
    for batch in made:
        batch["labels"][:, :2] = IGNORED
        batch["labels"][:, tokens - 4 :] = IGNORED
    return made


def built(build: Any) -> nn.Module:
    library()
    torch.manual_seed(0)
    return build()


@pytest.mark.parametrize("attention", ["ulysses", "ring"])
@pytest.mark.parametrize("build", [llama, gpt2, mistral])
def test_trains_as_the_whole_model(build: Any, attention: str) -> None:
    model, data = built(build), batches(2)
    assert_trains_as_whole(model, data, "zero3", {"sp": 2}, sequence={"attention": attention}, loss_of=own_loss)


@thorough_only("three things at once; the tests beside it have each")
@pytest.mark.parametrize("attention", ["ulysses", "ring"])
def test_with_padding_recomputing_and_tokens_that_do_not_divide(attention: str) -> None:
    model = built(llama)
    model.activation_checkpointing_enable()
    model.train()
    data = batches(2, tokens=15)
    for batch in data:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][1, 9:] = 0
        batch["labels"][1, 9:] = IGNORED
    assert_trains_as_whole(model, data, "zero2", {"sp": 4}, sequence={"attention": attention}, loss_of=own_loss)


def padded(where: str, tokens: int = TOKENS) -> list[Batch]:
    """Labels count wherever tokens are kept, so the label after padding is predicted from padding."""
    data = [{"input_ids": batch["input_ids"], "labels": batch["input_ids"].clone()} for batch in batches(2)]
    for batch in data:
        kept = torch.ones_like(batch["input_ids"])
        holes = {"left": [(1, 0, 5), (2, 0, 9)], "right": [(1, 11, tokens)], "middle": [(1, 4, 7), (3, 8, 14)]}
        for row, start, stop in holes[where]:
            kept[row, start:stop] = 0
        batch["attention_mask"] = kept
        if where != "right":
            batch["labels"][kept == 0] = IGNORED
    return data


@pytest.mark.parametrize("attention", ["ulysses", "ring"])
@pytest.mark.parametrize("where", ["left", "right", "middle"])
@pytest.mark.parametrize("build", [llama, gpt2, opt, mistral])
def test_padding_anywhere(build: Any, where: str, attention: str) -> None:
    """Padding sees the kept tokens before it, and not itself. OPT numbers only kept tokens."""
    model, data = built(build), padded(where)
    assert_trains_as_whole(model, data, "zero2", {"sp": 2}, sequence={"attention": attention}, loss_of=own_loss)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_left_padding_with_positions_over_four_ranks() -> None:
    model, data = built(llama), padded("left")
    for batch in data:
        kept = batch["attention_mask"]
        batch["position_ids"] = (kept.cumsum(1) - 1).masked_fill(kept == 0, 1)
    assert_trains_as_whole(model, data, "zero3", {"sp": 4}, sequence={"attention": "ring"}, loss_of=own_loss)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_eager_attention_has_its_own_result_for_padding_that_sees_nothing() -> None:
    model, data = built(lambda: llama(attn_implementation="eager")), padded("left")
    plan = {"sequence": {"attention": "ring"}, "loss_of": own_loss}
    with pytest.raises(
        sw.ShardwiseError, match=r"A label counts for padding that sees no token.* LlamaForCausalLM has"
    ):
        split_run(model, data, "zero2", {"sp": 2}, **plan)
    for batch in data:
        kept = batch["attention_mask"]
        batch["labels"][(kept.cumsum(1) == 1) & (kept == 1)] = IGNORED
    assert_alike(split_run(model, data, "zero2", {"sp": 2}, **plan), whole_run(model, data, loss_of=own_loss))


MIXTURES = [partial(moe, kind) for kind in ("Qwen2Moe", "Qwen3Moe", "Olmoe", "GraniteMoe")]


@pytest.mark.parametrize(
    "build", [qwen3, phi3, opt, gemma2, mixtral, deepseek_v2, deepseek_v3, apertus, jetmoe, *MIXTURES]
)
def test_other_models(build: Any) -> None:
    """Heads normalized separately, fused projections, learned positions, capped scores, experts."""
    model, data = built(build), batches(1)
    twin = whole_run(model, data, loss_of=own_loss)
    for attention in ("ulysses", "ring"):
        run = split_run(model, data, "zero2", {"sp": 2}, sequence={"attention": attention}, loss_of=own_loss)
        assert_alike(run, twin)


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("kind", ["Bert", "Roberta", "Esm"])
def test_a_model_that_looks_both_ways(kind: str) -> None:
    """The loss over masked tokens is computed from logits. RoBERTa and ESM number tokens from the padding index + 1."""

    def build() -> nn.Module:
        sizes = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 1}
        config = getattr(library(), f"{kind}Config")(**sizes, num_attention_heads=4)
        model = getattr(library(), f"{kind}ForMaskedLM")(config)
        if kind == "Esm":
            model.esm.contact_head.requires_grad_(False)  # it takes no part in the loss
        return model

    def loss_of(model: Any, batch: Batch) -> torch.Tensor:
        inputs = {name: value for name, value in batch.items() if name != "targets"}
        targets = batch["targets"].flatten()
        losses = functional.cross_entropy(model(**inputs).logits.flatten(0, 1), targets, reduction="none")
        counted = targets != IGNORED
        return model.mean_over_tokens(losses, counted) if isinstance(model, sw.Engine) else losses[counted].mean()

    model = built(build)
    data = [{"input_ids": one["input_ids"], "targets": one["labels"]} for one in batches(2)]
    for batch in data:
        batch["input_ids"][1, 12:] = 1
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][1, 12:] = 0
    for attention in ("ulysses", "ring"):
        assert_trains_as_whole(model, data, "zero3", {"sp": 2}, sequence={"attention": attention}, loss_of=loss_of)


def test_a_plain_loop_gives_whole_batches() -> None:
    """Neither the model nor the loop knows of the split. Tokens are passed by position or by name."""
    model, data = built(llama), batches(2)
    twin = whole_run(model, data, loss_of=own_loss)
    replicas = [built(llama) for _ in range(4)]

    def rank(world: sw.World) -> tuple[list[float], dict[str, torch.Tensor]]:
        replica, losses = replicas[world.rank], []
        optimizer = adamw(replica)
        plan = {"preset": "zero3", "mesh": {"dp": 2, "sp": 2}}
        with sw.shard(replica, plan, optimizer=optimizer, world=world) as engine:
            share, num_shares = engine.data_ranks
            for batch in data:
                mine = {name: value.chunk(num_shares)[share] for name, value in batch.items()}
                loss = replica(mine["input_ids"], labels=mine["labels"]).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(engine.mean(loss.item()))
            return losses, {name: value.clone() for name, value in engine.state_dict().items()}

    for losses, params in run_ranks(4, rank):
        assert losses == pytest.approx(twin.losses, rel=1e-5)
        for name, value in twin.params.items():
            torch.testing.assert_close(params[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["ulysses", "ring"])
def test_packed_documents(attention: str) -> None:
    """A position that starts again starts a new document, as in transformers itself."""
    model, data = built(llama), batches(2)
    for batch in data:
        batch["position_ids"] = torch.cat([torch.arange(7), torch.arange(5), torch.arange(4)]).expand(4, -1)
    run = split_run(model, data, "zero3", {"sp": 2}, sequence={"attention": attention}, loss_of=own_loss)
    twin = whole_run(model, data, loss_of=own_loss)
    assert_alike(run, twin)
    unpacked = [{name: batch[name] for name in ("input_ids", "labels")} for batch in data]
    assert abs(twin.losses[0] - whole_run(model, unpacked, loss_of=own_loss).losses[0]) > 1e-4


@thorough_only("slow; smaller tests beside it cover the same code")
def test_in_bf16() -> None:
    """Compared with bf16 training without splitting: the difference is about that of bf16 rounding."""
    model, data = built(llama), batches(2)
    one = split_run(model, data, "zero3", {"dp": 1}, loss_of=own_loss, precision="bf16")
    wide = whole_run(model, data, loss_of=own_loss)
    apart = max(abs(a - b) for a, b in zip(one.losses, wide.losses, strict=True))
    for attention in ("ulysses", "ring"):
        plan = {"sequence": {"attention": attention}, "precision": "bf16"}
        run = split_run(model, data, "zero3", {"sp": 2}, loss_of=own_loss, **plan)
        assert max(abs(a - b) for a, b in zip(run.losses, one.losses, strict=True)) <= 3 * apart + 1e-3


def test_generates_and_is_left_as_it_was() -> None:
    """In `inference()` each rank computes whole sequences, and after `close` the model has its own attention again."""
    model, data = built(llama), batches(1)
    prompt = data[0]["input_ids"][:1, :5]
    with torch.no_grad():
        expected = model.generate(prompt, max_new_tokens=4, do_sample=False)
    replicas = [built(llama) for _ in range(2)]

    def rank(world: sw.World) -> str:
        replica = replicas[world.rank]
        with sw.shard(replica, {"preset": "zero3", "mesh": {"sp": 2}}, world=world) as engine:
            for _ in range(2):
                with engine.inference():
                    assert torch.equal(replica.generate(prompt, max_new_tokens=4, do_sample=False), expected)
                own_loss(engine, engine.split_sequence(data[0])).backward()
        return replica.config._attn_implementation

    assert run_ranks(2, rank) == ["sdpa", "sdpa"]


def test_a_model_around_one_of_transformers_that_passes_no_positions_is_refused() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = llama()

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.inner(input_ids=input_ids, use_cache=False).logits

    def work(engine: sw.Engine) -> None:
        engine(engine.split_sequence(batches(1)[0]["input_ids"]))

    with pytest.raises(sw.ShardwiseError, match="The model numbers its tokens by itself"):
        work_on_ranks(2, work, {"preset": "zero3", "mesh": {"sp": 2}}, lambda: built(Around), None)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ("token_type_ids", "HrmTextForCausalLM is given token_type_ids, by which tokens of a prefix see each other"),
        ("pixel_values", "HrmTextForCausalLM is given pixel_values, which it places among its tokens"),
    ],
)
def test_batches_with_prefixes_and_images_are_refused(extra: str, said: str) -> None:
    def prefix_lm() -> nn.Module:
        sizes = {**SIZES, "num_attention_heads": 4, "head_dim": 8, "num_hidden_layers": 1}
        return library().HrmTextForCausalLM(library().HrmTextConfig(**sizes))

    def work(engine: sw.Engine) -> None:
        tokens = batches(1)[0]["input_ids"]
        engine.split_sequence({"input_ids": tokens, extra: torch.ones_like(tokens)})

    with pytest.raises(ModelError, match=said):
        work_on_ranks(2, work, {"preset": "zero3", "mesh": {"sp": 2}}, lambda: built(prefix_lm), None)


@pytest.mark.parametrize("kept", [6, torch.tensor([2, 4])], ids=["last", "chosen"])
def test_a_choice_among_all_tokens_is_refused(kept: Any) -> None:
    """It used to be each rank's own last ones."""

    def work(engine: sw.Engine) -> None:
        tokens = batches(1)[0]["input_ids"]
        engine.split_sequence({"input_ids": tokens, "logits_to_keep": 0})
        engine(input_ids=tokens, labels=tokens[:, -6:], logits_to_keep=kept)

    with pytest.raises(ConfigError, match="logits_to_keep chooses among all tokens"):
        work_on_ranks(2, work, {"preset": "zero3", "mesh": {"sp": 2}}, lambda: built(llama), None)


def test_what_cannot_be_split_is_refused() -> None:
    def bert() -> nn.Module:
        sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
        return library().BertForMaskedLM(library().BertConfig(**sizes, num_attention_heads=4))

    def gpt_oss() -> nn.Module:
        sizes = {**SIZES, **HEADS, "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
        return library().GptOssForCausalLM(library().GptOssConfig(**sizes))

    def jamba() -> nn.Module:
        sizes = {**SIZES, **HEADS, "num_experts": 2, "use_mamba_kernels": False, "mamba_dt_rank": 4, "pad_token_id": 0}
        return library().JambaForCausalLM(library().JambaConfig(**sizes))

    def llama4() -> nn.Module:
        sizes = {**SIZES, **HEADS, "num_local_experts": 2, "head_dim": 8, "intermediate_size_mlp": 32}
        return library().Llama4ForCausalLM(library().Llama4TextConfig(**sizes, pad_token_id=0))

    def esm() -> nn.Module:
        sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "pad_token_id": 1}
        return library().EsmForMaskedLM(library().EsmConfig(**sizes, num_attention_heads=4, token_dropout=True))

    def t5() -> nn.Module:
        return library().T5ForConditionalGeneration(library().T5Config(vocab_size=VOCAB, d_model=32, num_layers=1))

    cases: list[tuple[Any, str]] = [
        (lambda: mixtral(output_router_logits=True), "MixtralForCausalLM adds a loss that balances its experts"),
        (bert, "BertForMaskedLM is not a causal language model that takes shift_labels"),
        (gpt_oss, "GptOssAttention asks for s_aux in its attention"),
        (jamba, "layers.0.mamba.conv1d is a Conv1d"),
        (llama4, "Llama4ForCausalLM has layers of kind chunked_attention"),
        (esm, "EsmForMaskedLM scales its embeddings by how many tokens of a sequence are masked"),
        (t5, "T5ForConditionalGeneration .* Leave sp out of the mesh"),
    ]
    for build, message in cases:
        replicas = [built(build) for _ in range(2)]

        def rank(world: sw.World, replicas: list[nn.Module] = replicas) -> None:
            replica = replicas[world.rank]
            with sw.shard(replica, {"preset": "zero3", "mesh": {"sp": 2}}, world=world) as engine:
                own_loss(engine, engine.split_sequence(batches(1)[0]))

        with pytest.raises((ModelError, sw.ShardwiseError), match=message):
            run_ranks(2, rank)


@pytest.mark.parametrize(
    ("mesh", "is_ring"),
    [
        ({"sp": 2}, False),
        ({"sp": 4}, False),
        ({"sp": 3}, True),
        ({"tp": 2, "sp": 2}, False),
        ({"tp": 2, "sp": 4}, True),
    ],
)
def test_by_itself_a_plan_takes_ulysses_where_heads_divide(mesh: dict[str, int], is_ring: bool) -> None:
    """The model has four query heads; with tensor parallelism each rank has a part of them."""
    model = built(llama)
    num_ranks = int(torch.tensor(list(mesh.values())).prod())

    def work(engine: sw.Engine) -> bool:
        tokens = torch.arange(24)[None]
        [positions] = engine.split_sequence({"input_ids": tokens})["position_ids"].tolist()
        return max(after - before for before, after in pairwise(positions)) > 1

    assert work_on_ranks(num_ranks, work, {"preset": "zero3", "mesh": mesh}, model, None)[0] is is_ring


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("attention", ["ulysses", "ring"])
@pytest.mark.parametrize("mesh", [{"tp": 2, "sp": 2}, {"sp": 2, "tp": 2}], ids=["tp-sp", "sp-tp"])
def test_beside_tensor_parallelism(mesh: dict[str, int], attention: str) -> None:
    """Each rank has some tokens and some heads. Ulysses gives it fewer of these heads, for all tokens."""
    model, data = built(llama), batches(3)
    run = split_run(model, data, "zero1", mesh, sequence={"attention": attention}, loss_of=own_loss)
    twin = whole_run(model, data, loss_of=own_loss)
    run.grads, twin.grads = [], []  # on a rank those of its part; the norm and the updates cover all
    assert_alike(run, twin)
