"""Weights that were published in other formats, as folders that a run can begin with: `swarmproof import`."""
