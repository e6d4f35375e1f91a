"""The tokenizer of a run: that of the model, another one, or one trained on the text."""

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
from toolkit.formats import check_parsed_files, local_folder

END_OF_TEXT = "<|endoftext|>"
"""The only special token of a trained tokenizer; its id is 0."""
TRAINING_BYTES = 32 << 20
"""Amount of text on which a tokenizer is trained, taken evenly from all of the text."""
# A folder with any of these files holds a tokenizer.
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "sentencepiece.bpe.model",
    "tekken.json",
    "vocab.txt",
)

log = logging.getLogger(__name__)


def prepare_tokenizer(
    model: ModelConfig, data: DataConfig, folder: Path, *, keep: bool = False
) -> ModelConfig:
    """Return settings with the tokenizer that the run will use; train one if necessary.

    The run uses the first of these that exists: `model.tokenizer_name_or_path`; the tokenizer of
    the model; with `model.train_tokenizer`, a byte-level BPE that is trained on the text. If the
    data is token ids, there may be none. Collective; rank 0 trains and writes.

    Args:
        model: settings of the model; they are not changed.
        data: settings of the data.
        folder: folder for a trained tokenizer.
        keep: use a trained tokenizer that `folder` has already, instead of training one.

    Returns:
        `model` with `tokenizer_name_or_path` set; None there if there is no tokenizer.

    Raises:
        DataError: the data is text without a tokenizer, or has no text to train one on.
        ModelError: the Hub cannot be reached, or the vocabulary size is unknown.
    """
    model = use_model_tokenizer(model)
    if model.tokenizer_name_or_path is not None:
        return model
    return ranks.on_main(lambda: _train_if_needed(model, data, folder, keep))


@ranks.collective
def use_model_tokenizer(model: ModelConfig) -> ModelConfig:
    """Return settings with the model's own tokenizer, if none is set and the model has one.

    Otherwise `model` is returned unchanged. Collective.

    Raises:
        ModelError: the Hub cannot be reached, so it is not known if the model has a tokenizer.
    """
    return find_model_tokenizer(model)


def find_model_tokenizer(model: ModelConfig) -> ModelConfig:
    """Set the tokenizer of the model as `use_model_tokenizer` does, in one process."""
    if model.tokenizer_name_or_path is not None:
        return model
    check_folder(model.name_or_path)
    path = Path(model.name_or_path).expanduser()
    options = {"revision": model.revision, "_raise_exceptions_for_missing_entries": False}
    try:
        has_tokenizer = _has_tokenizer_files(path) or (
            not path.is_dir()
            and any(cached_file(model.name_or_path, name, **options) for name in _FILES)
        )
    except Exception as error:
        # The files may exist although they cannot be reached. Without this error, the run would
        # train another tokenizer.
        raise ModelError(
            f"cannot find out if {model.name_or_path} has a tokenizer ({one_line(error)}): it is "
            "not a local folder (check the path), and the Hub did not answer"
        ) from error
    if not has_tokenizer:
        return model
    return replace(model, tokenizer_name_or_path=model.name_or_path)


