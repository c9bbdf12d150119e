"""The submission's file: writing it, and reading an untrusted one."""
