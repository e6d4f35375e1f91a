"""Choose the answer that each KTO row is compared with.

[Note: KL partners] KTO measures gains and losses from a point that estimates how far the policy has
moved from the reference: the mean reward of answers that do not belong to their prompt. So each row
needs the answer of a row with another prompt, its partner. TRL shifts the answers of a batch by one
without comparing prompts, so consecutive answers to one prompt become each other's partners.

Here the partner depends only on the content of the rows, and not on their order, on batches or on
processes. Rows are sorted by digests of prompt and answer. A group has the rows of one prompt. Each
row gets the answer that is as many rows further as the largest group has, so each answer is a
partner once. If more than half of the rows have the same prompt, some answers are partners several
times. If all rows have the same prompt, partners have it too, which is reported.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from toolkit.data.examples.pairs import Answer, Pair
from toolkit.data.examples.recognise import Conversation
from toolkit.data.sources.row_values import catch_bad_row
from toolkit.data.sources.rows import DataSource
from toolkit.data.sources.tables import compute_digest

NO_PARTNER = -1
# Number of rows that are read at a time.
_BLOCK = 1000


class _AnswerDigests(NamedTuple):
    """Digests of an answer and its prompt; `is_chat` is 1 for a conversation, 0 for a text."""

    is_chat: int
    prompt: int
    answer: int


def choose_partners(source: DataSource) -> np.ndarray:
    """Choose for each row another row, its partner, with whose answer KTO compares it.

    See [Note: KL partners]. Costs one pass over the rows, and 24 bytes a row.

    Returns:
        The number of the partner; int64 [rows]. It is `NO_PARTNER` for rows without a usable
        answer, and if no other row has an answer of the same type (conversation or text).
    """
    partners = np.full(len(source.rows), NO_PARTNER, np.int64)
    numbers, keys = list[int](), list[_AnswerDigests]()
    for first in range(0, len(source.rows), _BLOCK):
        for number, stored in enumerate(
            read_stored_rows(source, range(first, first + _BLOCK)), first
        ):
            example = catch_bad_row(source.example, stored)
            if isinstance(example, Answer):
                numbers.append(number)
                keys.append(_compute_key(example))
    rows = np.array(numbers, np.int64)
    for number, at in zip(rows, _find_partner_indices(keys), strict=True):
        partners[number] = NO_PARTNER if at == NO_PARTNER else rows[at]
    return partners


def choose_partners_among(examples: Sequence[Any]) -> list[Answer | None]:
    """Choose for each answer another one, its partner, among the same examples.

    Returns:
        One entry per example: the partner, or None if the example is no answer or has no partner.
    """
    answers = [example for example in examples if isinstance(example, Answer)]
    places = iter(_find_partner_indices([_compute_key(answer) for answer in answers]))
    partners = list[Answer | None]()
    for example in examples:
        at = next(places) if isinstance(example, Answer) else NO_PARTNER
        partners.append(None if at == NO_PARTNER else answers[at])
    return partners


def join_partner(example: Any, other: Any) -> Any:
    """Build the pair of an answer and its partner `other`; return any other example unchanged.

    Both sides of the pair have the prompt of `example`. If `other` is not an answer of the same
    type, a `SkippedRow` is returned (not raised).
    """
    if not isinstance(example, Answer):
        return example
    partner = other if isinstance(other, Answer) else None
    pair = example.with_partner(partner)
    if isinstance(pair, Pair) and partner is not None and have_same_prompt(example, partner):
        return replace(pair, same_prompt=True)
    return pair


def have_same_prompt(first: Answer, second: Answer) -> bool:
    """Return True if two answers were given to the same prompt."""
    return _compute_key(first)[:2] == _compute_key(second)[:2]


def read_stored_rows(source: DataSource, numbers: Any) -> list[dict[str, Any]]:
    """Read rows of a source by their numbers, a range or a list, without decoding them.

    Numbers in a range that are beyond the last row are ignored.
    """
    if isinstance(numbers, range):
        columns = source.rows[numbers.start : numbers.stop]
    else:
        columns = source.rows[list(numbers)]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _find_partner_indices(keys: Sequence[_AnswerDigests]) -> list[int]:
    """Return the index of the partner of each answer; `NO_PARTNER` if it has none.

    Conversations and plain texts get partners of their own type only.
    """
    table = np.array(keys, np.uint64).reshape(-1, 3)
    partners = np.full(len(table), NO_PARTNER, np.int64)
    for kind in (0, 1):
        places = np.flatnonzero(table[:, 0] == kind)
        if len(places) > 1:
            partners[places] = places[_choose_shifted(table[places, 1], table[places, 2])]
    return partners.tolist()


def _choose_shifted(prompts: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """Return the index of the partner of each answer, int64; see [Note: KL partners].

    Partners have different prompts, unless all prompts are the same.

    Args:
        prompts: digests of the prompts of two or more answers.
        answers: digests of the answers.
    """
    total = len(prompts)
    order = np.lexsort((answers, prompts))
    _, begins, sizes = np.unique(prompts[order], return_index=True, return_counts=True)
    largest, at = int(sizes.max()), np.arange(total)
    if largest == total:
        partner = (at + 1) % total
    elif 2 * largest <= total:
        partner = (at + largest) % total
    else:
        begin = int(begins[sizes.argmax()])
        inside = (at >= begin) & (at < begin + largest)
        group, remaining = at[inside], at[~inside]
        partner = np.empty(total, np.int64)
        partner[inside] = remaining[np.arange(largest) % len(remaining)]
        partner[~inside] = group[: len(remaining)]
    chosen = np.empty(total, np.int64)
    chosen[order] = order[partner]
    return chosen


def _compute_key(answer: Answer) -> _AnswerDigests:
    """Compute the digests of an answer and of its prompt (messages, tools, template arguments)."""
    example = answer.example
    if isinstance(example, Conversation):
        prompt = (example.messages[:-1], example.tools, example.template_kwargs)
        parts: tuple[Any, Any] = prompt, example.messages[-1]
    else:
        parts = example.prompt, example.completion
    digests = (compute_digest(json.dumps(part, sort_keys=True, default=repr)) for part in parts)
    return _AnswerDigests(
        isinstance(example, Conversation), *(int(text[:16], 16) for text in digests)
    )
