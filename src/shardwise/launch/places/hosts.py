"""Which hosts, and how many ranks on each: host files, host lists, what to include and what to leave out. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shardwise.errors import ConfigError, nearest

_COUNT = "[0-9]{1,9}"


@dataclass(frozen=True)
class Host:
    """A host, and the `slots` ranks that are to run there; `devices` names those they may use, none leaves it open."""

    name: str
    slots: int | None = None
    user: str = ""
    devices: tuple[int, ...] = ()

    @property
    def target(self) -> str:
        """As `ssh` takes it."""
        return f"{self.user}@{self.name}" if self.user else self.name


@dataclass(frozen=True)
class Share:
    """The ranks of one host."""

    host: Host
    first_rank: int
    num_ranks: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_ranks)

    def in_words(self) -> str:
        """`ranks 2 to 3 on gpu1`."""
        ranks = f"ranks {self.ranks[0]} to {self.ranks[-1]}" if self.num_ranks > 1 else f"rank {self.first_rank}"
        devices = f", devices {', '.join(map(str, self.host.devices))}" if self.host.devices else ""
        return f"{ranks} on {self.host.target}{devices}"


def parse_hosts(text: str) -> list[Host]:
    """`gpu1:4,gpu2:4`, as `horovodrun -H` and `mpirun --host` take it."""
    return _distinct([_parse_host(word.strip(), "--hosts") for word in text.split(",") if word.strip()], "--hosts")


def parse_host_file(text: str, name: str) -> list[Host]:
    """Lines `host slots=4` (DeepSpeed, Open MPI), `host:4` (Horovod, MPICH) or `host`; `#` begins a comment."""
    hosts = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        place = f"{name}, line {number}"
        host = _parse_host(words[0], place)
        for word in words[1:]:
            key, _, value = word.partition("=")
            if key not in ("slots", "max_slots", "max-slots") or not re.fullmatch(_COUNT, value):
                raise ConfigError(f"{place}: {word!r} is not understood; write `host slots=4`, `host:4` or `host`.")
            if key == "slots":
                host = replace(host, slots=_at_least_one(int(value), place))
        hosts.append(host)
    return _distinct(hosts, name)


def choose(hosts: Sequence[Host], include: str | None = None, exclude: str | None = None) -> list[Host]:
    """What DeepSpeed's `--include host1@host2:0,1` and `--exclude` leave of `hosts`, in their order."""
    if include and exclude:
        raise ConfigError("--include and --exclude cannot be combined. Give one of them.")
    if not include and not exclude:
        return list(hosts)
    option = "--include" if include else "--exclude"
    filters = _parse_filter(include or exclude or "", option, hosts)
    if include:
        return [_only(host, filters[host.name]) for host in hosts if host.name in filters]
    left = [_without(host, filters[host.name]) if host.name in filters else host for host in hosts]
    chosen = [host for host in left if host is not None]
    if not chosen:
        raise ConfigError(f"--exclude {exclude} leaves no host.")
    return chosen


def shares(hosts: Iterable[Host], nproc: int | None = None) -> list[Share]:
    """Consecutive ranks on consecutive hosts: `nproc` on each, else as many as each has slots."""
    result: list[Share] = []
    for host in hosts:
        number = len(host.devices) or nproc or host.slots
        if number is None:
            raise ConfigError(
                f"The number of ranks on {host.name} is unknown. Write {host.name}:4 or `{host.name} slots=4`, "
                f"or give --nproc for all hosts."
            )
        if nproc is not None and host.slots is not None and nproc > host.slots:
            raise ConfigError(f"--nproc {nproc} is more than the {host.slots} slots of {host.name}.")
        first = result[-1].ranks.stop if result else 0
        result.append(Share(host, first, number))
    if not result:
        raise ConfigError("There is no host. Give --hosts gpu1:4,gpu2:4 or --hostfile FILE.")
    return result


def expand(nodes: str) -> list[str]:
    """Slurm's short form of host names in full: `gpu[007-009,12],login` are gpu007, gpu008, gpu009, gpu12, login."""
    return [name for part in re.split(r",(?![^\[]*\])", nodes) if part for name in _expand_one(part)]


def _expand_one(part: str) -> list[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [before]
    ranges, closing, after = rest.partition("]")
    if not closing:
        raise ConfigError(f"The host list {part!r} has no closing bracket.")
    middles: list[str] = []
    for numbers in ranges.split(","):
        low, dash, high = numbers.partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise ConfigError(f"The host list {part!r} has {numbers!r} instead of numbers.")
        middles += [f"{number:0{len(low)}d}" for number in range(int(low), int(high or low) + 1)]
    return [before + middle + end for middle in middles for end in _expand_one(after)]


def _parse_host(word: str, place: str) -> Host:
    user, at, address = word.rpartition("@")
    match = re.fullmatch(rf"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9_.-]+)(?::({_COUNT}))?", address)
    # ssh would read a name that begins with a dash as an option
    if match is None or address.startswith("-") or (at and not re.fullmatch(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*", user)):
        raise ConfigError(f"{place}: {word!r} is not a host; write `host`, `host:4` or `user@host:4`.")
    slots = _at_least_one(int(match[2]), place) if match[2] else None
    return Host(match[1].strip("[]"), slots, user)


def _at_least_one(slots: int, place: str) -> int:
    if slots < 1:
        raise ConfigError(f"{place}: a host needs at least one slot. Remove the host if it is not to be used.")
    return slots


def _distinct(hosts: list[Host], place: str) -> list[Host]:
    for name, count in Counter(host.name for host in hosts).items():
        if count > 1:
            raise ConfigError(f"{place}: {name} is named twice. Name each host once, with all of its slots.")
    if not hosts:
        raise ConfigError(f"{place}: it lists no host.")
    return hosts


def _parse_filter(text: str, option: str, hosts: Sequence[Host]) -> dict[str, tuple[int, ...]]:
    known = {host.name: host for host in hosts}
    filters: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        name, colon, numbers = part.partition(":")
        if name not in known:
            raise ConfigError(f"{option} names {name!r}, which is not in the host list. {nearest(name, known)}")
        if colon and not re.fullmatch(r"\d+(,\d+)*", numbers):
            raise ConfigError(f"{option} {part!r}: after the colon come slots, such as {name}:0,2.")
        chosen = tuple(sorted({int(number) for number in numbers.split(",")})) if colon else ()
        slots = known[name].slots
        if slots is not None and chosen and chosen[-1] >= slots:
            raise ConfigError(f"{option} {part!r}: {name} has slots 0 to {slots - 1}.")
        filters[name] = chosen
    return filters


def _only(host: Host, devices: tuple[int, ...]) -> Host:
    return replace(host, slots=len(devices), devices=devices) if devices else host


def _without(host: Host, devices: tuple[int, ...]) -> Host | None:
    if not devices:
        return None
    if host.slots is None:
        raise ConfigError(f"--exclude {host.name}:...: the number of slots of {host.name} is unknown.")
    left = tuple(number for number in range(host.slots) if number not in devices)
    return replace(host, slots=len(left), devices=left) if left else None
