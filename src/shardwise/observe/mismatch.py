"""How far the probabilities of a sampler are from the trainer's, for the tokens that it has sampled.

Policies are trained on what another engine has sampled, with other kernels, another precision, or weights of an earlier
step. Importance ratios then are not 1 where they should be, and training drifts or collapses before a loss shows it.

The divergence of the sampler q from the trainer p is estimated from q's tokens by `r - 1 - log r`, r = p/q, which has
no bias, and is never negative (J. Schulman, "Approximating KL Divergence", 2020).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import nn

from shardwise.comm import World
from shardwise.errors import ConfigError
from shardwise.observe.layer_outputs import (
    Comparison,
    LayerDistance,
    call,
    distances,
    is_hidden,
    modules_of,
    parting,
    watched,
)
from shardwise.system.module_modes import in_evaluation

Tensor = torch.Tensor
_MOST = 80.0
"""Differences of log-probabilities beyond this are counted as this: exp would overflow."""


@dataclass(frozen=True)
class Mismatch:
    """Over all sampled tokens that count, of all ranks."""

    num_tokens: int
    kl: float
    """The mean divergence per token, in nats."""
    mean_difference: float
    """Of the trainer's log-probability minus the sampler's."""
    largest_ratio: float
    """The largest of p/q and q/p."""
    rank: int
    row: int
    position: int
    """The rank, and in its samples the row and the token, where the ratio is largest."""
    steps_behind: int = 0
    """How many steps older the sampler's weights are, if it was said."""
    layers: tuple[LayerDistance, ...] = ()
    """How far apart the outputs of layers are, in their order, if the sampler's were given."""
    parts_at: int | None = None
    """The number in `layers` of the one where they part: behind it the distance is the largest multiple of that before
    it, and more than four times. `None` if it grows from layer to layer as rounding does."""

    def __str__(self) -> str:
        behind = f", with weights of {self.steps_behind} steps before" if self.steps_behind else ""
        return (
            f"KL {self.kl:.3g} nats a token over {self.num_tokens} tokens{behind}; largest ratio "
            f"{self.largest_ratio:.3g} (rank {self.rank}, row {self.row}, token {self.position}){self._where()}"
        )

    def _where(self) -> str:
        if not self.layers:
            return ""
        if self.parts_at is None:
            return f"; layers part nowhere, by at most {max(layer.distance for layer in self.layers):.2g} of an output"
        layer = self.layers[self.parts_at]
        before = f"{self.layers[self.parts_at - 1].distance:.2g} before it, " if self.parts_at else ""
        return f"; they part at {layer.name}: {before}{layer.distance:.2g} of its output behind it"


@dataclass
class Totals:
    """What one rank has found."""

    num_tokens: int = 0
    kl: float = 0.0
    difference: float = 0.0
    largest: float = 0.0
    row: int = 0
    position: int = 0
    layers: dict[str, list[float]] = field(default_factory=dict)
    """See `Comparison.sums`."""
    problem: str = ""
    """Of a layer that cannot be compared."""

    def add(self, trainer: Tensor, sampler: Tensor, counted: Tensor, first_row: int) -> None:
        """Count `[rows, tokens]` log-probabilities of the same tokens where `counted` is true."""
        apart = torch.where(counted, trainer.double() - sampler.double(), 0.0).clamp(-_MOST, _MOST)
        self.num_tokens += int(counted.sum())
        self.kl += float((apart.expm1() - apart).sum())
        self.difference += float(apart.sum())
        largest = apart.abs().max() if apart.numel() else apart.new_zeros(())
        if largest > self.largest:
            place = int(apart.abs().argmax())
            self.largest = float(largest)
            self.row, self.position = first_row + place // apart.shape[1], place % apart.shape[1]


@dataclass(frozen=True)
class Sampling:
    """How the sampler's log-probabilities were made of its logits, and how many rows are computed at a time."""

    rows: int = 8
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.rows < 1 or self.top_k < 0 or not self.temperature > 0 or not 0 < self.top_p <= 1:
            raise ConfigError(
                f"mismatch(rows={self.rows}, temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p}): "
                f"rows is at least 1, temperature above 0, top_k 0 (all) or more, top_p above 0 and at most 1."
            )


