"""What will be learned of the data, before anything is: the supervision report."""

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
from toolkit.tables import table

_SHOWN_CHARACTERS = 600  # of a longer part of a sample the middle is left out
_SHOWN_PARTS = 24
_BAR = 40
_GREEN, _PLAIN = "\x1b[1;32m", "\x1b[0m"
_NUMBERS = ("rows", "left_out", "examples", "truncated", "tokens", "supervised")
"""Of a source: `examples` are rows that are kept, `supervised` tokens that the loss covers; and
`cut_off`, tokens of what was truncated, beyond `tokens`."""


def build_supervision_report(
    feed: Feed, tokenizer: Tokenizer | None, samples: int = 2
) -> dict[str, Any]:
    """Return what the sources of a feed hold and what of it is learned, ready for JSON; of a stream
    only what is evaluated on is known. Costs a pass over the lengths of the examples.

    Keys: `sequence_length`; `sources` with an entry of each (see `_entry`); `total` with the sums
    over what is trained on. Of each source so many `samples` are shown, as ids without a tokenizer.
    Entries of single answers with a label have `labels`: how many have each.
    """
    found = []
    if isinstance(feed, PreparedFeed):
        pairs = zip(feed.sources, feed.parts, strict=True)
        found = [_entry(*pair, tokenizer, samples) for pair in pairs]
    total = {name: sum(entry[name] for entry in found) for name in (*_NUMBERS, "cut_off")}
    total["supervised_share"] = total["supervised"] / max(total["tokens"], 1)
    trained = len(found)
    found += [_entry(source, None, tokenizer, samples) for source in feed.eval_sources]
    _warn_of_labels(found[:trained])
    for entry in found[trained:]:
        _warn_of_labels([entry])
    return {"sequence_length": feed.shape.sequence_length, "sources": found, "total": total}


