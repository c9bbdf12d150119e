"""A policy of a real size through everything: what it is made of, who takes how much, and what the floor is."""
