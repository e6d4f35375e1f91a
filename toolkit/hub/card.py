"""What a published model says of itself: the facts of its run, and the model card made of them.

Owns which facts of a run are told (no secret, no path of a machine) and the text of the card. Reads
the run directory's files; does not know checkpoints, weights or the Hub.

[Note: the curve] The loss curve is drawn in the card's own text, in a code block. A PNG would need
a plotting library on the machine that publishes, and a second file that is neither in the export's
manifest nor the user's; whether mermaid's charts are drawn depends on who shows the text. Letters
are shown alike by the Hub, by git and by a terminal.
"""

import hashlib
import math
import re
from typing import Any

import yaml

from toolkit.redact import scrub

_MARK = re.compile(r"<!-- toolkit card ([0-9a-f]{64}) -->\n?")
# Of the run's settings, those that stand in the card's table; the others are folded away below it.
_MAIN = (
    *("model.init", "data.sequence_length", "train.per_device_train_batch_size"),
    *("train.gradient_accumulation_steps", "optim.learning_rate", "optim.lr_scheduler_type"),
    *("optim.warmup_steps", "optim.weight_decay", "optim.adam_beta1", "optim.adam_beta2"),
    *("optim.max_grad_norm", "model.dtype", "sharding.param_dtype", "lora.r", "lora.lora_alpha"),
    "seed",
)
_SPEED = ("tokens_per_second", "step_time", "memory_peak_bytes", "mfu", "learning_rate")


def render(manifest: dict[str, Any], repo_id: str, digest: str) -> str:
    """Return the model card (README.md) of an export, with the front matter that the Hub reads.

    Says only what the manifest knows: without the facts of a run, what the files are and how to
    load and verify them. See [Note: the curve].

    Args:
        manifest: of the export; the facts of its run are in origin.run.
        repo_id: ORG/NAME that it is published as.
        digest: sha256 of the manifest's file.
    """
    facts = dict(manifest["origin"].get("run") or {})
    adapter = manifest["origin"].get("adapter") or {}
    if adapter:
        facts.setdefault("base_model", adapter["base"])
    apart = bool(adapter) and not manifest["origin"].get("merged")
    name = repo_id.split("/")[-1]
    parts = [
        f"# {name}",
        _opening(facts, manifest),
        _loading_adapter(repo_id, facts, adapter) if apart else _loading(repo_id),
        _adapter(adapter, apart),
        _training(facts),
        _results(facts),
        _versions(facts, manifest),
        _proof(manifest, repo_id, digest),
    ]
    front = yaml.safe_dump(_front(facts, bool(adapter), apart), sort_keys=False, allow_unicode=True)
    text = scrub(f"---\n{front}---\n\n" + "\n\n".join(p for p in parts if p) + "\n\n")
    return f"{text}<!-- toolkit card {hashlib.sha256(text.encode()).hexdigest()} -->\n"


def is_unedited(card: str) -> bool:
    """Whether a model card is as `render` returned it, so that nobody's words are lost with it."""
    lines = card.replace("\r\n", "\n").rstrip("\n").rsplit("\n", 1)
    mark = _MARK.fullmatch(lines[-1])
    above = lines[0] + "\n" if len(lines) == 2 else ""
    return mark is not None and mark[1] == hashlib.sha256(above.encode()).hexdigest()


# --------------------------------------------------------------------------------------------------
# Facts
# --------------------------------------------------------------------------------------------------


# --------------------------------------------------------------------------------------------------
# The card
# --------------------------------------------------------------------------------------------------


def _front(facts: dict[str, Any], adapted: bool, apart: bool) -> dict[str, Any]:
    """Return the front matter: only what the Hub knows how to read, and only what is known.

    `adapted`: trained as an adapter; `apart`: which was not merged into its base.
    """
    base, data = facts.get("base_model") or {}, facts.get("data") or {}
    front: dict[str, Any] = {"library_name": "peft" if apart else "transformers"}
    front["pipeline_tag"] = "text-generation"
    if base.get("license"):
        front["license"] = base["license"]
    # The Hub refuses a card whose base model is not one of its own.
    if base.get("hub_id") and base.get("init") == "pretrained":
        front["base_model"] = base["hub_id"]
        if adapted:
            front["base_model_relation"] = "adapter" if apart else "finetune"
    on_the_hub = [d for d in (data, *data.get("sources", [])) if d.get("dataset_is_on_the_hub")]
    if on_the_hub:
        front["datasets"] = list(dict.fromkeys(d["dataset_name"] for d in on_the_hub))
    front["tags"] = ["fsdp2", "fsdp2-toolkit", *(["lora"] if adapted else [])]
    return front


