"""The tables next to the curves: progress, settings, starts, evaluations, answers to prompts."""

import time
import typing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from toolkit.config import KINDS, find_shipped_kind, flatten_settings, saved_kind_name
from toolkit.config.kinds import is_extra_section, section_names
from toolkit.config.preference import PreferenceConfig
from toolkit.report.runs import RunRecord, evaluation_key, get_finite_number
from toolkit.tables import size_text


@dataclass(frozen=True)
class Table:
    """A table of texts: its column titles, its rows, and the indices of highlighted rows."""

    head: list[str]
    rows: list[list[str]]
    marked: frozenset[int] = frozenset()


def make_overview(runs: list[RunRecord]) -> Table:
    """Make a table with one row for each run: progress, last and best values, speed, memory."""
    head = ["run", "step", "loss", "best eval_loss", "tokens", "tokens/s", "memory", "trained for"]
    head.append("last line")
    objectives = [describe_objective(run) for run in runs]
    if any(objectives):
        head.insert(1, "objective")
    rows = []
    for run, loss_name in zip(runs, objectives, strict=True):
        last = {
            k: v
            for line in run.lines
            for k, v in line.items()
            if get_finite_number(line, k) is not None
        }
        eval_losses = [
            v for line in run.lines if (v := get_finite_number(line, "eval_loss")) is not None
        ]
        max_steps = run.starts[-1].get("max_steps") if run.starts else None
        goal = f" of {max_steps:,}" if isinstance(max_steps, int) and max_steps > 0 else ""
        memory = last.get("memory_peak_bytes")
        tokens = last.get("tokens")
        rows.append(
            [
                run.name,
                *([loss_name or "cross entropy"] if any(objectives) else []),
                f"{run.last_step:,}{goal}",
                _format_value(last.get("loss"), ".4f"),
                _format_value(min(eval_losses, default=None), ".4f"),
                _format_value(tokens, ",d" if isinstance(tokens, int) else ",.0f"),
                _format_value(last.get("tokens_per_second"), ",.0f"),
                size_text(int(memory)) if memory is not None else "-",
                _format_training_time(run),
                _format_time(last.get("time")),
            ]
        )
    return Table(head, rows)


def describe_objective(run: RunRecord) -> str:
    """Describe the objective of a run by its settings; "" for a token-level cross entropy.

    For preference tuning, important defaults are listed, too. For a user's recipe, the settings of
    the sections that it adds are listed.
    """
    preference = run.config.get("preference")
    if not isinstance(preference, dict):
        sections = {
            n: s for n, s in run.config.items() if is_extra_section(n) and isinstance(s, dict)
        }
        # Of a frozen model, such as a teacher, the name says enough.
        models = {n: s["name_or_path"] for n, s in sections.items() if "name_or_path" in s}
        values = {n: v for name, s in sections.items() if name not in models for n, v in s.items()}
        settings = [f"{n} {_format_setting(v)}" for n, v in (models | values).items()]
        return ", ".join([saved_kind_name(run.config), *settings]) if sections else ""
    defaults = vars(PreferenceConfig())
    kind = preference.get("loss_type", defaults["loss_type"])
    names = kind if isinstance(kind, list) else [kind]
    always = {"beta"} if kind != "reward" else set()
    always |= {"simpo_gamma"} if kind == "simpo" else set()
    always |= {"discopop_tau"} if "discopop" in names else set()
    always |= {"desirable_weight", "undesirable_weight"} if kind == "kto" else set()
    listed = [
        f"{name} {_format_setting(preference.get(name, default))}"
        for name, default in defaults.items()
        if name not in ("loss_type", "loss_weights")
        and (name in always or preference.get(name, default) != default)
    ]
    return ", ".join([_format_losses(names, preference.get("loss_weights")), *listed])


