"""The parts of `benchmarks.load`: a coordinator to load, and workers that load it."""
