"""The command line: thin, one function for each command."""
