"""`make results`: its inputs are checked, its stages resume, its page marks what was not measured.

The figures themselves are measured on a quiet machine; here a tiny random model takes their place.
"""

import ast
import collections
import dataclasses
import gzip
import hashlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml
from conftest import ROOT

sys.path.append(str(ROOT / "benchmarks"))  # last: its files have plain names

CONFIGS = sorted((ROOT / "recipes" / "configs").glob("shakespeare_char_*.yaml"))


# ---- Inputs --------------------------------------------------------------------------------------


@pytest.fixture
def download(tmp_path, monkeypatch) -> Any:
    """A file of known bytes that only the cache or `--data` can supply."""
    import results_inputs

    monkeypatch.setenv("RESULTS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(results_inputs, "PACKAGE", "no_such_package")
    digest = hashlib.sha256(b"the text").hexdigest()
    file = results_inputs.Download("a.txt", "https://example.org/a.txt", digest)
    monkeypatch.setitem(results_inputs.DOWNLOADS, "text", (file,))
    return file


def test_a_missing_input_is_one_line_with_what_to_do(download, tmp_path) -> None:
    import results_inputs

    paths, _, missing = results_inputs.find_inputs(None, None, ("text", "model"))
    assert not paths
    assert len(missing) == 2
    assert all(len(line.splitlines()) == 1 for line in missing)
    assert missing[0].startswith("text: expected a.txt in --data FOLDER or in ")
    assert str(tmp_path / "cache") in missing[0]
    assert "it cannot be fetched (https://example.org/a.txt: OSError); put the file" in missing[0]
    assert "pass --model FOLDER" in missing[1]


def test_an_input_is_found_in_the_folder_and_in_the_cache_until_it_is_deleted(
    download, tmp_path
) -> None:
    import results_inputs

    for folder, data in ((tmp_path / "data", tmp_path / "data"), (tmp_path / "cache", None)):
        folder.mkdir(exist_ok=True)
        (folder / "a.txt").write_bytes(b"the text")
        paths, digests, missing = results_inputs.find_inputs(data, None, ("text",))
        assert paths == {"text": folder / "a.txt"}
        assert digests == {"text": download.sha256}
        assert not missing
        (folder / "a.txt").unlink()
        assert len(results_inputs.find_inputs(data, None, ("text",))[2]) == 1


def test_other_bytes_are_refused_and_not_kept(download, tmp_path, monkeypatch) -> None:
    import results_inputs

    (tmp_path / "a.txt").write_bytes(b"another text")
    _, _, (line,) = results_inputs.find_inputs(tmp_path, None, ("text",))
    other = hashlib.sha256(b"another text").hexdigest()
    assert f"expected sha256 {download.sha256}, got {other}; delete the file" in line
    monkeypatch.setattr(results_inputs, "_from_url", lambda file: b"another text")
    assert len(results_inputs.find_inputs(None, None, ("text",))[2]) == 1
    monkeypatch.setattr(results_inputs, "_from_url", lambda file: b"the text")
    paths, _, missing = results_inputs.find_inputs(None, None, ("text",))
    assert not missing
    assert paths["text"].read_bytes() == b"the text"


def test_other_bytes_on_the_hub_leave_the_address(download, tmp_path, monkeypatch) -> None:
    import results_inputs

    monkeypatch.setattr(results_inputs, "_from_hub", lambda file: b"another text")
    (line,) = results_inputs.find_inputs(None, None, ("text",))[2]
    other = hashlib.sha256(b"another text").hexdigest()
    assert f"the Hub: expected sha256 {download.sha256}, got {other}; https://" in line
    monkeypatch.setattr(results_inputs, "_from_url", lambda file: b"the text")
    paths, _, missing = results_inputs.find_inputs(None, None, ("text",))
    assert not missing
    assert paths["text"].read_bytes() == b"the text"
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["a.txt"]


def test_a_model_without_weights_is_refused(download, tmp_path) -> None:
    import results_inputs

    (tmp_path / "config.json").write_text("{}")
    _, _, (line,) = results_inputs.find_inputs(None, str(tmp_path), ("model",))
    assert "expected *.safetensors in" in line
    _, _, (line,) = results_inputs.find_inputs(None, str(tmp_path / "no"), ("model",))
    assert "expected a folder with config.json, found none" in line


def test_dialogues_become_turns_and_unusable_pairs_are_dropped(tmp_path) -> None:
    import results_inputs

    dialogue = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d"
    turns = results_inputs.read_turns(dialogue)
    assert [turn["content"] for turn in turns] == ["a", "b", "c", "d"]
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 2
    unusable = [
        "\n\nHuman: a",
        "\n\nHuman: a\n\nAssistant: ",
        "",
        dialogue.replace("Human: c", "x"),
    ]
    assert [results_inputs.read_turns(text) for text in unusable[:3]] == [None] * 3
    rejected = [dialogue[:-1] + "e", dialogue, dialogue.replace("a", "z"), *unusable]
    with gzip.open(tmp_path / "pairs.gz", "wt") as file:
        for text in rejected:
            file.write(json.dumps({"chosen": dialogue, "rejected": text}) + "\n")
    (row,) = results_inputs.read_pairs(tmp_path / "pairs.gz")
    assert row["prompt"] == turns[:-1]
    assert (row["chosen"][0]["content"], row["rejected"][0]["content"]) == ("d", "e")


def test_the_chat_template_differs_from_the_models_by_the_last_newline() -> None:
    import results_inputs

    # That of SmolLM2-135M-Instruct.
    original = (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + "
        "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    ours, theirs = (
        jinja2.Environment().from_string(text) for text in (results_inputs.TEMPLATE, original)
    )
    turns = [{"role": r, "content": r[0]} for r in ("system", "user", "assistant", "user")]
    for messages in (turns, turns[1:], turns[1:2]):
        assert ours.render(messages=messages) + "\n" == theirs.render(messages=messages)
        options = {"messages": messages, "add_generation_prompt": True}
        assert ours.render(**options) == theirs.render(**options)


# ---- Stages --------------------------------------------------------------------------------------


def test_a_stage_is_skipped_until_its_settings_or_inputs_change(tmp_path, monkeypatch) -> None:
    import results
    from results_common import ResultsError, Setup, Stage, read_record

    calls: list[str] = []

    def run(name: str):
        return lambda setup: calls.append(name) or {"calls": len(calls)}  # type: ignore[func-returns-value]

    def fails(setup: Setup) -> dict:
        raise ResultsError("the reason")

    sizes = {"steps": 1}
    first = Stage("first", "a", run("first"), lambda tiny: dict(sizes), ("text",))
    second = Stage("second", "b", run("second"), lambda tiny: {}, after=("first",))
    third = Stage("third", "c", fails, lambda tiny: {})
    stages = [first, second, third]
    monkeypatch.setattr(results, "STAGES", stages)
    setup = Setup(tmp_path, True, {"text": tmp_path}, {"text": "1"})
    with pytest.raises(ResultsError, match="second: run first before"):
        results.run_stages([second], setup)
    for _ in range(2):
        with pytest.raises(ResultsError, match="third: the reason"):
            results.run_stages(stages, setup)
        assert calls == ["first", "second"]
    assert read_record(setup, "third") is None
    assert read_record(setup, "first")["commit"]
    setup = dataclasses.replace(setup, digests={"text": "2"})
    results.run_stages(stages[:2], setup)
    assert calls == ["first", "second"] * 2
    sizes["steps"] = 2
    assert "to run again" in results.list_stages(setup).splitlines()[0]
    results.run_stages(stages[:2], setup)
    assert calls == ["first", "second"] * 3


def fake_setup(folder: Path, monkeypatch, **digests: str) -> tuple[Any, list[tuple[str, Any]]]:
    """A setup of two training rows, and the list of the programs that its stages would run."""
    import results_stages
    from results_common import Setup

    programs: list[tuple[str, Any]] = []
    run = {"losses": [1.0], "seconds": [1.0], "peak": 1, "metrics": {}}

    def run_program(command: list[str], log: Path, **_: Any) -> tuple[str, float]:
        if "order" in command:
            programs.append(("order", None))
            Path(command[-1]).write_text("[1, 0]")
        return "verified", 1.0

    def run_peer(program: str, settings: dict[str, Any], file: Path, **_: Any) -> Any:
        programs.append((program, settings))
        if program == "adapter":
            Path(settings["out"]).mkdir(parents=True)
            (Path(settings["out"]) / "adapter_config.json").write_text("{}")
        return run | {"rows": Path(settings["rows"]).read_text() if "rows" in settings else None}

    monkeypatch.setattr(results_stages, "run_program", run_program)
    monkeypatch.setattr(results_stages, "run_peer", run_peer)
    monkeypatch.setattr(results_stages, "train_with_toolkit", lambda *_: run)
    monkeypatch.setattr(results_stages, "trl_reason", lambda: None)
    setup = Setup(folder, True, {"model": folder}, {"model": "m1"} | digests)
    setup.data.mkdir(exist_ok=True)
    return setup, programs


@pytest.mark.parametrize("kind", ["sft-lora", "sft-full", "dpo"])
def test_a_second_measurement_orders_its_rows_again(tmp_path, monkeypatch, kind) -> None:
    import results_stages

    setup, programs = fake_setup(tmp_path, monkeypatch)
    name = "pairs" if kind == "dpo" else "chats"
    for rows in ("a\nb\n", "c\nd\n"):
        (setup.data / f"{name}_train.jsonl").write_text(rows)
        (theirs,) = results_stages.run_tuning(setup, kind)["sides"]["trl"]
        assert theirs["rows"] == "".join(reversed(rows.splitlines(True)))
    # Two ranks use the rows of the run on one rank.
    assert results_stages.ordered_rows(setup, kind).read_text() == "d\nc\n"
    assert sum(program == "order" for program, _ in programs) == 2


def test_another_model_or_other_settings_of_lora_start_from_a_new_adapter(
    tmp_path, monkeypatch
) -> None:
    import results_stages

    setup, programs = fake_setup(tmp_path, monkeypatch)
    sizes = results_stages.tuning_sizes(True)
    monkeypatch.setattr(results_stages, "tuning_sizes", lambda tiny: sizes)
    folders = set()
    for model, rank in (("m1", 8), ("m1", 8), ("m2", 8), ("m2", 4)):
        sizes["lora"] = {"r": rank}
        setup = dataclasses.replace(setup, digests={"model": model})
        results_stages.write_start(setup, "dpo")
        config = results_stages.tuning_config(setup, "dpo", 1, tmp_path / "run")
        assert (Path(config["lora"]["from"]) / "adapter_config.json").is_file()
        folders.add(config["lora"]["from"])
    assert [settings["lora"]["r"] for _, settings in programs] == [8, 8, 4]
    assert len(folders) == 3


def test_a_dry_run_has_its_own_folder(tmp_path, monkeypatch, capsys) -> None:
    import results
    from results_common import Setup

    folders = []

    def set_up(folder: Path, *_: Any) -> tuple[Setup, list[str]]:
        folders.append(folder)
        return Setup(folder, True), []

    monkeypatch.setattr(results, "set_up", set_up)
    for more in ([], ["--tiny"]):
        monkeypatch.setattr(sys, "argv", ["results.py", "--list", "--folder", str(tmp_path), *more])
        assert results.main() == 0
    assert folders == [tmp_path, tmp_path / "tiny"]


def test_a_record_with_a_peer_is_kept_and_one_without_is_measured_again(
    tmp_path, monkeypatch, capsys
) -> None:
    import results
    from results_common import Setup, Stage, read_record

    reasons: dict[str, str | None] = {"peer": "no peer"}
    calls = []

    def run(setup: Setup) -> dict[str, Any]:
        calls.append(reasons["peer"])
        return {"not_measured": reasons["peer"]}

    sizes = {"steps": 1}
    first = Stage("first", "a", run, lambda _: dict(sizes), peer_reason=lambda _: reasons["peer"])
    after = Stage("after", "b", lambda _: {}, lambda _: {}, after=("first",))
    monkeypatch.setattr(results, "STAGES", [first, after])
    setup = Setup(tmp_path, True)
    for reason in ("no peer", "another reason", None, "no peer", None):
        reasons["peer"] = reason
        results.run_stages([first, after], setup)
        assert (read_record(setup, "after") or {})["key"] == results.all_keys(setup)["after"]
    assert calls == ["no peer", None]
    assert capsys.readouterr().out.count("the peer's figures are kept, because no peer") == 1
    sizes["steps"], reasons["peer"] = 2, "no peer"
    results.run_stages([first, after], setup)
    assert calls == ["no peer", None, "no peer"]


def test_a_peer_that_is_missing_does_not_change_the_settings(tmp_path, monkeypatch) -> None:
    from results_common import NO_PEERS
    from results_stages import STAGES

    def settings() -> list[dict[str, Any]]:
        return [stage.settings(False) for stage in STAGES]

    monkeypatch.delenv(NO_PEERS, raising=False)
    before = settings()
    monkeypatch.setenv(NO_PEERS, "1")
    assert settings() == before
    peers = [stage.name for stage in STAGES if stage.peer_reason is not None]
    assert peers == ["shakespeare", "sft-lora", "sft-full", "dpo", "ranks"]


def test_one_file_pins_the_release_of_trl(monkeypatch) -> None:
    import importlib.metadata
    import importlib.util

    import results_common

    assert re.fullmatch(r"\d+\.\d+\.\d+", results_common.TRL)
    assert f"    trl=={results_common.TRL}\n" in (ROOT / "setup.cfg").read_text()
    assert not re.search(r"trl[=><~]=", (ROOT / "Makefile").read_text())
    monkeypatch.delenv(results_common.NO_PEERS, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    for version, reason in (
        (results_common.TRL, None),
        ("1.0.0", f"TRL {results_common.TRL} is needed, 1.0.0 is installed"),
    ):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, v=version: v)
        assert results_common.trl_reason() == reason


def test_every_program_of_a_peer_has_short_functions() -> None:
    tree = ast.parse((ROOT / "benchmarks" / "results_peers.py").read_text("utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert all(f.end_lineno - f.lineno < 79 for f in functions if f.end_lineno)
    assert len(functions) > 10


def test_every_stage_has_a_section() -> None:
    from results_page import SECTIONS
    from results_stages import STAGES

    assert [*SECTIONS] == [stage.name for stage in STAGES]
    assert len(STAGES) >= 7


def test_a_failed_program_names_its_error_and_shows_no_row(tmp_path) -> None:
    from results_common import ResultsError, run_program

    for code, words in (
        (
            "print('a row with an Error in it'); raise ValueError('the cause')",
            "ValueError: the cause",
        ),
        ("print('a row'); raise SystemExit(3)", "exit code 3: no line of its log names an error"),
    ):
        with pytest.raises(ResultsError, match=words) as error:
            run_program([sys.executable, "-c", code], tmp_path / "log", threads=1)
        assert "a row" not in str(error.value)
        assert str(tmp_path / "log") in str(error.value)


# ---- The page ------------------------------------------------------------------------------------


KEYS: dict[str, str] = collections.defaultdict(lambda: "k1")


def record(name: str, figures: dict[str, Any], **changes: Any) -> dict[str, Any]:
    sizes = {"steps": 2, "batch": 1, "rounds": 1, "warm": 1, "held_out": 2, "max_tokens": 9}
    stamp = {"stage": name, "tiny": False, "commit": "c1", "date": "2026-01-02", "seconds": 60.0}
    stamp["key"] = "k1"
    inputs = {"inputs": {"model": "ab12"}, "machine": "Machine: m.", "settings": sizes}
    return {**stamp, **inputs, "figures": figures, **changes}


def tuned(reason: str | None = None, loss: float = 4e-4) -> dict[str, Any]:
    run = {"losses": [3.0, 2.0], "seconds": [1.0], "peak": 2e9, "metrics": {}}
    compared = {"loss": loss, "steps": 2, "time_ratio": 0.5, "peak_ratio": 0.75, "metrics": {}}
    sides = {"toolkit": [run], "trl": [] if reason else [run]}
    more = {"compared": [] if reason else [compared], "verified": True}
    return {"sides": sides, "not_measured": reason, **more}


def characters(reason: str | None = None) -> dict[str, Any]:
    run = {"seed": 1, "loss": 1.5, "curve": [[1, 4.0], [2, 3.0]], "step_seconds": 0.1}
    peer = run | {"loss": 1.6}
    sides = {"toolkit": [run], "nanogpt": [] if reason else [peer]}
    return {"sides": sides, "published": 1.88, "not_measured": reason}


def records(**changes: Any) -> dict[str, Any]:
    from results_stages import KINDS, STAGES

    entries: dict[str, Any] = {stage.name: None for stage in STAGES}
    entries["shakespeare"] = record("shakespeare", characters())
    entries |= {kind: record(kind, tuned()) for kind in KINDS}
    return entries | changes


def test_figures_of_another_commit_and_absent_ones_are_marked(tmp_path) -> None:
    from results_page import write_page

    page, readme = tmp_path / "docs" / "results.md", tmp_path / "README.md"
    changes = {"dpo": record("dpo", tuned("TRL is not installed"), commit="c0")}
    changes["sft-full"] = record("sft-full", tuned(loss=2e-3))
    lines = write_page(records(**changes), KEYS, "c1", page, readme)
    text = page.read_text()
    parts = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
    other = "**Measured at another commit than this page (`c1`).**"
    full = parts["SmolLM2-135M-Instruct: SFT of all parameters"]
    assert other not in full
    assert "| loss | 2.0e-03 | **NOT MET** (at most 0.001) |" in full
    assert "0.50 of the time, 0.75 of the memory" in full
    dpo = parts["SmolLM2-135M-Instruct: DPO with LoRA"]
    assert other in dpo
    assert "**The peer was not measured: TRL is not installed.**" in dpo
    assert "**Not measured yet.**" in parts["Two ranks"]
    assert "-0.1000" in parts["A published figure: character-level Shakespeare"]
    assert "dry run" not in text
    assert any(line.startswith("README     left as it was: ") for line in lines)
    for name in re.findall(r"\]\((assets/\S+)\)", text):
        svg = (page.parent / name).read_text()
        assert "prefers-color-scheme: dark" in svg
        assert "var(--ink)" in svg
        assert "#010203" not in svg
    assert len(re.findall(r"!\[", text)) == 4


def test_figures_of_other_inputs_are_marked_and_not_in_readme(tmp_path) -> None:
    from results_page import BEGIN, END, page_text, write_page

    words = "**Other settings or inputs than now.**"
    assert words not in page_text(records(), KEYS, "c1", [])
    keys = {**dict.fromkeys(records(), "k1"), "dpo": "k2"}
    readme = tmp_path / "README.md"
    readme.write_text(f"{BEGIN}\nold\n{END}\n")
    lines = write_page(records(), keys, "c1", tmp_path / "docs" / "results.md", readme)
    text = (tmp_path / "docs" / "results.md").read_text()
    assert text.count(words) == 1
    assert words in text.partition("DPO with LoRA")[2]
    assert "old" in readme.read_text()
    assert "README     left as it was: dpo: other settings or inputs than now" in lines


def test_a_commit_with_changes_equals_no_other(tmp_path) -> None:
    from results_page import stamp_line

    entry = record("dpo", tuned())
    assert "**" not in stamp_line(entry, "k1", "c1")
    assert "another commit than this page (`c1+`)" in stamp_line(entry, "k1", "c1+")
    dirty = stamp_line(entry | {"commit": "c1+"}, "k1", "c1+")
    assert "**Measured with changes that are not committed.**" in dirty


def test_readme_gets_its_figures_only_if_all_were_measured(tmp_path) -> None:
    from results_page import BEGIN, END, write_page

    page, readme = tmp_path / "docs" / "results.md", tmp_path / "README.md"
    before = f"# A\n\n{BEGIN}\nold\n{END}\n\nthe rest\n"
    readme.write_text(before)
    for changes in (
        {"dpo": None},
        {"dpo": record("dpo", tuned(), tiny=True)},
        {"shakespeare": record("shakespeare", characters("no script"))},
        {"dpo": record("dpo", tuned("TRL is not installed"))},
    ):
        write_page(records(**changes), KEYS, "c1", page, readme)
        assert readme.read_text() == before
    write_page(records(), KEYS, "c2", page, readme)
    text = readme.read_text()
    assert text.startswith(f"# A\n\n{BEGIN}\n![Training loss")
    assert text.endswith(f"{END}\n\nthe rest\n")
    assert "old" not in text
    assert len(re.findall(r"^\| (?!---| \|)[^|]+ \|", text, re.MULTILINE)) == 4
    assert "commit c1" in text
    assert "(docs/assets/results/shakespeare.svg)" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.4e-3, "1.4e-03"), (1.41e-3, "1.5e-03"), (9.91e-4, "1.0e-03"), (0.0, "0.0e+00")],
)
def test_a_difference_is_never_printed_smaller_than_it_is(value: float, text: str) -> None:
    from results_page import readme_text, round_up

    assert round_up(value) == text
    entries = {"dpo": record("dpo", tuned(loss=value))}
    assert f"losses within {text} of TRL's" in readme_text(records(**entries), "docs")


