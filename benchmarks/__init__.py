"""Side-by-side measurements; `docs/benchmarks.md` holds what they printed."""
