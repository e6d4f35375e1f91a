"""Settings of the data: sources, columns, packing, chat templates."""

import math
import os
from dataclasses import dataclass, field
from typing import Any, Literal

from toolkit.config.fields import AtLeast1, AtLeast2, Fraction, NotNegative, Positive
from toolkit.errors import ConfigError


@dataclass(frozen=True)
class SourceConfig:
    """One source of training or evaluation data, and its weight in a mixture."""

    files: str | list[str] = field(default_factory=list)
    """Files or globs, as in data.train_files."""
    dataset_name: str | None = None
    """A data set on the Hub (or a local data set folder) instead of files."""
    dataset_config_name: str | None = None
    """Configuration of dataset_name."""
    dataset_split: str = "train"
    """Split of dataset_name to read."""
    name: str | None = None
    """Name of the source in reports and metrics. Empty: the name of its first file or data set."""
    weight: Positive | None = None
    """Share of the samples, relative to the other weights. Set it for all sources or for none.
    Empty: in proportion to the size of the source, which is one pass over all data."""
    columns: dict[str, str | None] = field(default_factory=dict)
    """Other names in the rows of this source, instead of data.columns. `{prompt: prompt}` keeps a
    name that data.columns maps for the other sources."""
    max_repeats: Positive | None = None
    """Maximum number of passes over the source. After that, the other sources supply its samples.
    Empty: no limit."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", _read_paths(self.files, "files of a data source"))
        _check_dataset_name(self.dataset_name, "dataset_name of a data source")


@dataclass(frozen=True)
class DataConfig:
    """Settings of the training and evaluation data, and of how rows become samples."""

    train_files: str | list[str] = field(default_factory=list)
    """Files or globs (.txt .md .py and other text, .jsonl .ndjson .json .csv .tsv .parquet .arrow),
    or folders. In a data set folder with the layout of the Hub, the split train is read. If
    train_files, dataset_name and sources are empty: built-in data made of Python's standard
    library."""
    eval_files: str | list[str] = field(default_factory=list)
    """Files or globs to evaluate on, each entry a source. If eval_files and eval_sources are empty:
    the eval_split of the training data."""
    eval_sources: list[SourceConfig] = field(default_factory=list)
    """Further sources to evaluate on, with the keys of data.sources except weight and max_repeats.
    For data sets by name, and for files with other columns than the training data."""
    dataset_name: str | None = None
    """A data set on the Hub (or a local data set folder) instead of train_files."""
    dataset_config_name: str | None = None
    """Configuration of dataset_name."""
    dataset_split: str = "train"
    """Split of dataset_name to train on."""
    sources: list[SourceConfig] = field(default_factory=list)
    """Several sources, mixed by weight, instead of train_files and dataset_name."""
    streaming: bool = False
    """Read the data while training instead of preparing all of it first. Needs train.max_steps."""
    stream_lanes: AtLeast1 = 64
    """Maximum number of lanes of a stream. Each rank reads and tokenises only its lanes; several
    ranks read the same ones if the ranks do not divide the lanes. The samples depend on this
    setting, but not on the number of ranks."""
    columns: dict[str, str | None] = field(default_factory=dict)
    """Other names in the rows: of columns (`prompt: question`, `text: body`), keys of turns
    (`content: value`) and roles (`human: user`). Null skips a column or a key:
    `reasoning_content: null` trains without the reasoning."""
    on_bad_row: Literal["error", "skip"] = "error"
    """`error`: a row that cannot be used ends the run, and the error names its file and line.
    `skip`: such a row is skipped and counted."""
    sequence_length: AtLeast2 = 1024
    """Tokens per sample."""
    append_eos: bool = True
    """Put the tokenizer's end-of-sequence token after each document."""
    packing: Literal["auto", "wrapped", "bfd", "none"] = "wrapped"
    """How documents or examples become samples. `wrapped` joins them and cuts at sequence_length.
    `bfd` (best fit decreasing) packs complete ones together, which do not attend to each other.
    `none` pads each one to the longest of its batch. `auto` is `bfd` if the model keeps packed
    examples apart, which is tested at the start, else `none`."""
    eval_split: Fraction = 0.01
    """Share of the samples to hold out for evaluation if there are no eval_files. 0: none. Streams
    have no such split."""
    max_eval_samples: AtLeast1 | None = None
    """Evaluate on at most this many samples."""
    num_workers: NotNegative = 0
    """Worker processes of each rank's DataLoader."""

    def __post_init__(self) -> None:
        for setting in ("train_files", "eval_files"):
            paths = _read_paths(getattr(self, setting), f"data.{setting}")
            object.__setattr__(self, setting, paths)
        _check_dataset_name(self.dataset_name, "data.dataset_name")
        for setting in ("sources", "eval_sources"):
            _check_source_list(getattr(self, setting), f"data.{setting}")
        sources = [n for n in ("dataset_name", "train_files", "sources") if getattr(self, n)]
        if len(sources) > 1:
            names = " and ".join(f"data.{name}" for name in sources)
            raise ConfigError(f"{names} are both set; set one of them")
        for i, source in enumerate(self.sources):
            if bool(source.files) == bool(source.dataset_name):
                raise ConfigError(f"data.sources[{i}] must name either files or a dataset_name")
        for i, source in enumerate(self.eval_sources):
            setting = f"data.eval_sources[{i}]"
            if bool(source.files) == bool(source.dataset_name):
                raise ConfigError(f"{setting} must name either files or a dataset_name")
            if source.weight is not None or source.max_repeats is not None:
                raise ConfigError(
                    f"{setting}: weight and max_repeats have no effect on evaluations, which read "
                    "each source once; remove them"
                )
        if len({s.weight is None for s in self.sources}) > 1:
            raise ConfigError("data.sources: set a weight for every source, or for none")


