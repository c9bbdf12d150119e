"""SHARDCAST alone: `swarmproof publish` and `swarmproof fetch`, for any large file and without a coordinator."""
