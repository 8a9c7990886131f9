"""MPI, by mpi4py: a transport, a backend for torch, and the store of ranks that `mpirun` has started.

Imported only where it is used; mpi4py itself only if MPI is.
"""
