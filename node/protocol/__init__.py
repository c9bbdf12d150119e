"""The rules every participant and every auditor reproduces: bytes in, values or typed refusals out.

Nothing here does IO, reads a clock, or needs torch. docs/protocol.md is the normative text; section numbers
in docstrings refer to it.
"""
