"""Conversations in their chat template, and which characters of them are learned."""
