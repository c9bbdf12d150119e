"""What a contributor sees of a worker: a live view on a terminal, lines elsewhere, JSON for programs."""
