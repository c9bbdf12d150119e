"""The public web pages: the run, each submission, and the auditor's page.

They show only what the log and `/v1/status` publish, at a cost independent of the run's length. Untrusted text passes
`visible` and then Jinja's escaping. JavaScript is optional: it adds live updates and interactive plots.
"""
