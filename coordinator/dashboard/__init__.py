"""The run as web pages: its own, one for each submission, and one for auditors.

Served by the coordinator to anybody, so that nothing is shown that its public log and `/v1/status` do not tell, and
nothing costs more the longer a run has been going. All that was written by strangers passes `visible`, and Jinja's
escaping after it. Without JavaScript the pages have every figure; with it they are live, and plots can be read off.
"""
