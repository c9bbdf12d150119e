"""SHARDCAST alone: `veriswarm publish` and `veriswarm fetch`, for any large file and without a coordinator."""
