"""How fast, and how dense, is best-fit packing beside TRL's?

    python benchmarks/packing.py [--samples 100000 1000000] [--repeats 3] [--output FILE]

Both get the same tokenised samples, whose lengths are drawn like those of instruction data
(log-normal: logarithms with mean 5.5 and deviation 1.0, so 245 tokens in the middle, cut at the
sequence length). Each variant runs in a process of its own, one after the other, the whole round
repeated. Timed: rows of tokens in memory to the packed data set, without imports. TRL builds the
packed rows; the toolkit plans bins and puts a sample together when it is read, so reading all
packed samples once stands beside. Prints a table and writes it, with the machine and the versions,
to docs/evidence/benchmarks/packing.md. A million samples take some 5 GB of memory.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe

SEQUENCE_LENGTH = 2048
MEAN, DEVIATION = 5.5, 1.0
OURS = "toolkit `bfd`"
VARIANTS = {
    OURS: "ours",
    'TRL `pack_dataset(strategy="bfd")`': "trl",
    "TRL, all rows in one batch": "trl whole",
}
WHOLE_AT_MOST = 200_000
"""Samples that TRL gets in one batch; a million took it over 7 GB of memory and many minutes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("docs/evidence/benchmarks/packing.md"))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]))))
        return
    found = {n: compare(n, args.repeats) for n in args.samples}
    text = report(found, args.repeats)
    print(text)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(text)


def compare(samples: int, repeats: int) -> dict[str, list[dict[str, Any]]]:
    """Return what every repeat of every variant measured; the variants take turns."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    for repeat in range(repeats):
        for name, kind in VARIANTS.items():
            if kind == "trl whole" and samples > WHOLE_AT_MOST:
                continue
            with tempfile.TemporaryDirectory() as cache:
                done = subprocess.run(
                    [sys.executable, __file__, "--one", kind, str(samples)],
                    env=os.environ | {"HF_DATASETS_CACHE": cache, "HF_HUB_OFFLINE": "1"},
                    check=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
            said = found[name][-1]
            print(f"{samples}, repeat {repeat + 1}: {name}: {said}", file=sys.stderr, flush=True)
    return found


def lengths_of(samples: int) -> np.ndarray:
    drawn = np.random.default_rng(0).lognormal(MEAN, DEVIATION, samples)
    return np.clip(drawn.astype(np.int64), 1, SEQUENCE_LENGTH)


def measure(kind: str, samples: int) -> dict[str, Any]:
    """Pack once; return seconds, bins and the bins that no packing can do without."""
    import datasets
    import pyarrow as pa

    datasets.disable_progress_bars()
    lengths = lengths_of(samples)
    chunks = []
    for first in range(0, samples, 1000):  # as a file has them
        ends = np.concatenate([[0], np.cumsum(lengths[first : first + 1000])]).astype(np.int32)
        ids = np.arange(ends[-1], dtype=np.int32) % 32_000
        chunks.append(pa.ListArray.from_arrays(ends, pa.array(ids)))
    table = pa.table({"input_ids": pa.chunked_array(chunks)})
    rows = datasets.Dataset(datasets.table.InMemoryTable(table))
    bound = -(-int(lengths.sum()) // SEQUENCE_LENGTH)
    data: Any
    if kind == "ours":
        from toolkit.data.samples.pieces import EncodedRows, cut_rows
        from toolkit.data.samples.sample_shape import Samples, SampleShape

        start = time.perf_counter()
        shape = SampleShape("bfd", SEQUENCE_LENGTH)
        packed = Samples(cut_rows(EncodedRows(rows), SEQUENCE_LENGTH), shape)
        seconds = time.perf_counter() - start
        bins, tokens, data = len(packed), packed.pieces.lengths.sum(), packed
    else:
        from trl import pack_dataset

        settings = {"batch_size": samples} if kind == "trl whole" else {}
        start = time.perf_counter()
        done = pack_dataset(rows, SEQUENCE_LENGTH, "bfd", settings)
        seconds = time.perf_counter() - start
        bins = len(done)
        tokens = sum(len(chunk.values) for chunk in done.data.column("input_ids").chunks)
        data = done.with_format("torch")
    start = time.perf_counter()
    for i in range(0, bins, 10):
        data[i]
    reading = (time.perf_counter() - start) * 10
    if tokens != lengths.sum():
        raise SystemExit(f"{kind} packed {tokens} of {lengths.sum()} tokens")
    return {"seconds": seconds, "reading": reading, "bins": bins, "bound": bound}


def report(found: dict[int, dict[str, list[dict[str, Any]]]], repeats: int) -> str:
    """Return the measurements as Markdown."""
    lines = [
        "# Packing",
        "",
        f"Samples whose lengths are log-normal (logarithms: mean {MEAN}, deviation {DEVIATION}; "
        f"cut at {SEQUENCE_LENGTH}) packed into {SEQUENCE_LENGTH} tokens; median of {repeats} "
        "rounds in which the variants take turns. The ratio is the median over the rounds of the "
        f"seconds of {list(VARIANTS)[1]} / seconds of the same round. The bound is what no packing "
        "can do without: all tokens divided by the room of a bin, rounded up. TRL builds the "
        "packed rows; the toolkit keeps a plan and puts a sample together when it is read, "
        "so reading all packed samples as tensors, once and in one process, stands beside "
        "(measured on every tenth).",
        "",
        "| samples | variant | seconds (lowest to highest) | samples/s | ratio | reading all, "
        "seconds | bins | above the bound |",
        "|---|---|---|---|---|---|---|---|",
    ]
    peer = list(VARIANTS)[1]
    for samples, variants in found.items():
        for name, runs in variants.items():
            if not runs:
                continue
            seconds = [r["seconds"] for r in runs]
            median = statistics.median(seconds)
            pairs = zip(variants[peer], runs, strict=True)
            ratios = [theirs["seconds"] / own["seconds"] for theirs, own in pairs]
            bins, bound = runs[0]["bins"], runs[0]["bound"]
            lines.append(
                f"| {samples:,} | {name} | {median:.2f} ({min(seconds):.2f} to {max(seconds):.2f}) "
                f"| {samples / median:,.0f} | {statistics.median(ratios):.2g} "
                f"| {statistics.median(r['reading'] for r in runs):.1f} | {bins:,} "
                f"| {100 * (bins / bound - 1):.3f} % |"
            )
    return "\n".join([*lines, "", describe("packing.py", "trl", "datasets", "numpy"), ""])


if __name__ == "__main__":
    main()
