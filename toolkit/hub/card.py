"""The model card of an export: front matter for the Hub, and what is known of the run.

Owns the text. Its facts come from the export's manifest (`toolkit.checkpoint.facts`).
"""

import hashlib
import math
import re
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from toolkit.errors import scrub

_MARK = re.compile(r"<!-- toolkit card ([0-9a-f]{64}) -->\n?")
# Settings in the first table; the others are folded away below it.
_MAIN_SETTINGS = (
    *("model.init", "data.sequence_length", "train.per_device_train_batch_size"),
    *("train.gradient_accumulation_steps", "optim.learning_rate", "optim.lr_scheduler_type"),
    *("optim.warmup_steps", "optim.weight_decay", "optim.adam_beta1", "optim.adam_beta2"),
    *("optim.max_grad_norm", "model.dtype", "sharding.param_dtype", "lora.r", "lora.lora_alpha"),
    "seed",
)
_NO_RESULTS = ("tokens_per_second", "step_time", "memory_peak_bytes", "mfu", "learning_rate")


def render(manifest: dict[str, Any], repo_id: str, digest: str) -> str:
    """Return the model card (README.md) of an export.

    Args:
        manifest: of the export; the facts of its run are in origin.run, where they are known.
        repo_id: ORG/NAME that it is published as.
        digest: sha256 of the manifest's file.
    """
    facts = dict(manifest["origin"].get("run") or {})
    adapter = manifest["origin"].get("adapter") or {}
    if adapter:
        facts.setdefault("base_model", adapter["base"])
    unmerged = bool(adapter) and not manifest["origin"].get("merged")
    name = repo_id.split("/")[-1]
    parts = [
        f"# {name}",
        _opening(facts, manifest),
        _loading(repo_id, facts, adapter if unmerged else None),
        _adapter(adapter, unmerged),
        _training(facts),
        _results(facts),
        _versions(facts, manifest),
        _proof(manifest, repo_id, digest),
    ]
    front = _front(facts, name, bool(adapter), unmerged).to_yaml()
    text = scrub(f"---\n{front}\n---\n\n" + "\n\n".join(p for p in parts if p) + "\n\n")
    return f"{text}<!-- toolkit card {hashlib.sha256(text.encode()).hexdigest()} -->\n"


def is_unedited(card: str) -> bool:
    """Return whether a model card is as `render` returned it, so that a push may replace it."""
    lines = card.replace("\r\n", "\n").rstrip("\n").rsplit("\n", 1)
    mark = _MARK.fullmatch(lines[-1])
    above = lines[0] + "\n" if len(lines) == 2 else ""
    return mark is not None and mark[1] == hashlib.sha256(above.encode()).hexdigest()


def _front(facts: dict[str, Any], name: str, with_adapter: bool, unmerged: bool) -> ModelCardData:
    base, data = facts.get("base_model") or {}, facts.get("data") or {}
    front: dict[str, Any] = {}
    # The Hub refuses a card whose base model or data set is not one of its own.
    if base.get("hub_id") and base.get("init") == "pretrained":
        front["base_model"] = base["hub_id"]
        if with_adapter:
            front["base_model_relation"] = "adapter" if unmerged else "finetune"
    of_hub = [d for d in (data, *data.get("sources", [])) if d.get("dataset_is_on_the_hub")]
    if of_hub:
        front["datasets"] = list(dict.fromkeys(d["dataset_name"] for d in of_hub))
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=of_hub[0]["dataset_name"] if of_hub else "text",
            dataset_name="held-out part of the training data"
            if not data.get("eval_files")
            else ", ".join(data["eval_files"][:3]),
            metric_type=metric.removeprefix("eval_"),
            metric_value=value,
        )
        for metric, value in (facts.get("metrics") or {}).items()
        if metric in ("eval_loss", "eval_perplexity") and value is not None
    ]
    return ModelCardData(
        library_name="peft" if unmerged else "transformers",
        pipeline_tag="text-generation",
        license=base.get("license"),
        tags=["fsdp2", "fsdp2-toolkit", *(["lora"] if with_adapter else [])],
        model_name=name if results else None,
        eval_results=results or None,
        **front,
    )


