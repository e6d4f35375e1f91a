"""The supervision report: which tokens of the data a run will train on, before it starts."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from toolkit.data.feed.feed import Feed
from toolkit.data.feed.prepared import PreparedFeed, SourceSamples
from toolkit.data.samples.pieces import EncodedRows
from toolkit.data.sources.row_values import escape_text
from toolkit.data.tokens.encoded import LABELS, WARNINGS, EncodedSource
from toolkit.errors import DataError
from toolkit.tables import format_table

# Longer parts of a sample are printed without their middle.
_MAX_CHARACTERS = 600
_MAX_PARTS = 24
_BAR_WIDTH = 40
_GREEN, _PLAIN = "\x1b[1;32m", "\x1b[0m"
_NUMBERS = ("rows", "left_out", "examples", "truncated", "tokens", "supervised")
"""Counts of a source: `left_out` are skipped rows, `examples` the used ones, and `supervised` the
tokens that the loss covers. `cut_off` counts the truncated tokens, which `tokens` excludes."""


def build_supervision_report(
    feed: Feed, tokenizer: Tokenizer | None, samples: int = 2
) -> dict[str, Any]:
    """Build a report on the rows of each source and on the share of tokens that the loss covers.

    Streamed training sources are omitted. Costs a pass over the lengths of the examples.

    Args:
        feed: the data of the run.
        tokenizer: decodes the examples; None: they are shown as token ids.
        samples: number of examples to show from each source.

    Returns:
        A JSON object: `sequence_length`; `sources`, a list with one entry for each source (see
        `_source_entry`); and `total`, the sums over the training sources.
    """
    train_entries = []
    if isinstance(feed, PreparedFeed):
        train_entries = [
            _source_entry(source, part, tokenizer, samples)
            for source, part in zip(feed.sources, feed.parts, strict=True)
        ]
    total = {name: sum(entry[name] for entry in train_entries) for name in (*_NUMBERS, "cut_off")}
    total["supervised_share"] = total["supervised"] / max(total["tokens"], 1)
    eval_entries = [_source_entry(s, None, tokenizer, samples) for s in feed.eval_sources]
    _warn_of_labels(train_entries)
    for entry in eval_entries:
        _warn_of_labels([entry])
    return {
        "sequence_length": feed.shape.sequence_length,
        "sources": train_entries + eval_entries,
        "total": total,
    }


def _warn_of_labels(entries: list[dict[str, Any]]) -> None:
    """Add a warning to each entry with labels if all answers of all sources have the same label.

    Changes `entries` in place. Pass the entries of all training sources, because one source may
    have the label that another lacks.
    """
    labelled = [entry for entry in entries if "labels" in entry]
    for label, other in (("true", "false"), ("false", "true")):
        if labelled and not any(entry["labels"][label] for entry in labelled):
            for entry in labelled:
                entry["warnings"].append(
                    f"all {entry['labels'][other]:,} answers have the label {other}: expected some "
                    f"with the label {label}, since KTO learns from both. Check the column 'label' "
                    "(data.columns), or add such rows"
                )


def check_supervised(source: EncodedSource, sequence_length: int) -> None:
    """Raise DataError if the loss covers no token of a source.

    The message counts the skipped rows by reason.
    """
    counts = source.counts
    if counts.supervised:
        return
    skipped = "".join(
        f"; {rows:,} rows were skipped ({reason}), such as {counts.places[reason][0]}"
        for reason, rows in counts.dropped.items()
    )
    raise DataError(
        f"expected supervised tokens in the source {source.name!r}, got none: {counts.rows:,} rows "
        f"gave {counts.kept:,} examples, {counts.truncated:,} truncated to data.sequence_length "
        f"{sequence_length}{skipped}. Check the data, data.supervise, the chat template, and where "
        "prompts end"
    )


def render_report(report: dict[str, Any], *, colour: bool | None = None) -> str:
    """Format a supervision report as text.

    Args:
        report: the result of `build_supervision_report`.
        colour: True: supervised text is green; False: it is in [[...]]; None: green if stdout is a
            terminal.
    """
    colour = sys.stdout.isatty() if colour is None else colour
    head = ["source", "rows", "skipped", "examples", "truncated", "tokens", "supervised", "share"]
    trained = [source for source in report["sources"] if source["use"] == "train"]
    several = [report["total"] | {"name": "all", "use": "train"}] if len(trained) > 1 else []
    rows = [
        [_source_title(s), *(f"{s[name]:,}" for name in _NUMBERS), f"{s['supervised_share']:.1%}"]
        for s in trained + several + report["sources"][len(trained) :]
    ]
    lines = format_table([head, *rows], right=set(range(1, len(head))))
    for source in report["sources"]:
        lines += ["", escape_text(f"{_source_title(source)}: {source['format']}")]
        lines += [f"  {line}" for line in _source_lines(source, report["sequence_length"])]
        lines += [f"  {line}" for line in _draw_histogram(source["lengths"]["histogram"])]
        for example in source["first"]:
            marked = sum(part["supervised"] for part in example["parts"])
            lines.append(
                f"  -- row {example['row']} (counted from 0), {example['tokens']:,} tokens, "
                f"{marked} supervised {'part' if marked == 1 else 'parts'}"
            )
            lines.append(_mark_parts(example["parts"], colour))
    return "\n".join(lines)


def _source_entry(
    source: EncodedSource, part: SourceSamples | None, tokenizer: Tokenizer | None, samples: int
) -> dict[str, Any]:
    """Build the entry of one source in the supervision report, as JSON values.

    It has counts of rows and tokens, reasons for skipped rows, a histogram of lengths, warnings,
    and decoded examples. For labelled answers, it also has counts of both `labels`.

    Args:
        source: the encoded rows.
        part: counts of the samples that are trained on; None for a source that is only evaluated
            on.
        tokenizer: decodes the examples; None: they are shown as token ids.
        samples: number of examples to include.
    """
    lengths, counts = EncodedRows(source.tokens).lengths(), asdict(source.counts)
    places, notes = counts.pop("places"), counts.pop("notes")
    warnings = [f"{notes.pop(note):,} {note}" for note in [*notes] if note.startswith(WARNINGS)]
    labels = {str(label).lower(): notes.pop(note, 0) for label, note in LABELS.items()}
    first = source.tokens[: min(samples, len(source.tokens))]
    columns = (first[name] for name in ("row", "input_ids", "spans"))
    no_values = [None] * len(first["row"])
    pairs = (first.get(name, no_values) for name in ("second", "desirable"))
    return {
        "name": source.name,
        "use": "eval" if part is None else "train",
        "format": source.format,
        "weight": source.weight,
        "max_repeats": source.max_repeats,
        "examples": counts.pop("kept"),
        **counts,
        "notes": notes,
        "warnings": warnings,
        **({"labels": labels} if any(labels.values()) else {}),
        "supervised_share": counts["supervised"] / max(counts["tokens"], 1),
        "left_out": sum(counts["dropped"].values()),
        "dropped": {
            reason: {"rows": rows, "first": places.get(reason, [])}
            for reason, rows in counts["dropped"].items()
        },
        "lengths": {
            "min": int(lengths.min()),
            "median": float(np.median(lengths)),
            "mean": float(lengths.mean()),
            "max": int(lengths.max()),
            "histogram": _count_lengths(lengths),
        },
        "packed": None if part is None else asdict(part),
        "first": [
            {
                "row": row,
                "tokens": len(ids) if desirable is None else second,
                "parts": _decode_example(ids, spans, tokenizer, second, desirable),
            }
            for row, ids, spans, second, desirable in zip(*columns, *pairs, strict=True)
        ],
    }


def _count_lengths(lengths: np.ndarray) -> list[list[int]]:
    """Count lengths in bins [0, 0], [1, 1], [2, 3], [4, 7] and so on.

    Returns:
        [smallest length, largest length, count] of each bin, from the first to the last bin that is
        not empty. Bins between them may have a count of 0.
    """
    # A length from 2^(p-1) to 2^p - 1 has the power p.
    powers = np.frexp(lengths)[1]
    first, last = int(powers.min()), int(powers.max())
    counts = np.bincount(powers, minlength=last + 1)
    return [[1 << p >> 1, (1 << p) - 1, int(counts[p])] for p in range(first, last + 1)]


def _decode_example(
    ids: list[int],
    spans: list[int],
    tokenizer: Tokenizer | None,
    second: int | None,
    desirable: bool | None,
) -> list[dict[str, Any]]:
    """Decode an example to a list of `{"text": str, "supervised": bool}`; see `_decode_parts`.

    For a pair, headings name the chosen and the rejected side. For a labelled answer, a heading
    gives its label, and the answer with which it is compared is omitted.

    Args:
        ids: token ids of the example.
        spans: alternating begin and end positions of its supervised tokens.
        tokenizer: decodes the parts; None: they are shown as token ids.
        second: position at which the second answer of the row begins; None for rows without one.
        desirable: label of a single answer; None for other rows.
    """
    if second is None:
        return _decode_parts(ids, spans, tokenizer)
    at = sum(edge < second for edge in spans[::2]) * 2
    first = _decode_parts(ids[:second], spans[:at], tokenizer)
    if desirable is not None:
        label = "desired (label true): " if desirable else "not desired (label false): "
        return [{"text": label, "supervised": False}, *first]
    return [
        {"text": "chosen: ", "supervised": False},
        *first,
        {"text": "\nrejected: ", "supervised": False},
        *_decode_parts(ids[second:], [edge - second for edge in spans[at:]], tokenizer),
    ]


def _decode_parts(
    ids: list[int], spans: list[int], tokenizer: Tokenizer | None
) -> list[dict[str, Any]]:
    """Decode tokens to a list of `{"text": str, "supervised": bool}`, which alternate.

    The first token is never supervised, because nothing predicts it. Empty parts are omitted.

    Args:
        ids: token ids.
        spans: alternating begin and end positions of the supervised tokens.
        tokenizer: decodes the parts; None: they are shown as token ids.
    """
    # Nothing predicts the first token, even if a span covers it.
    edges = [min(max(edge, 1), len(ids)) for edge in spans]
    return [
        {"text": _decode_part(ids, begin, end, tokenizer), "supervised": i % 2 == 1}
        for i, (begin, end) in enumerate(pairwise([0, *edges, len(ids)]))
        if begin < end
    ]


def _decode_part(ids: list[int], begin: int, end: int, tokenizer: Tokenizer | None) -> str:
    """Decode tokens [begin, end) as they read after the tokens before them.

    The text of a token may depend on earlier tokens. Without a tokenizer, the result lists the ids.
    """
    if tokenizer is None:
        return "".join(f"{token} " for token in ids[begin:end])

    def decode(tokens: list[int]) -> str:
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(tokenizer.decode(tokens, **options))

    # The text of a token may depend on the tokens before it: the first one of a text may lose its
    # space.
    before = decode(ids[:begin])
    up_to_end = decode(ids[:end])
    return up_to_end[len(before) :] if up_to_end.startswith(before) else decode(ids[begin:end])


def _source_title(source: Mapping[str, Any]) -> str:
    """Format the name of a source, with a note if it is only evaluated on."""
    return f"{source['name']} (to evaluate on)" if source["use"] == "eval" else source["name"]


def _source_lines(source: dict[str, Any], sequence_length: int) -> Iterable[str]:
    """Yield the lines of the text report that describe one source."""
    if source["weight"] is not None or source["max_repeats"] is not None:
        limit = source["max_repeats"]
        repeats = "" if limit is None else f", at most {limit:g} passes"
        weight = "by its size" if source["weight"] is None else f"weight {source['weight']:g}"
        yield f"mixed     {weight}{repeats}"
    for reason, dropped in source["dropped"].items():
        first = escape_text("; ".join(dropped["first"]), keep="")
        rows = "1 row" if dropped["rows"] == 1 else f"{dropped['rows']:,} rows"
        yield f"skipped   {rows}: {reason}" + (f" ({first})" if first else "")
    if source["cut_off"]:
        yield (
            f"truncated {source['cut_off']:,} tokens of {source['truncated']:,} examples, which "
            "are not trained on (data.sequence_length, data.too_long)"
        )
    for warning in source["warnings"]:
        yield f"WARNING   {warning}"
    if labels := source.get("labels"):
        yield (
            f"labels    {labels['true']:,} desired (true), {labels['false']:,} not desired (false)."
            " `tokens` include for each the answer to another prompt that sets the KL reference "
            "point; it has no gradient"
        )
    for note, count in source["notes"].items():
        yield f"note      {count:,} {note}"
    if packed := source["packed"]:
        line = f"samples   {packed['samples']:,} of up to {sequence_length:,} tokens"
        if packed["density"] is not None:
            line += f", {packed['density']:.1%} of the positions are tokens"
        yield line
        for unit, count in packed["dropped"].items():
            if count:
                yield f"dropped   {count:,} {unit}"
    lengths = source["lengths"]
    yield (
        f"lengths   {lengths['min']:,} to {lengths['max']:,} tokens, median "
        f"{lengths['median']:,.0f}, mean {lengths['mean']:,.1f}"
    )


def _draw_histogram(histogram: Sequence[Sequence[int]]) -> list[str]:
    """Draw a histogram as lines of text, one bar of # for each bin [from, to, count]."""
    highest = max(count for _, _, count in histogram)
    rows = []
    for begin, end, count in histogram:
        bar = "#" * max(round(_BAR_WIDTH * count / highest), 1 if count else 0)
        rows.append([f"{begin:,}" if begin == end else f"{begin:,} to {end:,}", f"{count:,}", bar])
    return [f"          {line}" for line in format_table(rows, right={0, 1}, margin=10)]


def _mark_parts(parts: Sequence[Mapping[str, Any]], colour: bool) -> str:
    """Join the parts of an example into a text in which supervised parts are marked.

    Long texts and long lists of parts are shortened.

    Args:
        parts: result of `_decode_parts`.
        colour: True: supervised parts are green; False: they are in [[...]].
    """
    before, after = (_GREEN, _PLAIN) if colour else ("[[", "]]")
    texts = []
    for part in parts[:_MAX_PARTS]:
        text = part["text"]
        if len(text) > _MAX_CHARACTERS:
            half, omitted = _MAX_CHARACTERS // 2, len(text) - _MAX_CHARACTERS
            text = f"{text[:half]} ... ({omitted:,} characters) ... {text[-half:]}"
        text = escape_text(text)
        texts.append(f"{before}{text}{after}" if part["supervised"] else text)
    if len(parts) > _MAX_PARTS:
        texts.append(f" ... ({len(parts) - _MAX_PARTS} more parts)")
    return "".join(texts)
