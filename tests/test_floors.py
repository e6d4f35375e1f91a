"""The house: a file imports only from floors below its own; some libraries enter through one
door.
"""

import ast
from pathlib import Path

from conftest import ROOT

# Lowest first. Files of one floor do not import each other, but for the pairs in DRAWN.
FLOORS = [
    {"__init__", "errors", "config", "redact", "store", "adapted", "direct_io"},
    {
        "accelerate_yaml",
        "ranks",
        "hf_format",
        "export_manifest",
        "shard_reader",
        "recorded_init",
        "layout",
        "patterns",
        "tables",
        "fake_world",
        "recompute",
        "prefetch",
        "units",
        "dcp_format",
        "shard_damage",
        "dcp_reader",
        "dcp_writer",
        "digests",
        "strided",
        "in_flight",
        "rng_state",
        "findings",
        "staging",
        "commit",
        "store_commit",
        "models",
        "adapter_init",
        "adapter_source",
        "adapter_coverage",
        "adapter_format",
        "adapter_switch",
        "lora_targets",
        "lora",
        "packed_linear",
        "quantise",
        "tiny_copy",
        "loss",
        "optim",
        "metrics",
    },
    {
        "data.files",
        "data.text",
        "data.tokenizer",
        "data.tokenise",
        "data.samples",
        "data.order",
        "data.packing",
        "data.sequences",
        "data.grouping",
        "data.mixture",
        "data.collate",
        "data.stream",
        "data.mixed_stream",
        "data.sets",
        "data.feed",
        "data.stream_feed",
        "data.row_values",
        "data.turns",
        "data.token_columns",
        "data.examples",
        "data.raw_rows",
        "data.columnar",
        "data.rows",
        "data.instructions",
        "data.report",
        "data.text_files",
        "data.text_checks",
        "data.rendering",
        "data.printed",
        "data.mask_text",
        "data.masks",
        "data.markers",
        "data.template_worker",
        "data.sandbox",
        "data.chat",
        "data.token_spans",
        "data.encoder",
        "data.encode",
        "data.documents",
        "data.__init__",
    },
    {
        "run_dir",
        "fetch",
        "model_card",
        "sharding",
        "loading",
        "training",
        "packing_probe",
        "model_flops",
        "neftune",
        "generation",
        "early_stopping",
        "checkpoint",
        "disk",
        "streaming",
        "sources",
        "tensor_stream",
        "export_plan",
        "launch",
    },
    {
        "export_folder",
        "export_proof",
        "checkpoint_check",
        "export_check",
        "adapter_export",
        "adapter_merge",
        "adapter_check",
        "packing_choice",
        "merge_proof",
        "merged_check",
    },
    {
        "consolidate",
        "live_export",
        "summary",
        "unit_table",
        "verify",
        "pretrain_data",
        "finetune_data",
        "feed_checks",
    },
    {"hub", "adapter_proof"},
    {"publish"},
    {"cli", "__main__", "recipes"},
]
DRAWN = {
    ("config", "errors"),
    ("config", "redact"),
    ("errors", "redact"),
    ("store", "errors"),
    ("store_commit", "commit"),
    ("fetch", "run_dir"),
    ("model_card", "run_dir"),
    ("models", "hf_format"),
    ("export_manifest", "hf_format"),
    ("models", "patterns"),
    ("units", "models"),
    ("adapter_init", "layout"),
    ("adapter_source", "hf_format"),
    *[("adapter_coverage", name) for name in ("ranks", "tables")],
    *[("lora_targets", name) for name in ("hf_format", "models", "patterns")],
    *[("lora", name) for name in ("hf_format", "lora_targets", "models")],
    ("units", "packed_linear"),
    ("quantise", "packed_linear"),
    ("quantise", "models"),
    ("quantise", "patterns"),
    ("adapter_source", "quantise"),
    ("adapter_source", "models"),
    ("adapter_switch", "layout"),
    ("tiny_copy", "models"),
    ("units", "patterns"),
    ("optim", "layout"),
    ("dcp_reader", "dcp_format"),
    ("shard_damage", "dcp_format"),
    ("shard_damage", "hf_format"),
    ("dcp_reader", "layout"),
    ("dcp_writer", "dcp_format"),
    ("digests", "layout"),
    ("in_flight", "ranks"),
    ("staging", "layout"),
    ("shard_reader", "hf_format"),
    ("export_check", "export_proof"),
    ("merge_proof", "export_proof"),
    *[("adapter_check", f"export_{name}") for name in ("check", "proof")],
    *[("adapter_check", name) for name in ("adapter_export", "merged_check")],
    *[("merged_check", name) for name in ("export_check", "export_proof", "merge_proof")],
    ("data.text", "data.files"),
    ("data.turns", "data.row_values"),
    ("data.examples", "data.row_values"),
    ("data.examples", "data.turns"),
    ("data.columnar", "data.files"),
    ("data.columnar", "data.row_values"),
    ("data.raw_rows", "data.columnar"),
    ("data.raw_rows", "data.row_values"),
    ("data.text_files", "data.columnar"),
    ("data.text_files", "data.raw_rows"),
    ("data.text", "data.columnar"),
    ("data.text", "data.raw_rows"),
    ("data.text", "data.row_values"),
    ("data.text", "data.text_checks"),
    ("data.text", "data.text_files"),
    ("data.instructions", "data.columnar"),
    ("data.instructions", "data.files"),
    ("data.instructions", "data.raw_rows"),
    ("data.rows", "data.columnar"),
    ("data.rows", "data.examples"),
    ("data.rows", "data.files"),
    ("data.rows", "data.instructions"),
    ("data.rows", "data.raw_rows"),
    ("data.rows", "data.row_values"),
    ("data.rows", "data.text_files"),
    ("data.report", "data.encode"),
    *[("data.rendering", f"data.{name}") for name in ("mask_text", "row_values")],
    *[("data.printed", f"data.{name}") for name in ("mask_text", "rendering", "row_values")],
    *[("data.masks", f"data.{name}") for name in ("mask_text", "printed", "rendering")],
    ("data.masks", "data.row_values"),
    *[("data.markers", f"data.{name}") for name in ("mask_text", "masks", "row_values")],
    *[("data.template_worker", f"data.{name}") for name in ("markers", "masks", "rendering")],
    ("data.template_worker", "data.row_values"),
    *[("data.sandbox", f"data.{name}") for name in ("row_values", "template_worker")],
    *[("data.chat", f"data.{name}") for name in ("examples", "row_values", "sandbox")],
    *[("data.token_spans", f"data.{name}") for name in ("row_values", "tokenise")],
    *[("data.encoder", f"data.{name}") for name in ("chat", "examples", "row_values", "samples")],
    *[("data.encoder", f"data.{name}") for name in ("sandbox", "token_spans", "tokenise")],
    ("data.encoder", "data.tokenizer"),
    *[("data.encode", f"data.{name}") for name in ("chat", "encoder", "examples", "row_values")],
    *[("data.encode", f"data.{name}") for name in ("rows", "sandbox", "template_worker")],
    ("data.encode", "data.tokenise"),
    ("data.examples", "data.token_columns"),
    ("data.token_columns", "data.row_values"),
    *[("data.tokenizer", f"data.{name}") for name in ("columnar", "row_values", "rows", "text")],
    *[("data.documents", f"data.{name}") for name in ("encoder", "examples", "row_values")],
    *[("data.documents", f"data.{name}") for name in ("rows", "text", "tokenise")],
    ("data.stream", "data.row_values"),
    ("data.tokenise", "data.tokenizer"),
    ("data.order", "data.samples"),
    ("data.sequences", "data.packing"),
    ("data.sequences", "data.samples"),
    ("data.grouping", "data.order"),
    ("data.mixture", "data.order"),
    ("data.collate", "data.samples"),
    *[("data.stream", f"data.{n}") for n in ("order", "packing", "samples", "sequences", "sets")],
    *[("data.mixed_stream", f"data.{n}") for n in ("grouping", "mixture", "order", "sets")],
    ("data.mixed_stream", "data.stream"),
    ("data.stream_feed", "data.mixed_stream"),
    *[("data.feed", f"data.{name}") for name in ("grouping", "mixture", "order", "sets")],
    *[("data.feed", f"data.{name}") for name in ("samples", "sequences")],
    *[("data.stream_feed", f"data.{name}") for name in ("order", "sets", "stream")],
    *[("data.sets", f"data.{n}") for n in ("collate", "order", "samples", "sequences")],
    ("__main__", "cli"),
}
ONE_DOOR = {
    "accelerate": {"launch"},
    "torch.distributed.fsdp": {"sharding"},
    "huggingface_hub": {"hub"},
    "fsspec": {"store"},
    "bitsandbytes": {"packed_linear"},
    "peft": {"lora", "adapter_format", "adapter_switch"},
}
NO_TORCH = {
    "data.row_values",
    "data.rendering",
    "data.printed",
    "data.mask_text",
    "data.masks",
    "data.markers",
    "data.template_worker",
    "__init__",
    "errors",
    "redact",
    "config",
    "accelerate_yaml",
    "commit",
    "store",
    "store_commit",
    "cli",
    "__main__",
}


