"""The coordinator's HTTP server: signed requests, limits, errors and connections."""
