"""A process's rank, from the variables of its launcher."""

from __future__ import annotations

import pytest

from shardwise.errors import ConfigError
from shardwise.system.process_rank import address_of, first_host, left_over, process_rank_of

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "5",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "5",
    "MV2_COMM_WORLD_SIZE": "8",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "4",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "1234",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("env", "name", "is_mpi"),
    [
        (TORCHRUN, "torchrun", False),
        (OPEN_MPI, "Open MPI", True),
        (MVAPICH, "MVAPICH", True),
        (HYDRA, "Hydra (MPICH, Intel MPI)", True),
        (SLURM, "Slurm", False),
    ],
)
def test_each_launcher_says_where_a_process_is(env: dict[str, str], name: str, is_mpi: bool) -> None:
    process = process_rank_of(env)
    assert (process.rank, process.size, process.local_rank, process.local_size) == (5, 8, 1, 4)
    assert process.launcher is not None
    assert (process.launcher.name, process.is_mpi) == (name, is_mpi)


def test_a_process_without_a_launcher_is_a_world_of_one() -> None:
    for env in ({}, {"OMPI_COMM_WORLD_SIZE": "1"}, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}):
        process = process_rank_of(env)
        assert (process.rank, process.size, process.launcher) == (0, 1, None)


def test_pmix_and_pmi_alone() -> None:
    process = process_rank_of({"PMIX_RANK": "3"})
    assert (process.rank, process.size, process.is_mpi) == (3, None, True)
    process = process_rank_of({"PMI_RANK": "3", "PMI_SIZE": "4"})
    assert (process.rank, process.size, process.is_mpi) == (3, 4, True)


def test_launchers_within_launchers() -> None:
    """The inner one counts, as far as one is known to be within the other."""
    inherited = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
    for env in (OPEN_MPI, HYDRA):
        assert process_rank_of(inherited | env).rank == 5
        assert process_rank_of(TORCHRUN | env).launcher is process_rank_of(TORCHRUN).launcher
        inner = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "2"}
        assert process_rank_of(env | inner).size == 2
        assert process_rank_of(env | {"WORLD_SIZE": "1"}).size == 1  # each is meant to be alone
    assert process_rank_of(SLURM | {"PMI_RANK": "5", "PMI_SIZE": "8"}).is_mpi is False
    assert process_rank_of(SLURM | {"RANK": "0", "WORLD_SIZE": "2"}).size == 2


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (
            OPEN_MPI | {"RANK": "2", "WORLD_SIZE": "8"},
            "two different ranks: RANK=2 of WORLD_SIZE=8 by torchrun's variables, and OMPI_COMM_WORLD_RANK=5 of "
            "OMPI_COMM_WORLD_SIZE=8 by those of mpirun",
        ),
        (
            OPEN_MPI | HYDRA | {"PMI_RANK": "1"},
            "two different ranks: OMPI_COMM_WORLD_RANK=5 .* PMI_RANK=1 of PMI_SIZE=8",
        ),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "8"}, "OMPI_COMM_WORLD_RANK=8 is not within OMPI_COMM_WORLD_SIZE=8"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 says .*RANK is not set.*shardwise launch"),
        ({"WORLD_SIZE": "4", "LOCAL_RANK": "0"}, "WORLD_SIZE=4 says .*RANK is not set"),
        ({"RANK": "0"}, "RANK=0 is set, but WORLD_SIZE is not"),
        ({"RANK": "3"}, "RANK=3 is set, but WORLD_SIZE is not"),
        (OPEN_MPI | {"RANK": "5"}, r"RANK=5 is set, but WORLD_SIZE is not. Unset it: mpirun \(Open MPI\) has started"),
        (HYDRA | {"WORLD_SIZE": "8"}, r"RANK is not set\). Unset it: mpiexec \(Hydra"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 is not within WORLD_SIZE=4"),
        ({"PMI_RANK": "one", "PMI_SIZE": "4"}, "PMI_RANK='one' is not a number"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_RANK=1 is set.* but OMPI_COMM_WORLD_SIZE is not"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4 says that mpirun starts several .* train alone"),
        ({"PMI_SIZE": "4"}, "PMI_SIZE=4 says that mpiexec starts several"),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, "SLURM_NTASKS=4 says that srun .*SLURM_STEP_ID is not set"),
    ],
)
def test_contradictory_variables_are_named(env: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        process_rank_of(env)
    if "WORLD_SIZE" not in env and env.get("RANK", "0") == "0":
        assert process_rank_of(env | {"WORLD_SIZE": "1"}).size == 1


def test_what_may_have_been_left_over_in_a_shell() -> None:
    """It is right for one of the ranks, which waits for the others while these find the contradiction."""
    for env in (OPEN_MPI, HYDRA):
        both = env | TORCHRUN
        said = left_over(both, process_rank_of(both))
        assert said.startswith(" RANK=5 of WORLD_SIZE=8 is set beside the variables of mpi")
        assert said.endswith("unset RANK and WORLD_SIZE.")
        inner = both | {"TORCHELASTIC_RUN_ID": "1"}
        assert not left_over(inner, process_rank_of(inner))
        assert not left_over(env, process_rank_of(env))
    assert not left_over(TORCHRUN, process_rank_of(TORCHRUN))


def test_addresses() -> None:
    process = process_rank_of(SLURM)
    host, port = address_of(SLURM, process)
    assert host == "gpu007"
    assert 20_000 <= port < 30_000
    assert address_of(SLURM | {"SLURM_STEP_ID": "1"}, process)[1] != port
    assert address_of(SLURM | {"MASTER_ADDR": "a", "MASTER_PORT": "7"}, process) == ("a", 7)
    process = process_rank_of(TORCHRUN)
    assert address_of(TORCHRUN, process) == ("127.0.0.1", 29500)
    assert address_of(TORCHRUN | {"MASTER_ADDR": ""}, process) == ("127.0.0.1", 29500)
    for port in ("65536", "-1"):
        for env in (TORCHRUN, SLURM):
            with pytest.raises(ConfigError, match=f"MASTER_PORT={port} is not a port"):
                address_of(env | {"MASTER_PORT": port}, process_rank_of(env))


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("", ""),
        ("login", "login"),
        ("a1,b2", "a1"),
        ("gpu[007-009,12],login", "gpu007"),
        ("r[1-2]n[3,4]", "r1n3"),
        ("r[3,1]-ib,x", "r3-ib"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(("node", "tasks"), [("0", 4), ("1", 4), ("2", 1)])
def test_tasks_of_a_slurm_node(node: str, tasks: int) -> None:
    env = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),1", "SLURM_NODEID": node}
    assert process_rank_of(env).local_size == tasks
