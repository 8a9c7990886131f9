"""One rank's own document, as JSON in its file: its random generators, and the states of the user's objects."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardwise.checkpoint.index_schema import RANK
from shardwise.checkpoint.json_codec import decode
from shardwise.checkpoint.read import Reader
from shardwise.errors import CheckpointError
from shardwise.system.safe_files import as_text, parse_json


@dataclass(frozen=True)
class Document:
    """`generators` as `rng.capture` returns them, `objects` by the names under which the user gave them."""

    generators: dict[str, Any]
    objects: dict[str, Any]


def read_document(reader: Reader, rank: int) -> Document | None:
    """The document of `rank`, checked; `None` if the checkpoint has none for such a rank."""
    found = reader.whole(RANK, str(rank))
    if found is None:
        return None
    name = f"what rank {rank} remembers, in {reader.path / found.chunk.file},"
    content = decode(parse_json(as_text(reader.tensor(found).numpy().tobytes(), name), name), name)
    if not isinstance(content, dict) or not all(
        isinstance(content.get(part), dict) for part in ("generators", "objects")
    ):
        raise CheckpointError(f"{name} is not what shardwise writes there: it has no generators or no objects.")
    try:
        _try(content["generators"])
    except Exception as error:  # numpy, torch and Python raise various errors for an invalid state
        raise CheckpointError(
            f"{name} has invalid states of random generators: {type(error).__name__}: {error}."
        ) from error
    return Document(content["generators"], content["objects"])


def _try(state: Mapping[str, Any]) -> None:
    """Load the states into unused generators, to check that they could be loaded into those in use."""
    version, numbers, gauss = state["python"]
    random.Random().setstate((version, tuple(numbers.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.RandomState().set_state((name, keys, position, has_gauss, cached))
    torch.Generator().set_state(state["torch"])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type in state:
        torch.Generator(accelerator).set_state(state[accelerator.type])
