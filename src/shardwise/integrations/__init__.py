"""Scripts written for other libraries, on this engine. Each package needs its library only where it says so."""
