"""Profiles of hardware: what they say in seconds, files of users, and what a calibration makes of measurements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cli import calibrating
from shardwise.cli.main import main
from shardwise.errors import ConfigError
from shardwise.fit import hardware_here
from shardwise.fit.calibrate.speed import calibrated_hardware, fit_products, hardware_from, hardware_of_file
from shardwise.fit.calibrate.speeds import Speeds
from shardwise.fit.hardware import PROFILES, Hardware, Link, hardware, profiles
from shardwise.fit.operations import Operation, product
from shardwise.system.calibration import (
    Calibration,
    DiskFigures,
    HostFigures,
    LinkFigures,
    read_calibration,
    write_calibration,
)

H100 = hardware("h100-sxm")
PLAIN = H100.model_copy(
    update={
        "ranks_per_node": 4,
        "local": Link(latency_seconds=1, bytes_per_second=100, share=1),
        "network": Link(latency_seconds=10, bytes_per_second=10, node_bytes_per_second=20, share=1),
    }
)
"""Four ranks on a node, which share two cards of the network."""


@pytest.mark.parametrize("name", profiles())
def test_every_profile_is_complete_and_says_where_its_figures_come_from(name: str) -> None:
    found = hardware(name)
    assert found.name == name
    assert found.host is not None
    assert found.product_seconds(4096, 4096, 4096, "fp16") > 0
    text = (Path(__file__).parents[2] / "src/shardwise/fit" / PROFILES / f"{name}.yaml").read_text()
    assert "data sheet" in text or "datasheet" in text or "whitepaper" in text


def test_the_issue_s_profiles_are_there() -> None:
    expected = {"h100-sxm", "h200", "b200", "b300", "gb200", "gb300", "a100-40", "a100-80", "l40s", "4090", "mi300x"}
    expected |= {"v100-32", "cpu"}
    assert expected <= set(profiles())


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("h100", "'h100-sxm'"),
        ("H100", "'h100-sxm'"),
        ("NVIDIA H100 80GB HBM3", "'h100-sxm'"),
        ("h100sxm", "'h100-sxm'"),
        ("a100", "'a100-40' or 'a100-80'"),
        ("A100-SXM4-80GB", "'a100-40' or 'a100-80'"),
        ("RTX 4090", "'4090'"),
        ("GB200-NVL72", "'gb200'"),
        ("mi30x", "'mi300x'"),
    ],
)
def test_an_unknown_profile_names_the_nearest(written: str, meant: str) -> None:
    with pytest.raises(ConfigError) as raised:
        hardware(written)
    assert f"There is no hardware {written!r}. Did you mean {meant}?" in str(raised.value)


def test_a_file_of_the_user_s_own_is_checked_as_a_plan_is(tmp_path: Path) -> None:
    source = (Path(__file__).parents[2] / "src/shardwise/fit" / PROFILES / "h100-sxm.yaml").read_text()
    mine = tmp_path / "mine.yaml"
    mine.write_text(source.replace("name: h100-sxm", "name: mine"))
    assert hardware(mine) == H100.model_copy(update={"name": "mine"})
    mine.write_text(source.replace("ranks_per_node: 8", "ranks_per_node: 0\nrank_per_node: 8"))
    with pytest.raises(ConfigError) as caught:
        hardware(str(mine))
    assert "mine.yaml:4: ranks_per_node is 0; expected a whole number of at least 1." in str(caught.value)
    mine.write_text(source.replace("  memory_bytes: 2048GiB", "  memory_bytes: many\n  memory_byte: 1"))
    with pytest.raises(ConfigError) as below:
        hardware(str(mine))
    assert "host.memory_bytes is 'many'; expected a whole number of at least 0" in str(below.value)
    assert "unknown key 'memory_byte' in host. Did you mean 'memory_bytes'?" in str(below.value)
    assert "unknown key 'rank_per_node' in the hardware. Did you mean 'ranks_per_node'?" in str(caught.value)
    mine.write_text(source.replace("\nmemory_bytes:", "\nmemory_byte:"))
    with pytest.raises(ConfigError) as absent:
        hardware(str(mine))
    assert f"{mine}: the hardware has no key 'memory_bytes', and needs one." in str(absent.value)
    assert "unknown key 'memory_byte' in the hardware" in str(absent.value)
    assert "the hardware is {" not in str(absent.value)
    (tmp_path / "mkdocs.yml").write_text("site_name: none of ours\n")
    with pytest.raises(ConfigError, match=r"Did you mean 'mine\.yaml'"):
        hardware(tmp_path / "mone.yml")
    with pytest.raises(ConfigError, match="A name without a suffix means what comes with the library"):
        hardware(tmp_path / "nosuch.yaml")


def test_collectives_within_a_node_between_nodes_and_over_both() -> None:
    within, between, both = range(4), range(0, 8, 4), range(8)
    assert PLAIN.collective_seconds("all_gather", 400, within) == pytest.approx(400 * 3 / 4 / 100 + 3)
    # one rank of each node; the other three pairs use the cards too, so that each gets a quarter of 20
    assert PLAIN.collective_seconds("all_gather", 400, between) == pytest.approx(400 / 2 / 5 + 10)
    # four ranks of a node have all of its cards
    assert PLAIN.collective_seconds("all_gather", 400, both) == pytest.approx(400 / 2 / 20 + 6 + 10), "a flat ring"
    assert PLAIN.collective_seconds("send", 400, (3, 4)) == pytest.approx(400 / 5 + 10)
    assert PLAIN.collective_seconds("all_reduce", 400, within) == pytest.approx(2 * (400 * 3 / 4 / 100 + 3)), "a ring"
    many = PLAIN.collective_seconds("all_reduce", 400, range(32))
    assert many == pytest.approx(2 * (400 / 20 + 3 + 3 * 10)), "a tree of eight nodes, chains within"
    assert PLAIN.collective_seconds("all_gather", 400, range(1)) == 0
    assert PLAIN.links_of(both) == ("local", "network")
    assert PLAIN.links_of(between) == ("network",)


def test_a_list_of_ranks_costs_what_the_same_range_costs() -> None:
    for ranks in (range(4), range(0, 8, 4), range(2, 32, 2)):
        for kind in ("all_gather", "all_reduce", "all_to_all", "broadcast"):
            assert PLAIN.collective_seconds(kind, 1e6, tuple(ranks)) == PLAIN.collective_seconds(kind, 1e6, ranks)


def test_an_unknown_collective_has_no_price() -> None:
    with pytest.raises(ConfigError, match="'scan' among 4 ranks has no price"):
        PLAIN.collective_seconds("scan", 1, range(4))


def test_on_processors_every_rank_sends_to_all_others_at_once() -> None:
    """See [Note: messages at once] in `fit/hardware.py`: as many bytes as in a ring, and one wait within a host and one
    between hosts, however many there are."""
    assert PLAIN.host is not None
    host = PLAIN.host.model_copy(update={"link_bytes_per_second": None})
    price = PLAIN.model_copy(update={"host": host}).collective_seconds
    one_host, eight_hosts, both = range(4), range(0, 32, 4), range(32)
    for kind in ("all_gather", "reduce_scatter"):
        assert price(kind, 400, one_host) == pytest.approx(400 * 3 / 4 / 100 + 1)
        assert price(kind, 400, eight_hosts) == pytest.approx(400 * 7 / 8 / 5 + 10), "a ring of eight waits seven times"
        assert price(kind, 400, both) == pytest.approx(400 * 7 / 8 / 20 + 1 + 10)
    assert price("all_reduce", 400, eight_hosts) == pytest.approx(2 * (400 * 7 / 8 / 5 + 10)), "sums, and back"
    assert price("all_reduce", 400, one_host) == pytest.approx(2 * (400 * 3 / 4 / 100 + 1))
    assert price("all_to_all", 400, both) == pytest.approx(400 * 28 / 32 / 5 + 1 + 10)
    assert price("broadcast", 400, eight_hosts) == pytest.approx(7 * 400 / 5 + 10), "a copy for each other host"
    assert price("broadcast", 400, one_host) == pytest.approx(400 / 100 + 1)
    two_hosts = range(0, 8, 4)
    assert price("all_reduce", 400, two_hosts) == pytest.approx(400 / 5 + 10), "[Note: sums of two] in pairwise.py"
    assert PLAIN.collective_seconds("all_reduce", 400, two_hosts) == pytest.approx(400 / 5 + 2 * 10)


@given(st.integers(1, 10_000), st.integers(1, 10_000), st.integers(1, 10_000))
def test_a_larger_product_never_takes_less(m: int, n: int, k: int) -> None:
    seconds = H100.product_seconds(m, n, k, "bf16")
    assert seconds * 0.999999 <= H100.product_seconds(m + 1, n, k, "bf16")
    assert seconds * 0.999999 <= H100.product_seconds(m, n, k + 1, "bf16")


def test_a_thin_product_is_bound_by_memory() -> None:
    thin = product(1, 8192, 8192, "bf16", 2)
    assert H100.operation_seconds(thin) == pytest.approx(H100.memory_seconds(thin.num_bytes))


def test_launches_count_beside_the_device_and_between_operators_of_a_processor() -> None:
    small = [Operation("memory", num_bytes=1)] * 100
    assert H100.computing_seconds(small) == pytest.approx(100 * H100.launch_seconds, rel=0.01)
    cpu = hardware("cpu")
    large = [Operation("memory", num_bytes=1e9)] * 100
    assert cpu.computing_seconds(large) == pytest.approx(
        100 * (cpu.launch_seconds + 1e9 / (cpu.memory_bytes_per_second * cpu.memory_share))
    )


def test_new_pages_cost_what_was_measured_and_in_proportion_beyond() -> None:
    cpu = hardware("cpu").model_copy(update={"fresh_blocks": ((2**20, 0.0), (2**21, 1e-3), (2**22, 3e-3))})
    copying = Operation("memory", num_bytes=0)
    for num_bytes, seconds in ((2**10, 0), (2**20, 0), (3 * 2**19, 5e-4), (2**21, 1e-3), (2**22, 3e-3), (2**24, 12e-3)):
        allocating = replace(copying, allocated_bytes=(num_bytes,))
        assert cpu.operation_seconds(allocating) == pytest.approx(seconds)
    twice = replace(product(64, 64, 64, "fp32", 4), allocated_bytes=(2**21, 2**21))
    alone = replace(twice, allocated_bytes=())
    assert cpu.operation_seconds(twice) == pytest.approx(cpu.operation_seconds(alone) + 2e-3)
    assert H100.operation_seconds(replace(copying, allocated_bytes=(2**30,))) == 0, "a device keeps its blocks"
    assert cpu.small_pages_seconds(2**22) == pytest.approx(3e-3)
    assert H100.small_pages_seconds(2**30) == 0


def test_blocks_from_the_heap_cost_what_small_ones_do() -> None:
    """Those of 8 MiB and more come from the system, in a backward, too."""
    blocks = ((2**18, 1e-6), (15 * 2**16, 2e-6), (2**20, 1e-3), (2**23, 3e-3))
    cpu = hardware("cpu").model_copy(update={"fresh_blocks": blocks})
    new = {2**18: 1e-6, 2**20: 1e-3, 2**23 - 2**20: 1e-3 + 6 / 7 * 2e-3, 2**23: 3e-3}
    kept = {2**18: 1e-6, 2**20: 2e-6, 2**23 - 2**20: 2e-6, 2**23: 3e-3}
    for from_heap, seconds in ((False, new), (True, kept)):
        assert {size: cpu.block_seconds(size, from_heap=from_heap) for size in seconds} == pytest.approx(seconds)
    allocating = Operation("memory", allocated_bytes=(2**20, 2**23))
    assert cpu.computing_seconds([allocating], from_heap=True) == pytest.approx(cpu.launch_seconds + 3e-3 + 2e-6)
    assert H100.block_seconds(2**20, from_heap=True) == 0


def test_ranks_share_a_processor() -> None:
    cpu = hardware("cpu")
    four = cpu.with_ranks(4)
    assert four.peak("fp32") == pytest.approx(cpu.peak("fp32") / 4)
    assert four.with_ranks(4) == four
    assert four.with_ranks(1).peak("fp32") == pytest.approx(cpu.peak("fp32"))
    assert H100.with_ranks(4).peak("bf16") == H100.peak("bf16")


def test_a_rank_on_a_processor_computes_on_no_more_cores_than_it_has_threads() -> None:
    """Of four ranks with four threads each on 16 cores, three that are left have their own twelve, not all."""
    machine = hardware("cpu").model_copy(update={"cores": 16})
    four = machine.with_ranks(4, 4)
    assert four.peak("fp32") == pytest.approx(machine.with_ranks(4).peak("fp32"))
    for left in (machine.with_ranks(3, 4), four.with_ranks_left(3), machine.with_ranks(2, 4), four.with_ranks_left(1)):
        assert left.peak("fp32") == pytest.approx(four.peak("fp32"))
        assert left.memory_bytes_per_second == pytest.approx(four.memory_bytes_per_second)
    again = machine.with_ranks(2, 4).with_ranks_left(1)
    assert again.peak("fp32") == pytest.approx(four.peak("fp32")), "threads of two ranks that had been four"
    crowded = machine.with_ranks(8, 4)
    assert crowded.peak("fp32") == pytest.approx(four.peak("fp32") / 2)
    assert crowded.with_ranks_left(4).peak("fp32") == pytest.approx(four.peak("fp32"))


def test_a_part_of_a_host_gets_that_part_of_its_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual machine with one H200 and 16 of 112 cores; one with more cores than the profile, or without them."""
    whole = hardware("h200")
    assert whole.host is not None
    part = whole.host.with_cores(16)
    assert part.adam_elements_per_second == pytest.approx(15e9 / 7)
    assert part.memory_bytes_per_second == pytest.approx(215e9 / 7)
    assert part.with_cores(16) == part
    assert part.link_bytes_per_second == whole.host.link_bytes_per_second
    assert whole.host.with_cores(112) == whole.host.with_cores(224) == whole.host
    unknown = whole.host.model_copy(update={"cores": None})
    assert unknown.with_cores(16) == unknown
    monkeypatch.setattr(hardware_here, "num_cores", lambda: 16)
    here = hardware_here.with_ranks_of(whole, SimpleNamespace(size=1, local_size=1, device=torch.device("cuda")))  # type: ignore[arg-type]
    assert here.host == part


