from attacked import bench, honest, http, scene  # noqa: F401  (fixtures)