def _format_losses(names: list[Any], weights: Any) -> str:
    """Format the objectives of a run as a sum with their weights; a single one by its name."""
    if len(names) == 1:
        return str(names[0])
    if not isinstance(weights, list) or len(weights) != len(names):
        weights = [1] * len(names)
    terms = zip(names, weights, strict=True)
    return " + ".join(f"{_format_setting(weight)} {name}" for name, weight in terms)


def make_evaluation_table(runs: list[RunRecord]) -> Table:
    """Make a table with a row for each run and evaluation source: last metrics and lowest loss."""
    measures = dict.fromkeys(m for run in runs for ms in run.evaluations().values() for m in ms)
    head = ["run", "source", "step", *measures, "lowest loss", "at step"]
    rows = []
    for run in runs:
        for source in run.evaluations():
            keys = [evaluation_key(source, measure) for measure in measures]
            lines = [line for line in run.lines if any(key in line for key in keys)]
            loss = evaluation_key(source, "loss")
            best = min(
                ((v, x["step"]) for x in lines if (v := get_finite_number(x, loss)) is not None),
                default=None,
            )
            last = [_format_value(get_finite_number(lines[-1], key), ".4g") for key in keys]
            lowest = ["-", "-"] if best is None else [f"{best[0]:.4f}", f"{best[1]:,}"]
            rows.append([run.name, source or "all", f"{lines[-1]['step']:,}", *last, *lowest])
    return Table(head, rows)


def list_notes(runs: list[RunRecord]) -> list[str]:
    """List notes on missing or unexpected contents of the runs' folders, as "RUN: NOTE"."""
    lines = []
    for run in runs:
        defaults = _default_settings(run.config)
        unknown = [name for name in _flatten_settings(run.config, defaults) if name not in defaults]
        if find_shipped_kind(saved_kind_name(run.config)) is None:
            # The sections that a user's recipe adds are known to that recipe only.
            unknown = [name for name in unknown if not is_extra_section(name.partition(".")[0])]
        problem = "config.yaml has settings that this version does not know"
        unknown_notes = [f"{problem}: {', '.join(unknown)}"] if unknown else []
        lines += [f"{run.name}: {note}" for note in run.notes + unknown_notes]
    return lines


def make_settings_table(runs: list[RunRecord]) -> Table:
    """Make a table of the settings that are not defaults, or that differ between the runs.

    It has a column for the default and one for each run. Rows that differ between the runs are
    highlighted.
    """
    configs = []  # of each run: defaults, settings; both by dotted name
    for run in runs:
        defaults = _default_settings(run.config)
        configs.append((defaults, _flatten_settings(run.config, defaults)))
    rows: list[list[str]] = []
    marked = set()
    for name in dict.fromkeys(name for _, values in configs for name in values):
        default = next((defaults[name] for defaults, _ in configs if name in defaults), None)
        texts = [_format_setting(values[name]) if name in values else "" for _, values in configs]
        if len(set(texts)) > 1:
            marked.add(len(rows))
        elif all(name in d and _format_setting(d[name]) == texts[0] for d, _ in configs):
            continue
        rows.append([name, _format_setting(default), *texts])
    head = ["setting", "default", *(run.name for run in runs)]
    return Table(head, rows, frozenset(marked))


def make_start_table(runs: list[RunRecord]) -> Table:
    """Make a table with a row for each start or resume: time, machines and package versions."""
    all_starts = [(run, start) for run in runs for start in run.starts]
    packages = dict.fromkeys(p for _, start in all_starts for p in start.get("versions", {}))
    head = ["run", "after step", "began", "processes", "device", "machines", *packages]
    rows = [
        [
            run.name,
            f"{start['step']:,}",
            _format_time(start.get("time")),
            str(start.get("world_size", "-")),
            str(start.get("device", "-")),
            ", ".join(map(str, start.get("hosts", []))),
            *(str(start.get("versions", {}).get(package, "-")) for package in packages),
        ]
        for run, start in all_starts
    ]
    return Table(head, rows)


