"""Rows as examples: text, prompt and completion, conversation, tokens."""
