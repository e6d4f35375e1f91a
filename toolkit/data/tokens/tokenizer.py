"""The tokenizer of a run: the model's own, one that is named, or one trained on the text."""

import itertools
import logging
import math
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import cached_file

from toolkit import ranks
from toolkit.config.data import DataConfig
from toolkit.config.settings import ModelConfig, check_folder
from toolkit.data.examples.recognise import Text
from toolkit.data.row_formats import DOCUMENTS
from toolkit.data.sources.row_values import BadRow, catch_bad_row
from toolkit.data.sources.rows import DataSource, load_sources
from toolkit.data.sources.tables import to_data_error
from toolkit.errors import ConfigError, DataError, ModelError, one_line
from toolkit.formats import check_config, local_folder

END_OF_TEXT = "<|endoftext|>"  # the only special token of a trained tokenizer; its id is 0
TRAINING_BYTES = 32 << 20  # of text to train a tokenizer on, taken evenly from all of it
_FILES = (  # any of these makes a folder a tokenizer's
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json"),
    *("sentencepiece.bpe.model", "tekken.json", "vocab.txt"),
)

log = logging.getLogger(__name__)


def prepare_tokenizer(
    model: ModelConfig, data: DataConfig, folder: Path, *, keep: bool = False
) -> ModelConfig:
    """Return `model` with `tokenizer_name_or_path` set to the tokenizer that the run will use.

    The first of these: the one that is named; the model's own; with `model.train_tokenizer` a
    byte-level BPE of the model's vocabulary size, trained on the text into `folder` (with `keep`
    the one that is there); none, where the data is tokenised already, else a DataError. Collective:
    rank 0 writes.
    """
    model = use_model_tokenizer(model)
    if model.tokenizer_name_or_path is not None:
        return model
    return ranks.on_main(lambda: _trained(model, data, folder, keep))


@ranks.collective
def use_model_tokenizer(model: ModelConfig) -> ModelConfig:
    """Return `model` with its own tokenizer where none is named and it has one. Collective."""
    if model.tokenizer_name_or_path is not None:
        return model
    check_folder(model.name_or_path)
    path = Path(model.name_or_path).expanduser()
    options = {"revision": model.revision, "_raise_exceptions_for_missing_entries": False}
    try:
        found = _has_files(path) or (
            not path.is_dir()
            and any(cached_file(model.name_or_path, name, **options) for name in _FILES)
        )
    except Exception as error:
        # Unreachable is not absent: going on would train another tokenizer without a word.
        raise ModelError(
            f"cannot see whether {model.name_or_path} has a tokenizer ({one_line(error)}); it is "
            "no folder here (check the path), and the Hub did not answer for it"
        ) from error
    return replace(model, tokenizer_name_or_path=model.name_or_path) if found else model


