"""A whole swarm on one machine: `swarmproof demo` starts it, watches it, and reports on it."""
