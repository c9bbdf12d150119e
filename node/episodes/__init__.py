"""What a slot asks for: its prompt and seeds, the environment's replies, and the reward. It imports no judge."""
