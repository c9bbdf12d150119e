from broadcast_swarm import http, limits, publisher, swarm  # noqa: F401  (fixtures)
