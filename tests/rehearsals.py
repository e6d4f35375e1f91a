"""`toolkit rehearse` on every ready config, beside stand-ins for what lies on the Hub.

    python tests/rehearsals.py [--configs NAME ...] [--write docs/evidence/rehearsals.md]

In the working folder the names of models and data sets are folders, as the toolkit finds before it
asks the Hub: the architecture as published (published.py), weights of the right shapes without
bytes (sparse files), a tokenizer and a chat template of ours, conversations and texts from Python's
standard library in the columns of the data sets. The configs are run as they are.
"""

# ruff: noqa: E402 - as a program it first says where the toolkit is
import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pyarrow as pa
import pyarrow.parquet as pq
from machine import describe
from published import folder_of
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from toolkit.config.settings import ModelConfig
from toolkit.models import build_on_meta

CONFIGS = sorted((ROOT / "recipes" / "configs").glob("*_*gpu*.yaml"))
CONFIGS += sorted((ROOT / "recipes" / "configs").glob("*nodes.yaml"))
# Configs with a published figure read their own text.
CONFIGS = [file for file in CONFIGS if "# Published figure: " not in file.read_text("utf-8")]
_END = "<|endoftext|>"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--configs", nargs="+", default=[c.stem for c in CONFIGS])
    parser.add_argument("--write", type=Path, help="write the table to this file")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="toolkit-rehearsals-"))
    results = []
    try:
        make_data(work)
        for name in args.configs:
            results.append(rehearsed(name, work))
            print(row(results[-1]), flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    text = report(results)
    print(text)
    if args.write is not None:
        args.write.write_text(text, "utf-8")
    return 0 if all(r["passed"] for r in results) else 1


def rehearsed(name: str, work: Path) -> dict[str, Any]:
    """Rehearse a config as it is; return what came of it."""
    config = ROOT / "recipes" / "configs" / f"{name}.yaml"
    text = config.read_text("utf-8")
    model, *frozen = re.findall(r"^  name_or_path: (\S+)", text, re.MULTILINE)
    for name_or_path in (model, *frozen):
        make_model(name_or_path, work)
    # The disk of the real run, of up to a terabyte, is not this machine's.
    command = [sys.executable, "-m", "toolkit", "rehearse", str(config), "--skip", "disk", "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(work)}
    begun = time.monotonic()
    done = subprocess.run(
        command,
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    seconds = time.monotonic() - begun
    found = {"config": name, "model": model, "passed": done.returncode == 0, "seconds": seconds}
    try:
        return found | json.loads(done.stdout)
    except json.JSONDecodeError:
        return found | {"stages": [], "error": (done.stderr or done.stdout)[-2000:]}


# ---- Stand-ins


def make_model(name: str, work: Path) -> None:
    """Write the published model `name` below `work`: config, tokenizer, weights without bytes."""
    if (work / name).exists():
        return
    folder = folder_of(name, work)
    tokenizer(work).save_pretrained(folder)
    tensors = build_on_meta(ModelConfig(str(folder), init="random")).state_dict()
    header, end = dict[str, Any](), 0
    for key, tensor in tensors.items():
        begin, end = end, end + 2 * tensor.numel()
        shape = list(tensor.shape)
        header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as f:
        f.write(len(encoded).to_bytes(8, "little") + encoded)
        f.truncate(8 + len(encoded) + end)


def tokenizer(work: Path) -> PreTrainedTokenizerFast:
    """Return a tokenizer of 4,096 tokens with the chat template that is shipped."""
    file = work / "tokenizer.json"
    if not file.is_file():
        own = ByteLevelBPETokenizer()
        texts = (source.read_text("utf-8", "replace") for source in islice(sources(), 60))
        own.train_from_iterator(texts, 4096, special_tokens=[_END], show_progress=False)
        own.save(str(file))
    template = (ROOT / "recipes" / "configs" / "chat_template.jinja").read_text("utf-8")
    wrapped = PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token=_END)
    wrapped.chat_template = template
    return wrapped


def sources() -> Iterator[Path]:
    return iter(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))


def make_data(work: Path) -> None:
    """Write the data sets that the configs name, in their own layout and columns."""
    make_preferences(work)
    chats = work / "HuggingFaceH4" / "ultrachat_200k" / "data"
    texts = work / "HuggingFaceFW" / "fineweb-edu" / "sample" / "10BT"
    for folder in (chats, texts):
        folder.mkdir(parents=True)
    rows = [
        {"prompt": question, "prompt_id": str(i), "messages": turns(question, answer)}
        for i, (question, answer) in enumerate(islice(documented(), 600))
    ]
    for split in ("train_sft", "test_sft"):
        pq.write_table(pa.Table.from_pylist(rows), chats / f"{split}-00000-of-00001.parquet")
    read = [{"text": f.read_text("utf-8", "replace"), "id": f.name} for f in islice(sources(), 150)]
    pq.write_table(pa.Table.from_pylist(read), texts / "000_00000.parquet")
    card = "---\nconfigs:\n- config_name: sample-10BT\n  data_files:\n  - split: train\n"
    (texts.parent.parent / "README.md").write_text(f"{card}    path: sample/10BT/*\n---\n")


def make_preferences(work: Path) -> None:
    """Write the data sets of pairs and of labelled answers that the configs name."""
    pairs = work / "HuggingFaceH4" / "ultrafeedback_binarized" / "data"
    answers = work / "trl-lib" / "kto-mix-14k" / "data"
    for folder in (pairs, answers):
        folder.mkdir(parents=True)
    texts = list(islice(documented(), 600))
    rows: list[dict[str, Any]] = [
        {
            "prompt": question,
            "prompt_id": str(i),
            "chosen": turns(question, answer),
            "rejected": turns(question, other),
            "messages": turns(question, answer),
            "score_chosen": 8.0,
            "score_rejected": 2.0,
        }
        for i, ((question, answer), (_, other)) in enumerate(pairwise(texts))
    ]
    for split in ("train_prefs", "test_prefs"):
        pq.write_table(pa.Table.from_pylist(rows), pairs / f"{split}-00000-of-00001.parquet")
    labelled = [
        {"prompt": pair[:1], "completion": pair[1:], "label": row[side] is row["chosen"]}
        for row in rows
        for side in ("chosen", "rejected")
        for pair in [row[side]]
    ]
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(labelled), answers / f"{split}-00000-of-00001.parquet")


