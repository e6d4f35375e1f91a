"""Does a rank of a streamed run read as fast however many ranks there are?

    python benchmarks/streams.py [--before FOLDER] [--megabytes 16] [--output FILE]

The same text in four forms: JSON lines plain and in gzip, 32 Parquet files, and token ids in one
Parquet file. Rank r of W reads one pass of it through the feed of a run, wrapped into samples of
1,024 tokens; counted are the tokens that it trains on and the processor seconds that it takes for
them, from the first file that it opens to the end of the pass, without imports. The ranks of a run
take turns in one process with one thread: so the rate is that of a rank with a core of its own, and
neither cores nor disk are shared. `--before` names a checkout of an earlier commit to compare with.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

LENGTH, DOCUMENT, FILES, GROUP = 1024, 600, 32, 1000
FORMS = {
    "JSON lines, 1 file": "rows.jsonl",
    "JSON lines, 1 file, gzip": "rows.jsonl.gz",
    f"Parquet, {FILES} files": "parquet/*.parquet",
    f"token ids, 1 Parquet file, groups of {GROUP:,} rows": "ids.parquet",
}
WORLDS = {1: (0,), 2: (1,), 4: (0, 3), 64: (37,)}
"""Ranks -> those that are measured."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    parser.add_argument("--megabytes", type=int, default=16)
    parser.add_argument("--output", type=Path, default=Path("docs/evidence/benchmarks/streams.md"))
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure(args.one)
        return
    here = Path(__file__).resolve().parent.parent
    codes = {"before": args.before, "now": here} if args.before else {"now": here}
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch), args.megabytes)
        found = {code: rates_of(Path(scratch), root.resolve()) for code, root in codes.items()}
    text = report(found, args.megabytes)
    print(text)
    args.output.write_text(text)


def rates_of(scratch: Path, root: Path) -> dict[str, dict]:
    """Return what was measured with the code of `root`, in a process of its own."""
    own = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run(
        [sys.executable, __file__, "--one", scratch],
        env=os.environ | own | {"PYTHONPATH": str(root)},
        check=True,
    )
    found = json.loads((scratch / "found.json").read_text())
    if not Path(found["code"]).is_relative_to(root):
        raise SystemExit(f"expected the code of {root}, ran that of {found['code']}")
    return found


def prepare(folder: Path, megabytes: int) -> None:
    """Write the text in all its forms, and a tokenizer trained on a part of it."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    from toolkit.data.tokens.tokenizer import train_tokenizer

    root = Path(sysconfig.get_paths()["stdlib"])
    text, files = "", sorted(f for f in root.rglob("*.py") if "site-packages" not in f.parts)
    for file in files:
        text += file.read_text("utf-8", errors="ignore")
        if len(text) > megabytes << 20:
            break
    documents = [text[i : i + DOCUMENT] for i in range(0, megabytes << 20, DOCUMENT)]
    lines = "".join(json.dumps({"text": t}) + "\n" for t in documents).encode()
    (folder / "rows.jsonl").write_bytes(lines)
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "parquet").mkdir()
    for n in range(FILES):
        part = pa.table({"text": documents[n::FILES]})
        pq.write_table(part, folder / "parquet" / f"{n:02}.parquet")
    train_tokenizer(documents[::8], 32000, folder / "tok")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tok")
    ids = pa.table({"input_ids": tokenizer(documents)["input_ids"]})
    pq.write_table(ids, folder / "ids.parquet", row_group_size=GROUP)


class Rank:
    """One rank of several, as a feed sees it, without the others."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.device = rank, world_size, None

    def loader(self, dataset, batches=None, workers=0, collate_fn=None):
        return iter(dataset)


def measure(folder: Path) -> None:
    """Write what each rank of each run reads in a pass, and the code that it ran."""
    from transformers import AutoTokenizer

    import toolkit

    tokenizer = AutoTokenizer.from_pretrained(folder / "tok")
    found: dict = {"code": toolkit.__file__}
    for form in FORMS:
        for world, ranks in WORLDS.items():
            one = [read(folder, form, tokenizer, Rank(rank, world)) for rank in ranks]
            found[f"{form} {world}"] = one
            print(f"{form}, ranks {ranks} of {world}: {one}", file=sys.stderr, flush=True)
    (folder / "found.json").write_text(json.dumps(found))


def read(folder: Path, form: str, tokenizer, rank: Rank) -> dict[str, float]:
    """Return the tokens that a rank reads in a pass, its processor seconds and the padding."""
    from toolkit.config.data import DataConfig, SourceConfig
    from toolkit.config.settings import (
        ModelConfig,
        PretrainConfig,
        TrainConfig,
    )
    from toolkit.data.prepare import PackingChoice, build_feed
    from toolkit.data.tokens.encode import Encoder
    from toolkit.errors import DataError

    source = SourceConfig(files=[f"{folder}/{FORMS[form]}"], max_repeats=1)
    data = DataConfig(sources=[source], streaming=True, sequence_length=LENGTH)
    train = TrainConfig(max_steps=10**6, global_batch_size=64)
    cfg = PretrainConfig(model=ModelConfig("unused"), data=data, train=train)
    encoder = Encoder(tokenizer, data, 32000)
    begun = time.process_time()
    feed = build_feed(cfg, encoder, PackingChoice("wrapped", "asked"), rank.world_size)
    tokens = room = 0
    try:
        for micro_batches in feed.steps(rank, train.max_steps, per_device_batch_size=1):
            for batch in micro_batches:
                tokens += int(batch.count)
                room += batch.targets.numel()
    except DataError as error:
        if "the data ended after" not in str(error):
            raise
    seconds = time.process_time() - begun
    return {"tokens": tokens, "seconds": seconds, "padding": 1 - tokens / room}


def report(found: dict[str, dict], megabytes: int) -> str:
    from machine import describe

    lines, form = [], next(iter(FORMS))
    for form in FORMS:
        for world in WORLDS:
            row = f"| {form} | {world} |"
            for rates in found.values():
                alone, these = (
                    [rank["tokens"] / rank["seconds"] / 1e3 for rank in rates[f"{form} {of}"]]
                    for of in (1, world)
                )
                span = " to ".join(f"{rate:,.0f}" for rate in sorted(these))
                row += f" {span} | {min(these) / alone[0]:.0%} |"
            lines.append(row)
    head = "".join(f" {code}: thousand tokens/s a rank | of 1 rank |" for code in found)
    padding = "; ".join(f"{code} {of[f'{form} 1'][0]['padding']:.1%}" for code, of in found.items())
    return "\n".join(
        [
            "# Streams on several ranks",
            "",
            f"One pass over {megabytes} MiB of Python source in rows of {DOCUMENT:,} characters, "
            f"wrapped into samples of {LENGTH:,} tokens, global batch 64, up to 64 lanes, "
            "byte-level BPE with 32,000 entries. Tokens that a rank trains on, by the processor "
            "seconds that it takes to read and encode them; the ranks of a run take turns in one "
            "process with one thread, so the rate is that of a rank with a core of its own. One "
            "rank or two of each run are measured: the lowest rate and the highest, and the lowest "
            "as a share of the rate of 1 rank. Start and end of the pass are in it. "
            f"Tokens that fill samples up: {padding}.",
            "",
            f"| data | ranks |{head}",
            f"|---|---|{'---|---|' * len(found)}",
            *lines,
            "",
            describe("streams.py", "datasets", "tokenizers", "transformers"),
            "",
        ]
    )


if __name__ == "__main__":
    main()
