"""Attacks on a run's availability: hostile relays around a fetch and around a swarm."""
