"""Conversations in their chat template, and which characters of them are learned."""

from toolkit.data.chat.checks import BLOCK_NOTES
from toolkit.data.chat.masks import Rendered
from toolkit.data.chat.template import TODAY, Chat, load_chat_templates
