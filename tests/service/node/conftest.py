"""A coordinator of prepared replies with a worker or relay beside it: see support/worker_swarm.py."""

from worker_swarm import swarm  # noqa: F401  (a fixture)