def _warn_of_labels(entries: list[dict[str, Any]]) -> None:
    """Add a warning to sources of labelled answers of which none has one of the two labels, in
    place. Sources that are trained on together may complete each other.
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
    """Raise a `DataError` for a source without a token that the loss covers."""
    counts = source.counts
    if counts.supervised:
        return
    left_out = "".join(
        f"; left out {rows:,} for {reason}, such as {counts.places[reason][0]}"
        for reason, rows in counts.dropped.items()
    )
    raise DataError(
        f"expected tokens to learn in the source {source.name!r}, got none: {counts.rows:,} rows "
        f"gave {counts.kept:,} examples, {counts.truncated:,} cut off at data.sequence_length "
        f"{sequence_length}{left_out}. Look at the data, data.supervise, the chat template, and "
        "where prompts end"
    )


def render_report(report: dict[str, Any], *, colour: bool | None = None) -> str:
    """Return a `build_supervision_report` as text, with what is learned in green, or else in [[...]];
    None: in green where stdout is a terminal.
    """
    colour = sys.stdout.isatty() if colour is None else colour
    head = ["source", "rows", "left out", "examples", "truncated", "tokens", "supervised", "share"]
    trained = [source for source in report["sources"] if source["use"] == "train"]
    several = [report["total"] | {"name": "all", "use": "train"}] if len(trained) > 1 else []
    rows = [
        [_titled(s), *(f"{s[name]:,}" for name in _NUMBERS), f"{s['supervised_share']:.1%}"]
        for s in trained + several + report["sources"][len(trained) :]
    ]
    lines = table([head, *rows], right=set(range(1, len(head))))
    for source in report["sources"]:
        lines += ["", escape_text(f"{_titled(source)}: {source['format']}")]
        lines += [f"  {line}" for line in _facts(source, report["sequence_length"])]
        lines += [f"  {line}" for line in _bars(source["lengths"]["histogram"])]
        for example in source["first"]:
            marked = sum(part["supervised"] for part in example["parts"])
            lines.append(
                f"  -- row {example['row']} (counted from 0), {example['tokens']:,} tokens, "
                f"{marked} {'part' if marked == 1 else 'parts'} learned"
            )
            lines.append(_marked(example["parts"], colour))
    return "\n".join(lines)


def _entry(
    source: EncodedSource, part: SourceSamples | None, tokenizer: Tokenizer | None, samples: int
) -> dict[str, Any]:
    """Return the facts on a source, which became the samples `part`; None: it is evaluated on."""
    lengths, counts = EncodedRows(source.tokens).lengths(), asdict(source.counts)
    places, notes = counts.pop("places"), counts.pop("notes")
    warnings = [f"{notes.pop(note):,} {note}" for note in [*notes] if note.startswith(WARNINGS)]
    labels = {str(label).lower(): notes.pop(note, 0) for label, note in LABELS.items()}
    shown = source.tokens[: min(samples, len(source.tokens))]
    columns = (shown[name] for name in ("row", "input_ids", "spans"))
    nothing = [None] * len(shown["row"])
    pairs = (shown.get(name, nothing) for name in ("second", "desirable"))
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
            "histogram": _histogram(lengths),
        },
        "packed": None if part is None else asdict(part),
        "first": [
            {
                "row": row,
                "tokens": len(ids) if desirable is None else second,
                "parts": _sides(ids, spans, tokenizer, second, desirable),
            }
            for row, ids, spans, second, desirable in zip(*columns, *pairs, strict=True)
        ],
    }


def _histogram(lengths: np.ndarray) -> list[list[int]]:
    """Return [from, to, how many]: bins that double, without the empty ones at both ends."""
    powers = np.frexp(lengths)[1]  # a length from 2^(p-1) to 2^p - 1 has p
    first, last = int(powers.min()), int(powers.max())
    counts = np.bincount(powers, minlength=last + 1)
    return [[1 << p >> 1, (1 << p) - 1, int(counts[p])] for p in range(first, last + 1)]


def _sides(
    ids: list[int],
    spans: list[int],
    tokenizer: Tokenizer | None,
    second: int | None,
    desirable: bool | None,
) -> list[dict[str, Any]]:
    """Return an example as parts (text, supervised): of a pair both sides, each after a part that
    names it; of an answer with a label the answer alone, after its label.

    Args:
        second: where the other side of a pair begins; None: it is no pair.
        desirable: the label of a single answer; None: it has none.
    """
    if second is None:
        return _parts(ids, spans, tokenizer)
    at = sum(edge < second for edge in spans[::2]) * 2
    first = _parts(ids[:second], spans[:at], tokenizer)
    if desirable is not None:
        label = "desired (label true): " if desirable else "not desired (label false): "
        return [{"text": label, "supervised": False}, *first]
    return [
        {"text": "chosen: ", "supervised": False},
        *first,
        {"text": "\nrejected: ", "supervised": False},
        *_parts(ids[second:], [edge - second for edge in spans[at:]], tokenizer),
    ]


def _parts(ids: list[int], spans: list[int], tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """Return tokens as parts (text, supervised), cut where the supervision begins and ends."""
    # The first token has nothing before it to be predicted from, whatever the span says.
    edges = [min(max(edge, 1), len(ids)) for edge in spans]
    return [
        {"text": _decoded(ids, begin, end, tokenizer), "supervised": i % 2 == 1}
        for i, (begin, end) in enumerate(pairwise([0, *edges, len(ids)]))
        if begin < end
    ]


def _decoded(ids: list[int], begin: int, end: int, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return "".join(f"{token} " for token in ids[begin:end])

    def decode(some: list[int]) -> str:
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(tokenizer.decode(some, **options))

    # What a token prints may depend on those before it: a space that a first one loses.
    before, whole = decode(ids[:begin]), decode(ids[:end])
    return whole[len(before) :] if whole.startswith(before) else decode(ids[begin:end])


def _titled(source: Mapping[str, Any]) -> str:
    return f"{source['name']} (to evaluate on)" if source["use"] == "eval" else source["name"]


def _facts(source: dict[str, Any], sequence_length: int) -> Iterable[str]:
    if source["weight"] is not None or source["max_repeats"] is not None:
        limit = source["max_repeats"]
        repeats = "" if limit is None else f", at most {limit:g} passes"
        weight = "by its size" if source["weight"] is None else f"weight {source['weight']:g}"
        yield f"mixed     {weight}{repeats}"
    for reason, dropped in source["dropped"].items():
        first = escape_text("; ".join(dropped["first"]), keep="")
        rows = "1 row" if dropped["rows"] == 1 else f"{dropped['rows']:,} rows"
        yield f"left out  {rows}: {reason}" + (f" ({first})" if first else "")
    if source["cut_off"]:
        yield (
            f"cut off   {source['cut_off']:,} tokens of {source['truncated']:,} examples, which "
            "are not learned (data.sequence_length, data.too_long)"
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
        for what, count in packed["dropped"].items():
            if count:
                yield f"dropped   {count:,} {what}"
    lengths = source["lengths"]
    yield (
        f"lengths   {lengths['min']:,} to {lengths['max']:,} tokens, median "
        f"{lengths['median']:,.0f}, mean {lengths['mean']:,.1f}"
    )


def _bars(histogram: Sequence[Sequence[int]]) -> list[str]:
    most = max(count for _, _, count in histogram)
    rows = []
    for begin, end, count in histogram:
        bar = "#" * max(round(_BAR * count / most), 1 if count else 0)
        rows.append([f"{begin:,}" if begin == end else f"{begin:,} to {end:,}", f"{count:,}", bar])
    return [f"          {line}" for line in table(rows, right={0, 1}, margin=10)]


def _marked(parts: Sequence[Mapping[str, Any]], colour: bool) -> str:
    before, after = (_GREEN, _PLAIN) if colour else ("[[", "]]")
    shown = []
    for part in parts[:_SHOWN_PARTS]:
        text = part["text"]
        if len(text) > _SHOWN_CHARACTERS:
            half, left = _SHOWN_CHARACTERS // 2, len(text) - _SHOWN_CHARACTERS
            text = f"{text[:half]} ... ({left:,} characters) ... {text[-half:]}"
        text = escape_text(text)
        shown.append(f"{before}{text}{after}" if part["supervised"] else text)
    if len(parts) > _SHOWN_PARTS:
        shown.append(f" ... ({len(parts) - _SHOWN_PARTS} more parts)")
    return "".join(shown)
