"""Losses of language models without the logits of all tokens; see [Note: rows in chunks] in `by_chunks.py`."""

from shardwise.parallel.chunked_logits.losses import chunked_cross_entropy, chunked_log_probs

__all__ = ["chunked_cross_entropy", "chunked_log_probs"]
