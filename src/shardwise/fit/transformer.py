"""What a decoder-only transformer computes, holds and sends, from its shapes alone. Pure.

GPT (LayerNorm, GELU) and LLaMA (RMSNorm, SwiGLU, grouped queries), dense or with experts, on one rank of tensor
parallelism with or without sequence parallelism (Korthikanti et al., arXiv:2205.05198), of context parallelism, and of
expert parallelism. The operations are those that eager kernels of Megatron and FSDP launch; for a model that exists,
rehearsal counts its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Literal

from shardwise.fit.operations import Operation, Operations, UnitWork, memory_pass, product
from shardwise.plan.placement import WIDTH, Dtype

Recompute = Literal["none", "selective", "full"]
Attention = Literal["plain", "fused", "flash1", "flash1_of_3", "flash2", "flash"]


SLOWER = {"flash1": 1.7, "flash2": 1.5, "flash1_of_3": 1.7 * 1.5}
"""How many times as long earlier versions of FlashAttention take as the one for the device: the first beside the second
(arXiv:2307.08691, section 4.1), the second beside the third on Hopper, 1.5 to 2 times (arXiv:2407.08608), and so the
first beside the third."""


@dataclass(frozen=True)
class Experts:
    """`count` experts of inner width `ffn`, of which each token uses `active`, and `shared_ffn` that all tokens use;
    the first `dense_layers` layers have none."""

    count: int
    active: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0


@dataclass(frozen=True)
class Transformer:
    """The shapes of a model. `gated`: SwiGLU, with three matrices instead of two; `tied`: the head is the embedding's
    transpose. `kv_rank` and `q_rank`: widths of the latents of multi-head latent attention (DeepSeek-V2,
    arXiv:2405.04434), 0 without. `window`: how many positions every other layer attends to, 0 for all (gpt-oss,
    arXiv:2508.10925). `predicts_more`: modules that each predict one token further, with a layer and the head of their
    own (DeepSeek-V3, arXiv:2412.19437, section 2.2)."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    ffn: int
    vocab: int
    seq_len: int
    head_size: int = 0
    gated: bool = False
    tied: bool = True
    causal: bool = True
    learned_positions: bool = True
    rotary: bool = False
    experts: Experts | None = None
    q_rank: int = 0
    kv_rank: int = 0
    window: int = 0
    predicts_more: int = 0

    @cached_property
    def size_of_head(self) -> int:
        return self.head_size or self.hidden // self.num_heads

    @cached_property
    def rope_size(self) -> int:
        """Of the key that all heads share beside a latent, and of the same part of each query: it has the positions.
        64 in all models of DeepSeek, half of the rest."""
        return self.size_of_head // 2 if self.kv_rank else 0

    @cached_property
    def size_of_key(self) -> int:
        return self.size_of_head + self.rope_size

    @cached_property
    def query_width(self) -> int:
        return self.num_heads * self.size_of_head

    @cached_property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.size_of_head

    @property
    def num_expert_layers(self) -> int:
        return 0 if self.experts is None else self.num_layers - self.experts.dense_layers

    @property
    def attention_params(self) -> int:
        h, q, kv = self.hidden, self.query_width, self.kv_width
        if self.kv_rank:
            down = h * (self.q_rank or 0) + h * (self.kv_rank + self.rope_size)
            return down + (self.q_rank or h) * self.num_heads * self.size_of_key + self.kv_rank * 2 * q + q * h
        return h * (q + 2 * kv) + q * h

    def mlp_params(self, width: int) -> int:
        return (3 if self.gated else 2) * self.hidden * width

    @property
    def dense_layer_params(self) -> int:
        return self.attention_params + self.mlp_params(self.ffn) + 4 * self.hidden

    @property
    def vocab_params(self) -> int:
        return self.vocab * self.hidden

    @property
    def num_params(self) -> int:
        experts, dense = self.experts, self.dense_layer_params
        layers = (self.num_layers - self.num_expert_layers) * dense
        if experts is not None:
            inside = experts.count * self.mlp_params(experts.ffn) + self.mlp_params(experts.shared_ffn)
            router = experts.count * self.hidden
            layers += self.num_expert_layers * (self.attention_params + inside + router + 4 * self.hidden)
        positions = self.seq_len * self.hidden if self.learned_positions else 0
        return layers + (1 if self.tied else 2) * self.vocab_params + positions


