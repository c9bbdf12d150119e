"""The parts of `benchmarks.chaos`: a swarm to break, what breaks it, who watches, and what must hold afterwards."""
