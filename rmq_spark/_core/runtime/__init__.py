"""What the protocol asks of the process it runs in: time, threads, failpoints, observers, spans."""
