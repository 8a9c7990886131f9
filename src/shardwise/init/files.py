"""Weights in safetensors files: each rank reads only the bytes of the elements that it keeps.

A tensor is contiguous in its file: elements `a` to `b` are the bytes `a * itemsize` to `b * itemsize` of its range.
They are read in place with `pread` and not mapped, because mapped pages would count as this process's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import CheckpointError, some
from shardwise.init.safetensors_headers import Stored, read_head
from shardwise.plan.placement import Span
from shardwise.system.safe_files import inside, read_json

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class WeightFiles:
    """The tensors of one safetensors file, of several, or of a folder as `save_pretrained` writes it; reads headers
    only.

    Raises `CheckpointError` for files that are missing, damaged, or of another format.
    """

    def __init__(self, source: Path | Sequence[Path]) -> None:
        self.path = source if isinstance(source, Path) else source[0].parent
        self.label = str(source) if isinstance(source, Path) else ", ".join(map(str, source))
        self.bytes_read = 0
        self.tensors: dict[str, Stored] = {}
        files: Mapping[Path, Sequence[str]] = _files(source) if isinstance(source, Path) else dict.fromkeys(source, ())
        for path, promised in files.items():
            found = read_head(path)
            if lacking := [name for name in promised if name not in found]:
                raise CheckpointError(f"{path} has no {some(lacking)}, though the index says so; it is incomplete.")
            if twice := [name for name in found if name in self.tensors]:
                raise CheckpointError(f"{twice[0]} is both in {self.tensors[twice[0]].path.name} and in {path.name}.")
            self.tensors |= found

    def read(self, name: str, span: Span) -> torch.Tensor:
        """Elements `span` of the tensor, flat, on the CPU, in the file's dtype."""
        values = self.tensors[name].read(span)
        self.bytes_read += values.nbytes
        return values


def _files(path: Path) -> dict[Path, list[str]]:
    """The safetensors files at `path`, and the tensors that an index lists for each."""
    if path.is_dir():
        return _in_folder(path)
    if not path.exists():
        raise CheckpointError(f"weights={str(path)!r}: there is no such file or folder.")
    if path.name.endswith(".index.json"):
        return read_index(path)
    _refuse_pickle(path)
    return {path: []}


def _in_folder(folder: Path) -> dict[Path, list[str]]:
    if (folder / INDEX).exists():
        return read_index(folder / INDEX)
    found = [folder / SINGLE] if (folder / SINGLE).exists() else sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return {inside(folder, found[0].name): []}
    if found:
        names = ", ".join(path.name for path in found[:3])
        raise CheckpointError(f"{folder} has several files ({names}) and no {INDEX}; give the path of one of them.")
    for path in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")):
        _refuse_pickle(path)
    raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}; is it the folder that save_pretrained wrote?")


def read_index(index: Path) -> dict[Path, list[str]]:
    """The files that a Hugging Face index names, sorted, each with the tensors listed for it."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} is not an index of weights: it has no weight_map of tensors to files.")
    names: dict[Any, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(f"{index} is not an index of weights: the file of {name!a:.200} is not text.")
        names.setdefault(file, []).append(name)
    files = {inside(index.parent, file): names[file] for file in sorted(names)}
    missing = [path.name for path in files if not path.exists()]
    if missing:
        raise CheckpointError(f"{index} names {some(missing, 3)}, which {index.parent} does not have.")
    return files


def _refuse_pickle(path: Path) -> None:
    if path.suffix in (".bin", ".pt", ".pth", ".pkl"):
        raise CheckpointError(
            f"{path} is a pickle, which can run code and cannot be read in part. Write it as safetensors: "
            f"model.save_pretrained(folder), or safetensors.torch.save_file(state_dict, file)."
        )
