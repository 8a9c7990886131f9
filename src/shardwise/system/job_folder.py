"""What launcher and ranks leave for each other in the folder of a host that outlives ranks: names of files."""

RECORD_PATH = "record-path"
"""Where the run's record is, as the rank that writes it has said."""
BAD_BATCH = "bad-batch"
"""The plan's `bad_batch`, for the launcher."""
LEFT_OUT = "left-out"
"""JSON, a list of the steps whose batches the launcher has had left out so far. It grows before a generation is
announced, and so is the same for all who enter that."""
ENDING = "ending"
"""There while the launcher ends the whole job."""
