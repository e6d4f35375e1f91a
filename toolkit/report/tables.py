"""What stands beside the curves, as tables of texts: settings, starts, answers to prompts."""

import time
import typing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from toolkit.config import KINDS, find_shipped_kind, flatten_settings, saved_kind_name
from toolkit.config.kinds import is_special, section_names
from toolkit.config.preference import PreferenceConfig
from toolkit.report.runs import RunRecord, evaluation_key, number
from toolkit.tables import size_text


@dataclass(frozen=True)
class Table:
    """Rows of texts below a head; `marked` are the indices of rows that stand out."""

    head: list[str]
    rows: list[list[str]]
    marked: frozenset[int] = frozenset()


def overview(runs: list[RunRecord]) -> Table:
    """Return a row for each run: how far it is, its last values."""
    head = ["run", "step", "loss", "best eval_loss", "tokens", "tokens/s", "memory", "trained for"]
    head.append("last line")
    objectives = [objective(run) for run in runs]
    if any(objectives):
        head.insert(1, "objective")
    rows = []
    for run, trained_by in zip(runs, objectives, strict=True):
        last = {k: v for line in run.lines for k, v in line.items() if number(line, k) is not None}
        evaluated = [v for line in run.lines if (v := number(line, "eval_loss")) is not None]
        most = run.starts[-1].get("max_steps") if run.starts else None
        goal = f" of {most:,}" if isinstance(most, int) and most > 0 else ""
        rate, memory, at = (last.get(k) for k in ("tokens_per_second", "memory_peak_bytes", "time"))
        rows.append(
            [
                run.name,
                *([trained_by or "cross entropy"] if any(objectives) else []),
                f"{run.last_step:,}{goal}",
                _value(last.get("loss"), ".4f"),
                _value(min(evaluated, default=None), ".4f"),
                _value(last.get("tokens"), ",d" if isinstance(last.get("tokens"), int) else ",.0f"),
                _value(rate, ",.0f"),
                size_text(int(memory)) if memory is not None else "-",
                _trained_for(run),
                _time(at),
            ]
        )
    return Table(head, rows)


def objective(run: RunRecord) -> str:
    """Describe the objective of a run by its settings; empty for a cross entropy of tokens.

    Of preference tuning the defaults that matter are listed too, of a user's recipe the settings of
    the sections that it adds.
    """
    asked = run.config.get("preference")
    if not isinstance(asked, dict):
        sections = {n: s for n, s in run.config.items() if is_special(n) and isinstance(s, dict)}
        settings = [f"{n} {_shown(v)}" for s in sections.values() for n, v in s.items()]
        return ", ".join([saved_kind_name(run.config), *settings]) if sections else ""
    defaults = vars(PreferenceConfig())
    kind = asked.get("loss_type", defaults["loss_type"])
    always = {"beta"} if kind != "reward" else set()
    always |= {"simpo_gamma"} if kind == "simpo" else set()
    always |= {"desirable_weight", "undesirable_weight"} if kind == "kto" else set()
    shown = [
        f"{name} {_shown(asked.get(name, default))}"
        for name, default in defaults.items()
        if name != "loss_type" and (name in always or asked.get(name, default) != default)
    ]
    return ", ".join([str(kind), *shown])


def evaluations(runs: list[RunRecord]) -> Table:
    """Return a row for each source that a run evaluates on: its last values, its lowest loss."""
    measures = dict.fromkeys(m for run in runs for one in run.evaluations().values() for m in one)
    head = ["run", "source", "step", *measures, "lowest loss", "at step"]
    rows = []
    for run in runs:
        for source in run.evaluations():
            keys = [evaluation_key(source, measure) for measure in measures]
            lines = [line for line in run.lines if any(key in line for key in keys)]
            loss = evaluation_key(source, "loss")
            best = min(
                ((v, x["step"]) for x in lines if (v := number(x, loss)) is not None), default=None
            )
            last = [_value(number(lines[-1], key), ".4g") for key in keys]
            lowest = ["-", "-"] if best is None else [f"{best[0]:.4f}", f"{best[1]:,}"]
            rows.append([run.name, source or "all", f"{lines[-1]['step']:,}", *last, *lowest])
    return Table(head, rows)


def notes(runs: list[RunRecord]) -> list[str]:
    """Return what is missing or odd in the runs' folders, a line each."""
    found = []
    for run in runs:
        known = _defaults(run.config)
        unknown = [name for name in _flattened(run.config, known) if name not in known]
        if find_shipped_kind(saved_kind_name(run.config)) is None:
            # The sections that a user's recipe adds are known to that recipe only.
            unknown = [name for name in unknown if not is_special(name.partition(".")[0])]
        what = "config.yaml has settings that this version does not know"
        odd = [f"{what}: {', '.join(unknown)}"] if unknown else []
        found += [f"{run.name}: {note}" for note in run.notes + odd]
    return found


