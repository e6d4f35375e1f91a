"""The feed of a run: the micro-batches of each rank, from prepared or streamed sources."""
