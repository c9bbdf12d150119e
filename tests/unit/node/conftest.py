from worker_swarm import swarm  # noqa: F401  (a fixture, of the system tests in here)
