"""Decide whether a submission is what the policy and its slot's seeds force."""
