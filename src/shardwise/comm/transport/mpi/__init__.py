"""MPI, by mpi4py: a transport, a backend for torch, and the store of ranks that `mpirun` has started.

What is in it is imported only where it is used; mpi4py itself only if MPI is.
"""

BACKEND = "mpi4py"
"""Torch's name of our backend."""
