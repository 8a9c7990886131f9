"""The diffs in docs/contributing.md apply to the source, and what they add works like what it is raced against."""

from __future__ import annotations

import re
import subprocess
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in __all__

import shardwise as sw
from shardwise.checkpoint import formats
from shardwise.checkpoint.formats import conversion, forms
from shardwise.cli.main import main
from shardwise.comm import ThreadTransport
from shardwise.comm.transport.threads import PostOffice
from shardwise.comm.work import LinkError
from shardwise.errors import CheckpointError
from shardwise.plan import placement
from shardwise.testing import run_ranks
from tests.files import module_at
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "contributing.md"
DIFFS = re.findall(r"^```diff\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
FILES = {
    "preset": ["plan/placement/presets.py"],
    "transport": ["comm/by_store.py"],
    "optimizer": ["optim/lars.py"],
    "format": ["checkpoint/formats/npz.py", "checkpoint/formats/forms.py"],
}


def applied(what: str, folder: Path) -> list[ModuleType]:
    """The modules that a diff adds or changes, as they are after it, without the modules of this process knowing."""
    (diff,) = [one for one in DIFFS if f"b/src/shardwise/{FILES[what][0]}" in one]
    named = re.findall(r"^\+\+\+ b/(\S+)$", diff, re.MULTILINE)
    assert named == [f"src/shardwise/{name}" for name in FILES[what]]
    for name in named:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            (folder / name).write_text((ROOT / name).read_text())
    git = ["git", "apply", "--whitespace=error", "-"]
    done = subprocess.run(git, cwd=folder, input=diff, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [module_at(folder / name) for name in named]


def test_every_diff_is_tried() -> None:
    assert len(DIFFS) == len(FILES)


def model() -> nn.Module:
    """The same each time; threads share torch's generator, so it is not asked."""
    made = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
    for number, param in enumerate(made.parameters()):
        param.data = torch.linspace(-0.5, 0.6, param.numel()).cos().roll(number).view(param.shape) - 0.8
    return made


def losses_and_params(
    plan: Any, world: sw.World | None, make: Any = torch.optim.SGD
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Three steps on the same samples on every rank, so that each rank's gradients are those of the plain model."""
    trained = model()
    engine = sw.shard(trained, plan, optimizer=make(trained.parameters(), lr=0.1), world=world)
    losses = []
    for step in range(3):
        loss = engine(torch.linspace(-1, 1, 24).view(4, 6) + step).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, {name: engine.get(name) for name, _ in trained.named_parameters()}


def test_the_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (presets,) = applied("preset", tmp_path)
    new = presets.PRESETS["zero2-local"]
    known = placement.Preset(new.axes, new.param, new.held, new.grad, new.optim, new.known_from)
    monkeypatch.setitem(placement.PRESETS, "zero2-local", known)
    assert main(["explain", "zero2-local", "--world", "4", "--set", "mesh={node: 2, local: 2}"]) == 0
    assert "reduce_scatter" in capsys.readouterr().out
    plan = {"preset": "zero2-local", "mesh": {"node": 2, "local": 2}}
    plain = losses_and_params("ddp", None)
    for found in run_ranks(4, lambda world: losses_and_params(plan, world)):
        assert found[0] == pytest.approx(plain[0], rel=1e-5)
        torch.testing.assert_close(found[1], plain[1])


@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_the_transport(preset: str, tmp_path: Path) -> None:
    """The same bits as by the transport of threads."""
    (by_store,) = applied("transport", tmp_path)
    store, office = HashStore(), PostOffice()
    by_stores = on_threads(lambda rank: by_store.StoreTransport(store, rank), preset)
    by_threads = on_threads(lambda rank: ThreadTransport(office, rank), preset)
    for found, expected in zip(by_stores, by_threads, strict=True):
        assert found[0] == expected[0]
        torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0)
    assert not store.num_keys() or {key for key in store.list_keys() if "-" in key} == set()  # all were taken
    transport = by_store.StoreTransport(store, 0)
    waiting = transport.receive(torch.empty(3), 1, 9)
    transport.abort()
    with pytest.raises(LinkError, match="Nothing came from rank 1"):
        waiting.wait()


def on_threads(transport_of: Any, preset: str, num_ranks: int = 2) -> list[Any]:
    """What each rank found, in worlds made by hand."""
    found: list[Any] = [None] * num_ranks

    def rank(number: int) -> None:
        with sw.World(number, num_ranks, transport_of(number)) as world:
            found[number] = losses_and_params(preset, world)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert None not in found
    return found


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3", "zero3-offload"])
def test_the_optimizer(preset: str, tmp_path: Path) -> None:
    (lars,) = applied("optimizer", tmp_path)
    plain = model()
    optimizer, losses = lars.Lars(plain.parameters(), lr=0.1), []
    for step in range(3):
        optimizer.zero_grad()
        loss = plain(torch.linspace(-1, 1, 24).view(4, 6) + step).square().mean()
        loss.backward()
        norms = [(param.detach().norm(), param.grad.norm(), param.detach().clone()) for param in plain.parameters()]
        optimizer.step()
        for param, (size, slope, before) in zip(plain.parameters(), norms, strict=True):
            ratio = size / slope if size > 0 and slope > 0 else 1.0
            torch.testing.assert_close(param.detach(), before - 0.1 * ratio * param.grad)
        losses.append(loss.item())
    for found in run_ranks(2, lambda world: losses_and_params(preset, world, lars.Lars)):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(found[1], {name: param.detach() for name, param in plain.named_parameters()})


def test_the_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "npz", None, raising=False)
    folder, weights = tmp_path / "weights", {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2)}
    folder.mkdir()
    np.savez(folder / "weights.npz", **weights)
    with pytest.raises(CheckpointError, match="not a known kind of checkpoint"):
        forms.open_checkpoint(folder)
    npz, changed = applied_format(tmp_path / "changed", monkeypatch)
    monkeypatch.setattr(conversion, "open_checkpoint", changed.open_checkpoint)
    source = changed.open_checkpoint(folder)
    assert source.form == npz.FORM
    assert {spec.name: spec.shape for spec in source.specs} == {"a.weight": (2, 3), "b": (2,)}
    formats.convert(folder, tmp_path / "hf", "hf")
    for spec in forms.open_checkpoint(tmp_path / "hf").specs:
        read = forms.open_checkpoint(tmp_path / "hf").read(spec)
        assert np.array_equal(read.numpy(), weights[spec.name])
    np.savez(folder / "weights.npz", evil=np.array([object()], dtype=object))
    with pytest.raises(CheckpointError, match=r"weights\.npz cannot be read: Object arrays"):
        changed.open_checkpoint(folder)
    (folder / "weights.npz").write_bytes(b"no archive")
    with pytest.raises(CheckpointError, match="not a zip file"):
        changed.open_checkpoint(folder)


def applied_format(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[ModuleType]:
    """The format's module must be in the package before `forms.py`, which imports it from there, is read."""
    folder.mkdir()
    (diff,) = [one for one in DIFFS if "b/src/shardwise/checkpoint/formats/npz.py" in one]
    text = "\n".join(re.findall(r"^\+(?!\+\+)(.*)$", diff.partition("--- a/")[0], re.MULTILINE))
    (folder / "npz.py").write_text(text)
    monkeypatch.setattr(formats, "npz", module_at(folder / "npz.py"), raising=False)
    return applied("format", folder)
