"""The verifier daemon: measures queued submissions, records verdicts, keeps evidence."""