def _opening(facts: dict[str, Any], manifest: dict[str, Any]) -> str:
    base, tensors = facts.get("base_model") or {}, manifest["tensors"].values()
    parameters = sum(math.prod(t["shape"]) for t in tensors)
    dtypes = ", ".join(sorted({t["dtype"] for t in tensors}))
    size = f"{parameters / 1e6:,.1f} M parameters ({dtypes})"
    adapter, merged = manifest["origin"].get("adapter"), manifest["origin"].get("merged")
    what = "An adapter for a causal language model" if adapter and not merged else ""
    what = what or "A causal language model"
    if not base.get("name"):
        return f"{what}, {size}, exported from a sharded checkpoint."
    said = base["name"]
    if hub_id := base.get("hub_id"):
        said = f"[{said}](https://huggingface.co/{hub_id})"
    at = f" (revision {base['revision']})" if base.get("revision") else ""
    start = "random weights in the shape of " if base.get("init") == "random" else ""
    if adapter:
        how = f"{said}{at} with an adapter merged in" if merged else f"trained on {said}{at}"
        return f"{what}, {size}: {how}."
    return f"{what}, {size}, trained from {start}{said}{at}."


def _loading(repo_id: str) -> str:
    return f"""## Load it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{repo_id}", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("{repo_id}")
```"""


def _loading_adapter(repo_id: str, facts: dict[str, Any], adapter: dict[str, Any]) -> str:
    base = (facts.get("base_model") or {}).get("hub_id")
    known = "" if base else "  # where you have it"
    rows = adapter["base"].get("rows")
    resized = f"base.resize_token_embeddings({rows})  # new tokens\n" if rows else ""
    return f"""## Load it

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained("{base or "BASE_MODEL"}", dtype="auto"){known}
{resized}model = PeftModel.from_pretrained(base, "{repo_id}")
tokenizer = AutoTokenizer.from_pretrained("{repo_id}")
```"""


def _adapter(adapter: dict[str, Any], apart: bool) -> str:
    if not adapter:
        return ""
    rows = [(name, _listed(value)) for name, value in adapter["settings"].items()]
    told = "The adapter" if apart else "The adapter that was merged in"
    text = f"{told} was trained with these settings of PEFT's `LoraConfig`:"
    digest = adapter["base"].get("digest")
    known = f"\n\nDigest of the base's weights: `{digest}`." if digest else ""
    return "\n".join(["## Adapter", "", text, "", *_table(("setting", "value"), rows)]) + known


