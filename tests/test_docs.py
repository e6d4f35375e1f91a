"""What README and docs show is so: commands, settings, YAML files and rows of data.

Every command is checked by what reads it (documents.py); the slow tests run those of the tutorial
and of the README.
"""

import re
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT
from documents import (
    CHECKS,
    OTHERS,
    Block,
    Wrong,
    blocks,
    check,
    check_yaml,
    commands,
    mentions,
    pages,
    settings,
)

PAGES = [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages()]
HISTORY = ("decisions.md",)  # speaks of settings and commands that are gone
NO_SETTINGS = {"lora.rank", "metrics.step", "checkpoint.resume"}  # PEFT's name, functions
SECTIONS = {name.split(".")[0] for name in settings() if "." in name} - {"model"}


@pytest.mark.parametrize("page", PAGES)
def test_commands(page: Path, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.language == "yaml" and block.title:
            (tmp_path / block.title).write_text(block.text, "utf-8")
    for folder in ("recipes", "accelerate_configs", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    wrong = []
    for command in commands(page):
        if page.name in HISTORY:
            continue
        try:
            check(command.text, command.whole, tmp_path)
        except Wrong as error:
            wrong.append(f"{command.where}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_commands_are_shell(page: Path) -> None:
    for block in blocks(page):
        if block.language == "bash":
            done = subprocess.run(
                ["bash", "-n"], input=block.text, capture_output=True, text=True, check=False
            )
            assert not done.returncode, f"{page.name}:{block.line}: {done.stderr}"


@pytest.mark.parametrize("page", PAGES)
def test_yaml_blocks(page: Path, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.language == "yaml":
            check_yaml(block, tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_settings_that_are_named_exist(page: Path) -> None:
    if page.name in HISTORY:
        return
    named = re.compile(rf"(?:--)?((?:{'|'.join(SECTIONS)})\.[a-z_0-9]+)(?:[ :=].*)?")
    gone = [
        f"{where}: {found[1]}"
        for where, text in mentions(page)
        if (found := named.fullmatch(text)) and found[1] not in settings()
        if not re.search(r"\.(py|yaml|md|jsonl?)$", found[1]) and found[1] not in NO_SETTINGS
    ]
    assert not gone, "\n".join(gone)


def test_many_commands_are_found() -> None:
    found = [command for page in pages() for command in commands(page)]
    assert len([command for command in found if command.whole]) > 30
    programs = {command.text.split()[0].removeprefix(".venv/bin/") for command in found}
    assert programs >= {"toolkit", "accelerate", "torchrun", "make", "pip", "python"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("toolkit train CONFIG --train.max_step 1", "did you mean train.max_steps"),
        ("toolkit train CONFIG --accelerate_config tpu", "is no file"),
        ("toolkit finetune --lora.r 16", "expected `toolkit finetune CONFIG`"),
        ("toolkit verify RUN --logit", "unrecognized arguments: --logit"),
        ("toolkit consolidate RUN", "required: --output"),
        ("accelerate launch --config_files x.yaml recipes/pretrain.py --config CONFIG", "--config"),
        ("accelerate launch --config_file x.yaml recipes/pretrain.py --config CONFIG", "no file"),
        ("torchrun --nprocs_per_node 8 recipes/pretrain.py", "nprocs_per_node"),
        ("python recipes/finetune.py --config CONFIG --lora.rr 2", "unknown setting 'lora.rr'"),
        ("python benchmarks/gpu.py --tinny", "has no option --tinny"),
        ("make dmeo", "No rule to make target"),
        ("pip install 'fsdp2-toolkit[qloar]'", "no such extra"),
        ("sbatch examples/nothing.slurm", "is not there"),
        ("curl -O https://example.org/x", "no command that the documents may show"),
    ],
)
def test_a_wrong_command_is_found(text: str, said: str) -> None:
    with pytest.raises(Wrong, match=re.escape(said)):
        check(text)


def test_a_misspelt_flag_in_a_page_is_found(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    wrong = text.replace("--data.sequence_length 4096", "--data.sequence_lenght 4096")
    assert wrong != text
    (tmp_path / "README.md").write_text(wrong, "utf-8")
    found = []
    for command in commands(tmp_path / "README.md"):
        try:
            check(command.text, command.whole)
        except Wrong as error:
            found.append(str(error))
    assert found
    assert all("did you mean data.sequence_length" in error for error in found)


def test_others_have_a_reason() -> None:
    assert all(OTHERS.values())
    assert set(OTHERS) < set(CHECKS)


@pytest.mark.parametrize("text", ["train: {max_step: 1}", "trian: {max_steps: 1}"])
def test_a_wrong_key_in_yaml_is_found(text: str, tmp_path: Path) -> None:
    with pytest.raises(Wrong, match="unknown setting"):
        check_yaml(Block(ROOT / "README.md", 1, "yaml", text), tmp_path)
