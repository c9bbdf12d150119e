"""The parts of `benchmarks.network`: a run on loopback, nodes that join it, attackers, and GossipSub beside it."""
