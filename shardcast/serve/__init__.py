"""What an origin or a relay does: answer requests within limits."""
