"""Tiny tokenizers of the kinds that published models have, trained on the spot."""

import argparse
import json
import subprocess
from functools import cache
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<unk>", "<s>", "</s>"]
TEXTS = [Path(module.__file__).read_text("utf-8") for module in (argparse, subprocess)]
# As Llama 3 and Qwen split texts; the newlines after a mark of punctuation go with it.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def _bpe(**options) -> tuple[Tokenizer, trainers.BpeTrainer]:
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=SPECIALS, show_progress=False, **options
    )
    return Tokenizer(models.BPE(unk_token="<unk>")), trainer


def _byte_level(pattern: str | None, prefix: bool = False) -> tuple[Tokenizer, object]:
    tokenizer, trainer = _bpe(initial_alphabet=_ALPHABET)
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=pattern is None)
    split = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, trainer


def _sentencepiece(scheme: str | None) -> tuple[Tokenizer, object]:
    """As Mistral and Gemma: spaces are signs of words; `None`: as Llama 2, by a normalizer."""
    tokenizer, trainer = _bpe(limit_alphabet=200)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=1100, special_tokens=[*SPECIALS, *bytes_], show_progress=False
    )
    if scheme is None:
        replaced = normalizers.Replace(" ", "▁")
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replaced])
        # To train on words; what is made of it below has none.
        tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if scheme != "never" else []
    tokenizer.decoder = decoders.Sequence([*parts, *strip])
    return tokenizer, trainer


def _unigram() -> tuple[Tokenizer, object]:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False
    )
    return tokenizer, trainer


def _wordpiece() -> tuple[Tokenizer, object]:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=800, special_tokens=SPECIALS, show_progress=False
    )
    return tokenizer, trainer


def _characters() -> tuple[Tokenizer, object]:
    tokenizer, _ = _bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=259, special_tokens=SPECIALS, initial_alphabet=_ALPHABET, show_progress=False
    )
    return tokenizer, trainer


KINDS = {
    "gpt2": lambda: _byte_level(None),
    "llama3": lambda: _byte_level(_WORDS),
    "byte_level_with_a_space_before": lambda: _byte_level(None, prefix=True),
    "llama2": lambda: _sentencepiece(None),
    "mistral": lambda: _sentencepiece("first"),
    "gemma": lambda: _sentencepiece("never"),
    "sentencepiece_always": lambda: _sentencepiece("always"),
    "unigram": _unigram,
    "wordpiece": _wordpiece,
    "bytes": _characters,
}


@cache
def _trained(kind: str) -> str:
    tokenizer, trainer = KINDS[kind]()
    tokenizer.train_from_iterator(TEXTS, trainer)
    content = json.loads(tokenizer.to_str())
    if kind == "llama2":
        content["pre_tokenizer"] = None
    if kind in ("llama2", "mistral", "gemma", "sentencepiece_always"):
        content["model"]["byte_fallback"] = True
        content["added_tokens"] = content["added_tokens"][: len(SPECIALS)]  # bytes are none
    return json.dumps(content)


def tokenizer_of(
    kind: str, template: str | None = None, specials: tuple[str | AddedToken, ...] = ()
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of a kind, with further special tokens."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(kind)),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=[*specials],
    )
    made.chat_template = template
    return made
