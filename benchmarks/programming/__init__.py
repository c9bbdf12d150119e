"""Random programs for the `python` tool, and the processes that compare what they say."""