@dataclass(frozen=True)
class Execution:
    """How one micro-batch of `micro_batch` sequences is computed on one rank.

    - `attention`: `plain` keeps the scores and has a kernel for each of its steps, `fused` has one kernel for scaling,
      masking and softmax; `flash` keeps no scores (arXiv:2205.14135), nor do its earlier versions (see `SLOWER`).
    - `passes`: how many times as often element-wise operations go over memory as where chains of them are one kernel;
      `fused_norm`: whether a norm is one kernel; `dropout`: whether there is dropout, whose masks are kept.
    - `product_dtype`: that of matrix products where it is narrower (fp8); `casts_weights`: the share of micro-batches
      in which weights are converted to it, where what was converted is kept for a step.
    - `wide_exchanges`: tensor parallelism sums in fp32. `expert_axis`: the axes along which tokens go to experts;
      `expert_tp`: the ranks that split each expert. `sends_once`: a token is sent once to each rank that has experts of
      its choice, and copied for each of them there (DeepEP), instead of once for each expert.
    - `overlaps`: axes along which messages are sent beside computation: `tp` in pieces beside the products that need
      them (Wang et al., doi:10.1145/3567955.3567959), `sp` beside attention (Liu et al., arXiv:2310.01889), `ep` while
      another micro-batch is computed (DeepSeek-V3, arXiv:2412.19437, section 3.2.1).
    - `whole_logits`: every rank has the logits of all words; `logit_bytes`: what one of them takes with its gradient.
    """

    micro_batch: int
    dtype: Dtype = "bf16"
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    ep: int = 1
    expert_axis: str = "ep"
    expert_tp: int = 1
    recompute: Recompute = "none"
    attention: Attention = "flash"
    passes: float = 1.0
    fused_norm: bool = True
    dropout: bool = False
    wide_exchanges: bool = False
    whole_logits: bool = False
    logit_bytes: float = 10.0
    product_dtype: str = ""
    casts_weights: float = 1.0
    sends_once: bool = False
    overlaps: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        return WIDTH[self.dtype]

    @property
    def keeps_no_scores(self) -> bool:
        return self.attention.startswith("flash")


