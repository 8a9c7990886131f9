"""Libraries whose users keep their scripts: one module or package for each, imported by whoever asks for it.

Only public names are used, of shardwise and of the other library.
"""
