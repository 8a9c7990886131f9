"""How often what breaks, as published for real jobs or counted by a user: files of `failures/`, and ones like them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from shardwise.errors import ConfigError, nearest
from shardwise.plan.files.sources import read_source

Taken = Literal["rank", "host", "job"]
FoundBy = Literal["exit", "silence", "timeout"]
FOLDER = Path(__file__).parent / "failures"
DEFAULT = "llama3-405b"


@dataclass(frozen=True)
class Cause:
    """One kind of interruption.

    `per_rank_hour`: events for each rank and hour, whatever they take. `takes` is what is lost at once, `found_by` how
    the others learn of it, `repair_hours` how long its place cannot be used. A `planned` one is no loss: the job saves,
    and stops by itself.
    """

    name: str
    per_rank_hour: float
    takes: Taken = "rank"
    found_by: FoundBy = "exit"
    repair_hours: float = 0.0
    planned: bool = False


@dataclass(frozen=True)
class FailureRates:
    """The causes, and where their rates come from."""

    causes: tuple[Cause, ...]
    source: str

    @property
    def per_rank_hour(self) -> float:
        """Events of all causes for each rank and hour."""
        return sum(cause.per_rank_hour for cause in self.causes)


def known_rates() -> list[str]:
    """Names that `failure_rates` knows."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def ranks_that_end(mean_hours: float) -> FailureRates:
    """Ranks that end after `mean_hours` on average, and nothing else. Raises `ConfigError` unless hours are above 0."""
    if not mean_hours > 0:
        raise ConfigError(f"The hours between failures of one rank are {mean_hours}; give more than 0.")
    cause = Cause("rank ended", 1 / mean_hours)
    return FailureRates((cause,), f"one failure in {mean_hours:g} hours of a rank")


def failure_rates(source: str) -> FailureRates:
    """The rates with that name (`llama3-405b`), or of a file. Raises `ConfigError` with the nearest name, or with what
    is wrong in the file."""
    known = known_rates()
    path = FOLDER / f"{source}.yaml" if source in known else Path(source)
    if source not in known and not path.suffix:
        raise ConfigError(
            f"There are no failure rates {source!r}. {nearest(source, known)} A file ends in .yaml, .toml or .json."
        )
    return _rates(read_source(path, "failure rates").values, str(path))


def _rates(values: dict[str, Any], where: str) -> FailureRates:
    unknown = set(values) - {"source", "gpu_hours", "causes"}
    if unknown or not isinstance(values.get("causes"), dict):
        what = f"does not know {sorted(unknown)[0]!r}" if unknown else "needs causes"
        raise ConfigError(f"{where}: a file of failure rates {what}. Write source, gpu_hours, and causes by name.")
    hours = _number(values.get("gpu_hours"), f"{where}: gpu_hours", is_divisor=True)
    causes = tuple(_cause(str(name), one, hours, f"{where}: {name}") for name, one in values["causes"].items())
    return FailureRates(causes, str(values.get("source", where)))


def _cause(name: str, values: Any, gpu_hours: float, where: str) -> Cause:
    keys = ("events", "takes", "found_by", "repair_hours", "planned")
    if not isinstance(values, dict) or set(values) - set(keys) or "events" not in values:
        raise ConfigError(f"{where} is {values!r}; write {{events: N}}, with any of {', '.join(keys[1:])}.")
    takes, found_by = values.get("takes", "rank"), values.get("found_by", "exit")
    for key, value, allowed in (("takes", takes, get_args(Taken)), ("found_by", found_by, get_args(FoundBy))):
        if value not in allowed:
            raise ConfigError(f"{where}: {key} is {value!r}; write one of {', '.join(allowed)}.")
    planned = values.get("planned", False)
    if not isinstance(planned, bool):
        raise ConfigError(f"{where}: planned is {planned!r}; write true or false.")
    rate = _number(values["events"], f"{where}: events") / gpu_hours
    return Cause(name, rate, takes, found_by, _number(values.get("repair_hours", 0), f"{where}: repair_hours"), planned)


def _number(value: object, what: str, *, is_divisor: bool = False) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
        if 0 <= number < float("inf") and (number or not is_divisor):
            return number
    raise ConfigError(f"{what} is {value!r}; give a number of {'more than 0' if is_divisor else 'at least 0'}.")
