"""Benchmarks against other programs, interleaved on one machine."""
