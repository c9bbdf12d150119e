"""The run's state: a database and content-addressed blobs."""
