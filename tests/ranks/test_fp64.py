"""`precision: fp64` compared with a plain loop in fp64, within fp64's own rounding."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from twins import PRESETS_2, PRESETS_2X2, batches, plain_run, sharded_run

from tests.models import Transformer
from tests.thorough import sampled

ROUNDING = 1e-12
"""About 5000 times the spacing of fp64 at 1; that of fp32 is 1e-7."""


class Wide(Transformer):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.logits(x).flatten(0, 1), y.flatten())


@sampled
@pytest.mark.parametrize("clip", [None, 0.5], ids=["as it is", "clipped"])
@pytest.mark.parametrize(("preset", "num_ranks", "mesh"), PRESETS_2 + PRESETS_2X2[:2])
def test_races_the_plain_loop(preset: str, num_ranks: int, mesh: Mapping[str, int] | None, clip: float | None) -> None:
    model = Wide(num_blocks=1).double()
    data = batches(3)
    settings = {"precision": "fp64"} | ({} if clip is None else {"clip_grad_norm": clip})
    run = sharded_run(model, data, preset, num_ranks, mesh, after=lambda engine: engine.state_dict(), **settings)
    twin = plain_run(model, data, clip=clip)
    assert run.losses == pytest.approx(twin.losses, rel=ROUNDING)
    assert run.norms == pytest.approx(twin.norms, rel=ROUNDING)
    for name, param in twin.params.items():
        assert run.extra[name].dtype == torch.float64
        assert (run.extra[name] - param).abs().max() < ROUNDING, name


def test_the_program_says_in_what_the_norm_is_summed() -> None:
    model = Wide(num_blocks=1).double()
    run = sharded_run(model, batches(1), "zero3", 2, None, after=lambda one: {"is": one.program()}, precision="fp64")
    assert "agree * verdict dp fp64" in " ".join(run.extra["is"].split())
