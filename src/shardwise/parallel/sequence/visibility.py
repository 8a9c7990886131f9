"""Which token attends to which: causal order, windows, documents and padding, tile by tile of a large matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.parallel.sequence.token_layout import Run

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Visibility:
    """What each token may see, by positions in the whole sample.

    `window` is how many tokens are seen under a causal mask, including the token itself. `documents`, int `[batch,
    tokens]`: only tokens with the same number see each other. `kept`, bool `[batch, tokens]`: tokens with False are
    padding, which no token sees, not even itself. A token that sees nothing, such as padding at the start under a
    causal mask, gets zeros, as from torch's `scaled_dot_product_attention`. Its output matters: a language model
    predicts the first token behind the padding from it.
    """

    is_causal: bool = True
    window: int | None = None
    documents: Tensor | None = None
    kept: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether everything, or everything before, is visible."""
        return self.window is None and self.documents is None and self.kept is None

    def sees_nothing(self, queries: Run, keys: Run) -> bool:
        """Whether no query sees any key, by order and window alone."""
        if self.is_causal and keys.start >= queries.stop:
            return True
        return self.window is not None and queries.start - (keys.stop - 1) >= self.window

    def mask(self, queries: Run, keys: Run, device: torch.device) -> Tensor | None:
        """The mask, bool `[1 or batch, 1, queries, keys]`, True where visible; `None` if everything is."""
        needs_causal = self.is_causal and keys.stop - 1 > queries.start
        needs_window = self.window is not None and (queries.stop - 1) - keys.start >= self.window
        if not (needs_causal or needs_window or self.documents is not None or self.kept is not None):
            return None
        at_query = torch.arange(queries.start, queries.stop, device=device)[:, None]
        at_key = torch.arange(keys.start, keys.stop, device=device)[None, :]
        seen = torch.ones(1, queries.numel, keys.numel, dtype=torch.bool, device=device)
        if needs_causal:
            seen = seen & (at_query >= at_key)
        if needs_window and self.window is not None:
            seen = seen & (at_query - at_key < self.window)
        if self.documents is not None:
            theirs = self.documents[:, None, keys.start : keys.stop]
            seen = seen & (self.documents[:, queries.start : queries.stop, None] == theirs)
        if self.kept is not None:
            seen = seen & self.kept[:, None, keys.start : keys.stop]
        return seen[:, None]
