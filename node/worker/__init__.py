"""The daemon that leases slots, generates rollouts and submits them."""
