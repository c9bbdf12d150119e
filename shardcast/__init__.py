"""SHARDCAST: signed policy weights through a tree of relays that nobody trusts."""
