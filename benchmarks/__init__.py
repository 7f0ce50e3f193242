"""Measurements of speed and agreement; docs/benchmarks.md has their results."""
