"""The run's state: a database and a content-addressed blob store."""
