"""What a client does: choose sources, request chunks and verify them."""
