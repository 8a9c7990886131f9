"""Detects the format of a folder by files that only one format has."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

from shardwise.checkpoint.formats import dcp, deepspeed, hf, ours
from shardwise.checkpoint.formats.source import Source
from shardwise.errors import CheckpointError
from shardwise.system.safe_files import inside, open_regular

FORMS = {
    ours.FORM: "a checkpoint of shardwise, or a run folder with checkpoints",
    hf.FORM: "a model folder of Hugging Face",
    dcp.FORM: "a torch distributed checkpoint (DCP)",
    deepspeed.FORM: "a checkpoint of DeepSpeed",
}
OTHERS = {
    "latest_checkpointed_iteration.txt": "a checkpoint of Megatron-LM",
    "adapter_config.json": "an adapter of PEFT, without the model that it is for",
    "trainer_state.json": "a checkpoint of the transformers Trainer without weights that could be read",
    "random_states_0.pkl": "a state that Accelerate saved",
}
LATEST = "latest"
_NUMBERED = re.compile(r"(checkpoint|step|global_step|iter|epoch|pytorch_model_fsdp)[-_=]?\d+")
_LOOSE = (".pt", ".pth", ".ckpt", ".distcp")
_log = logging.getLogger("shardwise")
OPENERS: dict[str, Callable[[Path], Source]] = {
    ours.FORM: ours.open_ours,
    hf.FORM: hf.open_hf,
    dcp.FORM: dcp.open_dcp,
    deepspeed.FORM: deepspeed.open_deepspeed,
}


def form_of(path: Path) -> str:
    """The format of what is at `path`. Raises `CheckpointError`, with a guess at what it is, if it is not readable."""
    try:
        return _form_of(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _form_of(path: Path) -> str:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; give the folder of the checkpoint.")
    if (path / LATEST).exists():
        open_regular(inside(path, LATEST)).close()  # several formats have and read this file
    if ours.is_ours(path):
        return ours.FORM
    if dcp.is_dcp(path):
        return dcp.FORM
    if deepspeed.tagged_folder(path) is not None:
        return deepspeed.FORM
    if hf.is_hf(path):
        return hf.FORM
    raise CheckpointError(_foreign(path))


def refuse_others(path: Path) -> None:
    """Raise `CheckpointError` if there is a checkpoint of another library at `path`, or in a folder in it that is named
    as one: who resumes there does not mean to begin anew. Single files are warned of; they may be anything."""
    if not path.is_dir():
        return
    _refuse_other(path, "which cannot be resumed as it is")
    names = sorted(os.listdir(path))
    for name in filter(_NUMBERED.fullmatch, names):
        _refuse_other(path / name, f"and {path} has no checkpoint of shardwise")
    if loose := [name for name in names if name.endswith(_LOOSE)]:
        _log.warning(
            "There is no checkpoint of shardwise in %s, so a new run begins; %s there is not read.", path, loose[0]
        )


def _refuse_other(path: Path, why: str) -> None:
    for form, is_there in ((dcp.FORM, dcp.is_dcp), (deepspeed.FORM, deepspeed.tagged_folder), (hf.FORM, hf.is_hf)):
        if path.is_dir() and is_there(path):
            raise CheckpointError(
                f"{path} is {FORMS[form]}, {why}. Convert it once, and resume from the result: shardwise convert "
                f"{path} NEW --to shardwise. For a new run, name another folder."
            )
    for name, words in OTHERS.items():
        if (path / name).exists():
            raise CheckpointError(
                f"{path} is {words} (it has {name}), {why}. shardwise cannot read it either: bring its weights into "
                f"the form of Hugging Face, and convert those. For a new run, name another folder."
            )


def _foreign(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    known = "; ".join(FORMS.values())
    for name, words in OTHERS.items():
        if name in names:
            return f"{path} is {words} (it has {name}), which cannot be read. These can: {known}."
    if not names:
        return f"{path} is empty."
    return f"{path} is not a known kind of checkpoint: it has {', '.join(names[:4])}. These can be read: {known}."


def open_checkpoint(path: Path) -> Source:
    """Open the checkpoint at `path`, of any format, without reading its tensors."""
    form = form_of(path)
    try:
        return OPENERS[form](path)
    except OSError as error:  # a folder without permission, or a failing disk
        raise CheckpointError(f"{path} cannot be read: {error}") from error
