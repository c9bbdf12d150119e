from forked import forked  # noqa: F401  (a fixture, of all tests in here)
