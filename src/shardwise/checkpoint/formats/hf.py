"""Folders of Hugging Face: `model.safetensors` or its shards with an index, and a configuration.

They are read without the transformers library. Older folders with `pytorch_model.bin` are read too, without running
anything in their pickles.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.formats.source import PARAM, Source, Spec, stored_files
from shardwise.checkpoint.formats.stream import SafetensorsFile, split_by_size
from shardwise.checkpoint.formats.torch_files import load_file
from shardwise.errors import CheckpointError
from shardwise.init.files import read_index
from shardwise.init.safetensors_headers import Stored, read_head
from shardwise.system.safe_files import inside, read_json

Tensor = torch.Tensor
Tick = Callable[[Spec], None]
FORM = "hf"
SAFE, BIN = "model.safetensors", "pytorch_model.bin"
CONFIG = "config.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


def is_hf(path: Path) -> bool:
    return any((path / name).exists() for name in (SAFE, f"{SAFE}.index.json", BIN, f"{BIN}.index.json"))


def open_hf(path: Path) -> Source:
    """The weights in the folder `path`."""
    kept, left_out = files_to_keep(path)
    return replace(
        _of_files(path, _names_by_file(path)),
        facts=_facts(path),
        files=stored_files(path),
        kept=kept,
        left_out=left_out,
    )


def open_files(files: Sequence[Path]) -> Source:
    """The weights in files of safetensors or `torch.save`, wherever they are."""
    return _of_files(files[0].parent, dict.fromkeys(files))


def _of_files(path: Path, names_by_file: Mapping[Path, Sequence[str] | None]) -> Source:
    readers: dict[Spec, Callable[[], Tensor]] = {}
    files: dict[str, Path] = {}
    for file, wanted in names_by_file.items():
        found = _in_safetensors(file) if file.suffix == ".safetensors" else _in_pickle(file)
        for name in found if wanted is None else wanted:
            if name not in found:
                raise CheckpointError(f"{file} has no {name!a:.200}, though the index says so; it is incomplete.")
            if name in files:
                raise CheckpointError(f"{name} is both in {files[name].name} and in {file.name}.")
            files[name] = file
            spec, read = found[name]
            readers[spec] = read
    return Source(form=FORM, path=path, specs=tuple(readers), read=lambda spec: readers[spec]())


def files_to_keep(folder: Path) -> tuple[tuple[Path, ...], list[str]]:
    """Files of `folder` that are not weights, such as configuration and tokenizer; and notes on those left out."""
    kept, left_out = [], []
    for file in sorted(folder.iterdir()):
        if not file.is_file() or file.name.endswith(WEIGHTS):
            continue
        try:
            kept.append(inside(folder, file.name))
        except CheckpointError:
            left_out.append(f"{file.name}, which is a link to elsewhere")
    return tuple(kept), left_out


def _names_by_file(path: Path) -> dict[Path, list[str] | None]:
    """The tensors to read from each file; `None` means all."""
    for name in (SAFE, BIN):
        if (path / name).exists():
            return {inside(path, name): None}
        if (path / f"{name}.index.json").exists():
            return dict(read_index(path / f"{name}.index.json"))
    raise CheckpointError(f"{path} is not a Hugging Face folder: it has neither {SAFE} nor {BIN}.")


Found = dict[str, tuple[Spec, Callable[[], Tensor]]]


def _in_safetensors(file: Path) -> Found:
    def entry(name: str, stored: Stored) -> tuple[Spec, Callable[[], Tensor]]:
        return Spec(PARAM, name, stored.shape, stored.dtype), lambda: stored.read().view(stored.shape)

    return {name: entry(name, stored) for name, stored in read_head(file).items()}


def _in_pickle(file: Path) -> Found:
    state = load_file(file)
    if not isinstance(state, dict):
        raise CheckpointError(f"{file} is not a state dict, which maps names to tensors.")

    def entry(name: str, one: Tensor) -> tuple[Spec, Callable[[], Tensor]]:
        return Spec(PARAM, name, tuple(one.shape), one.dtype), one.clone

    return {name: entry(name, one) for name, one in state.items() if isinstance(name, str) and isinstance(one, Tensor)}


def read_config(path: Path) -> dict[str, Any]:
    """The model's configuration; empty if there is none."""
    return read_json(inside(path, CONFIG), lenient=True) if (path / CONFIG).exists() else {}


