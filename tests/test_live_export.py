"""A running model's export is, to the byte, the consolidation of its checkpoint."""

import contextlib
import errno
import filecmp
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import save_tiny_model
from distributed import run_ranks
from sharded import apply_fsdp, init_mesh

from toolkit import checkpoint
from toolkit.adapters.lora import add_adapters
from toolkit.config.lora import LoraConfig
from toolkit.config.settings import CheckpointConfig, ModelConfig, ShardingConfig
from toolkit.errors import ExportError, ToolkitError
from toolkit.export import consolidate, export_live, export_step, live, plan, writer
from toolkit.formats import export_manifest
from toolkit.loading.pretrained import load_pretrained
from toolkit.models.causal_lm import build_on_meta
from toolkit.verify import verify_export

KINDS = ("llama", "tied", "moe")


def _export(rank: int, world: int, root: str) -> list[str]:
    said = []
    for kind in KINDS:
        folder = Path(root, kind)
        model = build_on_meta(ModelConfig(name_or_path=str(folder / "source")))
        apply_fsdp(model, init_mesh("cpu", world, ShardingConfig()), ShardingConfig())
        load_pretrained(model, folder / "source", torch.device("cpu"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        ids = torch.arange(8).view(1, 8)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        checkpoint.save(checkpoint.TrainState(model, step=1), folder / "run", CheckpointConfig())
        for name, arguments in (
            ("auto", {}),
            ("cast", {"dtype": "bfloat16", "max_shard_size": "10KB"}),
        ):
            path = export_live(model, folder / name, origin={"step": 1}, **arguments)
            assert path == str(folder / name)
        if kind == "llama":  # a run that comes by again may hold other weights by then
            export_step(model, folder / "run", 1)
            with torch.no_grad():
                next(model.parameters()).mul_(2)
            export_step(model, folder / "run", 1)
        before = model.state_dict()
        try:
            export_live(model, folder / "auto")
        except ExportError as error:
            said.append(str(error))

        def full(*args: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with mock.patch.object(os, "pwrite", full):  # on rank 0, the only one to write
            try:
                export_live(model, folder / "full")
            except ExportError as error:
                said.append(str(error))
        assert model.state_dict().keys() == before.keys()
    return said


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    root = tmp_path_factory.mktemp("live")
    save_tiny_model(root / "llama/source", dtype=torch.bfloat16)
    save_tiny_model(root / "tied/source", tie_word_embeddings=True)
    save_tiny_model(root / "moe/source", "qwen3_moe")
    return root, run_ranks(_export, 2, str(root))


@pytest.mark.parametrize("kind", KINDS)
def test_is_the_folder_of_the_offline_export(exported, tmp_path: Path, kind: str) -> None:
    folder = exported[0] / kind
    consolidate(folder / "run", tmp_path / "auto")
    consolidate(folder / "run", tmp_path / "cast", dtype="bfloat16", max_shard_size="10KB")
    for name in ("auto", "cast"):
        offline, live = export_manifest.read(tmp_path / name), export_manifest.read(folder / name)
        assert offline["origin"].pop("checkpoint") is not None
        assert live["origin"].pop("checkpoint") is None
        assert offline.pop("origin")["step"] == live.pop("origin")["step"] == 1
        assert offline == live
        names = sorted(p.name for p in (tmp_path / name).iterdir())
        assert names == sorted(p.name for p in (folder / name).iterdir())
        names.remove(export_manifest.FILE)
        same = filecmp.cmpfiles(tmp_path / name, folder / name, names, shallow=False)
        assert same == (names, [], [])
    assert len(list((tmp_path / "cast").glob("*.safetensors"))) > 2
    source = export_manifest.describe_folder(folder / "source")["tensors"]
    auto = export_manifest.read(folder / "auto")["tensors"]
    assert source.keys() == auto.keys()
    assert any(source[k]["xxh3"] != auto[k]["xxh3"] for k in auto)  # it was trained


def test_a_step_that_is_exported_again_replaces_nothing_and_is_new(exported) -> None:
    root, _ = exported
    new, old = sorted((root / "llama/run/exports").iterdir())
    assert (new.name, old.name[:18]) == ("step-00000001", "step-00000001.old-")
    assert verify_export(root / "llama/run", old).ok
    assert not verify_export(root / "llama/run", new).ok  # the weights were changed meanwhile


def test_a_failure_is_every_ranks(exported) -> None:
    root, (first, second) = exported
    assert len(first) == 2 * len(KINDS)
    for mine, other in zip(first, second, strict=True):
        assert other == f"{mine} (on rank 0)"
    assert "exists and is not empty" in first[0]
    assert "No space left on device; nothing was left" in first[1]
    assert not list(root.glob("*/*.tmp-export"))


FLIPS = ("gather", "copy", "convert", "cast", "write")


def flip_one_byte(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of `tensor` with the sign of its last element changed: a cast keeps that."""
    changed = tensor.clone(memory_format=torch.contiguous_format)
    changed.view(-1)[-1:].view(torch.uint8)[-1] ^= 128
    return changed


def _plant(where: str, patched: pytest.MonkeyPatch) -> None:
    """Change one byte of one tensor on its way from memory to the file, on rank 0."""
    hits: list[str] = []

    def once(value: Any) -> Any:
        hits.append(where)
        return flip_one_byte(value) if len(hits) == 3 else value

    if where == "gather":
        whole = live._full_tensor
        patched.setattr(live, "_full_tensor", lambda tensor: once(whole(tensor)))
    elif where == "copy":
        gather = live._gather_group

        def gathered(*arguments: Any) -> Any:
            return {name: once(tensor) for name, tensor in gather(*arguments).items()}

        patched.setattr(live, "_gather_group", gathered)
    elif where == "convert":
        convert = plan.ExportPlan.convert

        def converted(*arguments: Any) -> Any:
            return {name: once(tensor) for name, tensor in convert(*arguments).items()}

        patched.setattr(plan.ExportPlan, "convert", converted)
    elif where == "cast":
        contents = writer._cast_blocks

        def cast(values: Any, dtype: torch.dtype, name: str) -> Any:
            for content in contents(values, dtype, name):
                yield memoryview(once(torch.frombuffer(content, dtype=torch.uint8)).numpy())

        patched.setattr(writer, "_cast_blocks", cast)
    else:
        write = os.pwrite

        def written(descriptor: int, content: Any, position: int) -> int:
            if position == 0:  # the header
                return write(descriptor, content, position)
            changed = once(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            return write(descriptor, memoryview(changed.numpy()), position)

        patched.setattr(os, "pwrite", written)


def _fail_on_rank_1(rank: int, world: int, root: str) -> list[str]:
    """Return how an export ended whose sums fail on rank 1, and that of the next one."""
    model = build_on_meta(ModelConfig(name_or_path=str(Path(root, "tied/source"))))
    apply_fsdp(model, init_mesh("cpu", world, ShardingConfig()), ShardingConfig())
    load_pretrained(model, Path(root, "tied/source"), torch.device("cpu"))

    def fail(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    ends, out = [], Path(root, "failing-sums")
    with mock.patch.object(live, "part_sums", fail) if rank == 1 else contextlib.nullcontext():
        try:
            ends.append(export_live(model, out))
        except ToolkitError as error:
            ends.append(str(error))
    return [*ends, export_live(model, out)]


def _export_flipped(
    rank: int, world: int, root: str
) -> tuple[dict[tuple[str, str, str], str], list[str]]:
    """Return how an export ended, by kind of model, dtype and place of the flip; "" if well. And
    what `_fail_on_rank_1` does.
    """
    ends = {}
    for kind in ("tied", "moe", "lora"):
        folder = Path(root, "llama" if kind == "lora" else kind)
        model: Any = build_on_meta(ModelConfig(name_or_path=str(folder / "source")))
        if kind == "lora":
            model = add_adapters(model, LoraConfig(r=2))
        apply_fsdp(model, init_mesh("cpu", world, ShardingConfig()), ShardingConfig())
        load_pretrained(model, folder / "source", torch.device("cpu"))
        for dtype in ("auto", "bfloat16"):
            for where in ("", *FLIPS):
                if kind != "moe" and (dtype != "auto" or where in ("copy", "convert", "cast")):
                    continue
                out = folder / f"{kind}-flip-{dtype}-{where or 'none'}"
                with pytest.MonkeyPatch.context() as patched:
                    if where and rank == 0:
                        _plant(where, patched)
                    try:
                        export_live(model, out, dtype=dtype)
                        ends[kind, dtype, where] = ""
                    except ExportError as error:
                        ends[kind, dtype, where] = str(error)
                        assert not out.exists()
    return ends, _fail_on_rank_1(rank, world, root)


@pytest.fixture(scope="module")
def flipped(exported) -> list[tuple[dict[tuple[str, str, str], str], list[str]]]:
    return run_ranks(_export_flipped, 2, str(exported[0]))


def test_sums_that_fail_on_one_rank_end_the_export_on_all(exported, flipped) -> None:
    for _, (failed, path) in flipped:
        assert "out of memory" in failed
        assert "on rank 1" in failed
        assert path == str(exported[0] / "failing-sums")


def test_a_byte_that_changes_on_the_way_to_a_file_is_an_error(flipped) -> None:
    """One byte of one tensor, at each station between memory and file."""
    for ends, _ in flipped:
        for case, message in ends.items():
            if case[2]:
                assert (
                    "other bytes were written of 1 tensor(s) than their source held: " in message
                ), case
            else:
                assert not message, case
