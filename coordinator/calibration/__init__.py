"""What honest work is like on the machines at hand, and which cheats the limits that follow catch."""
