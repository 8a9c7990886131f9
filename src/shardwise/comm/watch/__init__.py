"""How ranks notice a fault and say which rank is at fault: journal, status, board, watchdog, diagnosis."""
