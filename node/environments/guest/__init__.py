"""Programs that an environment's own interpreter runs: the standard library of Python 3.11 to 3.14, and the package.

`main.py` is run as a file, and imports this folder as a package by itself: nothing else of the project is there.
"""
