"""Swarms on one machine: the demonstration and the red team, behind an entry point that nothing else imports."""
