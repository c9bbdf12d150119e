"""A run on the operator's side: service, descriptors, relays, leader."""
