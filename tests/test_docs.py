"""What README and docs show is so: commands, settings, YAML files and rows of data.

Every command is checked by what reads it (documents.py); the slow tests run those of the tutorial
and of the README.
"""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, free_port
from distributed import run_toolkit
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
HISTORY = ("journal.md",)  # speaks of settings and commands that are gone
NO_SETTINGS = {"lora.rank", "metrics.step", "checkpoint.resume"}  # PEFT's name, functions
SECTIONS = {name.split(".")[0] for name in settings() if "." in name} - {"model"}


@pytest.mark.parametrize("page", PAGES)
def test_commands(page: Path, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.title:
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
def test_yaml_and_python_blocks(page: Path, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.language == "yaml":
            check_yaml(block, tmp_path)
        elif block.language == "python":
            compile(block.text, str(page), "exec")


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


def lost_files(text: str) -> list[str]:
    """Return the files and folders that a text names by their place in the repository, and that
    are not there; a name without a folder after another is in that one's.
    """
    named = re.findall(r"`((?:toolkit|tests|benchmarks)/[\w/]+(?:\.py|/))`", text)
    for folder, name in re.findall(r"`((?:toolkit|tests)/\w+/)\w+\.py`, `(\w+\.py)`", text):
        named.append(folder + name)
    return [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("room", ["sharding", "loss", "data", "checkpoint", "planning"])
def test_the_files_and_notes_that_a_design_names_are_there(room: str) -> None:
    text = " ".join((ROOT / "docs" / "design" / f"{room}.md").read_text("utf-8").split())
    assert text.count("`toolkit/") > 5
    assert not lost_files(text)
    for note in re.findall(r"\[Note: [^\]]+\]", text):
        assert any(note in file.read_text("utf-8") for file in (ROOT / "toolkit").rglob("*.py"))
    assert lost_files("`toolkit/sharding/nothing.py`") == ["toolkit/sharding/nothing.py"]
    assert lost_files("`toolkit/sharding/units.py`, `no.py`") == ["toolkit/sharding/no.py"]


def test_the_layout_says_of_each_room_what_it_says_itself() -> None:
    text = (ROOT / "docs" / "layout.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `([\w/.]+)` \| (.+) \|$", text, re.MULTILINE))
    rooms = {f"{file.parent.name}/" for file in (ROOT / "toolkit").glob("*/__init__.py")}
    rooms |= {file.name for file in (ROOT / "toolkit").glob("[a-z]*.py")}
    assert rooms <= set(rows)
    for name, owns in rows.items():
        file = ROOT / "toolkit" / name / ("__init__.py" if name.endswith("/") else "")
        described = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
        assert owns == " ".join(described.split("\n\n")[0].split()), name
    layers = re.search(r"^layers = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    assert layers is not None
    heights = {
        name: height
        for height, line in enumerate(layers[1].split(",")[::-1])
        for name in re.findall(r"toolkit\.([a-z]\w*)", line)
    }
    named = [name.removesuffix("/").removesuffix(".py") for name in rows if name.count("/") < 2]
    assert [heights[name] for name in named] == sorted(heights[name] for name in named)


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
        ("pip install '.[qloar]'", "no such extra"),
        ("pip install 'fsdp2-toolkit[qlora]'", "no index has it"),
        ("sbatch examples/nothing.slurm", "is not there"),
        ("srun -n 8 python recipes/pretrain.py --config CONFIG --train.max_step 1", "unknown sett"),
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


SCALE = {  # what makes a command of the documents small
    "train": "--train.max_steps 4 --checkpoint.save_steps 2 --data.sequence_length 64",
    "finetune": "--train.max_steps 4 --checkpoint.save_steps 4 --data.sequence_length 64"
    " --data.max_eval_samples 4",
}


def run_commands(lines: list[str], folder: Path, changed: dict[str, str]) -> list[str]:
    """Run commands as they stand, but for `changed` and SCALE, in `folder`; return their output.

    Launches are real ones, the other commands run in a fork.
    """
    for name in ("recipes", "accelerate_configs"):
        (folder / name).symlink_to(ROOT / name)
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    said = []
    for line in lines:
        for old, new in changed.items():
            line = line.replace(old, new)
        program, *words = shlex.split(line, comments=True)
        program = program.removeprefix(".venv/bin/")
        if program == "toolkit" and words[0] not in SCALE:
            done = run_toolkit(*words, cwd=folder)
        else:
            module = {"toolkit": ["-m", "toolkit"], "python": []}[program]
            if words[0] in SCALE:
                words += SCALE[words[0]].split()
                words += ["--main_process_port", str(free_port())]
            done = subprocess.run(
                [sys.executable, *module, *words],
                cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=300,
            )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        said.append(done.stdout)
    return said


def lines_of(page: Path, heading: str, end: str = "\n## ") -> list[str]:
    """Return the command lines of the blocks below a heading of `page`."""
    text = page.read_text("utf-8")
    begin = text.count("\n", 0, text.index(heading)) + 1
    stop = text.find(end, text.index(heading) + len(heading))
    last = text.count("\n", 0, stop) + 1 if stop != -1 else 10**6
    shown = [b for b in blocks(page) if begin <= b.line < last and b.language != "text"]
    return [line for block in shown for line in block.lines()]


@pytest.mark.slow
def test_the_tutorial(tmp_path: Path, text_file: Path) -> None:
    page = ROOT / "docs" / "tutorial.md"
    shutil.copyfile(text_file, tmp_path / "mine.txt")
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "Two."}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n", "utf-8")
    for block in blocks(page):
        if block.title:
            (tmp_path / block.title).write_text(block.text, "utf-8")
    lines = lines_of(page, "# From a text", end="\n## The same with 8 billion")
    needed = [line for line in lines if " inspect " not in line]  # a look, which changes nothing
    exported = next(i for i, line in enumerate(needed) if "--merge" in line)
    assert exported < 5  # five commands from a fresh clone to the exported, fine-tuned model
    assert lines.pop(0) == "make install"
    said = "\n".join(run_commands(lines, tmp_path, {}))
    for sentence in (
        "runs/mine: run verified",
        "runs/tuned-merged: export verified",
        "next       toolkit consolidate runs/mine --output runs/mine-hf",
        "send: 7 files",
    ):
        assert sentence in said


@pytest.mark.slow
@pytest.mark.parametrize("heading", ["## Your model, your data", "## Fine-tuning"])
def test_the_commands_of_the_readme(heading, tmp_path, tiny_llama, text_file) -> None:
    chat = {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(chat)}\n" * 40, "utf-8")
    (tmp_path / "text.jsonl").write_text(
        f"{json.dumps({'text': text_file.read_text('utf-8')})}\n" * 2, "utf-8"
    )
    template = (ROOT / "recipes/configs/chat_template.jinja").read_text("utf-8")
    base = shutil.copytree(tiny_llama, tmp_path / "base")
    (base / "chat_template.jinja").write_text(template, "utf-8")
    changed = {
        "one_node": "cpu",
        "/path/to/checkpoint": str(base),
        "/path/to/*.jsonl": "text.jsonl",
        "/path/to/chats/*.jsonl": "chats.jsonl",
        "--train.max_steps 10000": "",
        "CONFIG": "config.yaml",
    }
    model = f"model: {{name_or_path: {base}}}\n"
    (tmp_path / "config.yaml").write_text(model + "data: {train_files: chats.jsonl}\n", "utf-8")
    lines = [line for line in lines_of(ROOT / "README.md", heading) if line[:2] != ". "]
    said = run_commands(lines, tmp_path, changed)
    assert len(said) >= 5
    assert "verified" in "".join(said)
