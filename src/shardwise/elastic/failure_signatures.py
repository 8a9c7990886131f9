"""What the end of one rank suggests about its cause: patterns of exceptions, signals and exit codes."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import Literal

Sign = Literal[
    "memory",
    "gpu",
    "disk",
    "bits",
    "connection",
    "data",
    "fault",
    "left",
    "exception",
    "crash",
    "kill",
    "asked",
    "exit",
]
"""memory: out of memory, on a host or a device; gpu: a device or its driver failed; disk: full or failing; bits: they
changed where no program has written; connection: a peer could not be reached; data: a source could not provide a
sample; fault: raised because another rank failed; left: so, with nothing to go on from;
exception: of the script; crash: of native code; kill: SIGKILL;
asked: a signal that asks to end; exit: a code that the script chose."""

_OWN_WORKER = r"^(shardwise\.errors\.)?DataError: Worker process \d+ of the data loader "
_TORCHS_WORKER = re.compile(r"DataLoader worker \(pid\(s\) .*\) exited unexpectedly")
"""What torch raises, with the reason in the exception before it."""

# Searched in this order, the more specific ones first. That the process of a loader ends says nothing of the samples: a
# batch that is bad does it again on another rank.
_PATTERNS: tuple[tuple[Sign, str], ...] = (
    ("memory", _OWN_WORKER + r"was killed by SIGKILL|DataLoader worker .* is killed by signal: Killed"),
    ("exception", _OWN_WORKER),
    ("data", r"^(shardwise\.errors\.)?DataError\b"),
    ("bits", r"^(shardwise\.errors\.)?CorruptionError\b"),
    (
        "memory",
        r"OutOfMemoryError|out of (shared )?memory|Cannot allocate memory|^MemoryError\b|"
        r"DefaultCPUAllocator: can't alloc|std::bad_alloc",
    ),
    (
        "disk",
        r"No space left on device|Input/output error|Read-only file system|Disk quota exceeded|Stale file handle|"
        r"has answered nothing for",
    ),
    (
        "gpu",
        r"\bXid\b|uncorrectable ECC|ECC error|CUDA error: (?!device-side assert)|cudaError(?!.*assert)|"
        r"unspecified launch failure|NVLink|fallen off the bus|CUBLAS_STATUS_(ALLOC|EXECUTION|INTERNAL)|"
        r"CUDNN_STATUS_(EXECUTION|INTERNAL)|unhandled cuda error|hipError|device .* is lost",
    ),
    (
        "connection",
        r"Connection (reset|refused|closed|timed out|aborted)|Broken pipe|No route to host|Network is unreachable|"
        r"ncclRemoteError|ncclSystemError|unhandled system error|NCCL.*(timeout|timed out|remote)|"
        r"Timed out waiting \d+ ?ms|Host is down|ConnectionError",
    ),
)
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGABRT, signal.SIGFPE, signal.SIGSYS, signal.SIGTRAP}
_REQUESTS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
_LEFT_BEHIND = re.compile(r"^(shardwise\.errors\.)?LostStateError\b")
_KINDS_OF_FAULT = re.compile(r"^(shardwise\.errors\.)?(FaultError|CommError|TurnedAwayError)\b")


@dataclass(frozen=True)
class End:
    """How one rank ended, as far as is known.

    `exit_code` is negative for a signal. `error` is the last line of its exception; `text` the whole exception, or the
    end of its log. `step` is the last committed step, `batch` describes its samples. `ran_out`: the kernel killed it
    for lack of memory. `is_alive`: it has not ended, but others could not reach it. `is_new`: it had joined others, and
    has taken no step with them.
    """

    rank: int
    host: str = ""
    exit_code: int = 0
    error: str = ""
    text: str = ""
    step: int = -1
    batch: str = ""
    ran_out: bool = False
    is_alive: bool = False
    is_new: bool = False
    at: float = 0.0

    @property
    def signature(self) -> str:
        """The same for all occurrences of one error: the exception without numbers and addresses, or the signal."""
        if self.error:
            return re.sub(r"0x[0-9a-f]+|\d+", "#", self.error)[:400]
        return _signal_name(self.exit_code) or f"exit code {self.exit_code}"

    @property
    def signal_name(self) -> str:
        """The signal that ended it; empty if none did."""
        return _signal_name(self.exit_code)

    @property
    def manner(self) -> str:
        """How it ended, as a predicate of a sentence."""
        if self.is_alive:
            return "could not be reached"
        if self.ran_out:
            return "was killed by the kernel, out of memory"
        if self.error:
            return f"raised {self.error[:300]}"
        name = _signal_name(self.exit_code)
        return f"was killed by {name}" if name else f"ended with exit code {self.exit_code}"


def sign_of(end: End) -> Sign:
    """The cause of one rank's end, judged by that rank alone."""
    if end.is_alive:
        return "connection"
    if end.ran_out:
        return "memory"
    if end.error:
        return _sign_of_error(end)
    if end.exit_code < 0:
        number = -end.exit_code
        if number == signal.SIGKILL:
            return "kill"
        if number in _CRASHES:
            found = _found(end.text)
            return found if found in ("gpu", "memory", "disk") else "crash"
        return "asked" if number in _REQUESTS else "kill"
    return "exit"


def _sign_of_error(end: End) -> Sign:
    if _KINDS_OF_FAULT.match(end.error):
        return "fault"  # even if it quotes another rank's error
    if _LEFT_BEHIND.match(end.error):
        return "left"
    return _found(end.error) or (_found(end.text) if _TORCHS_WORKER.search(end.error) else None) or "exception"


def _found(text: str) -> Sign | None:
    for sign, pattern in _PATTERNS:
        if re.search(pattern, text, re.MULTILINE):
            return sign
    return None


def _signal_name(exit_code: int) -> str:
    try:
        return signal.Signals(-exit_code).name if exit_code < 0 else ""
    except ValueError:
        return f"signal {-exit_code}"
