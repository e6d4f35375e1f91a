"""Faults while a run trains, and what it does then: signals, dead ranks, hangs, bad numbers.

Numbers that are not finite or far above others, bits that change, ranks that differ or are slow.
"""
