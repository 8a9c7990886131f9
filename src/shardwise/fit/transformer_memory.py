"""What a training step of a transformer holds on its fullest rank, from shapes. Pure.

[Note: where these figures come from] Parameters, gradients and states follow from the table, and activations from the
operations. What follows from neither was chosen on runs of LLaMA 13B on A100 (Aleph-Alpha, arXiv:2311.05610), of which
it is known whether they ran: `SCORE_COPIES`, the part that is lost to fragmentation, and that the logits and the
working memory of a layer add up. `USABLE` is a margin: with it none of the published runs that we know is said to fit
and did not. What that costs is that some which ran are said not to.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.fit.transformer_step import Job, stages_of
from shardwise.plan.placement import WIDTH

SCORE_COPIES = 4
"""Of attention scores while one layer that keeps them goes backward."""
FRAGMENTATION = 0.05
"""Of activations, lost between blocks of the allocator."""
CONTEXT_BYTES = 1.5 * 2**30
"""Context, libraries' kernels and workspaces, and buffers of a few communicators."""
USABLE = 0.90


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank at its peak."""

    states: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        moving = (self.activations + self.working) * (1 + FRAGMENTATION)
        return self.states + moving + CONTEXT_BYTES


def peak_bytes(job: Job) -> RankBytes:
    """Of the rank of the pipeline that holds most."""
    return max((_of_rank(job, place) for place in range(job.pp)), key=lambda one: one.total)


def fits(peak: float, memory_bytes: float) -> bool:
    """Whether a peak fits with a margin."""
    return peak <= USABLE * memory_bytes


def _of_rank(job: Job, place: int) -> RankBytes:
    model, how, layers = job.model, job.how, job.layers
    mine = [stage for number, stage in enumerate(stages_of(job)) if number % job.pp == place]
    has_head, has_embedding = any(one.has_head for one in mine), any(one.has_embedding for one in mine)
    further = model.predicts_more if has_head else 0
    num_experts = sum(one.num_expert_layers for one in mine) + (further if model.experts is not None else 0)
    num_layers = sum(one.num_layers for one in mine) + further
    shared = (num_layers - num_experts) * layers.dense_params(with_experts=False)
    shared += num_experts * layers.dense_params(with_experts=True)
    shared += layers.vocab_params() * (has_embedding + (has_head and not (model.tied and has_embedding)))
    replicas = job.dp * how.cp
    states = _state_bytes(job, shared, replicas)
    states += _state_bytes(
        job, num_experts * layers.expert_params(), max(1, replicas * how.tp // (how.ep * how.expert_tp))
    )
    if job.zero == 3:  # two units are whole at once, of parameters and of gradients
        largest = max(layers.dense_params(with_experts=num_experts > 0), layers.vocab_params())
        states += 2 * 2 * how.width * largest
    kept = num_experts * layers.saved_bytes(with_experts=True)
    kept += (num_layers - num_experts) * layers.saved_bytes()
    working = layers.working_bytes(SCORE_COPIES)
    if has_head:
        working += layers.logits_bytes * (1 + further)
    return RankBytes(states, kept * _num_in_flight(job, place), working)


def _state_bytes(job: Job, numel: float, replicas: int) -> float:
    """Parameters, gradients, and master weights and two moments in fp32."""
    width = job.how.width
    param = 0.0 if job.zero == 3 and job.rests_wide else width / (replicas if job.zero == 3 else 1)
    grad = WIDTH[job.table.grad.dtype] / (replicas if job.zero >= 2 else 1)
    states = 12 / (replicas if job.zero >= 1 else 1)
    if job.offloads:
        grad, states = width / replicas, 0.0
    return numel * (param + grad + states)


def _num_in_flight(job: Job, place: int) -> float:
    """Micro-batches whose activations rank `place` of a pipeline holds at once, under 1F1B, interleaved or not."""
    if job.num_chunks == 1:
        return min(job.num_micro_batches, job.pp - place)
    passes = (job.pp - place - 1) * 2 + (job.num_chunks - 1) * job.pp + 1
    return min(job.num_micro_batches * job.num_chunks, passes) / job.num_chunks
