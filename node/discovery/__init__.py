"""What nodes learn of a run: descriptors, addresses, known peers."""