def test_readme_gets_no_figure_if_a_bar_fails_or_an_export_does_not_verify() -> None:
    from results_page import difference_table, reason_not_in_readme

    assert reason_not_in_readme(records(), KEYS) is None
    worse, unverified, second, metric, missing = characters(), *(tuned() for _ in range(4))
    worse["sides"]["nanogpt"][0]["loss"] = 1.47
    unverified["verified"] = False
    second["compared"].append(second["compared"][0] | {"loss": 0.00104})
    metric["compared"][0]["metrics"] = {"margin": 0.5}
    missing["compared"].append(missing["compared"][0] | {"loss": float("nan")})
    for name, figures, reason in (
        ("shakespeare", worse, "seed 1: expected at most 0.02 over nanoGPT's loss, got 0.0300"),
        ("sft-full", unverified, "the export did not verify"),
        ("dpo", second, "loss differs from TRL's: expected at most 0.001, got 1.1e-03"),
        ("dpo", metric, "margin differs from TRL's: expected at most 0.001, got 5.0e-01"),
        ("dpo", missing, "loss differs from TRL's: expected at most 0.001, got nan"),
    ):
        entries = records(**{name: record(name, figures)})
        assert reason_not_in_readme(entries, KEYS) == f"{name}: {reason}"
    assert "| 1.1e-03 | **NOT MET**" in difference_table(second["compared"])


