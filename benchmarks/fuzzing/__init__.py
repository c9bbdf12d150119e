"""Fuzzing of what strangers send: targets, mutations, and the processes that try one on the other."""
