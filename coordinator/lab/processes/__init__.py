"""Start, watch and end the processes of a swarm on one machine."""