def make_answer_tables(runs: list[RunRecord]) -> list[tuple[str, Table]]:
    """Make one table for each evaluation prompt, with the answers that the runs generated.

    A table has a row for each step and a column for each run.

    Returns:
        (prompt, table) pairs, in the order of the prompts.
    """
    prompts = dict.fromkeys(str(s.get("prompt")) for run in runs for s in run.samples)
    answering_runs = [run for run in runs if run.samples]
    answer_tables = []
    for prompt in prompts:
        by_run = [
            {s["step"]: _format_answer(s) for s in run.samples if str(s.get("prompt")) == prompt}
            for run in answering_runs
        ]
        steps = sorted({step for answer_of in by_run for step in answer_of})
        rows = [[f"{step:,}", *(answer_of.get(step, "") for answer_of in by_run)] for step in steps]
        answer_tables.append((prompt, Table(["step", *(run.name for run in answering_runs)], rows)))
    return answer_tables


def collect_start_texts(run: RunRecord) -> dict[str, str]:
    """Collect the texts that the run printed when it started: title -> text.

    The description of model, units, dtypes and data is that of the last start; the description of
    the supervision is that of the first. A text that was not recorded is omitted.
    """
    texts = {
        "Model, units, dtypes, data": "\n".join(map(str, run.starts[-1].get("opening", [])))
        if run.starts
        else "",
        "Supervision": next((s["supervision"] for s in run.starts if s.get("supervision")), ""),
    }
    # Supervised text is green if the run wrote to a terminal, and in [[...]] if it did not.
    plain = {k: v.replace("\x1b[1;32m", "[[").replace("\x1b[0m", "]]") for k, v in texts.items()}
    return {title: text for title, text in plain.items() if text}


def _format_training_time(run: RunRecord) -> str:
    """Format the total time of a run's steps as H:MM:SS, without starts, saves and evaluations.

    "-" if it is unknown.
    """
    previous_step = 0
    seconds = 0.0
    for line in run.lines:
        seconds += (get_finite_number(line, "step_time") or 0.0) * max(
            0, line["step"] - previous_step
        )
        previous_step = line["step"]
    return str(timedelta(seconds=round(seconds))) if 0 < seconds < 2**34 else "-"


def _default_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Map each setting of a run's kind, as a dotted name, to its default.

    For the kind of a user's recipe, the most similar kind of the toolkit is used.
    """
    kind = find_shipped_kind(saved_kind_name(config))
    if kind is None:
        # A user's recipe extends the settings of a shipped kind: the one with most of its sections.
        kind = max(KINDS, key=lambda shipped: len(section_names(shipped.config) & config.keys()))
    model = typing.get_type_hints(kind.config)["model"]
    return flatten_settings(kind.config(model("-"))) | {"model.name_or_path": None}


def _flatten_settings(
    config: dict[str, Any], defaults: dict[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """Flatten nested settings to dotted name -> value.

    Args:
        config: the nested settings.
        defaults: dict with the dotted names of all settings. If a dict in `config` has one of these
            names, it is the value of that setting, and is not flattened.
        prefix: put before each name.
    """
    values: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name not in defaults:
            values |= _flatten_settings(value, defaults, f"{name}.")
        else:
            values[name] = value
    return values


def _format_answer(sample: dict[str, Any]) -> str:
    """Return the generated answer of a sample; if it has no visible character, describe it."""
    answer = str(sample.get("answer"))
    if answer.strip():
        return answer
    lines = answer.count("\n")
    return f"({lines} line breaks and no text)" if lines else "(no text)"


def _format_setting(value: Any) -> str:
    """Format the value of a setting as text; None and booleans as in YAML."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _format_value(value: Any, form: str) -> str:
    """Format a number by the format spec `form`; "-" if it is None."""
    return "-" if value is None else format(value, form)


def _format_time(seconds: Any) -> str:
    """Format a Unix time as local date and time; "-" if it is not a valid time."""
    if not isinstance(seconds, int | float) or not 0 <= seconds < 2**34:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
