"""Jobs whose ranks come and go: the launcher decides who goes on, and starts others in the place of the dead."""
