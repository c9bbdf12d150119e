"""Proofs of states that nobody computed: small policies, a ladder of forgers, and who takes what they make."""
