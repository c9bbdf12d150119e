"""The run's state: a database that only grows by transactions, and content-addressed blobs."""