def most_calls(world: World, samples: Mapping[str, Tensor], sampling: Sampling) -> int:
    """How often the rank with the most samples calls the model. All ranks call."""
    own = -(-len(samples["input_ids"]) // sampling.rows)
    return max(int(message) for message in world.exchange(str(own).encode(), "calls of mismatch"))


def totals_of(
    model: nn.Module,
    samples: Mapping[str, Tensor],
    sampling: Sampling,
    layers: Mapping[str, Tensor],
    num_calls: int,
) -> Totals:
    """What this rank's samples show; see `Engine.mismatch`. The model's parameters are at hand. It is called
    `num_calls` times, with one token where no samples are left: experts of this rank compute for others."""
    tokens, mask = samples["input_ids"], samples.get("attention_mask")
    comparison = Comparison(layers, mask)
    totals = Totals(layers=comparison.sums)
    with in_evaluation(model), torch.no_grad():
        with watched(modules_of(model, list(layers)), comparison.add):
            for first in range(0, len(tokens), sampling.rows):
                some = slice(first, first + sampling.rows)
                comparison.begin_call(first)
                logits = call(model, tokens, mask, some).logits
                trainer = torch.zeros_like(samples["log_probs"][some], dtype=torch.float32)
                for row, of_row in enumerate(logits):  # row by row: in fp32 logits are the largest tensor there is
                    trainer[row, 1:] = log_probs(of_row[:-1], tokens[first + row, 1:], sampling)
                counted = samples["counted"][some].bool().clone()
                counted[:, :1] = False  # nothing predicts the first
                totals.add(trainer, samples["log_probs"][some], counted, first)
        for _ in range(-(-len(tokens) // sampling.rows), num_calls):
            model(input_ids=tokens.new_zeros(1, 1))
    totals.problem = comparison.problem
    return totals


def check_samples(samples: Mapping[str, Tensor], layers: Mapping[str, Tensor]) -> None:
    missing = {"input_ids", "log_probs", "counted"} - set(samples)
    if missing:
        raise ConfigError(f"mismatch() needs {', '.join(sorted(missing))} among its samples, beside {sorted(samples)}.")
    shapes = {name: list(one.shape) for name, one in samples.items()}
    if samples["input_ids"].dim() != 2 or any(shape != shapes["input_ids"] for shape in shapes.values()):
        raise ConfigError(f"mismatch() takes samples that all have the shape [rows, tokens], and got {shapes}.")
    for name, one in layers.items():
        if not is_hidden(one, samples["input_ids"]):
            raise ConfigError(
                f"mismatch(layers=...) takes what layers gave for the samples, [rows, tokens, features] for tokens "
                f"{shapes['input_ids']}, and got {one.dtype} {list(one.shape)} of {name}."
            )


def of_all_ranks(world: World, share: int, own: Totals, steps_behind: int, names: Sequence[str]) -> Mismatch:
    """All ranks call, with the same names of layers. `share` is the part of the samples that this rank has; ranks with
    the same one count once, and have its layers together, each stage of a pipeline its own."""
    found: dict[int, tuple[int, Totals]] = {}
    messages = world.exchange(json.dumps([share, list(names), asdict(own)]).encode(), "mismatch")
    told = [json.loads(message) for message in messages]
    for rank, (place, others, totals) in enumerate(told):
        if others != list(names):
            raise ConfigError(
                f"mismatch() has layers {', '.join(names) or 'none'} on rank {world.rank}, and "
                f"{', '.join(others) or 'none'} on rank {rank}. Give every rank the same ones, in the same order."
            )
        if totals["problem"]:
            raise ConfigError(totals["problem"])
        _, first = found.setdefault(place, (rank, Totals(**totals)))
        first.layers = totals["layers"] | first.layers
    return merged(dict(found.values()), steps_behind, names)


def merged(found: Mapping[int, Totals], steps_behind: int, names: Sequence[str] = ()) -> Mismatch:
    """`found`: by rank, of those with samples of their own."""
    num_tokens = sum(one.num_tokens for one in found.values())
    if not num_tokens:
        raise ConfigError("mismatch() got no token that counts, on any rank: `counted` is false everywhere.")
    rank = max(found, key=lambda rank: found[rank].largest)
    worst = found[rank]
    layers = distances(names, [one.layers for one in found.values()])
    return Mismatch(
        num_tokens,
        sum(one.kl for one in found.values()) / num_tokens,
        sum(one.difference for one in found.values()) / num_tokens,
        math.exp(worst.largest),
        rank,
        worst.row,
        worst.position,
        steps_behind,
        layers,
        parting(layers),
    )


def log_probs(logits: Tensor, tokens: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities of `tokens` (any shape) by `logits` (with the vocabulary as a further dimension), as a sampler
    has them: among what `top_k` and then `top_p` keep, divided by the sum of what is kept. A token that they do not
    keep has minus infinity."""
    logits = logits.float() / sampling.temperature
    if sampling.top_k:
        least = logits.topk(min(sampling.top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if sampling.top_p < 1.0:
        ordered, places = logits.sort(descending=True)
        probs = ordered.softmax(-1)
        is_beyond = probs.cumsum(-1) - probs >= sampling.top_p
        logits = logits.masked_fill(torch.zeros_like(is_beyond).scatter(-1, places, is_beyond), -math.inf)
    return logits.gather(-1, tokens[..., None]).squeeze(-1) - logits.logsumexp(-1)