def _trained(model: ModelConfig, data: DataConfig, folder: Path, keep: bool) -> ModelConfig:
    """Return `model` with the tokenizer in `folder`, trained anew but where it is to be kept."""
    trained = model.train_tokenizer and (folder / "tokenizer.json").is_file()
    with_trained = replace(model, tokenizer_name_or_path=str(folder))
    if trained and keep:
        return with_trained
    sources = load_sources(data, row_format=DOCUMENTS)
    formats = {source.layout.format for source in sources}
    if formats == {"tokenised"}:
        return model
    if len(formats) > 1:
        raise DataError("data.sources: expected text or token ids in all of them, got both")
    if not model.train_tokenizer:
        raise DataError(
            f"expected a tokenizer for the text, {model.name_or_path} comes with none; set "
            "model.tokenizer_name_or_path to a folder or Hub id, or model.train_tokenizer: true to "
            "train one on the text, or give data with a column input_ids"
        )
    vocab_size = _vocab_size(model)
    texts = list(_training_text(sources, data))
    if not any(texts):
        where = ", ".join(source.where for source in sources)
        raise DataError(f"{where}: expected text to train a tokenizer on, the rows hold none")
    if trained:
        shutil.rmtree(folder)  # of an earlier start, which came to nothing
    if model.init == "pretrained":
        log.warning(
            "training a new tokenizer for the pretrained weights of %s: their embeddings were "
            "learned with another one. Set model.tokenizer_name_or_path where that one is known",
            model.name_or_path,
        )
    train_tokenizer(texts, vocab_size, folder)
    return with_trained


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer at `model.tokenizer_name_or_path`; None where that is empty.

    One that is not there or cannot be loaded is a DataError, too large a JSON file a ModelError.
    """
    name = model.tokenizer_name_or_path
    if name is None:
        return None
    path = Path(name).expanduser()
    if path.is_dir():
        if not _has_files(path):
            raise DataError(
                f"expected a tokenizer in {name}, found none of {', '.join(_FILES)}; set "
                "model.tokenizer_name_or_path to a folder that holds one or to a Hub id"
            )
        check_config(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path) if path.exists() else name,
            revision=model.revision if name == model.name_or_path else None,
            trust_remote_code=model.trust_remote_code,
        )
        if not tokenizer.get_vocab():
            raise ValueError("its vocabulary is empty: the vocabulary file is missing")
    except Exception as error:
        raise DataError(
            f"the tokenizer {name} cannot be loaded ({one_line(error)}); check its files, or set "
            "model.tokenizer_name_or_path to another one"
        ) from error
    return tokenizer


def choose_pad_id(tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Return the token that fills up; it is never learned, so any that has an embedding will do."""
    for name in ("pad_token_id", "eos_token_id"):
        if (found := getattr(tokenizer, name, None)) is not None:
            return int(found)
    return 0


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise DataError where the tokenizer gives ids for which the model has no embedding."""
    largest = max([*tokenizer.get_vocab().values(), *map(int, tokenizer.added_tokens_decoder)])
    if largest >= vocab_size:
        raise DataError(
            f"the tokenizer {tokenizer.name_or_path} gives ids up to {largest}, the model's "
            f"embedding has {vocab_size} rows (ids up to {vocab_size - 1}); set "
            f"model.resize_embeddings: true to grow it to {largest + 1}, or "
            "model.tokenizer_name_or_path to the tokenizer that the model was trained with"
        )


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Train a byte-level BPE on `texts` and write it to `folder` as a Hugging Face tokenizer.

    Id 0 is `END_OF_TEXT`, which begins and ends texts; then come the 256 bytes, then merges up to
    `vocab_size` (fewer where the text is small), at least one (else ConfigError). The same text
    gives the same files. About 6 MB a second on two cores.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet) + 2:
        raise ConfigError(
            f"model.train_tokenizer: expected a vocabulary of at least {len(alphabet) + 2} (256 "
            f"bytes, {END_OF_TEXT} and a merge), the model's config has vocab_size {vocab_size}; "
            "give it more or set model.tokenizer_name_or_path"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    try:
        wrapped.save_pretrained(folder)
    except OSError as error:
        raise DataError(f"cannot write the tokenizer to {folder}: {error}") from error


def _training_text(sources: list[DataSource], data: DataConfig) -> Iterator[str]:
    """Yield `TRAINING_BYTES` of text or less: every k-th row, or of streams the first of each."""
    left = TRAINING_BYTES
    total = 0 if data.streaming else sum(s.rows.data.column(0).nbytes for s in sources)
    stride, before = max(1, math.ceil(total / TRAINING_BYTES)), 0
    for number, source in enumerate(sources):
        rows, first, room = source.rows, 0, left // (len(sources) - number)
        if not data.streaming:
            first, room, before = -before % stride, left, before + len(rows)
            rows = rows.select(range(first, len(rows), stride))
        left -= room
        try:
            for at, stored in zip(itertools.count(first, stride), rows, strict=False):
                example = catch_bad_row(source.example, stored)
                if isinstance(example, BadRow) and data.on_bad_row == "error":
                    raise source.refusal(stored, at, example)
                text = example.text[:room] if isinstance(example, Text) else ""
                yield text
                room -= len(text)
                if room <= 0:
                    break
        except Exception as error:
            raise to_data_error(error, source.where) from error
        left += room


def _has_files(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _FILES)


def _vocab_size(model: ModelConfig) -> int:
    try:
        folder = local_folder(model.name_or_path, model.revision)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
        return int(config.get_text_config().vocab_size)
    except Exception as error:  # the file comes from outside: it may hold anything
        raise ModelError(
            f"expected a config.json with a vocab_size in {model.name_or_path}, to train a "
            f"tokenizer of that size ({one_line(error)})"
        ) from error
