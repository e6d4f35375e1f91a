"""From files to the micro-batches of a rank: text, tokens, samples, order."""
