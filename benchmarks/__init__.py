"""Benchmarks: the library's cost relative to that of its peers, measured in interleaved runs."""