@dataclass(frozen=True)
class FinetuneDataConfig(DataConfig):
    """Settings of the data for fine-tuning, including which tokens are supervised."""

    packing: Literal["auto", "wrapped", "bfd", "none"] = "auto"
    supervise: Literal["auto", "completion", "assistant", "last_assistant", "all"] = "auto"
    """Tokens that the loss covers: the completion, all turns of the assistant, the last one of
    them, or everything. `auto`: all tokens of a text, the completion of a prompt, and the
    assistant's turns of a conversation."""
    chat_template: str | None = None
    """Jinja template of conversations, or a file with one. Empty: the template of the tokenizer."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template for all conversations and eval_prompts, such as
    `{enable_thinking: false}`. A variable in the column `chat_template_kwargs` of a row takes
    precedence."""
    too_long: Literal["truncate", "drop", "error"] = "truncate"
    """An example of more than sequence_length tokens is cut at its end (`truncate`), is skipped
    (`drop`), or ends the run (`error`). Cut and skipped examples are counted. Plain text is cut
    into several samples instead, without loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_template_kwargs(self.chat_template_kwargs)


RESERVED_ARGUMENTS = frozenset(
    (
        *("conversation", "conversations", "messages", "tools", "chat_template"),
        *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
        *("tokenize", "tokenizer_kwargs", "return_dict", "return_tensors"),
        *("padding", "truncation", "max_length", "processor_kwargs"),
    )
)
"""Template arguments that `apply_chat_template` or the toolkit sets itself."""


def check_template_kwargs(kwargs: dict[str, Any]) -> None:
    """Check the names and values of `data.chat_template_kwargs`.

    Raises:
        ConfigError: a name is not a Python identifier or is reserved for the toolkit, or a value
            cannot be written as JSON.
    """
    for name, value in kwargs.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(
                f"data.chat_template_kwargs: expected the name of a variable, got {name!r}"
            )
        if not _is_json(value):
            raise ConfigError(
                f"data.chat_template_kwargs.{name}: expected texts, finite numbers, true, false, "
                f"null, and lists and mappings of them, got {value!r}"
            )
    if reserved := sorted(RESERVED_ARGUMENTS.intersection(kwargs)):
        raise ConfigError(
            f"data.chat_template_kwargs: {', '.join(reserved)} cannot be set, because the toolkit "
            "sets it for each rendering; set variables of the template, such as "
            "{enable_thinking: false}"
        )


def _is_json(value: Any) -> bool:
    """Return True if a value can be written as JSON."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | int)


_OBJECT_ADVICE = (
    "For rows in memory, call toolkit.finetune(data=dataset, ...), or call "
    "dataset.to_parquet(FILE) and give FILE as data.train_files"
)


def _read_paths(value: Any, setting: str) -> str | list[str]:
    """Convert a path or a list of paths, such as `data.train_files`, to text.

    Raises:
        ConfigError: the value is something else, such as a `datasets.Dataset`.
    """
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    entries = value if isinstance(value, list | tuple) else [value]
    for entry in entries:
        if not isinstance(entry, str | os.PathLike):
            is_inside = entry is not value
            raise ConfigError(
                f"{setting}: expected a path or a list of paths, got {'a list with ' * is_inside}"
                f"{type(entry).__name__}. {_OBJECT_ADVICE}"
            )
    return [os.fspath(entry) for entry in entries]


def _check_dataset_name(value: Any, setting: str) -> None:
    """Raise ConfigError if the name of a data set is not text, such as a `datasets.Dataset`."""
    if value is not None and not isinstance(value, str):
        raise ConfigError(
            f"{setting}: expected the Hub id or the folder of a data set, got "
            f"{type(value).__name__}. {_OBJECT_ADVICE}"
        )


def _check_source_list(value: Any, setting: str) -> None:
    """Raise ConfigError if `data.sources` or `data.eval_sources` is no list of `SourceConfig`."""
    entries = value if isinstance(value, list | tuple) else [value]
    for entry in entries:
        if not isinstance(entry, SourceConfig):
            raise ConfigError(
                f"{setting}: expected a list of SourceConfig, got {type(entry).__name__}. Write "
                "each source as SourceConfig(files=[...])"
            )
