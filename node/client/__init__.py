"""The coordinator's HTTP API as a node sees it."""
