"""By what ranks that `doctor` starts tell it how they fare. Imported by both sides, which do not import each other."""

RESULT = "RESULT "
"""The beginning of a line with what was found, as JSON."""
TROUBLE = "TROUBLE "
"""The beginning of a line with the reason why a rank cannot take part."""
STARTED = "started-"
"""The beginning of the name of a file that a rank creates when it has started and imported torch."""
