"""Tokens that end an answer: generation stops there, and a reward model reads its reward there."""

import json
from collections import Counter

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from toolkit.data.feed.feed import Feed
from toolkit.data.feed.prepared import PreparedFeed
from toolkit.data.tokens.tokenizer import choose_pad_id
from toolkit.errors import ModelError
from toolkit.formats import assets_of
from toolkit.models.reward import set_pad_token_id
from toolkit.parsing import parse_json

_FILE = "generation_config.json"
# Number of examples of each source that are looked at.
_EXAMPLES = 64
# Share of a source's answers that must end in a token.
_MIN_SHARE = 0.5


def find_stop_tokens(feed: Feed, tokenizer: Tokenizer) -> list[int]:
    """Find the special tokens that usually end the answers in the data.

    For each source, the candidate is the most frequent last token of the answers in its first 64
    rows. It counts if it is a special token and ends at least half of these answers. Streamed
    training sources are ignored.

    Returns:
        The token ids, ascending, without repeats; empty if there are none.
    """
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    sources = [*feed.eval_sources, *(feed.sources if isinstance(feed, PreparedFeed) else ())]
    stop_ids: set[int] = set()
    for source in sources:
        if "spans" not in source.tokens.column_names:
            continue
        examples = source.tokens[:_EXAMPLES]
        rows = zip(examples["input_ids"], examples["spans"], strict=True)
        last_ids = Counter(ids[end - 1] for ids, spans in rows for end in spans[1::2])
        for token, count in last_ids.most_common(1):
            if token in special and count >= _MIN_SHARE * last_ids.total():
                stop_ids.add(token)
    return sorted(stop_ids)


def add_stop_tokens(model: PreTrainedModel, stop_ids: list[int], tokenizer: Tokenizer) -> str:
    """Add `stop_ids` to the end-of-sequence ids at which the model stops generating.

    Changes the generation config of the model, and the file in the model's assets that exports
    contain.

    Returns:
        A log line; "" if the model already stops at all of these ids.
    """
    files = assets_of(model).files
    content = parse_json(files[_FILE], _FILE, ModelError) if _FILE in files else {}
    default = assets_of(model).config.get("eos_token_id", tokenizer.eos_token_id)
    eos_ids = content.get("eos_token_id", default)
    eos_ids = [eos_ids] if isinstance(eos_ids, int) else [*(eos_ids or ())]
    new = [token for token in stop_ids if token not in eos_ids]
    if not new:
        return ""
    content = {**content, "eos_token_id": eos_ids + new}
    files[_FILE] = (json.dumps(content, indent=2) + "\n").encode()
    if model.generation_config is not None:
        model.generation_config.eos_token_id = eos_ids + new
    names = ", ".join(f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in new)
    return f"ends       {names} ends the answers: added to eos_token_id of {_FILE}"


def set_reward_position(model: PreTrainedModel, tokenizer: Tokenizer) -> str:
    """Set `pad_token_id` of a reward model and of its exports to the pad id of the tokenizer.

    The model reads the reward at the last token that is not this one.

    Returns:
        A log line.
    """
    pad = choose_pad_id(tokenizer)
    set_pad_token_id(model, assets_of(model), pad)
    is_eos = pad == tokenizer.eos_token_id
    note = " (which also ends texts, so it is passed over)" if is_eos else ""
    return (
        f"reward     read at the last token that is not {tokenizer.convert_ids_to_tokens(pad)}"
        f"{note}: pad_token_id {pad} of config.json"
    )
