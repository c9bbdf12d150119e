"""Attacks on a run by processes that speak the real protocol: `veriswarm redteam` runs a mixture of them."""
