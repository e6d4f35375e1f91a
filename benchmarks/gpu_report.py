"""What `gpu.py` found: the bars, the tables in markdown, of which commit and card each figure is,
and what is owed. Without torch.
"""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu_ledger import CURRENT, FAILED, NEVER, Case, Line, faults, newest, runs, why_owed

DRY = "no GPU"
# Figures that `make gpu` did not find, with the commit and the card that they are of.
_CITED = Path(__file__).with_name("gpu_cited.md")
_HOW = (
    "`make gpu` writes this page: one call of at most 15 minutes, without a network, which goes on "
    "where the last one ended. What all calls have found is kept in "
    "[gpu_results.jsonl](gpu_results.jsonl); each figure bears the commit that it is of. For a "
    "machine with PyTorch for CUDA and transformers but without a network, `python "
    "benchmarks/gpu.py --bundle DIR` packs the committed tree and the wheels that it may lack, and "
    "prints the commands. All weights are random. One GPU shows nothing of NCCL between ranks; one "
    "rank of eight is measured with copies on the card in the place of the wire."
)
_ABOUT = (("memory_gb", "GB"), ("driver", "driver"), ("cuda", "CUDA"), ("cores", "cores"))
_STAMP = ("commit", "committed", "date", "card", "torch", "transformers")
_HIDDEN = ("case", "check", "ok", "kernels_ms", "path", "losses", "order", "found", "expected")
_KINDS = {
    NEVER: "Never run",
    FAILED: "Failed, or not to its end",
    CURRENT - 1: "Of an older commit",
}


