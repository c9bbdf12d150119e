"""A second client of the protocol, written from docs/protocol.md and docs/run-toml.md alone.

It shares no code with the project (a test reads its imports), so whatever it needs and cannot find on the page is a
defect of the page. It joins a run, fetches policies, draws forced completions from logits and hidden states that it
is handed, submits them, keeps receipts and audits the log. Section numbers in here are those of docs/protocol.md.

It is a check of the page, not a product: one request at a time, everything in memory.
"""
