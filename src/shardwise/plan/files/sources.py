"""Finding plan files, reading them by suffix, and refusing them with file and line."""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.plan.files.formats import MAX_CHARS, Source, SourceError

_READERS = {  # imported when such a file is read: most plans are just the name of a preset
    ".yaml": "shardwise.plan.files.yaml_text",
    ".yml": "shardwise.plan.files.yaml_text",
    ".toml": "shardwise.plan.files.toml_text",
    ".json": "shardwise.plan.files.json_text",
}
_NO_PLANS = {"pyproject.toml", "package.json"}  # common files with such a suffix that are not plans


def read_source(path: Path, what: str = "plan") -> Source:
    """Read a `.yaml`, `.yml`, `.toml` or `.json` file; `ConfigError` with file and line for anything wrong in it.
    `what` it is: files of the same formats describe hardware, and rates of failures."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(
            f"{path} ends in {path.suffix!r}, which is not a {what} file's suffix. Use one of {', '.join(_READERS)}."
            if path.suffix
            else f"{path} has no suffix, so its format is unknown. Use one of {', '.join(_READERS)}."
        )
    text = _text(path, what)
    if len(text) > MAX_CHARS:
        raise ConfigError(f"{path} has more than {MAX_CHARS} characters, which is too long for a {what}.")
    try:
        source: Source = importlib.import_module(reader).read(text)
        if not source.values and not text.lstrip().startswith("{"):
            raise SourceError(
                "the file is empty." + (" Give at least a preset, such as 'preset: zero3'." if what == "plan" else "")
            )
    except SourceError as error:
        place = f"{path}:{error.line}" if error.line else str(path)
        raise ConfigError(f"{place}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: the values are nested too deeply for a {what}.") from None
    return source


def parse_value(text: str) -> object:
    """One value in YAML syntax; `SourceError` if it is not YAML."""
    value: object = importlib.import_module(_READERS[".yaml"]).parse(text)
    return value


def _text(path: Path, what: str) -> str:
    try:
        with path.open(encoding="utf-8-sig") as file:
            return file.read(MAX_CHARS + 1)
    except FileNotFoundError:
        raise ConfigError(_missing(path, what)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8 text. Save the file as UTF-8.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None


def _missing(path: Path, what: str) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"There is no folder {str(folder)!r} for the {what} {path.name!r}; the current folder is {Path.cwd()}."
    names = {file.name for file in folder.iterdir() if file.suffix.lower() in _READERS} - _NO_PLANS
    by_stem = {Path(name).stem: name for name in sorted(names)}
    close = difflib.get_close_matches(path.stem, by_stem, n=1, cutoff=0.5)  # suffixes make any two names alike
    if close:
        hint = f"Did you mean {by_stem[close[0]]!r}?"
    elif names and what == "plan":
        hint = "To use a preset, give its name without a suffix, such as zero3."
    elif names:
        hint = "A name without a suffix means what comes with the library."
    else:
        hint = f"There is no {' or '.join(_READERS)} file in that folder."
    return f"There is no {what} file {str(path)!r}; looked in {folder.resolve()}. {hint}"
