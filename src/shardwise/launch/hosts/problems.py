"""Why a host cannot take part, as a sentence: from the messages of ssh, a shell and Python. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_SSH_FAILED = 255
_NOT_FOUND = 127


@dataclass(frozen=True)
class Problem:
    """What keeps a host from answering, and what to do about it; neither ends with a period."""

    what: str
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.what}; {self.cure}" if self.cure else self.what


@dataclass(frozen=True)
class Options:
    """How the command that the user has called names the port and the key of ssh."""

    port: str = "--ssh-port PORT"
    key: str = "--identity FILE"


# Messages of OpenSSH, what they mean, and the cure.
_SSH_FAILURES = (
    (
        r"Could not resolve hostname",
        "its name is not known",
        "check the spelling, ~/.ssh/config, DNS and /etc/hosts on this machine",
    ),
    (r"Connection refused", "nothing answers at its ssh port", "start sshd there, or name its port with {port}"),
    (
        r"[Cc]onnection timed out|Operation timed out|banner exchange",
        "it does not answer",
        "check that it is up, and that no firewall blocks its ssh port",
    ),
    (
        r"No route to host|Network is unreachable",
        "there is no route to it",
        "check that it is up and has a network",
    ),
    (
        r"Host key verification failed|REMOTE HOST IDENTIFICATION",
        "its host key is not the one that is known",
        "connect once with ssh by hand, and read the message",
    ),
    (r"Permission denied", "it refuses the key", "copy yours with ssh-copy-id, or name one with {key}"),
    (r"Too many authentication failures", "it refuses the keys", "name the right one with {key}"),
    (
        r"kex_exchange_identification|Connection (closed|reset) by",
        "it closed the connection before authentication",
        "check the log of sshd there",
    ),
)


def connection_problem(status: int | None, stderr: str, python: str, options: Options | None = None) -> Problem:
    """Why a host did not answer, from the exit status of ssh (None: it still runs) and its output on stderr."""
    last, options = _last_line(stderr), options or Options()
    if status is None:
        return Problem("its shell started and did not answer", "check whether its login script waits for something")
    if status == _SSH_FAILED:
        for pattern, what, cure in _SSH_FAILURES:
            if re.search(pattern, stderr):
                return Problem(what, cure.format(port=options.port, key=options.key))
        return Problem(f"ssh failed: {last or 'it gave no reason'}", "try ssh by hand")
    if status == _NOT_FOUND or "No such file or directory" in last:
        return Problem(f"there is no {python}", "name the interpreter with --python")
    if "No module named" in stderr or "Error while finding module specification" in stderr:
        return Problem(
            f"{python} has no shardwise of this version there",
            "install it, or name another interpreter with --python",
        )
    return Problem(f"{python} ended with status {status}: {last or 'it gave no reason'}")


def contradictions(versions: Mapping[str, Mapping[str, str]], own: str) -> dict[str, str]:
    """Versions of `shardwise` and `torch` that do not match, by host; `own` is this machine's shardwise.

    Torch's version must be the same on all hosts; its build (`+cpu`, `+cu130`) may differ.
    """
    problems: dict[str, str] = {}
    first = next(iter(versions), "")
    for host, found in versions.items():
        torch, wanted = (_without_build(versions[name]["torch"]) for name in (host, first))
        if found["shardwise"] != own:
            problems[host] = f"it has shardwise {found['shardwise']}, and this machine {own}; install the same"
        elif not torch:
            problems[host] = "it has no torch; install it"
        elif torch != wanted:
            problems[host] = f"it has torch {torch}, and {first} has {wanted}; install the same"
    return problems


def joined(problems: Mapping[str, str]) -> str:
    """One error text for all hosts that cannot take part, each different problem once."""
    by_text: dict[str, list[str]] = {}
    for host, text in problems.items():
        by_text.setdefault(text, []).append(host)
    lines = [
        f"{', '.join(hosts)}: {text.rstrip('.?')}{'?' if text.endswith('?') else '.'}"
        for text, hosts in by_text.items()
    ]
    return "\n".join(["Nothing was started.", *lines] if len(lines) > 1 else [f"{lines[0]} Nothing was started."])


def _without_build(version: str) -> str:
    return version.partition("+")[0]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else ""
