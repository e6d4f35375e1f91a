"""Number types of settings: a range that jsonargparse checks, and its wording in errors."""

import math
from typing import TYPE_CHECKING, Any

from jsonargparse import typing as restricted

if TYPE_CHECKING:
    AtLeast1 = int
    AtLeast2 = int
    NotNegative = int
    AllOrCount = int
    Positive = float
    NonNegative = float
    Fraction = float
    UnitInterval = float
else:
    _FINITE = ("<", math.inf)
    AtLeast1 = restricted.PositiveInt
    AtLeast2 = restricted.restricted_number_type("AtLeast2", int, (">=", 2))
    NotNegative = restricted.NonNegativeInt
    _ALL_OR_COUNT = [("==", -1), (">=", 1)]
    AllOrCount = restricted.restricted_number_type("AllOrCount", int, _ALL_OR_COUNT, join="or")
    Positive = restricted.restricted_number_type("Positive", float, [(">", 0), _FINITE])
    NonNegative = restricted.restricted_number_type("NonNegative", float, [(">=", 0), _FINITE])
    Fraction = restricted.restricted_number_type("Fraction", float, [(">=", 0), ("<", 1)])
    UnitInterval = restricted.ClosedUnitInterval

WORDS: dict[Any, str] = {
    AtLeast1: "an integer of at least 1",
    AtLeast2: "an integer of at least 2",
    NotNegative: "an integer of at least 0",
    AllOrCount: "an integer of at least 1, or -1 for all",
    Positive: "a number above 0",
    NonNegative: "a number of at least 0",
    Fraction: "a number from 0 to below 1",
    UnitInterval: "a number from 0 to 1",
}
