"""Which tokens end a learned answer: what generates with the model has to stop at them, and a
reward model reads its reward there.
"""

import json
from collections import Counter

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from toolkit.data.feed.feed import Feed
from toolkit.data.feed.prepared import PreparedFeed
from toolkit.data.tokens.tokenizer import choose_pad_id
from toolkit.errors import ModelError
from toolkit.formats import assets_of
from toolkit.models.reward import set_pooling_token
from toolkit.parsing import parse_json

_FILE = "generation_config.json"
_LOOKED_AT = 64  # examples of each source
_SHARE = 0.5  # of a source's answers


def find_stop_tokens(feed: Feed, tokenizer: Tokenizer) -> list[int]:
    """Return the special tokens with which at least half of a source's answers end, by its first
    examples; of a stream by what is evaluated on.
    """
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    sources = [*feed.eval_sources, *(feed.sources if isinstance(feed, PreparedFeed) else ())]
    found: set[int] = set()
    for source in sources:
        if "spans" not in source.tokens.column_names:
            continue
        shown = source.tokens[:_LOOKED_AT]
        pairs = zip(shown["input_ids"], shown["spans"], strict=True)
        last = Counter(ids[end - 1] for ids, spans in pairs for end in spans[1::2])
        common = last.most_common(1)
        found |= {i for i, n in common if i in special and n >= _SHARE * last.total()}
    return sorted(found)


def add_stop_tokens(model: PreTrainedModel, ends: list[int], tokenizer: Tokenizer) -> str:
    """Let generation with `model` and its exports stop at `ends` too; return the line that says so,
    empty where it did already.
    """
    files, said = assets_of(model).files, assets_of(model).config
    content = parse_json(files[_FILE], _FILE, ModelError) if _FILE in files else {}
    known = content.get("eos_token_id", said.get("eos_token_id", tokenizer.eos_token_id))
    before = [known] if isinstance(known, int) else [*(known or ())]
    new = [i for i in ends if i not in before]
    if not new:
        return ""
    files[_FILE] = (json.dumps({**content, "eos_token_id": before + new}, indent=2) + "\n").encode()
    if model.generation_config is not None:
        model.generation_config.eos_token_id = before + new
    names = ", ".join(f"{tokenizer.convert_ids_to_tokens(i)} ({i})" for i in new)
    return f"ends       {names} ends a learned answer: added to eos_token_id of {_FILE}"


def set_reward_position(model: PreTrainedModel, tokenizer: Tokenizer) -> str:
    """Let a reward model and its exports read rewards before what fills up; return the line that
    says so.
    """
    pad = choose_pad_id(tokenizer)
    set_pooling_token(model, assets_of(model), pad)
    also = " (which ends texts, too: it is passed over)" if pad == tokenizer.eos_token_id else ""
    return (
        f"reward     read at the last token that is not {tokenizer.convert_ids_to_tokens(pad)}"
        f"{also}: pad_token_id {pad} of config.json"
    )
