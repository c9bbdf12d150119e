from attacked import scene  # noqa: F401  (fixtures)
