"""What the protocol needs from the process it runs in: time, threads, failpoints, observers, spans."""
