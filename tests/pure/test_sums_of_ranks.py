"""What ranks have sent, added in their order, and kept as it was sent."""

from __future__ import annotations

import pytest
import torch

from shardwise.comm.mixed_sums import add_up, as_sent, keep_sent


@pytest.mark.parametrize("own", range(4))
@pytest.mark.parametrize("is_in_place", [True, False])
def test_what_ranks_have_sent_is_added_in_their_order_whichever_is_the_sum_itself(own: int, is_in_place: bool) -> None:
    """Rounding shows the order: what is added to 1 one by one is lost, and what comes before it is not."""
    small = torch.finfo(torch.float32).eps / 2
    for one in range(4):
        summands = [torch.tensor([1.0 if place == one else small]) for place in range(4)]
        total = torch.zeros(1)
        for summand in summands:
            total = total + summand
        out = summands[own] if is_in_place else torch.zeros(1)
        add_up(out, summands, own)
        assert out == total, one


def test_sums_are_kept_as_they_were_sent() -> None:
    chunks = [torch.tensor([1 + 2**-12]), torch.zeros(1)]
    assert as_sent(chunks, 0, torch.float32) is chunks
    sent = as_sent(chunks, 0, torch.bfloat16)
    assert (sent[0].dtype, sent[0].item()) == (torch.bfloat16, 1)
    sent[1].fill_(3)
    keep_sent(chunks, sent)
    assert [chunk.item() for chunk in chunks] == [1, 3]