def test_a_missing_peer_is_in_the_page_of_a_dry_run_too(tmp_path) -> None:
    from results_page import page_text

    dry = record("sft-full", tuned("why"), tiny=True)
    text = page_text(records(**{"sft-full": dry}), KEYS, "c1", [])
    assert "**This is a dry run (`--tiny`)" in text
    assert "**The peer was not measured: why.**" in text


def distilled(taught: float) -> dict[str, Any]:
    shape = {"teacher_layers": 30, "student_layers": 10}
    shape |= {"teacher_parameters": 135e6, "student_parameters": 64e6}
    run = {"step_seconds": 1.0, "peak": 2e9, "curve": [[1, 4.0], [2, 3.0]]}
    runs = {"finetune": run, "distill": run | {"agreement": [0.1, 0.4]}}
    perplexities = {"teacher": 30.0, "student at the start": 5e4}
    perplexities |= {"without the teacher": 100.0, "with the teacher": taught}
    held_out = {name: {"perplexity": value, "tokens": 9} for name, value in perplexities.items()}
    return {"student": shape, "rows": {}, "runs": runs, "held_out": held_out}


@pytest.mark.parametrize(("taught", "words"), [(90.0, "is lower: 0.90 of"), (101.0, "**not lower")])
def test_the_page_says_whether_a_teacher_helped(tmp_path, taught: float, words: str) -> None:
    from results_distillation import distillation_sizes
    from results_page import write_page

    page = tmp_path / "results.md"
    entry = record("distillation", distilled(taught), settings=distillation_sizes(False))
    write_page(records(distillation=entry), KEYS, "c1", page, tmp_path / "README.md")
    (part,) = (p for p in page.read_text().split("\n## ") if p.startswith("Distillation"))
    assert words in part
    assert f"| with the teacher | {taught:.2f} | 1.00 | 2.00 |" in part
    assert "10.0% of the tokens in the first step and 40.0%" in part
    assert (tmp_path / "assets" / "results" / "distillation.svg").is_file()


