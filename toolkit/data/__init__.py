"""From files to the micro-batches of a rank: rows, examples, tokens, samples, order."""
