"""The parts of `benchmarks.dashboard`: a long run, its coordinator, and a browser."""