def _listed(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def _training(facts: dict[str, Any]) -> str:
    settings, data = facts.get("hyperparameters") or {}, facts.get("data") or {}
    if not settings and not data:
        return ""
    lines = ["## Training", "", f"Data: {_data_line(data)}.", ""]
    if facts.get("steps") is not None:
        seen = f", {facts['tokens']:,} supervised tokens" if facts.get("tokens") else ""
        lines += [f"Length: {facts['steps']:,} steps{seen}.", ""]
    main = [(n, settings[n]) for n in _MAIN if settings.get(n) is not None]
    rest = [(n, v) for n, v in settings.items() if n not in _MAIN and v not in (None, [], {})]
    lines += _table(("setting", "value"), main)
    if rest:
        lines += ["", "<details><summary>All settings</summary>", ""]
        lines += [*_table(("setting", "value"), rest), "", "</details>"]
    return "\n".join(lines)


def _data_line(data: dict[str, Any]) -> str:
    if sources := data.get("sources"):
        weighed = [(_data_line(s), s.get("weight")) for s in sources]
        return "; ".join(f"{text} (weight {w})" if w is not None else text for text, w in weighed)
    if name := data.get("dataset_name"):
        which = [data.get("dataset_config_name"), data.get("dataset_split")]
        return ", ".join([f"`{name}`", *(f"`{w}`" for w in which if w)])
    if data.get("built_in"):
        return str(data["built_in"])
    files = data.get("train_files") or data.get("files") or []
    more = f" and {len(files) - 10} more" if len(files) > 10 else ""
    return (", ".join(f"`{_cell(f)}`" for f in files[:10]) + more) or "not told"


def _results(facts: dict[str, Any]) -> str:
    metrics, curve = facts.get("metrics") or {}, facts.get("curve") or {}
    rows = [(n, v) for n, v in metrics.items() if n not in _SPEED and v is not None]
    if not rows:
        return ""
    lines = ["## Results", "", "At the last step:", "", *_table(("metric", "value"), rows)]
    if chart := draw(curve.get("loss") or [], curve.get("eval_loss") or []):
        lines += ["", "Loss over the steps (`*` training, `o` evaluation):", "", "```text", chart]
        lines += ["```"]
    return "\n".join(lines)


def _versions(facts: dict[str, Any], manifest: dict[str, Any]) -> str:
    found = facts.get("versions") or {"toolkit": manifest["toolkit"]}
    return "## Versions\n\n" + ", ".join(f"{name} {version}" for name, version in found.items())


def _proof(manifest: dict[str, Any], repo_id: str, digest: str) -> str:
    name, origin = repo_id.split("/")[-1], manifest["origin"]
    step = f" of step {origin['step']:,}" if origin.get("step") is not None else ""
    source = ""
    if origin.get("checkpoint"):
        source = (
            f" They were exported from the checkpoint{step} whose manifest has the sha256 "
            f"`{origin['checkpoint']}`."
        )
    return f"""## Verify it

`toolkit_manifest.json` names the size and sha256 of every file and of every tensor.{source} Its own
sha256 is

    {digest}

```sh
hf download {repo_id} --local-dir {name}
toolkit verify {name}
```"""


def _table(head: tuple[str, str], rows: list[tuple[str, Any]]) -> list[str]:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    return [*lines, *(f"| {_cell(name)} | {_cell(_number(value))} |" for name, value in rows)]


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _cell(text: Any) -> str:
    """Return a text that cannot end its cell, its code or its line."""
    return re.sub(r"\s+", " ", str(text)).replace("|", "\\|").replace("`", "'").replace("<", "&lt;")


def draw(loss: list[list[float]], evaluated: list[list[float]], width: int = 64) -> str:
    """Return a chart of [step, loss] points in letters, "" where there are fewer than two.

    A column shows the mean of the points that fall into it, so that one outlier neither hides nor
    invents a trend.
    """
    series = [[p for p in points if None not in p] for points in (loss, evaluated)]
    points = [p for one in series for p in one]
    if len({step for step, _ in points}) < 2:
        return ""
    height = 14
    first, last = min(s for s, _ in points), max(s for s, _ in points)
    columns: dict[tuple[int, str], list[float]] = {}
    for letter, one in zip("*o", series, strict=True):
        for step, value in one:
            column = round((step - first) / (last - first) * (width - 1))
            columns.setdefault((column, letter), []).append(value)
    means = {key: sum(values) / len(values) for key, values in columns.items()}
    low, high = min(means.values()), max(means.values())
    span = (high - low) or 1.0
    grid = [[" "] * width for _ in range(height)]
    for (column, letter), value in means.items():
        grid[round((high - value) / span * (height - 1))][column] = letter
    labels = {0: f"{high:.3f}", height - 1: f"{low:.3f}"}
    margin = max(len(label) for label in labels.values())
    rows = [f"{labels.get(i, ''):>{margin}} |{''.join(r).rstrip()}" for i, r in enumerate(grid)]
    ends = f"{first}{str(last).rjust(width - len(str(first)))}"
    return "\n".join([*rows, f"{'':>{margin}} +{'-' * width}", f"{'step':>{margin}}  {ends}"])
