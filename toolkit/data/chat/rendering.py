"""A conversation rendered, and ways to render it changed.

Owns the words that are put in, and whom a refusal names. Refuses to know what is searched for.
"""

from collections.abc import Iterable
from typing import Any

from toolkit.data.chat.habits import Render
from toolkit.data.chat.mask_text import Message, absent
from toolkit.data.sources.row_values import BadRow

REFUSED = "refused by template"

_WORDS = ("Qz4vKx7Wb", "h9MtUe3Ry")


class Rendering:
    """The true rendering of a conversation, and changed ones.

    Attributes:
        text: the true rendering.
        words: two unlike words that are not in it.

    Raises:
        BadRow: the template refuses the conversation.
    """

    def __init__(self, render: Render, messages: list[Message]) -> None:
        self.render, self.messages = render, messages
        self.text = self._whole()
        self.words = [absent(word, self.text) for word in _WORDS]

    def word(self, i: int) -> str:
        """Return a word for turn `i`, when several turns are changed."""
        return f"{self.words[0]}n{i}n"

    def words_like(self, content: str) -> list[str]:
        """Return two words as long as `content`; none where it is too short."""
        words = [(word * (1 + len(content) // len(word)))[: len(content)] for word in self.words]
        return words if len(content) > 3 and not any(w in self.text for w in words) else []

    def named(self, i: int) -> str:
        """Return a turn for a message."""
        return f"turn {i} ({self.messages[i].get('role')})"

    def turns(self) -> Iterable[tuple[int, Message]]:
        """Return the turns with their indices."""
        return enumerate(self.messages)

    def changed(self, changes: dict[int, Message]) -> str | None:
        """Return the rendering with some turns replaced; None where the template raises."""
        return self.tried([changes.get(i, message) for i, message in self.turns()])

    def tried(self, messages: list[Message], **options: Any) -> str | None:
        """Return the rendering, None where the template raises: it may judge what it is given."""
        try:
            return self.render(messages, **options)
        except Exception:
            return None

    def _whole(self) -> str:
        try:
            return self.render(self.messages)
        except Exception as error:
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> BadRow:
        """Name the turn that the template does not take: the first that makes it raise."""
        said = " ".join(str(error).split())[:200] or type(error).__name__
        for i in range(len(self.messages) - 1):
            try:
                self.render(self.messages[: i + 1])
            except Exception as earlier:
                if str(earlier) == str(error):
                    return BadRow(f"the chat template refuses {self.named(i)}: {said}", REFUSED)
        last = len(self.messages) - 1
        return BadRow(f"the chat template refuses {self.named(last)}: {said}", REFUSED)