def test_ranks_that_are_left_run_the_threads_that_they_were_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four ranks of a host with 16 cores. The host's own rates stay: ranks that compute on it share them."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    world = SimpleNamespace(size=2, local_size=2, device=torch.device("cpu"))
    machine = hardware("cpu").model_copy(update={"cores": 16})
    here = hardware_here.with_ranks_of(machine, world)  # type: ignore[arg-type]
    assert here.peak("fp32") == pytest.approx(machine.peak("fp32") / 4)
    assert here.host == machine.host
    assert here.ranks_per_node == 2


def test_a_dtype_or_a_tier_without_figures_is_named() -> None:
    with pytest.raises(ConfigError, match="'v100-32' has no rate for bf16: peak_flops has fp16"):
        hardware("v100-32").product_seconds(1, 1, 1, "bf16")
    with pytest.raises(ConfigError, match="'h100-sxm' has no disk"):
        H100.disk_seconds(read_bytes=1)


# -- calibration ------------------------------------------------------------------------------------------

SIZES = ((128, 256, 256), (512, 512, 512), (256, 256, 2048), (1024, 2048, 1024))


def rows(peak: float, half_area: float, half_depth: float) -> list[tuple[int, int, int, float]]:
    return [(m, n, k, 2 * m * n * k / peak * (1 + half_area / (m * n) + half_depth / k)) for m, n, k in SIZES]


