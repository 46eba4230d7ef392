"""Benchmarks: pairs of runs in one process, ours and the peer in turn, reported as ratios with their spread."""
