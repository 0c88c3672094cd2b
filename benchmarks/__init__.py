"""Benchmarks: ratios to the peers, measured in interleaved runs."""
