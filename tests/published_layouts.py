"""Today's published layouts through the whole toolkit: one table, `docs/evidence/layouts.md`.

    python tests/published_layouts.py [--layouts qwen3_5,llama4] [--write docs/evidence/layouts.md]

Each checkpoint of `layouts.py` (bf16, random values) is loaded, trained for two steps in full and
with LoRA on two ranks, saved, exported (also from the live model), verified and loaded again by
transformers, and compared with one plain process of the class that config.json names, or of its
text part where that class has no forward for text. Every tensor of the source must be in each
export, those that were not trained to the bit.
"""

# ruff: noqa: E402 - as a program it first says where the toolkit is
import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from architectures import Mismatch, RecordingSGD, difference, whole
from distributed import run_ranks
from layouts import LAYOUTS, save_layout
from machine import describe
from safetensors.torch import load_file
from sharded import apply_fsdp, init_mesh, loss_sum, train_step
from tiny_models import float64_throughout, rows

from toolkit import checkpoint, ranks
from toolkit.adapters.lora import add_adapters
from toolkit.config.lora import LoraConfig
from toolkit.config.settings import CheckpointConfig, ModelConfig, ShardingConfig
from toolkit.errors import ToolkitError
from toolkit.export import consolidate
from toolkit.export.live import export_live
from toolkit.loading import load_pretrained
from toolkit.loading.pretrained import check_weights_fit
from toolkit.models.causal_lm import build_on_meta
from toolkit.models.peft_model import base_of, trained_tensors
from toolkit.verify import verify_export

_START: dict[str, torch.Tensor] = {}  # of the plain model
WORLD, FILE = 2, "model.safetensors"
_FP32 = ShardingConfig(param_dtype="float32", dp_replicate=1)
_RATE = 0.05


