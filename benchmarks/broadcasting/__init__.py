"""A version on its way to many workers: real processes on loopback, link caps, hostile relays, and the peer."""
