"""Attacks on a run by processes that speak the real protocol: `swarmproof redteam` runs a mixture of them."""
