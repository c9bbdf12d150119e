"""A whole swarm on one machine: `veriswarm demo` starts it, watches it, and reports on it."""
