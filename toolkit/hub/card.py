"""Write the model card of an export: front matter for the Hub, and the facts of the run.

Its text is in `card.md.jinja`.
"""

import hashlib
import math
import re
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCardData

from toolkit.errors import scrub
from toolkit.models.classes import auto_class_name, reward_loading_code

Facts = dict[str, Any]
_MAX_STAGES = 50
_MARK = re.compile(r"<!-- toolkit card ([0-9a-f]{64}) -->\n?")
# Settings in the first table; the others follow in a folded one.
_MAIN_SETTINGS = (
    *("model.init", "data.sequence_length", "train.per_device_train_batch_size"),
    *("preference.loss_type", "preference.loss_weights", "preference.beta"),
    *("teacher.name", "distill.divergence", "distill.temperature", "distill.kl_weight"),
    "preference.reference",
    *("train.gradient_accumulation_steps", "optim.learning_rate", "optim.lr_scheduler_type"),
    *("optim.warmup_steps", "optim.weight_decay", "optim.adam_beta1", "optim.adam_beta2"),
    *("optim.max_grad_norm", "model.dtype", "sharding.param_dtype", "lora.r", "lora.lora_alpha"),
    "seed",
)
# The Hub's task by the class of transformers that loads the model.
_TASKS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForMultimodalLM": "any-to-any",
    "AutoModelForSequenceClassification": "text-classification",
}
_NO_RESULTS = (
    *("tokens_per_second", "step_time", "memory_peak_bytes", "mfu", "learning_rate"),
    *("time", "epoch", "skipped", "data_time", "data_time_max"),
)


def render_card(manifest: Facts, repo_id: str, digest: str, config: Facts | None = None) -> str:
    """Render the model card (README.md) of an export, without secrets.

    Its last line holds a hash of the text, from which `is_unedited` recognises it.

    Args:
        manifest: the export's manifest. Its `origin.run` has the facts of the run, if known.
        repo_id: ORG/NAME.
        digest: sha256 of the manifest's file.
        config: config.json of a full model; None for an adapter.
    """
    origin = manifest["origin"]
    name = repo_id.split("/")[-1]
    facts = dict(origin.get("run") or {})
    adapter = origin.get("adapter") or {}
    if adapter:
        facts.setdefault("base_model", adapter["base"])
    relation = None if not adapter else "finetune" if origin.get("merged") else "adapter"
    model_config = (adapter.get("base_config") if relation == "adapter" else config) or {}
    base_class = adapter.get("base_class") if relation == "adapter" else None
    auto = auto_class_name(base_class or (model_config.get("architectures") or [""])[0])
    base = facts.get("base_model") or {}
    data = facts.get("data") or {}
    metrics = {n: v for n, v in (facts.get("metrics") or {}).items() if v is not None}
    logged_at = (facts.get("logged_at") or {}).items()
    step_text = {metric: f", step {step:,}" for metric, step in logged_at if step is not None}
    settings = facts.get("hyperparameters") or {}
    set_values = {n: v for n, v in settings.items() if v not in (None, [], {})}
    versions = facts.get("versions") or {"toolkit": manifest["toolkit"]}
    front = _make_front_matter(
        base, data, metrics, name, relation, _TASKS[auto], settings
    ).to_yaml()
    body = _TEMPLATE.render(
        {"name": name, "repo_id": repo_id, "digest": digest, "origin": origin, "facts": facts},
        base=base,
        unknown=_missing_base_entries(base),
        adapter=adapter,
        stages=_list_continued_adapters(adapter.get("continued")),
        unmerged=relation == "adapter",
        auto=auto,
        as_reward_model=reward_loading_code(auto, model_config),
        kind="reward" if _TASKS[auto] == "text-classification" else "causal language",
        parameters=sum(math.prod(tensor["shape"]) for tensor in manifest["tensors"].values()),
        dtypes=sorted({tensor["dtype"] for tensor in manifest["tensors"].values()}),
        data_line=_describe_data(data) if settings or data else "",
        main_settings={n: set_values.pop(n) for n in _MAIN_SETTINGS if n in set_values},
        settings=set_values,
        results={
            n + step_text.get(n, ""): v for n, v in metrics.items() if not n.startswith(_NO_RESULTS)
        },
        changes=_describe_changes(facts),
        versions=[f"{package} {version}" for package, version in versions.items()],
    )
    text = scrub(f"---\n{front}\n---\n\n{body}\n")
    return f"{text}<!-- toolkit card {hashlib.sha256(text.encode()).hexdigest()} -->\n"


def is_unedited(card: str) -> bool:
    """Return True if `render_card` wrote this model card and it was not edited since.

    A push may replace such a card.
    """
    lines = card.replace("\r\n", "\n").rstrip("\n").rsplit("\n", 1)
    mark = _MARK.fullmatch(lines[-1])
    above = lines[0] + "\n" if len(lines) == 2 else ""
    return mark is not None and mark[1] == hashlib.sha256(above.encode()).hexdigest()