@given(st.floats(1e9, 1e15), st.floats(0, 1e6), st.floats(0, 1e3))
def test_the_fit_finds_what_made_the_measurements(peak: float, half_area: float, half_depth: float) -> None:
    measured = rows(peak, half_area, half_depth)
    products, rate = fit_products(measured)
    found = H100.model_copy(update={"products": products, "peak_flops": {"fp32": rate}})
    for m, n, k, seconds in measured:
        assert found.product_seconds(m, n, k, "fp32") == pytest.approx(seconds, rel=0.05)


SPEEDS = Speeds(
    num_ranks=2,
    products={"fp32": rows(1e11, 1e4, 64), "bf16": rows(4e11, 1e5, 128)},
    attention={
        "fp32": [(128, 1e9, 2e-2), (1024, 1e9, 1.2e-2)],
        "bf16": [(128, 1e9, 1e-2), (1024, 1e9, 4e-3)],
    },
    attention_backward={
        "fp32": [(128, 1e9, 3e-2), (1024, 1e9, 1.5e-2)],
        "bf16": [(length, 1e9, 6e-3 + 400 / length**2) for length in (128, 256, 512, 1024)],
    },
    memory={"fp32": [(1e8, 2e-2)], "bf16": [(1e8, 4e-2)]},
    copy_bytes_per_second=1e10,
    flat_bytes_per_second=8e9,
    launch_seconds=3e-6,
    messages=[(2**13, 2e-5), (2**25, 2e-5 + 2**24 / 4e9)],
    exchanges=[(2**13, 4e-5), (2**25, 4e-5 + 2**24 / 1e9)],
)


