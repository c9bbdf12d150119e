"""A run as its coordinator keeps it: service, relays, leader."""