def report(results: Sequence[Line], cases: Sequence[Case], commit: str) -> str:
    """Return the page in markdown."""
    lines = ["# On one GPU", "", _HOW, "", *calls_table(results), "", "## Bars", ""]
    lines += ["| bar | wanted | found | | commit |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in bars(results)]
    lines += ["", "## Speed", "", *speed_table(results), "", "## Functional cases", ""]
    lines += ["| case | check | | | commit |", "|---|---|---|---|---|"]
    records = newest(results)
    for r in records:
        if r.get("ok") is not None:
            verdict = "passed" if r["ok"] else "FAILED"
            detail = f"differs by {r['differs']:.1e}" if "differs" in r else r.get("error", "")
            cells = (r["case"], r["check"], verdict, one_line(detail), label(r, results))
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Other figures", "", "| case | what | | commit |", "|---|---|---|---|"]
    for r in records:
        if r.get("ok") is None and r["check"] not in ("speed", "machine"):
            shown = {k: v for k, v in r.items() if k not in (*_HIDDEN, *_STAMP)}
            text = one_line(", ".join(f"{k} {short(v)}" for k, v in shown.items()))
            lines.append(f"| {r['case']} | {r['check']} | {text} | {label(r, results)} |")
    lines += ["", *_CITED.read_text("utf-8").splitlines()]
    lines += ["", *owed_lines(results, cases, commit)]
    return "\n".join([*lines, "", "Written by `benchmarks/gpu.py`.", ""])


def calls_table(results: Sequence[Line]) -> list[str]:
    """Return which commits, cards and versions the figures are of, the newest first."""
    lines = ["| commit | calls | card | |", "|---|---|---|---|"]
    found: dict[tuple[str, ...], set[str]] = {}
    about = {(r["card"], r["commit"]): r for r in results if r.get("check") == "machine"}
    for r in results:
        key = (label(r, results), str(r.get("card")), str(r.get("commit")), versions(r))
        found.setdefault(key, set()).add(str(r.get("date"))[:10])
    for (of, card, commit, which), days in sorted(
        found.items(), key=lambda one: min(one[1]), reverse=True
    ):
        machine = about.get((card, commit), {})
        more = [f"{machine[k]} {what}" for k, what in _ABOUT if machine.get(k)]
        text = "; ".join([which, *filter(None, [machine.get("note")])])
        lines.append(f"| {of} | {', '.join(sorted(days))} | {', '.join([card, *more])} | {text} |")
    return lines


def versions(line: Line) -> str:
    names = ("torch", "transformers")
    return ", ".join(f"{name} {line[name]}" for name in names if line.get(name))


def label(line: Line, results: Sequence[Line]) -> str:
    """Return the commit that a figure is of, and the card and versions where they are not those of
    the last call.
    """
    last = results[-1]
    unlike = [str(line[k]) for k in ("card",) if line.get(k) != last.get(k)]
    unlike += [
        f"{k} {line.get(k)}" for k in ("torch", "transformers") if line.get(k) != last.get(k)
    ]
    return ", ".join([str(line.get("commit")), *unlike])


def owed_lines(results: Sequence[Line], cases: Sequence[Case], commit: str) -> list[str]:
    """Return what the next call owes: never run, failed, of an older commit."""
    lines = ["## Owed", "", f"In the order in which the next call of commit {commit} takes them."]
    why = {case.name: why_owed(results, case.name, commit) for case in cases}
    for kind, title in _KINDS.items():
        names = [name for name, (own, _, _) in why.items() if own == kind]
        names.sort(key=lambda name: why[name][1])
        if not names:
            continue
        lines += ["", f"{title}:", ""]
        if kind == NEVER:
            lines.append(f"- {', '.join(names)}")
            continue
        lines += [f"- {name}: {one_line(why[name][2])}" for name in names]
    if all(kind == CURRENT for kind, _, _ in why.values()):
        lines += ["", "Nothing: every case has run well at this commit."]
    return lines


def failures(results: Sequence[Line]) -> list[Line]:
    """Return the records of each case's last run that say that it failed."""
    last = (runs(results, case)[-1] for case in dict.fromkeys(r["case"] for r in results))
    return [bad for run in last for bad in faults(run) if bad.get("status") != "not here"]


def one_line(text: Any) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")[:300]


def short(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k}: {short(v)}" for k, v in value.items()) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ---- Speed ---------------------------------------------------------------------------------------


def found_speed(results: Sequence[Line]) -> dict[str, Line]:
    """Return case -> its figures, with the MFU by the toolkit's formula of its shape, and the same
    against the best matrix product that was measured on that card.
    """
    records = newest(results)
    speed = {r["case"]: dict(r) for r in records if r.get("check") == "speed"}
    for name, line in speed.items():
        card = line.get("card")
        here = [r for r in records if r.get("card") == card]
        ceiling = max((r["tflops"] for r in here if "tflops" in r), default=0.0)
        peak = next((r["peak_tflops"] for r in here if r.get("peak_tflops")), 0.0)
        line["loss"] = line.get("mean_loss")
        if "losses" in line:
            line["loss"] = sum(line["losses"]) / len(line["losses"])
        ours = speed.get(f"{name.split('_')[0]}_toolkit", {})
        flops = line.get("flops_per_token") or ours.get("flops_per_token")
        if flops:
            rate = line["tokens_per_second"] * flops / 1e12
            line |= {"mfu": rate / peak if peak else None}
            line["of_ceiling"] = rate / ceiling if ceiling else None
    return speed


def speed_table(results: Sequence[Line]) -> list[str]:
    lines = [
        "2 warm-up and 5 timed steps of 4 micro-batches; medians. MFU by the toolkit's formula "
        "(docs of `toolkit.training.flops`), and against the best measured bf16 product. "
        "`one_of_8`: one micro-batch a step, this rank's tokens alone.",
        "",
        "| case | recomputed | tokens/s | step s | spread | MFU | of measured | peak GB "
        "| mean loss | commit |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, r in found_speed(results).items():
        shares = [f"{r[k]:.1%}" if r.get(k) else "" for k in ("mfu", "of_ceiling")]
        loss = "" if r["loss"] is None else f"{r['loss']:.4f}"
        cells = [name, str(r.get("recomputed", "")), f"{r['tokens_per_second']:,.0f}"]
        cells += [f"{r['step_seconds']:.3f}", f"{r['spread']:.1%}", *shares]
        cells += [f"{r['peak_allocated'] / 1e9:.1f}", loss, label(r, results)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


_HEADS = ("4096 x 128256 frozen", "4096 x 128256 trained")
_HEADS += ("2048 x 128256 trained", "2048 x 32000 trained")


# ---- Bars ----------------------------------------------------------------------------------------

Row = tuple[str, str, str, str, str]


class _Bars:
    """The rows of the table, as they are added."""

    def __init__(self, results: Sequence[Line]) -> None:
        self.results, self.rows = results, list[Row]()
        self.records = newest(results)
        self.speed = found_speed(results)

    def add(
        self, what: str, wanted: str, met: Callable[[float], bool], found: float | None, *of: Line
    ) -> None:
        """Add a row; `of`: the records that `found` is made of."""
        labels = ", ".join(dict.fromkeys(label(line, self.results) for line in of))
        verdict = "not measured" if found is None else "met" if met(found) else "NOT MET"
        shown = "" if found is None else f"{found:,.0f}" if found >= 1000 else f"{found:.4g}"
        if len({(line.get("card"), line.get("torch")) for line in of}) > 1:
            shown, verdict = "", "not comparable: of two cards or versions"
        elif found is not None and str(of[0].get("card", "")).startswith(DRY):
            verdict = "a dry run says nothing"
        self.rows.append((what, wanted, shown, verdict, labels if found is not None else ""))

    def ratio(
        self,
        what: str,
        wanted: str,
        met: Callable[[float], bool],
        ours: Line | None,
        theirs: Line | None,
        name: str = "tokens_per_second",
    ) -> None:
        """Add a row on what `ours` has of the figure `name` of `theirs`."""
        a, b = (None if line is None else line.get(name) for line in (ours, theirs))
        if ours is None or theirs is None or a is None or not b:
            self.add(what, wanted, met, None)
        else:
            self.add(what, wanted, met, a / b, ours, theirs)

    def best(self, start: str, name: str = "tokens_per_second") -> Line | None:
        """Return the record of the cases whose names begin so that has most of a figure."""
        found = [r for case, r in self.speed.items() if case.startswith(start) and r.get(name)]
        return max(found, key=lambda r: r[name], default=None)

    def record(self, case: str, check: str) -> Line | None:
        return next((r for r in self.records if (r["case"], r["check"]) == (case, check)), None)


def at_least(least: float) -> tuple[str, Callable[[float], bool]]:
    return f">= {least}", lambda x: x >= least


def at_most(most: float) -> tuple[str, Callable[[float], bool]]:
    return f"<= {most}", lambda x: x <= most


def about_one(within: float) -> tuple[str, Callable[[float], bool]]:
    return f"1 +- {within}", lambda x: abs(x - 1) <= within


def bars(results: Sequence[Line]) -> list[Row]:
    """Return what is asked for, what was found, whether that is met, and of which commit it is."""
    table = _Bars(results)
    speed = table.speed
    for group, least in (("lora8b", 0.97), ("full1b", 0.97), ("full3b", 0.99)):
        names = [f"{group}_{n}" for n in ("toolkit", "bare", "trainer")]
        ours, plain, peer = (speed.get(n) for n in names)
        table.ratio(f"{names[0]} / bare", *at_least(least), ours, plain)
        table.ratio(f"{names[0]} / Trainer", *at_least(1.0), ours, peer)
        what = f"{names[0]} peak memory / bare"
        table.ratio(what, *at_most(1.02), ours, plain, "peak_allocated")
        for name in names[1:]:
            what = f"mean loss of {names[0]} / {name}"
            table.ratio(what, *about_one(0.01), ours, speed.get(name), "loss")
        profile = table.record(names[0], "profile")
        busy = None if profile is None else profile.get("busy")
        table.add(f"{names[0]} device busy", *at_least(0.97), busy, *filter(None, [profile]))
    for group in ("lora8b", "full1b"):
        ours, peer = (speed.get(f"{group}_{n}_liger") for n in ("toolkit", "trainer"))
        table.ratio(f"{group}_toolkit_liger / Trainer", *at_least(1.0), ours, peer)
    _products(table)
    _adapters_of_8b(table)
    _plans(table)
    _heads(table)
    _attention(table)
    _published_losses(table)
    return table.rows


def _products(table: _Bars) -> None:
    for name in ("full1b_toolkit", "full3b_toolkit"):
        best = table.best(name, "of_ceiling")
        what = f"{name} of measured product"
        found = best and best["of_ceiling"]
        table.add(what, *at_least(0.55), found, *filter(None, [best]))


def _adapters_of_8b(table: _Bars) -> None:
    packed, compiled = "lora8b_toolkit_packed", "lora8b_compiled"
    speed = table.speed
    table.ratio("packed / wrapped", *at_least(1.0), speed.get(packed), speed.get("lora8b_toolkit"))
    ours = [r for r in (table.best(packed), speed.get(f"{compiled}_packed")) if r]
    best = max(ours, key=lambda r: r["tokens_per_second"], default=None)
    what = "packed, the faster / Trainer packed"
    table.ratio(what, *at_least(1.2), best, speed.get("lora8b_trainer_packed"))
    for kind, wanted in (("wrapped", 14_500), ("packed", 15_500)):
        line = speed.get(f"{compiled}_{kind}")
        what = f"8b lora compiled, {kind}, tokens/s on an H100"
        found = line and line["tokens_per_second"]
        if line and not any(name in str(line.get("card")) for name in ("H100", DRY)):
            found = None
        met = partial(operator.lt, wanted)
        table.add(what, f"> {wanted:,}", met, found, *filter(None, [line]))


def _plans(table: _Bars) -> None:
    """A plan of a run is of a card of so much memory; its measure may be of another day."""
    for plan in table.records:
        if plan["case"] != "plans" or "peak_gb" not in plan:
            continue
        name = plan["check"].removeprefix("plan of ")
        measured = table.speed.get(name)
        what = f"peak memory, plan of {name} / measured"
        peak = measured and measured["peak_allocated"] / 1e9
        table.ratio(
            what, *about_one(0.05), plan, measured and measured | {"peak_gb": peak}, "peak_gb"
        )


def _heads(table: _Bars) -> None:
    """The toolkit's head in each shape beside Liger's, and its products alone."""
    of = {r["check"]: r for r in table.records if r["case"] == "loss_head" and "ms" in r}
    for shape in dict.fromkeys(check.split(": ")[0] for check in of) or _HEADS:
        ours = of.get(f"{shape}: toolkit")
        what = f"loss head {shape} / Liger"
        table.ratio(what, *at_most(1.05), ours, of.get(f"{shape}: liger"), "ms")


def _attention(table: _Bars) -> None:
    ours, flash = (
        table.record("compiled_attention", f"kernels, {way}") for way in ("compiled", "flash")
    )
    what = "attention of compiled layers / flash, time of the kernels"
    table.ratio(what, "< 1", lambda x: x < 1, ours, flash, "ms")


def _published_losses(table: _Bars) -> None:
    """nanoGPT's README gives 1.4697, over random batches; ours is over all windows."""
    line = table.record("shakespeare", "best validation loss")
    what = "character-level Shakespeare, best validation loss (nanoGPT: 1.4697)"
    found = None if line is None else line["eval_loss"]
    table.add(what, *at_most(1.4897), found, *filter(None, [line]))
