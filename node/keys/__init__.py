"""Node and run keys: files, and their backup as words."""
