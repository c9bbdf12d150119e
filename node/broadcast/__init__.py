"""`swarmproof publish` and `swarmproof fetch`: SHARDCAST for any large file, without a coordinator."""