def _opening(facts: dict[str, Any], manifest: dict[str, Any]) -> str:
    base, tensors = facts.get("base_model") or {}, manifest["tensors"].values()
    parameters = sum(math.prod(t["shape"]) for t in tensors)
    dtypes = ", ".join(sorted({t["dtype"] for t in tensors}))
    size = f"{parameters / 1e6:,.1f} M parameters ({dtypes})"
    adapter, merged = manifest["origin"].get("adapter"), manifest["origin"].get("merged")
    kind = "An adapter for a causal" if adapter and not merged else "A causal"
    if not base.get("name"):
        return f"{kind} language model, {size}, exported from a sharded checkpoint."
    hub_id = base.get("hub_id")
    source = f"[{base['name']}](https://huggingface.co/{hub_id})" if hub_id else base["name"]
    if base.get("revision"):
        source += f" (revision {base['revision']})"
    if base.get("init") == "random":
        source = f"random weights in the shape of {source}"
    how = f"trained from {source}"
    if adapter:
        how = f"{source} with an adapter merged in" if merged else f"trained on {source}"
    return f"{kind} language model, {size}, {how}."


def _loading(repo_id: str, facts: dict[str, Any], adapter: dict[str, Any] | None) -> str:
    """Return the code that loads the model; `adapter`: of one that was not merged."""
    imports = "from transformers import AutoModelForCausalLM, AutoTokenizer"
    load = f'model = AutoModelForCausalLM.from_pretrained("{repo_id}", dtype="auto")'
    if adapter is not None:
        base = (facts.get("base_model") or {}).get("hub_id")
        load = (
            f'base = AutoModelForCausalLM.from_pretrained("{base or "BASE_MODEL"}", dtype="auto")'
            + "  # where you have it" * (not base)
        )
        if rows := adapter["base"].get("rows"):
            load += f"\nbase.resize_token_embeddings({rows})  # new tokens"
        load += f'\nmodel = PeftModel.from_pretrained(base, "{repo_id}")'
        imports = f"from peft import PeftModel\n{imports}"
    return f"""## Load it

```python
{imports}

{load}
tokenizer = AutoTokenizer.from_pretrained("{repo_id}")
```"""


def _adapter(adapter: dict[str, Any], unmerged: bool) -> str:
    if not adapter:
        return ""
    rows = [
        (name, ", ".join(map(str, value)) if isinstance(value, list) else value)
        for name, value in adapter["settings"].items()
    ]
    which = "The adapter" if unmerged else "The adapter that was merged in"
    text = f"{which} was trained with these settings of PEFT's `LoraConfig`:"
    lines = ["## Adapter", "", text, "", *_table(("setting", "value"), rows)]
    if digest := adapter["base"].get("digest"):
        lines += ["", f"Digest of the base's weights: `{digest}`."]
    return "\n".join(lines)


def _training(facts: dict[str, Any]) -> str:
    settings, data = facts.get("hyperparameters") or {}, facts.get("data") or {}
    if not settings and not data:
        return ""
    lines = ["## Training", "", f"Data: {_data_line(data)}.", ""]
    if facts.get("steps") is not None:
        tokens = f", {facts['tokens']:,} supervised tokens" if facts.get("tokens") else ""
        lines += [f"Length: {facts['steps']:,} steps{tokens}.", ""]
    if facts.get("global_batch"):
        devices = facts.get("devices")
        of = f" on {devices:,} device{'s' * (devices != 1)}" if devices else ""
        lines += [f"Batch: {facts['global_batch']:,} samples a step{of}.", ""]
    main = [(n, settings[n]) for n in _MAIN_SETTINGS if settings.get(n) is not None]
    rest = [
        (n, v) for n, v in settings.items() if n not in _MAIN_SETTINGS and v not in (None, [], {})
    ]
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
    return (", ".join(f"`{_cell(f)}`" for f in files[:10]) + more) or "not known"


def _results(facts: dict[str, Any]) -> str:
    metrics = facts.get("metrics") or {}
    rows = [(n, v) for n, v in metrics.items() if n not in _NO_RESULTS and v is not None]
    if not rows:
        return ""
    lines = ["## Results", "", "At the last step:", "", *_table(("metric", "value"), rows)]
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
    return [*lines, *(f"| {_cell(name)} | {_cell(value)} |" for name, value in rows)]


def _cell(value: Any) -> str:
    """Return a text that cannot end its cell, its code or its line."""
    if isinstance(value, float):
        value = f"{value:.6g}"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("`", "'").replace("<", "&lt;")