def _facts(path: Path) -> dict[str, Any]:
    config = read_config(path)
    return {key: config[key] for key in ("architectures", "model_type", "transformers_version") if key in config}


# -- writing --------------------------------------------------------------------------------------------


def shards_of(specs: Sequence[Spec], max_bytes: int) -> dict[str, list[Spec]]:
    """The tensors of each file, with the file names of transformers."""
    runs = split_by_size(specs, max_bytes)
    if len(runs) == 1:
        return {SAFE: runs[0]}
    stem = SAFE.removesuffix(".safetensors")
    return {f"{stem}-{number:05d}-of-{len(runs):05d}.safetensors": run for number, run in enumerate(runs, 1)}


METADATA = {"format": "pt"}


def write_index(folder: Path, shards: Mapping[str, Sequence[Spec]]) -> None:
    """Write which file has which tensor, if there are several files."""
    if len(shards) == 1:
        return
    weight_map = {spec.name: name for name, run in shards.items() for spec in run}
    total = sum(spec.num_bytes for run in shards.values() for spec in run)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / f"{SAFE}.index.json").write_text(json.dumps(index, indent=2) + "\n")


class HfWriter:
    """Writes weights into a folder in the order of `specs`, one file after the other.

    Use it in a `with`; the end of the context raises unless every tensor was written.
    """

    def __init__(self, folder: Path, specs: Sequence[Spec], max_bytes: int) -> None:
        self._folder = folder
        self._shards = shards_of(specs, max_bytes)
        self._waiting = [(name, spec) for name, run in self._shards.items() for spec in run]
        self._open: tuple[str, SafetensorsFile] | None = None
        self._next = 0

    def write(self, spec: Spec, tensor: Tensor) -> None:
        name, expected = self._waiting[self._next]
        if expected.name != spec.name:
            raise CheckpointError(f"{spec.name} arrived instead of {expected.name}; the source contradicts itself.")
        if self._open is None or self._open[0] != name:
            self._finish_file()
            heads = {one.name: one for one in self._shards[name]}
            self._open = (name, SafetensorsFile(self._folder / name, heads, METADATA))
        self._open[1].write(spec.name, tensor.to(expected.dtype))
        self._next += 1

    def __enter__(self) -> HfWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            if self._open is not None:
                self._open[1].__exit__(kind, None, None)
            return
        self._finish_file()
        if self._next < len(self._waiting):
            raise CheckpointError(f"{self._waiting[self._next][1].name} was listed but never arrived.")
        write_index(self._folder, self._shards)

    def _finish_file(self) -> None:
        if self._open is not None:
            self._open[1].__exit__(None, None, None)
            self._open = None


def write_hf(source: Source, folder: Path, specs: Mapping[str, Spec], max_bytes: int, tick: Tick) -> None:
    """Write the weights of `source` as a Hugging Face folder. `specs` has the target of each of its names."""
    by_name = {spec.name: spec for spec in source.weights}
    with HfWriter(folder, list(specs.values()), max_bytes) as writer:
        for name, spec in specs.items():
            writer.write(spec, source.read(by_name[name]))
            tick(spec)
    for path in source.kept:
        shutil.copy(path, folder / path.name)
    _set_dtype(folder, list(specs.values()))


def _set_dtype(folder: Path, specs: Sequence[Spec]) -> None:
    """Set the dtype in the configuration to that of the weights, because `from_pretrained` uses it."""
    config = read_config(folder)
    dtypes = {spec.dtype for spec in specs if spec.kind == PARAM and spec.dtype.is_floating_point}
    if not config or len(dtypes) != 1:
        return
    word = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[word] = str(dtypes.pop()).removeprefix("torch.")
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
