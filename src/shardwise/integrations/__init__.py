"""Integrations of other libraries: one module or package each, imported only by its users.

They use only public names of shardwise and of the other library.
"""
