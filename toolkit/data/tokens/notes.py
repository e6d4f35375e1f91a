"""Notes on encoded rows, which are counted by their text and shown in the data report."""

from toolkit.data.chat import BLOCK_NOTES

LATE_COLUMN = "rows with a column {!r}, which the first rows do not have and nothing uses"
OTHER_PROMPT = "pairs whose prompts end in other tokens"
WITH_MARGIN = "pairs with a margin, which preference.loss_type reward asks for"
LABELS = {True: "answers with the label true", False: "answers with the label false"}
SAME_PROMPT = (
    "answers whose KL reference point is another answer to the same prompt, because all rows have "
    "one prompt; add rows with other prompts"
)

WARNINGS = (SAME_PROMPT, *BLOCK_NOTES)
"""Beginnings of the notes that the report shows as warnings."""