def _train_if_needed(model: ModelConfig, data: DataConfig, folder: Path, keep: bool) -> ModelConfig:
    """Return settings with the tokenizer in `folder`, which is trained first if necessary.

    Args:
        model: settings of the model without a tokenizer.
        data: settings of the data, whose text is the training text.
        folder: the folder for the tokenizer.
        keep: use a trained tokenizer that is in `folder` already. If False, an existing one is
            deleted before the new training.

    Returns:
        The new settings; `model` unchanged if the data is token ids.

    Raises:
        DataError: `model.train_tokenizer` is false, or the data has no text or mixes text and ids.
        ModelError: the vocabulary size of the model cannot be read.
    """
    is_trained = model.train_tokenizer and (folder / "tokenizer.json").is_file()
    with_trained = replace(model, tokenizer_name_or_path=str(folder))
    if is_trained and keep:
        return with_trained
    sources = load_sources(data, row_format=DOCUMENTS)
    formats = {source.layout.format for source in sources}
    if formats == {"tokenised"}:
        return model
    if len(formats) > 1:
        raise DataError("data.sources: expected text or token ids in all of them, got both")
    if not model.train_tokenizer:
        raise DataError(
            f"expected a tokenizer for the text, and {model.name_or_path} has none; set "
            "model.tokenizer_name_or_path to a folder or Hub id, or model.train_tokenizer: true to "
            "train one on the text, or give data with a column input_ids"
        )
    vocab_size = _read_vocab_size(model)
    texts = list(_iterate_training_text(sources, data))
    if not any(texts):
        where = ", ".join(source.where for source in sources)
        raise DataError(f"{where}: expected text to train a tokenizer on, but the rows have none")
    if is_trained:
        # An earlier start of the run failed after it had trained this tokenizer.
        shutil.rmtree(folder)
    if model.init == "pretrained":
        log.warning(
            "training a new tokenizer for the pretrained weights of %s, whose embeddings were "
            "trained with another one. Set model.tokenizer_name_or_path to that one if possible",
            model.name_or_path,
        )
    train_tokenizer(texts, vocab_size, folder)
    return with_trained


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer at `model.tokenizer_name_or_path`; None if that is None.

    Raises:
        DataError: the tokenizer does not exist or cannot be loaded.
        ModelError: one of its JSON files is too large.
    """
    name = model.tokenizer_name_or_path
    if name is None:
        return None
    path = Path(name).expanduser()
    if path.is_dir():
        if not _has_tokenizer_files(path):
            raise DataError(
                f"expected a tokenizer in {name}, found none of {', '.join(_FILES)}; set "
                "model.tokenizer_name_or_path to a folder with a tokenizer or to a Hub id"
            )
        check_parsed_files(path)
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
    """Return the pad id of a tokenizer, else its end-of-sequence id, else 0.

    Any id with an embedding can be used for padding, since the loss never covers it.
    """
    for name in ("pad_token_id", "eos_token_id"):
        token = getattr(tokenizer, name, None)
        if token is not None:
            return int(token)
    return 0


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise DataError if the tokenizer has ids for which the model has no embedding.

    The message gives the largest id and explains how to grow the embedding. `vocab_size` is the
    number of rows of the embedding.
    """
    largest = max([*tokenizer.get_vocab().values(), *map(int, tokenizer.added_tokens_decoder)])
    if largest >= vocab_size:
        raise DataError(
            f"the tokenizer {tokenizer.name_or_path} gives ids up to {largest}, but the model's "
            f"embedding has {vocab_size} rows (ids up to {vocab_size - 1}); set "
            f"model.resize_embeddings: true to grow it to {largest + 1}, or "
            "model.tokenizer_name_or_path to the tokenizer that the model was trained with"
        )


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Train a byte-level BPE on `texts` and write it to `folder` as a Hugging Face tokenizer.

    Id 0 is `END_OF_TEXT`, which begins and ends texts. The 256 bytes follow, then merges up to
    `vocab_size` ids, or fewer if the text is short. The same text gives the same files. Trains on
    about 6 MB a second on two cores.

    Raises:
        ConfigError: `vocab_size` leaves no room for a merge.
        DataError: the folder cannot be written.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet) + 2:
        raise ConfigError(
            f"model.train_tokenizer: expected a vocabulary of at least {len(alphabet) + 2} (256 "
            f"bytes, {END_OF_TEXT} and a merge), but the model's config has vocab_size "
            f"{vocab_size}; increase it or set model.tokenizer_name_or_path"
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


def _iterate_training_text(sources: list[DataSource], data: DataConfig) -> Iterator[str]:
    """Yield at most `TRAINING_BYTES` of text from the sources.

    If there is more, it is every k-th row, or the first rows of each stream.

    Raises:
        DataError: a file cannot be read, or a row is bad with `data.on_bad_row: error`.
    """
    bytes_left = TRAINING_BYTES
    total = 0 if data.streaming else sum(s.rows.data.column(0).nbytes for s in sources)
    stride, before = max(1, math.ceil(total / TRAINING_BYTES)), 0
    for number, source in enumerate(sources):
        rows, first, room = source.rows, 0, bytes_left // (len(sources) - number)
        if not data.streaming:
            first, room, before = -before % stride, bytes_left, before + len(rows)
            rows = rows.select(range(first, len(rows), stride))
        bytes_left -= room
        try:
            for at, stored in zip(itertools.count(first, stride), rows, strict=False):
                example = catch_bad_row(source.example, stored)
                if isinstance(example, BadRow) and data.on_bad_row == "error":
                    raise source.make_error(stored, at, example)
                text = example.text[:room] if isinstance(example, Text) else ""
                yield text
                room -= len(text)
                if room <= 0:
                    break
        except Exception as error:
            raise to_data_error(error, source.where) from error
        bytes_left += room


def _has_tokenizer_files(folder: Path) -> bool:
    """Return True if a folder has any of the files that a tokenizer may consist of."""
    return any((folder / name).is_file() for name in _FILES)


def _read_vocab_size(model: ModelConfig) -> int:
    """Read the vocabulary size of a model from its config.json; raise ModelError if that fails."""
    try:
        folder = local_folder(model.name_or_path, model.revision)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
        return int(config.get_text_config().vocab_size)
    except Exception as error:
        # The file comes from outside and may have any content.
        raise ModelError(
            f"expected a config.json with a vocab_size in {model.name_or_path}, to train a "
            f"tokenizer of that size ({one_line(error)})"
        ) from error
