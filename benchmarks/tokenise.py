"""Is tokenising at least as fast as a plain `datasets.map` with the fast tokenizer?

    python benchmarks/tokenise.py [--megabytes 32] [--repeats 5] [--output FILE]

Each variant runs in a process of its own with an empty cache and the same rows of text (the
standard library with its tests), one after the other, the whole round repeated. Timed: text rows to
token rows on disk, without imports. Prints a table and writes it, with the machine and the
versions, to docs/evidence/benchmarks/tokenise.md.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

PLAIN = "datasets.map(batched=True)"
VARIANTS = {
    PLAIN: ("plain", "1", None),
    f"{PLAIN}, num_proc=2": ("plain", "2", None),
    "toolkit": ("ours", "1", None),
    f"{PLAIN}, RAYON_NUM_THREADS=1": ("plain", "1", "1"),
    "toolkit, RAYON_NUM_THREADS=1": ("ours", "1", "1"),
    "toolkit, RAYON_NUM_THREADS=2": ("ours", "1", "2"),
}
"""Name -> what runs, its processes, its threads (None: as many as there are cores)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("docs/evidence/benchmarks/tokenise.md"))
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure(*args.one)
        return
    with tempfile.TemporaryDirectory() as scratch:
        seconds = compare(Path(scratch), args.megabytes, args.repeats)
        facts = json.loads(Path(scratch, "facts.json").read_text())
    text = report(seconds, facts, args.repeats)
    print(text)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(text)


def compare(scratch: Path, megabytes: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of every repeat of every variant; the variants take turns."""
    prepare(scratch, megabytes)
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for repeat in range(repeats):
        for name, (kind, workers, threads) in VARIANTS.items():
            with tempfile.TemporaryDirectory(dir=scratch) as cache:
                env = os.environ | {"HF_DATASETS_CACHE": cache, "HF_HUB_OFFLINE": "1"}
                for variable in ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS"):
                    env.pop(variable, None)
                if threads is not None:
                    env["RAYON_NUM_THREADS"] = threads
                done = subprocess.run(
                    [sys.executable, __file__, "--one", kind, workers, str(scratch)],
                    env=env,
                    check=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            seconds[name].append(float(done.stdout.split()[-1]))
            print(f"repeat {repeat + 1}: {name}: {seconds[name][-1]:.2f} s", file=sys.stderr)
    return seconds


def prepare(scratch: Path, megabytes: int) -> None:
    """Write the rows of text and a tokenizer trained on a part of them."""
    import datasets

    from toolkit.data.sources.file_readers import read_pieces
    from toolkit.data.tokens.tokenizer import train_tokenizer
    from toolkit.errors import DataError

    root = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in sorted(root.rglob("*.py")) if "site-packages" not in f.parts]
    rows: list[str] = []
    size, wanted = 0, megabytes << 20
    while size < wanted:
        for file in files:
            try:
                rows += read_pieces(file)
            except DataError:  # some of the library's tests are no UTF-8 on purpose
                continue
            size += file.stat().st_size
            if size >= wanted:
                break
    text = datasets.Dataset.from_dict({"text": rows})
    text.save_to_disk(str(scratch / "text"))
    train_tokenizer(rows[::8], 32000, scratch / "tok")
    facts = {"megabytes": sum(len(r.encode()) for r in rows) / 1e6, "rows": len(rows)}
    (scratch / "facts.json").write_text(json.dumps(facts))


def measure(kind: str, workers: str, folder: str) -> None:
    """Print the seconds that one variant takes."""
    import datasets
    from transformers import AutoTokenizer

    from toolkit.config.data import DataConfig
    from toolkit.data.row_formats import DOCUMENTS
    from toolkit.data.sources.rows import load_sources
    from toolkit.data.tokens.encode import Encoder, encode_source

    text = datasets.load_from_disk(f"{folder}/text")
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/tok")
    datasets.disable_progress_bars()
    start = time.perf_counter()
    if kind == "ours":
        cfg = DataConfig(dataset_name=f"{folder}/text", append_eos=False)
        (source,) = load_sources(cfg, row_format=DOCUMENTS)
        tokens = encode_source(source, Encoder(tokenizer, cfg, 32000)).tokens
    else:
        tokens = text.map(
            lambda rows: {"input_ids": tokenizer(rows["text"])["input_ids"]},
            batched=True,
            remove_columns=["text"],
            num_proc=int(workers) if workers != "1" else None,
            cache_file_name=f"{datasets.config.HF_DATASETS_CACHE}/plain.arrow",
        )
    seconds = time.perf_counter() - start
    first = tokenizer(text[0]["text"])["input_ids"]
    if len(tokens) != len(text) or tokens[0]["input_ids"] != first:
        raise SystemExit("the variants do not give the same tokens")
    print(seconds)


def report(seconds: dict[str, list[float]], facts: dict, repeats: int) -> str:
    """Return the measurements as Markdown."""
    base = seconds[PLAIN]
    lines = [
        "# Tokenising",
        "",
        f"{facts['megabytes']:.0f} MB of Python source in {facts['rows']} rows, byte-level BPE "
        f"with 32000 entries; median of {repeats} rounds in which the variants take turns. The "
        "ratio is the median over the rounds of plain seconds / seconds of the same round: above 1 "
        f"is faster than `{PLAIN}`.",
        "",
        "| variant | seconds (lowest to highest) | MB/s | ratio |",
        "|---|---|---|---|",
    ]
    for name, values in seconds.items():
        median = statistics.median(values)
        ratio = statistics.median(b / v for b, v in zip(base, values, strict=True))
        lines.append(
            f"| `{name}` | {median:.2f} ({min(values):.2f} to {max(values):.2f}) | "
            f"{facts['megabytes'] / median:.1f} | {ratio:.2f} |"
        )
    versions = ", ".join(
        f"{p} {importlib.metadata.version(p)}" for p in ("datasets", "tokenizers", "transformers")
    )
    lines += [
        "",
        f"Machine: {cpu_model()}, {len(os.sched_getaffinity(0))} cores; Python "
        f"{platform.python_version()}, {versions}. Written by `benchmarks/tokenise.py`.",
        "",
    ]
    return "\n".join(lines)


def cpu_model() -> str:
    """Return the processor's name as the system states it."""
    try:
        info = Path("/proc/cpuinfo").read_text()
        line = next(n for n in info.splitlines() if n.startswith("model name"))
        return line.split(":")[1].strip()
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
