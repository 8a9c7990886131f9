"""Arguments that are true or false: text, as an environment variable or a command line has it, is true whatever it
says, so it is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.system.flags import says_yes
from shardwise.testing import run_ranks

NO: Any = "no"
OF_AN_ENGINE: dict[str, Callable[[sw.Engine], object]] = {
    "save(wait": lambda engine: engine.save("here", wait=NO),
    "save(without_gradients": lambda engine: engine.save("here", without_gradients=NO),
    "save_pretrained(overwrite": lambda engine: engine.save_pretrained("here", overwrite=NO),
    "publish(wait": lambda engine: engine.publish("here", wait=NO),
    "weights(merge_adapters": lambda engine: engine.weights(merge_adapters=NO),
    "gathered(write": lambda engine: engine.gathered(write=NO),
    "state_dict(rank_0_only": lambda engine: engine.state_dict(rank_0_only=NO),
    "optimizer_state_dict(rank_0_only": lambda engine: engine.optimizer_state_dict(rank_0_only=NO),
    "load_state_dict(strict": lambda engine: engine.load_state_dict({}, strict=NO),
    "step(is_last": lambda engine: engine.step(is_last=NO),
    "log(mean": lambda engine: engine.log({}, mean=NO),
    "any_rank(": lambda engine: engine.any_rank(NO),
}
OTHERS: dict[str, Callable[[], object]] = {
    "shard(strict": lambda: sw.shard(nn.Linear(2, 2), strict=NO),
    "join(shares_memory": lambda: sw.World.join(shares_memory=NO),
    "Keep(largest": lambda: sw.Keep(best="loss", largest=NO),
    "Samples(shuffle": lambda: sw.data.Samples(shuffle=NO),
    "Workers(processes": lambda: sw.data.Workers(processes=NO),
    "Workers(pin": lambda: sw.data.Workers(pin=NO),
    "PackedRows(masks": lambda: sw.data.PackedRows([torch.arange(9)], 4, masks=NO),
    "from_iterable(skip": lambda: sw.data.from_iterable(list, skip=NO),
}


def test_text_is_neither_true_nor_false(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def rank(world: sw.World) -> None:
        model = nn.Linear(4, 4)
        engine = sw.shard(model, "zero3", optimizer=torch.optim.SGD(model.parameters(), 0.1), world=world)
        for said, call in OF_AN_ENGINE.items():
            with pytest.raises(ConfigError, match="True or False") as refused:
                call(engine)
            assert f"{said}='no')".replace("(='", "('") in str(refused.value)
        engine.close()

    run_ranks(1, rank)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("said", OTHERS)
def test_nor_is_it_elsewhere(said: str) -> None:
    with pytest.raises(ConfigError, match="True or False") as refused:
        OTHERS[said]()
    assert f"{said}='no')" in str(refused.value)


def test_what_is_true_or_false_in_other_ways_is_taken() -> None:
    """Numbers of numpy, and tensors, as loops compute them."""

    def rank(world: sw.World) -> tuple[bool, bool]:
        model = nn.Linear(4, 4)
        with sw.shard(model, "zero3", optimizer=torch.optim.SGD(model.parameters(), 0.1), world=world) as engine:
            return engine.any_rank(torch.tensor(True)), bool(engine.state_dict(rank_0_only=torch.tensor(False)))

    assert run_ranks(1, rank) == [(True, True)]


def test_yes_is_said_in_the_words_that_accelerate_takes() -> None:
    assert all(map(says_yes, ("1", "true", "True", "YES", "on", "y", "t", " true ", True)))
    assert not any(map(says_yes, (None, "", "0", "false", "no", "off", "2", False)))