def turns(question: str, answer: str) -> list[dict[str, str]]:
    return [{"content": question, "role": "user"}, {"content": answer, "role": "assistant"}]


def documented() -> Iterator[tuple[str, str]]:
    """Yield what a function of the standard library is asked for, and its docstring."""
    for file in sources():
        for node in ast.walk(ast.parse(file.read_text("utf-8", "replace"))):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                yield f"What does {file.stem}.{node.name} do?", text


# ---- The table


def row(result: dict[str, Any]) -> str:
    failed = next((s for s in result["stages"] if s["ok"] is False), None)
    why = f"{failed['stage']}: {failed['said']}" if failed else result.get("error", "")
    verdict = "passed" if result["passed"] else f"FAILED {' '.join(why.split())[:300]}"
    done = sum(s["ok"] is True for s in result["stages"])
    load = next((s["said"] for s in result["stages"] if s["stage"] == "load"), "")
    small = load.partition("first step done; ")[2]
    cells = [result["config"], result["model"], verdict, str(done), small]
    return f"| {' | '.join(cells)} | {result['seconds']:.0f} s |"


def report(results: list[dict[str, Any]]) -> str:
    packages = ("torch", "transformers", "peft", "bitsandbytes")
    lines = [
        "# Rehearsals of the ready configs",
        "",
        "`toolkit rehearse` on each config of `recipes/configs` as it is "
        "([rehearsing](../rehearsing.md)), with stand-ins for what lies on the Hub: the published "
        "architecture, weights of its shapes without bytes, a tokenizer and a template of ours, "
        "conversations and texts of Python's standard library. The stage `disk` is left out.",
        "",
        "| config | model | | stages passed | the small model | time |",
        "|---|---|---|---|---|---|",
        *map(row, results),
        "",
        describe("tests/rehearsals.py", *packages),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