def check(rank: int, world: int, name: str, folder: Path) -> dict[str, Any]:
    """Return what was found of one layout, on rank 0. Collective; runs on gloo ranks."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    source = folder / "source"
    ranks.on_main(lambda: save_layout(name, source) and None)
    found: dict[str, Any] = {"layout": name}
    for kind in ("full", "LoRA"):
        try:
            found[kind] = _train(source, folder / kind, kind == "LoRA")
        except ToolkitError as error:
            found[kind] = f"refused: {error}"
        except Exception as error:
            found[kind] = f"{type(error).__name__}: {error}"[:300]
            if os.environ.get("TRACE"):
                raise
    return found


def _train(source: Path, folder: Path, adapted: bool) -> dict[str, Any]:
    cfg = ModelConfig(str(source), dtype="float32")
    model: Any = build_on_meta(cfg)
    model_class = type(model)
    if adapted:
        model = add_adapters(model, LoraConfig(r=2))
    check_weights_fit(model, cfg)
    apply_fsdp(model, init_mesh("cpu", WORLD, _FP32), _FP32)
    load_pretrained(model, source, "cpu")
    if adapted:  # else the first gradient of A is 0
        _shake(model)
    start = {n: t.clone() for n, t in whole(model).items()} if adapted else {}
    optimizer = RecordingSGD(model)
    model.train()
    batch = rows(2 * WORLD)
    rank = ranks.rank()
    mine = {k: v[2 * rank : 2 * rank + 2] for k, v in batch.items()}
    losses = [
        train_step(model, optimizer, [mine], max_grad_norm=0.0, loss=loss_sum).loss
        for _ in range(2)
    ]
    gradients = {n.replace("base_model.model.", ""): g for n, g in optimizer.gradients[0].items()}
    run = folder / "run"
    checkpoint.save(checkpoint.TrainState(model, step=2), run, CheckpointConfig())
    live = export_live(model, folder / "live")
    trained = whole(model)

    def compare() -> dict[str, Any]:
        plain = _plain(model_class, source, model if adapted else None, start)
        ours = _plain_steps(plain, batch)
        grads = {n.replace("base_model.model.", ""): g for n, g in ours["gradients"].items()}
        wanted = {n: gradients[n] for n in grads}
        out: dict[str, Any] = {
            "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, ours["losses"], strict=True)),
            "gradients": _apart(wanted, grads, plain, batch),
            "class": model_class.__name__,
        }
        idle = {n for n, g in gradients.items() if n not in grads and bool(g.any())}
        if idle:
            raise ToolkitError(f"gradients where one process has none: {sorted(idle)[:3]}")
        exported = Path(consolidate(run, folder / "hf", merge=adapted))
        out |= _compare_exports(source, exported, None if adapted else Path(live))
        report = verify_export(run, exported)
        out["verify"] = report.ok
        if not report.ok:
            out["why"] = [str(line) for line in report.lines()[:3]]
        out |= _reload(source, exported)
        return out

    del trained
    return ranks.on_main(compare)


@torch.no_grad()
def _shake(model: Any) -> None:
    for name, tensor in sorted(trained_tensors(model).items()):
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        noise = torch.randn(tensor.shape, generator=generator) * 0.05
        from torch.distributed.tensor import DTensor, distribute_tensor

        if isinstance(tensor, DTensor):
            noise = distribute_tensor(noise, tensor.device_mesh, tensor.placements)
        tensor.add_(noise)


def _plain(model_class: Any, source: Path, adapted: Any, start: dict[str, torch.Tensor]) -> Any:
    """Return the model of one plain process; with the same adapters where there are any."""
    readable = source / "plain" if (source / "plain").is_dir() else source
    plain = model_class.from_pretrained(readable, dtype=torch.float32)
    if adapted is not None:
        from peft import get_peft_model

        plain = get_peft_model(plain, adapted.peft_config["default"], autocast_adapter_dtype=False)
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(start[name])
    _START.clear()
    _START.update({n: p.detach().clone() for n, p in plain.named_parameters()})
    return plain.train()


def _plain_steps(plain: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=_RATE)
    losses, gradients = [], {}
    for _ in range(2):
        tokens, total = int((batch["labels"][:, 1:] != -100).sum()), 0.0
        for first in range(0, 2 * WORLD, 2):  # the ranks' parts: the whole rounds otherwise
            ids, labels = (batch[n][first : first + 2] for n in ("input_ids", "labels"))
            logits = plain(input_ids=ids).logits[:, :-1].flatten(0, 1).float()
            loss = torch.nn.functional.cross_entropy(
                logits, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
            )
            (loss / tokens).backward()
            total += float(loss.detach()) / tokens
        losses.append(total)
        if not gradients:
            named = plain.named_parameters()
            gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "gradients": gradients}


def _apart(
    found: dict[str, torch.Tensor],
    plain: dict[str, torch.Tensor],
    model: Any,
    batch: dict[str, torch.Tensor],
) -> float:
    """Return how far gradients are apart, relative to the largest of their tensor: 1e-5 is allowed,
    or what one plain process in fp32 is off from fp64, twice: see `architectures.py`.
    """
    try:
        return difference(found, plain, floor=1e-4)
    except Mismatch:
        pass
    with torch.no_grad():  # back to where the first gradient was taken
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(_START[name])
    exact = model.double()
    base_of(exact).set_experts_implementation("eager")  # grouped products have no fp64
    with float64_throughout():
        truth = _plain_steps(exact, batch)["gradients"]
    truth = {n.replace("base_model.model.", ""): g for n, g in truth.items()}
    largest, off = max(float(g.abs().max()) for g in plain.values()), [0.0, 0.0]
    for name, want in truth.items():
        scale = max(float(want.abs().max()), 1e-4 * largest)
        far = (float((of[name].double() - want).abs().max()) / scale for of in (found, plain))
        off = list(map(max, off, far))
    if off[0] > max(1e-5, 2 * off[1]):
        raise Mismatch(f"gradients {off[0]:.1e} from fp64, one process {off[1]:.1e}")
    return min(off[0], 1e-5)


def _compare_exports(source: Path, exported: Path, live: Path | None) -> dict[str, Any]:
    theirs, ours = load_file(source / FILE), load_file(exported / FILE)
    if (source / "plain").is_dir():  # what is read of a quantised one, which is not what it stores
        theirs = {n: t.bfloat16() for n, t in load_file(source / "plain" / FILE).items()}
    lost, added = sorted(theirs.keys() - ours.keys()), sorted(ours.keys() - theirs.keys())
    recast = [n for n in theirs.keys() & ours.keys() if theirs[n].dtype != ours[n].dtype]
    same = [n for n in theirs.keys() & ours.keys() if torch.equal(theirs[n], ours[n])]
    out: dict[str, Any] = {
        "tensors": len(theirs),
        "lost": lost,
        "added": added,
        "recast": recast,
        "untouched": len(same),
    }
    if live is not None:
        out["live"] = (live / FILE).read_bytes() == (exported / FILE).read_bytes()
    return out


def _reload(source: Path, exported: Path) -> dict[str, Any]:
    """Load the export under the class that config.json names."""
    named = transformers.AutoConfig.from_pretrained(exported).architectures[0]
    _, info = getattr(transformers, named).from_pretrained(exported, output_loading_info=True)
    return {"reload": named, "missing": sorted(info["missing_keys"])}


def passed(part: Any) -> bool:
    """Whether a layout came through one way of training."""
    return (
        isinstance(part, dict)
        and not (part["lost"] or part["added"] or part["recast"] or part["missing"])
        and part["verify"]
        and part.get("live", True)
        and part["loss"] <= 1e-5
        and part["gradients"] <= 1e-5
    )


def run(name: str) -> dict[str, Any]:
    """Return what was found of one layout."""
    folder = Path(tempfile.mkdtemp(prefix="layout-"))
    begun = time.perf_counter()
    try:
        found = run_ranks(check, WORLD, name, folder)[0]
    except Exception as error:
        found = {"layout": name, "full": f"{type(error).__name__}: {error}"[-400:], "LoRA": ""}
        if os.environ.get("TRACE"):
            print(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found | {"seconds": round(time.perf_counter() - begun, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    results = []
    for name in args.layouts.split(","):
        results.append(found := run(name))
        for kind in ("full", "LoRA"):
            part = found[kind]
            word = "ok" if passed(part) else "NOT"
            print(
                f"{name:18} {kind:5} {word} {found['seconds']} s {part if word == 'NOT' else ''}",
                flush=True,
            )
    if args.write:
        args.write.write_text(report(results))
    refused = {"paligemma"}  # it is no causal language model
    bad = [r for r in results if not (passed(r["full"]) and passed(r["LoRA"]))]
    return int({r["layout"] for r in bad} - refused != set())


def report(results: list[dict[str, Any]]) -> str:
    """Return the page."""
    both = [r for r in results if passed(r["full"]) and passed(r["LoRA"])]
    head = ["layout", "class in config.json", "trained as", "source tensors", "full", "LoRA"]
    rows = []
    for found in results:
        layout, full, lora = LAYOUTS[found["layout"]], found["full"], found["LoRA"]
        trained = full["class"] if isinstance(full, dict) else ""
        count = str(full["tensors"]) if isinstance(full, dict) else ""
        rows.append([found["layout"], layout.class_name, trained, count, said(full), said(lora)])
    lines = [
        "# Published layouts",
        "",
        "Tiny checkpoints in the layouts in which today's models are published (names, nested "
        "configs, extra tensors, stored dtypes), with random values. Each is trained for two steps "
        "on 2 ranks, in full and with LoRA on `all-linear`, saved, exported (also from the live "
        "model), verified, and loaded by transformers under the class that `config.json` names.",
        "",
        f"{len(both)} of {len(results)} come through both ways: losses and gradients as one plain "
        "process has them (1e-5, or as near to fp64 as that is), every source tensor in the export "
        "under its name and in its dtype, `verify` without a finding, no missing keys. A number is "
        "the largest relative difference of a gradient; in brackets the tensors that are equal to "
        "the source's to the bit.",
        "",
        *(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)),
        "",
    ]
    return "\n".join(
        [*lines, describe("tests/published_layouts.py", "torch", "transformers", "peft"), ""]
    )


def said(part: Any) -> str:
    """Return a cell of the table."""
    if passed(part):
        return f"{part['gradients']:.0e} ({part['untouched']})"
    if not isinstance(part, dict):
        reason = re.search(r"has no forward for text alone \(.*?\)", str(part))
        return "refused: " + (reason[0] if reason else str(part)[:200]).replace("|", "/")
    names = ("lost", "added", "recast", "missing")
    kinds = [f"{len(part[name])} {name}" for name in names if part[name]]
    return ", ".join(kinds) or f"loss {part['loss']:.0e}, gradients {part['gradients']:.0e}"


if __name__ == "__main__":
    sys.exit(main())
