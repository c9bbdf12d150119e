"""The verifier daemon: measure queued submissions, keep evidence."""
