"""Does a rank of a streamed run read as fast however many ranks there are?

    python benchmarks/streams.py [--before FOLDER] [--megabytes 9] [--output FILE]

The same text in three forms: JSON lines in gzip, 32 Parquet files, and token ids in one Parquet
file. Rank r of W reads one pass of it through the feed of a run, wrapped into samples of
1,024 tokens; counted are the tokens that it trains on and the processor seconds that it takes for
them, from the first file that it opens to the end of the pass, without imports. The ranks of a run
take turns, each in a process of its own with one thread: so the rate is that of a rank with a core
of its own, and neither cores nor disk are shared. `--before` names a checkout of an earlier commit
to compare with.
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

LENGTH, DOCUMENT, FILES = 1024, 1000, 32
FORMS = {
    "JSON lines, 1 file, gzip": "rows.jsonl.gz",
    f"Parquet, {FILES} files": "parquet/*.parquet",
    "token ids, 1 Parquet file": "ids.parquet",
}
WORLDS = {1: (0,), 2: (1,), 4: (0, 3), 64: (37,)}
"""Ranks -> those that are measured."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    parser.add_argument("--megabytes", type=int, default=9)
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks/streams.md"))
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure(*args.one)
        return
    here = Path(__file__).resolve().parent.parent
    codes = {"before": args.before, "now": here} if args.before else {"now": here}
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch), args.megabytes)
        found = {
            (form, world, code): [rank_of(scratch, form, r, world, root) for r in ranks]
            for form in FORMS
            for world, ranks in WORLDS.items()
            for code, root in codes.items()
        }
    text = report(found, list(codes), args.megabytes)
    print(text)
    args.output.write_text(text)


def rank_of(scratch: str, form: str, rank: int, world: int, root: Path) -> dict[str, float]:
    """Return what a rank measured, in a process of its own with the code of `root`."""
    own = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, __file__, "--one", scratch, form, str(rank), str(world)],
        env=os.environ | own | {"PYTHONPATH": str(root.resolve())},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    if not Path(found["code"]).is_relative_to(root.resolve()):
        raise SystemExit(f"expected the code of {root}, ran that of {found['code']}")
    print(f"{form}, rank {rank} of {world}, {root.name}: {found}", file=sys.stderr)
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
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "parquet").mkdir()
    for n in range(FILES):
        part = pa.table({"text": documents[n::FILES]})
        pq.write_table(part, folder / "parquet" / f"{n:02}.parquet")
    train_tokenizer(documents[::8], 32000, folder / "tok")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tok")
    pq.write_table(
        pa.table({"input_ids": tokenizer(documents)["input_ids"]}), folder / "ids.parquet"
    )


class Rank:
    """One rank of several, as a feed sees it, without the others."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.device = rank, world_size, None

    def loader(self, dataset, batches=None, workers=0, collate_fn=None):
        return iter(dataset)


def measure(folder: str, form: str, rank: str, world: str) -> None:
    """Print the tokens that a rank reads in a pass, its processor seconds and the padding."""
    from transformers import AutoTokenizer

    import toolkit
    from toolkit.config.settings import (
        DataConfig,
        ModelConfig,
        PretrainConfig,
        SourceConfig,
        TrainConfig,
    )
    from toolkit.data.prepare import Choice, read_sources
    from toolkit.data.tokens.encode import Encoder
    from toolkit.errors import DataError

    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/tok")
    source = SourceConfig(files=[f"{folder}/{FORMS[form]}"], max_repeats=1)
    data = DataConfig(sources=[source], streaming=True, sequence_length=LENGTH, num_workers=0)
    train = TrainConfig(max_steps=10**6, global_batch_size=64)
    cfg = PretrainConfig(model=ModelConfig("unused"), data=data, train=train)
    encoder = Encoder(tokenizer, data, 32000)
    begun, clock = time.process_time(), time.perf_counter()
    feed = read_sources(cfg, encoder, Choice("wrapped", "asked"), int(world))
    tokens = room = 0
    try:
        for micro_batches in feed.steps(
            Rank(int(rank), int(world)), train.max_steps, per_device_batch_size=1
        ):
            for batch in micro_batches:
                tokens += int((batch["labels"] >= 0).sum())
                room += batch["labels"].numel()
    except DataError as error:
        if "the data ended after" not in str(error):
            raise
    seconds, wall = time.process_time() - begun, time.perf_counter() - clock
    found = {"tokens": tokens, "seconds": seconds, "wall": wall, "padding": 1 - tokens / room}
    print(json.dumps(found | {"code": toolkit.__file__}))


def report(found: dict, codes: list[str], megabytes: int) -> str:
    from machine import describe

    lines = []
    for form in FORMS:
        for world in WORLDS:
            row = f"| {form} | {world} |"
            for code in codes:
                rates = [r["tokens"] / r["seconds"] for r in found[form, world, code]]
                alone = found[form, 1, code][0]
                share = min(rates) / (alone["tokens"] / alone["seconds"])
                span = f"{min(rates) / 1e3:,.0f}"
                span += f" to {max(rates) / 1e3:,.0f}" if len(rates) > 1 else ""
                row += f" {span} | {share:.0%} |"
            lines.append(row)
    head = "".join(f" {code}: thousand tokens/s a rank | of 1 rank |" for code in codes)
    padding = "; ".join(
        f"{code} {found[next(iter(FORMS)), 1, code][0]['padding']:.1%}" for code in codes
    )
    return "\n".join(
        [
            "# Streams on several ranks",
            "",
            f"One pass over {megabytes} MiB of Python source in rows of {DOCUMENT:,} characters, "
            f"wrapped into samples of {LENGTH:,} tokens, global batch 64, 64 lanes, byte-level BPE "
            "with 32,000 entries. Tokens that a rank trains on, by the processor seconds that it "
            "takes to read and encode them; the ranks of a run take turns, each in a process with "
            "one thread, so the rate is that of a rank with a core of its own. One rank or two of each "
            "run are measured: the lowest to the highest, and the lowest as a share of the rate of "
            "1 rank. The end of the pass, where lanes differ, is in it. "
            f"Tokens that fill samples up: {padding}.",
            "",
            f"| data | ranks |{head}",
            f"|---|---|{'---|---|' * len(codes)}",
            *lines,
            "",
            describe("streams.py", "datasets", "tokenizers", "transformers"),
            "",
        ]
    )


if __name__ == "__main__":
    main()
