"""How bytes go between ranks: shared memory, gloo, MPI, device groups, threads; and collectives of these."""
