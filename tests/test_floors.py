"""The house: a file imports only from floors below its own; some libraries enter through one
door.
"""

import ast
from pathlib import Path

from conftest import ROOT

# Lowest first. Files of one floor do not import each other, but for the pairs in DRAWN.
FLOORS = [
    {"__init__", "errors", "config", "redact", "store"},
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
        "data.__init__",
    },
    {
        "run_dir",
        "fetch",
        "model_card",
        "sharding",
        "loading",
        "training",
        "checkpoint",
        "disk",
        "streaming",
        "sources",
        "tensor_stream",
        "export_plan",
        "launch",
    },
    {"export_folder", "export_proof", "checkpoint_check", "export_check"},
    {"consolidate", "live_export", "summary", "unit_table", "verify"},
    {"hub"},
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
    ("data.text", "data.files"),
    ("data.tokenizer", "data.text"),
    ("data.tokenise", "data.tokenizer"),
    ("data.order", "data.samples"),
    ("__main__", "cli"),
}
ONE_DOOR = {
    "accelerate": {"launch"},
    "torch.distributed.fsdp": {"sharding"},
    "huggingface_hub": {"hub"},
    "fsspec": {"store"},
    "peft": set(),
}
NO_TORCH = {
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
