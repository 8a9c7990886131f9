"""The task, and a policy for it: words of letters are to be written backwards.

    c a b d =  ->  d b a c

Whether an answer is right can be checked, and nobody shows one: the reward is the share of letters in their place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 the name all of PyTorch has for it

LETTERS, LENGTH = 8, 4
EQUALS = LETTERS
PROMPT, TOKENS = LENGTH + 1, 2 * LENGTH + 1
"""Tokens of a prompt, and of a row: prompt and answer."""
WIDTH, HEADS, LAYERS = 64, 4, 2


def prompts(num_rows: int, draw: torch.Generator) -> Tensor:
    """int64 `[num_rows, PROMPT]`."""
    words = torch.randint(LETTERS, (num_rows, LENGTH), generator=draw)
    return F.pad(words, (0, 1), value=EQUALS)


def rewards(rows: Tensor) -> Tensor:
    """Of `rows` `[rows, TOKENS]`, the share of letters of the answer that are right: `[rows]`, 0 to 1."""
    return (rows[:, PROMPT:] == rows[:, :LENGTH].flip(1)).float().mean(1)


class Output(NamedTuple):
    logits: Tensor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Policy(nn.Module):
    """Called as models of transformers are: `model(input_ids=...)` has `logits` `[rows, tokens, LETTERS + 1]`."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(LETTERS + 1, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LETTERS + 1)

    def forward(self, input_ids: Tensor) -> Output:
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        return Output(self.head(self.norm(x)))


def log_probs(model: nn.Module, rows: Tensor) -> Tensor:
    """fp32 `[rows, TOKENS]`: of each token given those before it; 0 for the first."""
    logits = model(input_ids=rows).logits[:, :-1].float()
    of_tokens = logits.log_softmax(-1).gather(-1, rows[:, 1:, None]).squeeze(-1)
    return F.pad(of_tokens, (1, 0))


@torch.no_grad()
def answers(model: nn.Module, rows: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample an answer to each of `rows` `[rows, PROMPT]`: rows `[rows, TOKENS]`, and log-probabilities of the same
    shape, which are 0 for the prompts."""
    chosen = []
    for _ in range(LENGTH):
        of_next = model(input_ids=rows).logits[:, -1].float().log_softmax(-1)
        token = torch.multinomial(of_next.exp(), 1, generator=draw)
        chosen.append(of_next.gather(-1, token))
        rows = torch.cat([rows, token], 1)
    return rows, F.pad(torch.cat(chosen, 1), (PROMPT, 0))
