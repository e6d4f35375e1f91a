"""What may befall a run while it trains, and what it does then: signals, ranks that die or hang,
numbers that are not finite or far above others, bits that change, ranks that differ or are slow.
"""
