"""What proximal policy optimization (arXiv:1707.06347) computes, as DeepSpeed-Chat's third step does: for the script
that trains with engines, and for the plain training beside it."""

from __future__ import annotations

import torch

Tensor = torch.Tensor
KL, CLIP_REWARD, CLIP, GAMMA, LAMBDA = 0.1, 5, 0.2, 1.0, 0.95


def log_probs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of each token after the first, given those before it."""
    return logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def end_scores(values: Tensor, tokens: Tensor, prompt_length: int, pad: int) -> Tensor:
    """The value at the last token of each answer."""
    lengths = [
        int(padding[0]) + prompt_length if len(padding := (row[prompt_length:] == pad).nonzero()) else len(row)
        for row in tokens
    ]
    return torch.stack([row[length - 1] for row, length in zip(values, lengths, strict=True)])


def advantages_and_returns(experience: dict[str, Tensor], start: int) -> tuple[Tensor, Tensor, Tensor]:
    """By generalized advantage estimation (arXiv:1506.02438); and the old values, without those after the end."""
    mask = experience["attention_mask"][:, 1:]
    rewards = -KL * (experience["log_probs"] - experience["reference_log_probs"])
    values = experience["values"].clone()
    ends = start + mask[:, start:].sum(1) + 1
    for row, end in enumerate(ends):
        rewards[row, start:end][-1] += experience["rewards"][row].clamp(-CLIP_REWARD, CLIP_REWARD)
        rewards[row, end:] = 0
        values[row, end:] = 0
    length, last, found = rewards.shape[1], torch.zeros(len(rewards)), []
    for at in reversed(range(start, length)):
        following = values[:, at + 1] if at < length - 1 else 0.0
        last = rewards[:, at] + GAMMA * following - values[:, at] + GAMMA * LAMBDA * last
        found.append(last)
    advantages = torch.stack(found[::-1], 1)
    return advantages, advantages + values[:, start:], values


def actor_loss_of(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    ratio = ((log_probs - old) * mask).exp()
    worst = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
    return (worst * mask).sum() / mask.sum()


def critic_loss_of(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    clipped = values.clamp(old - CLIP, old + CLIP)
    worst = torch.max((values - returns) ** 2, (clipped - returns) ** 2)
    return 0.5 * (worst * mask).sum() / mask.sum()
