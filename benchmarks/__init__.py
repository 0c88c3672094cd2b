"""Benchmarks: ratios against the peers, measured in one interleaved run."""