def test_a_profile_follows_from_measurements() -> None:
    known = Calibration("here", memory=HostFigures(1e10, 1e9, 2, "today"))
    found = hardware_from(SPEEDS, known, "mine", fresh_blocks=((2**20, 0.0), (2**22, 1e-3)))
    assert found.fresh_blocks == ((2**20, 0.0), (2**22, 1e-3))
    assert found.flat_seconds(8e9) == pytest.approx(1), "flat buffers are in no cache"
    assert found.ranks_share_device
    assert found.is_processor
    assert found.ranks_per_node == 2
    assert found.memory_share == pytest.approx(0.5)
    assert found.collective_seconds("all_gather", 2**25, range(2)) == pytest.approx(2e-5 + 2**24 / 4e9, rel=0.01)
    assert found.collective_seconds("all_to_all", 2**25, range(2)) == pytest.approx(4e-5 + 2**24 / 1e9, rel=0.01)
    assert found.memory_seconds(1e8, "fp32") == pytest.approx(2e-2)
    assert found.memory_seconds(1e8, "bf16") == pytest.approx(4e-2)
    for measured, is_backward in ((SPEEDS.attention, False), (SPEEDS.attention_backward, True)):
        for dtype, some in measured.items():
            for length, flops, seconds in some:
                one = {"dtype": dtype, "is_backward": is_backward}
                predicted = found.attention_seconds(flops, length, length, **one, is_causal=True)
                assert predicted == pytest.approx(seconds, rel=0.02), "each dtype and pass has its own fit"
                assert found.attention_seconds(flops, length, length, **one) == pytest.approx(2 * predicted)
    for dtype, some in SPEEDS.products.items():
        for m, n, k, seconds in some:
            assert found.product_seconds(m, n, k, dtype) == pytest.approx(seconds, rel=0.02)
    assert found.host is not None
    assert Hardware.model_validate(found.model_dump(exclude_none=True)) == found


