"""The order of samples, and how far a run has come in it."""
