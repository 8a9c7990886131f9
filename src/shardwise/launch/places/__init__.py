"""One module per place where ranks run: a pure function gives a plan to print, another carries it out."""
