"""Text and examples as token ids, and which of them are learned."""