def test_rows_of_text_have_whole_paragraphs_and_fit() -> None:
    from results_distillation import iterate_rows

    def tokenizer(text: str, **_: Any) -> dict[str, list[str]]:
        return {"input_ids": text.split()}

    text = "a b\n\nc\n\nd e f\n\n" + "g " * 9 + "\n\nh\n\ni"
    assert [*iterate_rows(text, tokenizer, 4)] == ["a b\n\nc", "d e f", "h\n\ni"]


# ---- The configs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_config_with_a_published_figure_says_how_it_starts(file: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    text = file.read_text("utf-8")
    for words in ("# Published figure: ", "# Hyper-parameters: ", "# Change: "):
        assert words in text
    assert f"toolkit train recipes/configs/{file.name}" in text
    settings = yaml.safe_load(text)
    folder = ROOT / settings["model"]["name_or_path"]
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert config.vocab_size == len(tokenizer) == 65
    assert config.n_positions == settings["data"]["sequence_length"]
    letters = "First Citizen:\nBefore we proceed any further, hear me speak & 3$-?!;'zZ"
    ids = tokenizer(letters)["input_ids"]
    assert len(ids) == len(letters)
    assert tokenizer.decode(ids) == letters


def test_both_configs_are_there() -> None:
    assert [file.stem.rsplit("_", 1)[1] for file in CONFIGS] == ["cpu", "gpu"]


