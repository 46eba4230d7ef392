"""The process in which the protocol runs: time, threads, failpoints, observers, spans."""