def _make_front_matter(
    base: Facts,
    data: Facts,
    metrics: Facts,
    name: str,
    relation: str | None,
    task: str,
    settings: Facts,
) -> ModelCardData:
    """Make the YAML metadata at the top of the model card.

    Args:
        base: facts of the base model.
        data: facts of the training data.
        metrics: metric -> its last value in the run.
        name: name of the model.
        relation: `adapter`, `finetune` (an adapter merged into its base), or None without adapters.
        task: the Hub's name of the model's task.
        settings: dotted setting -> value; `preference.loss_type` marks preference tuning.
    """
    objective = settings.get("preference.loss_type")
    kind = "preference-tuning" if objective else "text-generation"
    front: Facts = {}
    # The Hub refuses a card whose base model or data set is not on the Hub.
    if base.get("hub_id") and base.get("init") == "pretrained":
        front["base_model"] = base["hub_id"]
        if relation:
            front["base_model_relation"] = relation
    of_hub = [d for d in (data, *data.get("sources", [])) if d.get("dataset_is_on_the_hub")]
    if of_hub:
        front["datasets"] = list(dict.fromkeys(d["dataset_name"] for d in of_hub))
    eval_files = data.get("eval_files")
    names = [*eval_files] if isinstance(eval_files, list) else []
    for source in data.get("eval_sources") or []:
        names += [source["dataset_name"]] if "dataset_name" in source else source.get("files") or []
    eval_names = ", ".join(map(str, names[:3]))
    results = [
        EvalResult(
            task_type=task if task == "text-classification" else kind,
            task_name="preference pairs" if objective else None,
            dataset_type=of_hub[0]["dataset_name"] if of_hub else "text",
            dataset_name=eval_names or "held-out part of the training data",
            metric_type=metric.removeprefix("eval_"),
            # The share of pairs whose chosen answer has the higher reward, not of tokens.
            metric_name="preference accuracy" if objective and metric == "eval_accuracy" else None,
            metric_value=value,
        )
        for metric, value in metrics.items()
        if metric in ("eval_loss", "eval_perplexity", "eval_accuracy")
    ]
    return ModelCardData(
        library_name="peft" if relation == "adapter" else "transformers",
        pipeline_tag=task,
        license=base.get("license"),
        tags=[
            *("fsdp2", "fsdp2-toolkit"),
            *(["lora"] if relation == "adapter" else []),
            *_objective_tags(objective),
        ],
        model_name=name if results else None,
        eval_results=results or None,
        **front,
    )


def _missing_base_entries(base: Facts) -> list[str]:
    """List the metadata entries of the card that are unknown because the base model is local.

    The list is empty if the base has a Hub id or was initialised at random. Otherwise it has
    `base_model`, and `license` if that is unknown, too.
    """
    if not base.get("name") or base.get("hub_id") or base.get("init") == "random":
        return []
    return ["base_model", *([] if base.get("license") else ["license"])]


def _list_continued_adapters(entry: Any) -> list[Facts]:
    """List the earlier adapters that a manifest's entry `continued` describes, newest first.

    Anybody may have written the entry, so the list has at most `_MAX_STAGES` items.
    """
    stages: list[Facts] = []
    while isinstance(entry, dict) and len(stages) < _MAX_STAGES:
        stages.append({"name": "an adapter", **entry})
        entry = entry.get("continued")
    return stages


def _objective_tags(loss_type: str | list[str] | None) -> list[str]:
    """List the Hub's tags for models of a preference objective, or of a weighted sum of several."""
    if loss_type is None:
        return []
    if isinstance(loss_type, list):
        return ["preference-tuning", "dpo", "mpo"]
    tags = {"simpo": "simpo", "orpo": "orpo", "kto": "kto", "reward": "reward-model"}
    return ["preference-tuning", tags.get(loss_type, "dpo")]


def _describe_changes(facts: Facts) -> list[str]:
    """Format one line for each setting that changed during the run, with its earlier values."""
    return [
        f"`{_escape_cell(name)}` was "
        + ", ".join(f"{_escape_cell(value)} up to step {step:,}" for value, step in before)
        for name, before in (facts.get("changes") or {}).items()
    ]


def _describe_data(data: Facts) -> str:
    """Describe the training data on one line: data sets or files, with their weights."""
    if sources := data.get("sources"):
        weighted = [(_describe_data(s), s.get("weight")) for s in sources]
        return "; ".join(f"{text} (weight {w})" if w is not None else text for text, w in weighted)
    if name := data.get("dataset_name"):
        selection = [data.get("dataset_config_name"), data.get("dataset_split")]
        return ", ".join([f"`{name}`", *(f"`{w}`" for w in selection if w)])
    if data.get("built_in"):
        return str(data["built_in"])
    files = data.get("train_files") or data.get("files") or []
    more = f" and {len(files) - 10} more" if len(files) > 10 else ""
    return (", ".join(f"`{_escape_cell(f)}`" for f in files[:10]) + more) or "not known"


def _escape_cell(value: Any) -> str:
    """Format a value as text that cannot end its table cell, code span or line."""
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    if isinstance(value, float):
        value = f"{value:.6g}"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("`", "'").replace("<", "&lt;")


_ENVIRONMENT = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
_ENVIRONMENT.filters["cell"] = _escape_cell
_TEMPLATE = _ENVIRONMENT.from_string(Path(__file__).with_name("card.md.jinja").read_text("utf-8"))
