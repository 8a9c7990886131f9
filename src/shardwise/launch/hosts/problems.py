"""Why a host cannot take part, in a sentence: from what ssh, a shell and Python say. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SSH_FAILED = 255
_NOT_FOUND = 127
# What OpenSSH says, and what it means to whoever started the job.
_OF_SSH = (
    (r"Could not resolve hostname", "its name is not known; is it spelled right, here and in ~/.ssh/config?"),
    (r"Connection refused", "nothing answers at its ssh port; does sshd run there, at this --ssh-port?"),
    (r"[Cc]onnection timed out|Operation timed out|banner exchange", "it does not answer; is it on, with a network?"),
    (r"No route to host|Network is unreachable", "there is no route to it; is it on, with a network?"),
    (
        r"Host key verification failed|REMOTE HOST IDENTIFICATION",
        "its host key is not the one that is known; connect once with ssh by hand, and read what it says",
    ),
    (r"Permission denied", "it refuses the key; copy yours with ssh-copy-id, or name one with --identity"),
    (r"Too many authentication failures", "it refuses the keys; name the right one with --identity"),
    (r"kex_exchange_identification|Connection (closed|reset) by", "it closed the connection before it was made"),
)


def connection_problem(status: int | None, stderr: str, python: str) -> str:
    """Why a host did not answer, by the status with which ssh ended (None: it has not) and by what it printed."""
    last = _last_line(stderr)
    if status is None:
        return "its shell began and did not come to an answer; does its login script wait for something?"
    if status == _SSH_FAILED:
        for pattern, sentence in _OF_SSH:
            if re.search(pattern, stderr):
                return sentence
        return f"ssh failed: {last or 'it does not say why'}"
    if status == _NOT_FOUND or "No such file or directory" in last:
        return f"there is no {python}; name the interpreter with --python"
    if "No module named" in stderr or "Error while finding module specification" in stderr:
        return f"{python} has no shardwise of this version there; install it, or name another interpreter with --python"
    return f"{python} ended with status {status}: {last or 'it does not say why'}"


def contradictions(versions: Mapping[str, Mapping[str, str]], own: str) -> dict[str, str]:
    """What is wrong with the versions of hosts (`shardwise`, `torch`), by host; `own` is this machine's shardwise.

    Torch has to be the same on all hosts; what it is built for need not be.
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


def letter(problems: Mapping[str, str]) -> str:
    """All hosts that cannot take part, each kind of problem once."""
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