def modules() -> dict[str, Path]:
    found = {}
    for file in sorted((ROOT / "toolkit").rglob("*.py")):
        found[".".join(file.relative_to(ROOT / "toolkit").with_suffix("").parts)] = file
    for file in sorted((ROOT / "recipes").glob("*.py")):
        found[f"recipes.{file.stem}"] = file
    return found


def imports(file: Path) -> set[str]:
    """Return every module that `file` imports anywhere, functions included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def inside(file: Path) -> set[str]:
    known = modules()
    found = set()
    for name in imports(file):
        if name == "toolkit":
            continue
        short = name.removeprefix("toolkit.")
        if name.startswith("toolkit.") and short in known:
            found.add(short)
    return found


def floor_of(name: str) -> int:
    name = "recipes" if name.startswith("recipes.") else name
    return next(i for i, floor in enumerate(FLOORS) if name in floor)


def violations(graph: dict[str, set[str]]) -> list[str]:
    bad = []
    for name, targets in graph.items():
        for target in targets:
            if (name, target) in DRAWN:
                continue
            if floor_of(target) >= floor_of(name):
                bad.append(
                    f"{name} (floor {floor_of(name)}) imports {target} (floor {floor_of(target)})"
                )
    return bad


def test_every_file_has_a_floor():
    for name in modules():
        floor_of(name)


def test_imports_go_down():
    assert not violations({name: inside(file) for name, file in modules().items()})


def test_a_wrong_import_is_seen():
    assert violations({"config": {"launch"}})
    assert violations({"sharding": {"loading"}})


def test_some_libraries_enter_through_one_door():
    for library, doors in ONE_DOOR.items():
        users = {
            name
            for name, file in modules().items()
            if any(i == library or i.startswith(library + ".") for i in imports(file))
        }
        assert users <= doors, library


def test_the_ground_floor_does_not_know_torch():
    for name in NO_TORCH:
        assert not any(i.split(".")[0] == "torch" for i in imports(modules()[name])), name
