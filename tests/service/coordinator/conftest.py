from backups import backed_up  # noqa: F401  (a fixture)
