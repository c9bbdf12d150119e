"""The operator's side: the HTTP service, the verifier, the trainer and what they store."""
