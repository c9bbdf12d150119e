"""The relay daemon, and whom it is advised to fetch from."""
