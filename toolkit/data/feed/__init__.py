"""What a run reads from: micro-batches of a rank, map-style or streamed."""