def test_a_calibration_from_before_causal_masks_had_a_share_prices_them_as_it_measured_them() -> None:
    old = hardware("h100-sxm").model_dump(exclude={"causal_share"}, exclude_none=True)
    whole = {"flops": 1e12, "queries": 1024, "keys": 1024, "dtype": "bf16"}
    assert hardware_of_file(old).attention_seconds(**whole, is_causal=True) == H100.attention_seconds(**whole)
    assert H100.attention_seconds(**whole, is_causal=True) == pytest.approx(H100.attention_seconds(**whole) / 2)


def test_the_faster_of_two_rounds_counts() -> None:
    """A machine that others use is slow for seconds at a time, longer than a setting is repeated."""
    busy = {dtype: [(m, n, k, 1.5 * seconds) for m, n, k, seconds in some] for dtype, some in SPEEDS.products.items()}
    other = replace(SPEEDS, products=busy, copy_bytes_per_second=2e10, messages=[(2**13, 1e-5), SPEEDS.messages[1]])
    assert Speeds.fastest([SPEEDS]) == SPEEDS
    found = Speeds.fastest([other, SPEEDS])
    assert found.products == SPEEDS.products
    assert found.copy_bytes_per_second == 2e10
    assert found.messages == other.messages


def test_calibrate_says_which_disk_it_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = DiskFigures(2e9, 1e9, 8, 2**20, True, "2026-01-01T00:00:00+00:00")
    measured: list[Path] = []
    monkeypatch.setattr(calibrating.disk, "measure_disk", lambda place, _grid: measured.append(place))
    monkeypatch.setattr(calibrating, "disk_figures", lambda _rows: figures)
    monkeypatch.setattr(calibrating, "measured_speeds", lambda _dtypes: [SPEEDS])
    monkeypatch.setattr(calibrating, "measured_fresh_blocks", lambda: ())
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    path, nvme = tmp_path / "calibration.json", tmp_path / "nvme"
    links = LinkFigures(5e9, 1e9, 0.0, 0.0, "today")
    write_calibration(Calibration("here", memory=HostFigures(1e10, 1e9, 2, "today"), links=links), path)
    assert main(["calibrate", "--disk", "$SCRATCH/run", "--calibration", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"the disk with {tmp_path}/scratch/run: 1.9 GiB/s read, 953.7 MiB/s written" in shown
    assert f"There is no folder {tmp_path}/scratch/run yet, so these are figures of the disk with {tmp_path}." in shown
    nvme.mkdir()
    (tmp_path / "fast").symlink_to(nvme)
    assert main(["calibrate", "--disk", str(tmp_path / "fast"), "--calibration", str(path)]) == 0
    assert "There is no folder" not in capsys.readouterr().out
    assert measured == [tmp_path / "scratch/run", nvme]
    known = read_calibration(path)
    assert known.hardware is not None
    assert known.hardware["disk"] == {"read_bytes_per_second": 2e9, "write_bytes_per_second": 1e9}, "behind the link"


def test_a_calibration_is_of_one_machine(tmp_path: Path) -> None:
    found = hardware_from(SPEEDS, Calibration("here", memory=HostFigures(1e10, 1e9, 2, "today")), "mine")
    path = tmp_path / "calibration.json"
    write_calibration(Calibration("here", machine="A; 2 cores", hardware=found.model_dump(exclude_none=True)), path)
    known = read_calibration(path)
    assert calibrated_hardware(known, "A; 2 cores") == found
    with pytest.raises(ConfigError, match=r"of another machine: 'A; 2 cores', and this is 'B; 4 cores'"):
        calibrated_hardware(known, "B; 4 cores")
    with pytest.raises(ConfigError, match=r"has not been measured\. Run shardwise calibrate, or give --hardware"):
        calibrated_hardware(replace(known, hardware=None), "A; 2 cores")


def test_a_calibration_without_a_profile_is_still_read(tmp_path: Path) -> None:
    """Files that `shardwise bench` wrote before there was `shardwise calibrate`."""
    path = tmp_path / "calibration.json"
    path.write_text('{"version": 1, "host": "here", "disks": {}, "memory": null, "links": null}')
    assert read_calibration(path) == Calibration("here")
