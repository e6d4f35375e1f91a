"""Settings of the data: sources, columns, packing, chat templates."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from toolkit.config.fields import AtLeast1, AtLeast2, Fraction, NotNegative, Positive
from toolkit.errors import ConfigError


@dataclass(frozen=True)
class SourceConfig:
    """One of several sources of training data that are mixed."""

    files: str | list[str] = field(default_factory=list)
    """Files or globs, as data.train_files."""
    dataset_name: str | None = None
    """A data set on the Hub (or a local data set folder) instead of files."""
    dataset_config_name: str | None = None
    """Configuration of dataset_name."""
    dataset_split: str = "train"
    """Split of dataset_name to train on."""
    name: str | None = None
    """Name in reports and metrics; empty: the name of its first file or data set."""
    weight: Positive | None = None
    """Its share of the samples, relative to the other weights; empty (for all sources or none): in
    proportion to its size, which is one pass over everything."""
    columns: dict[str, str | None] = field(default_factory=dict)
    """Other names in its rows, instead of data.columns. `{prompt: prompt}` keeps a name if
    data.columns is set for the other sources."""
    max_repeats: Positive | None = None
    """Passes over it at most; what it would give beyond comes from the others. Empty: no limit."""


@dataclass(frozen=True)
class DataConfig:
    """Sources of the text, and how it becomes samples."""

    train_files: str | list[str] = field(default_factory=list)
    """Files or globs (.txt .md .py and other text, .jsonl .ndjson .json .csv .tsv .parquet .arrow),
    or folders (of a data set as the Hub has it the split train); empty, and no dataset_name and no
    sources: built-in data made of Python's own standard library."""
    eval_files: str | list[str] = field(default_factory=list)
    """Files or globs to evaluate on, each a source; empty, and no eval_sources: the eval_split of
    the training data."""
    eval_sources: list[SourceConfig] = field(default_factory=list)
    """Further sources to evaluate on, with the keys of data.sources except weight and max_repeats:
    for data sets by name, and for files with other columns than the training data."""
    dataset_name: str | None = None
    """A data set on the Hub (or a local data set folder) instead of train_files."""
    dataset_config_name: str | None = None
    """Configuration of dataset_name."""
    dataset_split: str = "train"
    """Split of dataset_name to train on."""
    sources: list[SourceConfig] = field(default_factory=list)
    """Several sources, mixed by weight, instead of train_files and dataset_name."""
    streaming: bool = False
    """Read the data while training instead of preparing all of it before; needs train.max_steps."""
    stream_lanes: AtLeast1 = 64
    """Lanes of a stream, at most: each rank reads and tokenises its share of them, more where the
    ranks do not divide them. The samples depend on it, and not on the number of ranks."""
    columns: dict[str, str | None] = field(default_factory=dict)
    """Other names in the rows: of columns (`prompt: question`, `text: body`), keys of turns
    (`content: value`) and roles (`human: user`). With null a column or a key is left out:
    `reasoning_content: null` trains without the reasoning."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be used ends the run with its file and line, or is left out and counted."""
    sequence_length: AtLeast2 = 1024
    """Tokens per sample."""
    append_eos: bool = True
    """Put the tokenizer's end-of-sequence token after each document."""
    packing: Literal["auto", "wrapped", "bfd", "none"] = "wrapped"
    """Making of samples from documents or examples: `wrapped` joins all and cuts them at
    sequence_length; `bfd` (best fit decreasing) puts whole ones together that do not see each
    other; `none` pads each to the longest of its batch. `auto` is `bfd` where the model keeps
    packed ones apart, which is tried at start, else `none`."""
    eval_split: Fraction = 0.01
    """Share of the samples held out where there are no eval_files; 0: none. Not of streams."""
    max_eval_samples: AtLeast1 | None = None
    """Evaluate on at most this many samples."""
    num_workers: NotNegative = 0
    """Worker processes of each rank's DataLoader."""

    def __post_init__(self) -> None:
        given = [n for n in ("dataset_name", "train_files", "sources") if getattr(self, n)]
        if len(given) > 1:
            names = " and ".join(f"data.{name}" for name in given)
            raise ConfigError(f"{names} are both set; give one of them")
        for i, source in enumerate(self.sources):
            if bool(source.files) == bool(source.dataset_name):
                raise ConfigError(f"data.sources[{i}] must name either files or a dataset_name")
        for i, source in enumerate(self.eval_sources):
            where = f"data.eval_sources[{i}]"
            if bool(source.files) == bool(source.dataset_name):
                raise ConfigError(f"{where} must name either files or a dataset_name")
            if source.weight is not None or source.max_repeats is not None:
                raise ConfigError(
                    f"{where}: weight and max_repeats have no effect on evaluations, which read "
                    "each source once; remove them"
                )
        if len({s.weight is None for s in self.sources}) > 1:
            raise ConfigError("data.sources: give every source a weight, or none")


@dataclass(frozen=True)
class FinetuneDataConfig(DataConfig):
    """Sources of the examples, the tokens of them that are learned, and how they become samples."""

    packing: Literal["auto", "wrapped", "bfd", "none"] = "auto"
    supervise: Literal["auto", "completion", "assistant", "last_assistant", "all"] = "auto"
    """Tokens that the loss covers: completions, the turns of the assistant, the last of them, or
    everything. `auto`: everything of texts, completions of prompts, turns of the assistant."""
    chat_template: str | None = None
    """Jinja template of conversations, or a file that holds one; empty: the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template for all conversations and eval_prompts, such as
    `{enable_thinking: false}`. A row's own column `chat_template_kwargs` wins, name by name."""
    too_long: Literal["truncate", "drop", "error"] = "truncate"
    """An example of more than sequence_length tokens loses its end (`truncate`), is left out, or
    ends the run. Both are counted. Plain text is cut into samples instead, and none of
    it is lost."""

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
"""Arguments that `apply_chat_template` or the toolkit gives a meaning of their own."""


def check_template_kwargs(kwargs: dict[str, Any]) -> None:
    """Refuse arguments of `data.chat_template_kwargs` that the toolkit sets itself, and names and
    values that no template can hold.

    Raises:
        ConfigError: names them.
    """
    for name, value in kwargs.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(
                f"data.chat_template_kwargs: expected names of variables, got {name!r}"
            )
        if not _is_writable(value):
            raise ConfigError(
                f"data.chat_template_kwargs.{name}: expected texts, finite numbers, true, false, "
                f"null, and lists and mappings of them, got {value!r}"
            )
    if reserved := sorted(RESERVED_ARGUMENTS.intersection(kwargs)):
        raise ConfigError(
            f"data.chat_template_kwargs: {', '.join(reserved)} cannot be set, because the toolkit "
            "sets it for each rendering; expected variables of the template, such as "
            "{enable_thinking: false}"
        )


def _is_writable(value: Any) -> bool:
    """Return whether a value can be written as JSON."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_writable(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(_is_writable, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | int)
