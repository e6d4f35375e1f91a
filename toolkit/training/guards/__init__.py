"""Guards of a run while it trains: signals, dead ranks, hangs, bad numbers, changed bits."""