def settings(runs: list[RunRecord]) -> Table:
    """Return the settings that are not the defaults, or not the same in all runs (marked)."""
    both = [(known := _defaults(run.config), _flattened(run.config, known)) for run in runs]
    rows: list[list[str]] = []
    marked = set()
    for name in dict.fromkeys(name for _, values in both for name in values):
        default = next((known[name] for known, _ in both if name in known), None)
        shown = [_shown(values[name]) if name in values else "" for _, values in both]
        if len(set(shown)) > 1:
            marked.add(len(rows))
        elif all(name in known and _shown(known[name]) == shown[0] for known, _ in both):
            continue
        rows.append([name, _shown(default), *shown])
    head = ["setting", "default", *(run.name for run in runs)]
    return Table(head, rows, frozenset(marked))


def starts(runs: list[RunRecord]) -> Table:
    """Return a row for each start of each run: when, where, with which versions."""
    every = [(run, start) for run in runs for start in run.starts]
    packages = dict.fromkeys(p for _, start in every for p in start.get("versions", {}))
    head = ["run", "after step", "began", "processes", "device", "machines", *packages]
    rows = [
        [
            run.name,
            f"{start['step']:,}",
            _time(start.get("time")),
            str(start.get("world_size", "-")),
            str(start.get("device", "-")),
            ", ".join(map(str, start.get("hosts", []))),
            *(str(start.get("versions", {}).get(package, "-")) for package in packages),
        ]
        for run, start in every
    ]
    return Table(head, rows)


def answers(runs: list[RunRecord]) -> list[tuple[str, Table]]:
    """Return each fixed prompt with its generated answers by step, a column for each run."""
    prompts = dict.fromkeys(str(s.get("prompt")) for run in runs for s in run.samples)
    holders = [run for run in runs if run.samples]
    found = []
    for prompt in prompts:
        by_run = [
            {s["step"]: _answer(s) for s in run.samples if str(s.get("prompt")) == prompt}
            for run in holders
        ]
        steps = sorted({step for answered in by_run for step in answered})
        rows = [[f"{step:,}", *(answered.get(step, "") for answered in by_run)] for step in steps]
        found.append((prompt, Table(["step", *(run.name for run in holders)], rows)))
    return found


def openings(run: RunRecord) -> dict[str, str]:
    """Return what the run printed of its model, units, dtypes and data at its last start, and of
    its supervision at its first; without what was not recorded.
    """
    texts = {
        "Model, units, dtypes, data": "\n".join(map(str, run.starts[-1].get("opening", [])))
        if run.starts
        else "",
        "Supervision": next((s["supervision"] for s in run.starts if s.get("supervision")), ""),
    }
    # Learned text is green where the run wrote to a terminal, in [[...]] elsewhere.
    plain = {k: v.replace("\x1b[1;32m", "[[").replace("\x1b[0m", "]]") for k, v in texts.items()}
    return {title: text for title, text in plain.items() if text}


def _trained_for(run: RunRecord) -> str:
    """Return the time of a run's steps, without starts, saves and evaluations."""
    before, seconds = 0, 0.0
    for line in run.lines:
        seconds += (number(line, "step_time") or 0.0) * max(0, line["step"] - before)
        before = line["step"]
    return str(timedelta(seconds=round(seconds))) if 0 < seconds < 2**34 else "-"


def _defaults(config: dict[str, Any]) -> dict[str, Any]:
    kind = find_shipped_kind(saved_kind_name(config))
    if kind is None:
        # A user's recipe extends the settings of a shipped kind: the one with most of its sections.
        kind = max(KINDS, key=lambda shipped: len(section_names(shipped.config) & config.keys()))
    model = typing.get_type_hints(kind.config)["model"]
    return flatten_settings(kind.config(model("-"))) | {"model.name_or_path": None}


def _flattened(config: dict[str, Any], known: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted name -> value; a mapping that is the value of a known setting stays whole."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name not in known:
            found |= _flattened(value, known, f"{name}.")
        else:
            found[name] = value
    return found


def _answer(sample: dict[str, Any]) -> str:
    """Return the answer of a sample; one without a visible character is described."""
    answer = str(sample.get("answer"))
    if answer.strip():
        return answer
    lines = answer.count("\n")
    return f"({lines} line breaks and no text)" if lines else "(no text)"


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def _time(seconds: Any) -> str:
    if not isinstance(seconds, int | float) or not 0 <= seconds < 2**34:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