class Layers:
    """Work, parameters and bytes of the parts of `model` on one rank under `how`."""

    def __init__(self, model: Transformer, how: Execution) -> None:
        self.model, self.how = model, how
        self.tokens = how.micro_batch * model.seq_len // how.cp
        self.width = how.width
        self._heads = max(1, model.num_heads // how.tp)
        self._mixed = model.query_width // how.tp
        self._values = max(model.size_of_head, model.kv_width // how.tp)
        """Widths of what attention mixes and of its result; queries and keys are wider with latents."""
        self._queries = self._mixed * model.size_of_key // model.size_of_head
        self._keys = self._values * model.size_of_key // model.size_of_head

    # -- parameters of one rank ---------------------------------------------------------------------------

    def dense_params(self, *, with_experts: bool) -> int:
        """Elements of one layer that all ranks along `ep` share."""
        model, experts = self.model, self.model.experts if with_experts else None
        width, router = (model.ffn, 0) if experts is None else (experts.shared_ffn, experts.count * model.hidden)
        return (model.attention_params + model.mlp_params(width)) // self.how.tp + router + 4 * model.hidden

    def expert_params(self) -> int:
        """Elements of the experts of one layer that lie on this rank."""
        experts = self.model.experts
        if experts is None:
            return 0
        return experts.count * self.model.mlp_params(experts.ffn) // (self.how.ep * self.how.expert_tp)

    def vocab_params(self) -> int:
        return self.model.vocab_params // self.how.tp

    @property
    def row_bytes(self) -> int:
        """Bytes of one hidden state of this rank's tokens, as stages of a pipeline send it."""
        return self._row_tokens * self.model.hidden * self.width

    # -- work ---------------------------------------------------------------------------------------------

    def layer(self, *, with_experts: bool = False) -> UnitWork:
        """One transformer layer."""
        how = self.how
        core_forward, core_backward = self._attention_core()
        before, before_back = self._attention_inputs()
        after, after_back = self._attention_output()
        mlp, mlp_back = self._experts() if with_experts else self._mlp(self.model.ffn)
        forward = (*before, *core_forward, *after, *mlp)
        backward = (*mlp_back, *after_back, *core_backward, *before_back)
        recompute: Operations = ()
        if how.recompute == "full":
            recompute = forward
        elif how.recompute == "selective" and not how.keeps_no_scores:
            recompute = core_forward
        return UnitWork(forward, backward, (), recompute)

    def embedding(self) -> UnitWork:
        """The look-up, whose gradient is as large as the table."""
        rows = self.tokens * self.model.hidden * self.width
        table = self.vocab_params() * self.width
        exchange = self._reduce() if self.how.tp > 1 else ()
        return UnitWork((memory_pass(4 * rows, 4), *exchange), (memory_pass(2 * rows + table, 3),))

    def head(self) -> UnitWork:
        """The last norm, the logits and the cross-entropy, which is computed in fp32."""
        model, how = self.model, self.how
        logits = self.tokens * (model.vocab // how.tp)
        forward = (
            self._norm(),
            *self._gathered(),
            product(self.tokens, model.vocab // how.tp, model.hidden, how.dtype, self.width),
            memory_pass(logits * (self.width + 4 + 4 * 4), 8),
        )
        backward = (
            memory_pass(logits * (4 + 4 + self.width), 4),
            product(self.tokens, model.hidden, model.vocab // how.tp, how.dtype, self.width),
            product(model.vocab // how.tp, model.hidden, self.tokens, how.dtype, self.width),
            *self._reduced_back(),
            self._norm(backward=True),
        )
        return UnitWork(forward, backward)

    def predicting_more(self) -> UnitWork:
        """A module that predicts one token further: hidden state and embedding are normalized and joined by a product,
        a layer, and the head."""
        joined = (self._row_tokens, self.model.hidden, 2 * self.model.hidden)
        norms, norms_back = (self._norm(),) * 2, (self._norm(backward=True),) * 2
        joining = UnitWork(norms + self._matmul(*joined), self._product_backward(*joined) + norms_back)
        return joining + self.layer(with_experts=self.model.experts is not None) + self.head()

    @property
    def latent_width(self) -> int:
        """Of what a token has before its queries, keys and values are made of it; 0 without latents."""
        return self.model.q_rank + self.model.kv_rank + self.model.rope_size

    @property
    def _projections(self) -> tuple[tuple[int, int], ...]:
        """Width of the result and of the input of each product that makes queries, keys and values."""
        model, q_rank = self.model, self.model.q_rank
        if not model.kv_rank:
            return ((self._queries + self._keys + self._values, model.hidden),)
        straight = 0 if q_rank else self._queries
        of_queries = ((self._queries, q_rank),) if q_rank else ()
        return (self.latent_width + straight, model.hidden), *of_queries, (2 * self._mixed, model.kv_rank)

    def _attention_inputs(self) -> tuple[Operations, Operations]:
        tokens, projections = self.tokens, self._projections
        width = self._queries + self._keys + self._values + self.latent_width
        moved = self._pass(2 * width * tokens * self.width, 2)
        products = [self._matmul(tokens, *one) for one in projections]
        back = [self._product_backward(tokens, *one) for one in reversed(projections)]
        forward = (self._norm(), *self._gathered(), *chain(*products), moved)
        backward = (moved, *chain(*back), *self._reduced_back(), self._norm(backward=True))
        return forward, backward

    def _attention_core(self) -> tuple[Operations, Operations]:
        model, how = self.model, self.how
        queries, keys, size = model.seq_len // how.cp, model.seq_len, model.size_of_key
        batch = how.micro_batch * self._heads
        exchange: Operations = ()
        if how.cp > 1:
            exchanged = (self._keys + self._values) * self.tokens * how.cp * self.width
            exchange = (self._collective("all_gather", exchanged, "sp"),)
        if how.keeps_no_scores:
            slower = SLOWER.get(how.attention, 1.0)
            flops = slower * 2.0 * batch * self._pairs(queries, keys) * (size + model.size_of_head)
            read = (self._queries + self._keys + self._values + self._mixed) * self.tokens * self.width
            shape = (batch, queries, keys, size)
            forward = (*exchange, Operation("attention", shape, how.dtype, flops, read, 1))
            backward = (*exchange, Operation("attention", shape, how.dtype, 2.5 * flops, 2 * read, 3))
            return forward, backward
        scores = batch * queries * keys * self.width
        fits_fused = how.attention == "fused" and batch % 4 == 0 and keys <= 4096
        softmax = memory_pass((2 if fits_fused else 8) * scores, 1 if fits_fused else 5)
        drop = (memory_pass(2.5 * scores, 1),) if how.dropout else ()
        softmax_back = memory_pass((3 if fits_fused else 8) * scores, 1 if fits_fused else 5)
        one = self._scores(queries, keys, size, batch)
        forward = (*exchange, one, softmax, *drop, self._scores(queries, size, keys, batch))
        backward = (
            self._scores(queries, keys, size, batch),
            self._scores(keys, size, queries, batch),
            *drop,
            softmax_back,
            self._scores(queries, size, keys, batch),
            self._scores(keys, size, queries, batch),
        )
        return forward, backward

    def _pairs(self, queries: int, keys: int) -> float:
        """Of a query and a key that are multiplied, for one head, in a layer on average."""
        model = self.model
        whole = queries * keys / (2 if model.causal else 1)
        return (whole + min(whole, queries * model.window)) / 2 if model.window else whole

    def _attention_output(self) -> tuple[Operations, Operations]:
        model, tokens = self.model, self.tokens
        forward = (*self._matmul(tokens, model.hidden, self._mixed), *self._reduce(), self._residual())
        backward = (
            self._residual(backward=True),
            *self._gathered(),
            *self._product_backward(tokens, model.hidden, self._mixed),
        )
        return forward, backward

    def _mlp(self, ffn: int) -> tuple[Operations, Operations]:
        model, how, tokens = self.model, self.how, self.tokens
        inner, halves = ffn // how.tp, 2 if model.gated else 1
        act = self._pass((halves + 1) * inner * tokens * self.width)
        act_back = self._pass((2 * halves + 1) * inner * tokens * self.width, 2)
        up, down = (tokens, halves * inner, model.hidden), (tokens, model.hidden, inner)
        forward = (
            self._norm(),
            *self._gathered(),
            *self._matmul(*up),
            act,
            *self._matmul(*down),
            *self._reduce(),
            self._residual(),
        )
        backward = (
            self._residual(backward=True),
            *self._gathered(),
            *self._product_backward(*down),
            act_back,
            *self._product_backward(*up),
            *self._reduced_back(),
            self._norm(backward=True),
        )
        return forward, backward

    def _experts(self) -> tuple[Operations, Operations]:
        """Router, tokens to their experts and back, and the experts' products; balanced. Ranks that split an expert
        compute as much as if each had a part of the tokens."""
        model, how, experts = self.model, self.how, self.model.experts
        assert experts is not None
        local = max(1, experts.count // how.ep)
        tokens = self.tokens // (how.tp if how.sequence_parallel else 1)
        routed = tokens * experts.active
        each = max(1, routed // local)
        halves = 2 if model.gated else 1
        rows = routed * model.hidden * self.width
        sent = rows * self._share_sent if how.sends_once else rows
        there = (self._collective("all_to_all", sent, how.expert_axis),) if how.ep > 1 else ()
        act = memory_pass((halves + 1) * routed * experts.ffn * self.width, 1)
        act_back = memory_pass((2 * halves + 1) * routed * experts.ffn * self.width, 2)
        permute = memory_pass(2 * rows, 3)
        pack = () if how.sends_once and how.ep > 1 else (permute,)
        router = (self._product(tokens, experts.count, model.hidden), memory_pass(tokens * experts.count * 24, 10))
        up, down = (each, halves * experts.ffn, model.hidden, local), (each, model.hidden, experts.ffn, local)
        shared, shared_back = self._mlp(experts.shared_ffn) if experts.shared_ffn else ((), ())
        forward = (
            self._norm(),
            *router,
            *pack,
            *there,
            permute,
            *self._matmul(*up),
            act,
            *self._matmul(*down),
            permute,
            *there,
            *pack,
            self._residual(),
            *shared,
        )
        backward = (
            *shared_back,
            self._residual(backward=True),
            *pack,
            *there,
            permute,
            *self._product_backward(*down),
            act_back,
            *self._product_backward(*up),
            permute,
            *there,
            *pack,
            *router,
            self._norm(backward=True),
        )
        return forward, backward

    @property
    def _share_sent(self) -> float:
        """Of a token's choices, those that are the first on their rank, with experts drawn evenly."""
        assert self.model.experts is not None
        ranks, active = self.how.ep, self.model.experts.active
        return ranks * (1 - (1 - 1 / ranks) ** active) / active

    # -- memory -------------------------------------------------------------------------------------------

    def saved_bytes(self, *, with_experts: bool = False) -> float:
        """What one layer keeps of one micro-batch for its backward: its input, if it is recomputed whole."""
        how = self.how
        return self.row_bytes if how.recompute == "full" else self.all_saved_bytes(with_experts=with_experts)

    def all_saved_bytes(self, *, with_experts: bool = False) -> float:
        """What the operations of one layer keep for their backwards (Korthikanti et al., arXiv:2205.05198, section 4.1,
        for GPT; counted alike for gated layers and experts)."""
        model, how, tokens, width = self.model, self.how, self.tokens, self.width
        rows, masks = self.row_bytes, 0.5 if how.dropout else 0.0
        if how.recompute == "selective" and how.keeps_no_scores:  # outputs of products and of attention
            inner = model.experts.ffn * model.experts.active if with_experts and model.experts else model.ffn // how.tp
            attention = self._queries + self._keys + self._values + self._mixed + self.latent_width
            return 2 * rows + (attention + inner * (2 if model.gated else 1)) * tokens * width
        norms = 2 * rows * (2 if how.fused_norm else 5)  # unfused in fp32: the input, its normalized copies
        residuals = 2 * masks * rows
        heads = (self._queries + self._keys + self._values + self.latent_width) * tokens * width
        moved = (self._queries + self._keys) * tokens * width if model.rotary else 0
        core: float = self._mixed * tokens * width
        if how.recompute != "selective":
            core += self._scores_saved
        return norms + residuals + heads + moved + core + self._mlp_saved(with_experts=with_experts)

    @property
    def _score_bytes(self) -> float:
        return (
            self.how.micro_batch * self._heads * (self.model.seq_len // self.how.cp) * self.model.seq_len * self.width
        )

    @property
    def _scores_saved(self) -> float:
        """Attention scores that are kept: before and after the softmax, in fp32 where that is not fused, and masks."""
        if self.how.keeps_no_scores:
            return 0.0
        return self._score_bytes * ((2 if self.how.attention == "fused" else 3) + (0.5 if self.how.dropout else 0))

    def _mlp_saved(self, *, with_experts: bool) -> float:
        model, how, experts = self.model, self.how, self.model.experts
        halves = 4 if model.gated else 2  # gate, its activation, the other half, their product
        if not with_experts or experts is None:
            return halves * (model.ffn // how.tp) * self.tokens * self.width
        routed = self.tokens // (how.tp if how.sequence_parallel else 1) * experts.active
        inside = routed * (halves * experts.ffn + 2 * model.hidden) * self.width
        return inside + halves * (experts.shared_ffn // how.tp) * self.tokens * self.width

    def working_bytes(self, score_copies: float) -> float:
        """The most that a backward of one layer holds at once beside what was saved: what is computed again, or
        gradients of half of what was saved, and `score_copies` of attention scores where these are kept."""
        how = self.how
        saved = self.all_saved_bytes() - (0.0 if how.recompute == "selective" else self._scores_saved)
        working = saved * (1.0 if how.recompute == "full" else 0.5)
        if not how.keeps_no_scores:
            working += score_copies * self._score_bytes
        return working

    @property
    def logits_bytes(self) -> float:
        """The logits and what the loss makes of them."""
        return self.how.logit_bytes * self.tokens * (self.model.vocab // (1 if self.how.whole_logits else self.how.tp))

    # -- pieces -------------------------------------------------------------------------------------------

    @property
    def _row_tokens(self) -> int:
        """Tokens of this rank between the parts that tensor parallelism splits."""
        return self.tokens // (self.how.tp if self.how.sequence_parallel else 1)

    def _norm(self, *, backward: bool = False) -> Operation:
        once = 2 * self._row_tokens * self.model.hidden * self.width
        if self.how.fused_norm:
            return self._pass(once * (2 if backward else 1), 2 if backward else 1)
        return self._pass(once * (8 if backward else 5), 10 if backward else 6)

    def _residual(self, *, backward: bool = False) -> Operation:
        once = self._row_tokens * self.model.hidden * self.width
        masks = 1 if self.how.dropout else 0
        return self._pass(once * ((2 if backward else 3) + masks))

    def _pass(self, num_bytes: float, kernels: int = 1) -> Operation:
        return memory_pass(num_bytes * self.how.passes, max(1, round(kernels * self.how.passes)))

    def _product(self, m: int, n: int, k: int, batch: int = 1) -> Operation:
        return product(m, n, k, self.how.product_dtype or self.how.dtype, self.width, batch)

    def _scores(self, m: int, n: int, k: int, batch: int) -> Operation:
        """A product of attention, which is never narrowed."""
        return product(m, n, k, self.how.dtype, self.width, batch)

    def _matmul(self, m: int, n: int, k: int, batch: int = 1) -> Operations:
        """A product with weights: where it is computed in a narrower dtype, what it reads is converted first, as it is
        and transposed for the backward."""
        one = self._product(m, n, k, batch)
        if not self.how.product_dtype:
            return (one,)
        share = self.how.casts_weights
        return (memory_pass(batch * (m + share * n) * k * (self.width + 2), 1 + round(share)), one)

    def _product_backward(self, m: int, n: int, k: int, batch: int = 1) -> Operations:
        """The gradients of the input and of the weights."""
        narrowed = (memory_pass(batch * m * n * (self.width + 2), 1),) if self.how.product_dtype else ()
        return (*narrowed, self._product(m, k, n, batch), self._product(n, k, m, batch))

    def _collective(self, kind: str, num_bytes: float, axis: str) -> Operation:
        how = self.how
        overlaps = ("ep" if kind == "all_to_all" else axis) in how.overlaps
        return Operation(kind, dtype=how.dtype, num_bytes=num_bytes, axis=axis, overlaps=overlaps)  # type: ignore[arg-type]

    def _of_rows(self, kind: str) -> Operations:
        if self.how.tp == 1:
            return ()
        width = 4 if self.how.wide_exchanges else self.width
        num_bytes = self.tokens * self.model.hidden * width
        return (self._collective(kind, num_bytes, "tp"),)

    def _gathered(self) -> Operations:
        """With sequence parallelism, before what tensor parallelism splits."""
        return self._of_rows("all_gather") if self.how.sequence_parallel else ()

    def _reduce(self) -> Operations:
        return self._of_rows("reduce_scatter" if self.how.sequence_parallel else "all_reduce")

    def _reduced_back(self) -> Operations:
        """The backward's counterpart of `_gathered`. With sequence parallelism inputs are gathered again for the
        gradients of weights (Korthikanti et al., section 4.2.2), beside the product."""
        return self._reduce()
