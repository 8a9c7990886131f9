"""The page that a person reads, and the verdict in the last lines of the output. Pure: results in, text out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]
GIB = 1 << 30


def page_of(whole: Mapping[str, Any]) -> str:
    gpus = ", ".join(whole["machine"]["gpus"]) or "no GPU: a rehearsal, whose figures mean nothing"
    versions = ", ".join(f"{name} {version}" for name, version in whole["versions"].items())
    lines = ["# Device run", "", f"{gpus}; {whole['machine']['cores']} cores; {versions}; {whole['started']}.", ""]
    for name, part in whole["parts"].items():
        lines += [f"## {name}: {part['status']}, {part['seconds']} s", ""]
        lines += _SECTIONS.get(name, _plain)(part)
        lines += ["", *(f"- **{error.splitlines()[0][:300]}**" for error in part["errors"]), ""]
    return "\n".join(lines)


def verdict_of(whole: Mapping[str, Any]) -> str:
    """At most about 60 lines."""
    lines = ["", "=== verdict: " + (", ".join(whole["machine"]["gpus"]) or "rehearsed on the CPU")]
    for name, part in whole["parts"].items():
        lines.append(f"{name}: {part['status']}, {part['seconds']} s, {len(part['errors'])} errors")
        lines += [f"    {line}" for line in _SECTIONS.get(name, _plain)(part)[:12] if line]
        lines += [f"    ! {error.splitlines()[0][:160]}" for error in part["errors"][:6]]
    return "\n".join(lines)


def _correctness(part: Row) -> list[str]:
    return [f"{part.get('passed', 0)} passed, {part.get('failed', 0)} failed, {part.get('skipped', 0)} skipped"]


def _memory(part: Row) -> list[str]:
    kinds = ("requested", "allocated", "reserved")
    lines = _table(("model, preset, precision", "promised GiB", *(f"{kind} over" for kind in kinds)))
    for row in part["rows"]:
        if "promised_bytes" in row:
            over = " | ".join(str(row.get(f"{kind}_over_promised", "")) for kind in kinds)
            lines.append(f"| {row['name']} | {row['promised_bytes'] / GIB:.2f} | {over} |")
    return lines


def _speed(part: Row) -> list[str]:
    lines = _table(("variant", "ms", "tokens/s", "MFU", "host ms", "waits", "launches", "peak GiB"))
    for row in part["rows"]:
        if "seconds" in row:
            lines.append(
                f"| {row['name']} | {row['seconds'] * 1e3:.1f} | {row['tokens_per_second']:,.0f} "
                f"| {_share(row.get('mfu'))} | {row['host_seconds'] * 1e3:.1f} | {row.get('host_waits', '')} "
                f"| {row.get('launches', '')} | {row.get('peak_allocated_bytes', 0) / GIB:.1f} |"
            )
    return lines


def _fp8(part: Row) -> list[str]:
    lines = [f"{row['name']}: off by {row['off']}" for row in part["rows"] if "off" in row]
    for row in part["rows"]:
        if "promised_bytes" in row:
            over = ", ".join(f"{kind} {row.get(f'{kind}_over_promised', '')}" for kind in ("requested", "allocated"))
            lines.append(f"{row['name']}: {row['promised_bytes'] / GIB:.2f} GiB promised; over it: {over}")
    timed = {row["name"]: row["seconds"] for row in part["rows"] if "seconds" in row}
    plain = min((seconds for name, seconds in timed.items() if name.startswith("bf16,")), default=0.0)
    lines += _table(("recipe", "ms", "tokens/s", "times bf16", "peak GiB"))
    for row in part["rows"]:
        if "seconds" in row:
            lines.append(
                f"| {row['name']} | {row['seconds'] * 1e3:.1f} | {row['tokens_per_second']:,.0f} "
                f"| {plain / row['seconds']:.3f} | {row.get('peak_allocated_bytes', 0) / GIB:.1f} |"
            )
    return lines


def _codes(part: Row) -> list[str]:
    lines = _plain(part)
    for row in part["rows"]:
        if "gigabytes_per_second" in row:
            speeds = ", ".join(f"{name} {speed}" for name, speed in row["gigabytes_per_second"].items())
            lines.append(f"{row['name']}, GB/s of fp32: {speeds}")
    return lines


def _offload(part: Row) -> list[str]:
    lines = []
    for row in part["rows"]:
        if "fetch_gb" in row:
            lines.append(
                f"bare copies, GB/s: {row['fetch_gb']:.1f} to the device, {row['evict_gb']:.1f} to the host, "
                f"{row['both_gb']:.1f} both at once"
            )
        elif "write_gb" in row:
            lines.append(f"{row['name']}, GB/s: {row['write_gb']:.2f} written, {row['read_gb']:.2f} read")
        elif "ours_norm_seconds" in row:
            ours, torch = (
                f"{row[f'{name}_norm_seconds'] * 1e3:.0f} ms, off by {row[f'{name}_off']:.0e}"
                for name in ("ours", "torch")
            )
            lines.append(f"{row['name']}, {row['numel'] / 1e6:.0f} M: {ours}; torch's {torch}")
        elif "params_per_second" in row:
            lines.append(
                f"{row['name']}, {row['threads']} threads: {row['params_per_second'] / 1e9:.2f} G parameters/s"
            )
        elif "seconds" in row:
            busy = row.get("busy_seconds", {})
            lines.append(
                f"{row['name']}: {row['seconds'] * 1e3:.0f} ms, forward and backward "
                f"{row['forward_backward_seconds'] * 1e3:.0f}; profiled, s: {busy}, hidden {row.get('copies_hidden')}, "
                f"GB/s {row.get('copies_gb')}"
            )
            if "state_bytes" in row:
                of, card = row["state_bytes"] / 1e9, row["card_bytes"] / 1e9
                lines.append(
                    f"    {row['num_params'] / 1e9:.2f} G parameters, whose training takes {of:.0f} GB of {card:.0f}"
                )
            if "disk_read_bytes" in row:
                moved = (row["disk_read_bytes"] + row["disk_written_bytes"]) / sum(row["all_seconds"]) / 1e9
                lines.append(f"    {moved:.2f} GB/s of the disk over all steps")
    return lines


def _gaps(part: Row) -> list[str]:
    lines = []
    for row in part["rows"]:
        if "gaps" in row:
            largest = ", ".join(f"{gap['us']} us in {gap['in'] or gap['before']}" for gap in row["gaps"][:3])
            lines.append(f"{row['name']}: {row['busy_seconds']}; largest gaps: {largest}")
    return lines


def _scripts(part: Row) -> list[str]:
    good = [row["name"] for row in part["rows"] if "error" not in row and "left_out" not in row]
    out = [f"{row['name']} ({row['left_out']})" for row in part["rows"] if "left_out" in row]
    return [f"{len(good)} of {len(part['rows'])} run right: {', '.join(good)}", *(f"left out: {one}" for one in out)]


def _calibrated(part: Row) -> list[str]:
    return [line for row in part["rows"] for line in row.get("said", "").splitlines()]


def _plain(part: Row) -> list[str]:
    good = sum("error" not in row and "left_out" not in row for row in part["rows"])
    return [f"{good} of {len(part['rows'])} right"]


def _table(columns: Iterable[str]) -> list[str]:
    names = list(columns)
    return [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


_SECTIONS = {
    "correctness": _correctness,
    "memory": _memory,
    "speed": _speed,
    "fp8": _fp8,
    "codes": _codes,
    "offload": _offload,
    "larger": _offload,
    "gaps": _gaps,
    "scripts": _scripts,
    "calibrated": _calibrated,
}
