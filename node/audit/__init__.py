"""The auditor: replay a run's log and decide drawn submissions again."""
