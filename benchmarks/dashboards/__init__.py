"""What benchmarks.dashboard is made of."""
