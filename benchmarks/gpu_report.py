"""What `gpu.py` found: the file of results, the bars, the tables in markdown. Without torch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def read_results(out: Path) -> list[dict[str, Any]]:
    file = out / "results.jsonl"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def forget(out: Path, names: set[str]) -> None:
    """Drop what earlier calls recorded of these cases."""
    kept = [line for line in read_results(out) if line["case"] not in names]
    (out / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))


def failures(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of checks and cases that failed."""
    return [r for r in results if r.get("ok") is False or r.get("status") in ("failed", "timeout")]


def report(results: list[dict[str, Any]]) -> str:
    """Return the tables in markdown."""
    about = next((r for r in results if r.get("check") == "machine"), {})
    versions = ", ".join(f"{n} {v}" for n, v in about.get("versions", {}).items())
    more = [f"{about[k]} {what}" for k, what in _ABOUT if about.get(k)]
    lines = ["# On one GPU", "", f"{', '.join([str(about.get('card')), *more])}; {versions}."]
    lines += ["", _HOW, "", "## Bars", "", "| bar | wanted | found | |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in bars(results)]
    lines += ["", "## Speed", "", *speed_table(results), "", "## Functional cases", ""]
    lines += ["| case | check | | |", "|---|---|---|---|"]
    for r in results:
        if r.get("ok") is not None:
            verdict = "passed" if r["ok"] else "FAILED"
            detail = f"differs by {r['differs']:.1e}" if "differs" in r else r.get("error", "")
            lines.append(f"| {r['case']} | {r['check']} | {verdict} | {one_line(detail)} |")
    lines += ["", "## Other figures", "", "| case | what | |", "|---|---|---|"]
    for r in results:
        if r.get("ok") is None and r.get("check") not in (None, "speed", "machine"):
            hidden = ("case", "check", "ok", "kernels_ms", "path")
            text = ", ".join(f"{k} {short(v)}" for k, v in r.items() if k not in hidden)
            lines.append(f"| {r['case']} | {r['check']} | {one_line(text)} |")
    left_out = [r for r in results if r.get("status") not in (None, "ended")]
    if left_out:
        lines += ["", "## Not measured, or failed", "", "| case | | |", "|---|---|---|"]
        for r in left_out:
            why = r.get("why") or (r.get("log") or "no output").splitlines()[-1]
            lines.append(f"| {r['case']} | {r['status']} | {one_line(why)} |")
    return "\n".join([*lines, "", "Written by `benchmarks/gpu.py`.", ""])


DRY = "no GPU"
_HOW = (
    "`make gpu` writes this page (three parts of at most 8 minutes, no network). For a machine "
    "with PyTorch for CUDA and transformers but without a network, `python benchmarks/gpu.py "
    "--bundle DIR` packs the committed tree and the wheels that it may lack, and prints the "
    "commands. All weights are random. One GPU shows nothing of NCCL between ranks, of HSDP and of "
    "several nodes."
)
_ABOUT = (("memory_gb", "GB"), ("driver", "driver"), ("cuda", "CUDA"), ("cores", "cores"))


def one_line(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")[:300]


def short(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k}: {short(v)}" for k, v in value.items()) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def found_speed(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return case -> its figures, with the MFU by the toolkit's formula of its shape, and the same
    against the best matrix product that was measured.
    """
    speed = {r["case"]: dict(r) for r in results if r.get("check") == "speed"}
    ceiling = max((r["tflops"] for r in results if "tflops" in r), default=0.0)
    peak = next((r["peak_tflops"] for r in results if r.get("peak_tflops")), 0.0)
    for name, line in speed.items():
        line["loss"] = line.get("mean_loss")
        if "losses" in line:
            line["loss"] = sum(line["losses"]) / len(line["losses"])
        flops = speed.get(f"{name.split('_')[0]}_toolkit", {}).get("flops_per_token")
        if flops:
            rate = line["tokens_per_second"] * flops / 1e12
            line |= {"tflops_used": rate, "mfu": rate / peak if peak else None}
            line["of_ceiling"] = rate / ceiling if ceiling else None
    return speed


def speed_table(results: list[dict[str, Any]]) -> list[str]:
    lines = [
        "2 warm-up and 5 timed steps of 4 micro-batches; medians. MFU by the toolkit's formula "
        "(docs of `toolkit.training.metrics`), and against the best measured bf16 product.",
        "",
        "| case | tokens/s | step s | spread | MFU | of measured | peak GB | mean loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, r in found_speed(results).items():
        shares = [f"{r[k]:.1%}" if r.get(k) else "" for k in ("mfu", "of_ceiling")]
        lines.append(
            f"| {name} | {r['tokens_per_second']:,.0f} | {r['step_seconds']:.3f} | "
            f"{r['spread']:.1%} | {shares[0]} | {shares[1]} | {r['peak_allocated'] / 1e9:.1f} | "
            f"{r['loss']:.4f} |"
        )
    return lines


def bars(results: list[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Return what is asked for, what was found, and whether that is met."""
    speed = found_speed(results)
    profiles = {r["case"]: r for r in results if r.get("check") == "profile"}
    rows = []

    card = next((r["card"] for r in results if "card" in r), "")

    def bar(what: str, wanted: str, found: float | None, met: Callable[[float], bool]) -> None:
        verdict = "not measured" if found is None else "met" if met(found) else "NOT MET"
        if card.startswith(DRY):
            verdict = "a dry run says nothing"
        shown = "" if found is None else f"{found:,.0f}" if found >= 1000 else f"{found:.4g}"
        rows.append((what, wanted, shown, verdict))

    def ratio(field: str, ours: str, theirs: str) -> float | None:
        a, b = (speed.get(n, {}).get(field) for n in (ours, theirs))
        return a / b if a is not None and b else None

    rate = "tokens_per_second"
    for group in ("lora8b", "full1b", "full3b"):
        ours, plain, peer = (f"{group}_{n}" for n in ("toolkit", "bare", "trainer"))
        bar(f"{ours} / bare", ">= 0.97", ratio(rate, ours, plain), lambda x: x >= 0.97)
        bar(f"{ours} / Trainer", ">= 1.0", ratio(rate, ours, peer), lambda x: x >= 1.0)
        peak = ratio("peak_allocated", ours, plain)
        bar(f"{ours} peak memory / bare", "<= 1.02", peak, lambda x: x <= 1.02)
        for other in (plain, peer):
            apart = ratio("loss", ours, other)
            bar(f"mean loss of {ours} / {other}", "1 +- 0.01", apart, lambda x: abs(x - 1) <= 1e-2)
        busy = profiles.get(ours, {}).get("busy")
        bar(f"{ours} device busy", ">= 0.97", busy, lambda x: x >= 0.97)
    for group in ("lora8b", "full1b"):
        ours, peer = f"{group}_toolkit_liger", f"{group}_trainer_liger"
        bar(f"{ours} / Trainer", ">= 1.0", ratio(rate, ours, peer), lambda x: x >= 1.0)
    for r in results:
        if r["case"] == "plans" and "memory" in r:
            off = r["memory"]
            bar(
                f"peak memory, {r['check']} / measured",
                "1 +- 0.05",
                off,
                lambda x: abs(x - 1) <= 0.05,
            )
    for name in ("full1b_toolkit", "full3b_toolkit"):
        best = best_of(speed, name, "of_ceiling")
        bar(f"{name} of measured product", ">= 0.55", best, lambda x: x >= 0.55)
    packed = "lora8b_toolkit_packed"
    bar("packed / wrapped", ">= 1.0", ratio(rate, packed, "lora8b_toolkit"), lambda x: x >= 1.0)
    best, peer = (best_of(speed, n, rate) for n in (packed, "lora8b_trainer_packed"))
    peer = best / peer if best and peer else None
    bar("packed, the faster / Trainer packed", ">= 1.2", peer, lambda x: x >= 1.2)
    wanted = 12_473 if "H100" in card else 14_000
    best = best_of(speed, "lora8b_toolkit", rate)
    bar("8b lora tokens/s", f"> {wanted:,}", best, lambda x: x > wanted)
    heads = {r["check"]: r["ms"] for r in results if r["case"] == "loss_head" and "ms" in r}
    for name, ms in heads.items():
        shape, kind = name.split(": ")
        if kind == "toolkit":
            share = ms / heads[f"{shape}: products"]
            bar(f"loss head {shape} / its products", "<= 1.25", share, lambda x: x <= 1.25)
    return rows


def best_of(speed: dict[str, dict[str, Any]], start: str, field: str) -> float | None:
    found = [r[field] for n, r in speed.items() if n.startswith(start) and r.get(field)]
    return max(found, default=None)
