"""MPI, by mpi4py: a transport, a backend for torch, and the meeting of ranks that `mpirun` has started.

Imported where it is used; mpi4py itself only where MPI is.
"""