# ---- The program ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.long
def test_a_tiny_run_of_all_stages_ends_and_a_second_one_measures_nothing(tmp_path) -> None:
    """Recipes, exports, two ranks, kill -9 and resume, held-out figures, the page; no peers."""
    page = tmp_path / "docs" / "results.md"
    command = [sys.executable, str(ROOT / "benchmarks" / "results.py"), "--tiny", "--no_peers"]
    command += ["--folder", str(tmp_path / "results"), "--write", str(page)]
    command += ["--readme", str(tmp_path / "README.md")]
    program = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert program.returncode == 0, program.stdout + program.stderr
    text = page.read_text()
    assert "Not measured yet" not in text
    assert text.count("**The peer was not measured: ") == 5
    assert "**NOT EQUAL**" not in text
    assert "**started again**" not in text
    assert "did not verify" not in text
    folder = tmp_path / "results" / "tiny"
    resumed = json.loads((folder / "resume.json").read_text())["figures"]["dpo"]
    assert resumed["losses_equal"]
    assert resumed["state_equal"]
    assert resumed["has_resumed"]
    assert resumed["checkpoints_at_kill"] >= 1
    (ranks,) = json.loads((folder / "ranks.json").read_text())["figures"]["kinds"].values()
    assert ranks["one_rank_loss"] < 1e-4
    again = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert again.stdout.count("done at commit") == 8
    listed = subprocess.run(
        [*command, "--list"], capture_output=True, text=True, timeout=100, check=True
    )
    assert listed.stdout.count("done at") == 8


def test_an_accuracy_of_rounding_is_not_compared():
    from results_stages import compare

    def side(margins: list[float], accuracies: list[float]) -> dict[str, Any]:
        metrics = {"margin": margins, "accuracy": accuracies}
        return {"losses": [0.7] * 3, "seconds": [1.0], "peak": 1, "metrics": metrics}

    ours = side([1e-7, 0.01, 0.02], [0.25, 0.5, 0.75])
    theirs = side([0.0, 0.01, 0.02], [0.0, 0.5, 0.75])
    assert compare(ours, theirs)["metrics"]["accuracy"] == 0
    theirs["metrics"]["accuracy"][2] = 0.5  # the control
    assert compare(ours, theirs)["metrics"]["accuracy"] == 0.25
    nothing = side([0.0] * 3, [0.0] * 3)
    assert math.isnan(compare(nothing, nothing)["metrics"]["accuracy"])
