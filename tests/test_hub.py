"""Publishing: the real `huggingface_hub` client against a Hub in this process that can fail.

The client is told to use its HTTP transport (HF_HUB_DISABLE_XET=1), but for one test of the other.
"""

import ast
import copy
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, free_port, save_byte_tokenizer, save_tiny_model, torchrun
from hub_server import READ_TOKEN, SIGNATURE, TOKEN, XET_TOKEN, Fault, Hub, Large, Repo

from toolkit.checkpoint import commit
from toolkit.checkpoint.summary import collect_run_facts
from toolkit.config.published import select_publishable_settings
from toolkit.errors import REMOVED, ExportError, is_secret_name, scrub
from toolkit.formats import export_manifest
from toolkit.hub import card as model_card
from toolkit.hub.local import read_export

NAME = "me/tiny"
FACTS = {
    "base_model": {"name": "tiny", "hub_id": None, "init": "random"},
    "data": {"train_files": ["a.txt"]},
    "hyperparameters": {"optim.learning_rate": 0.001},
    "metrics": {"loss": 1.5},
    "global_batch": 16,
    "devices": 2,
    "versions": {"toolkit": "0"},
    "steps": 3,
    "tokens": 96,
}


class Worker:
    """The process that holds the real client."""

    def __init__(self, hub: Hub, folder: Path) -> None:
        self.errors = folder / "stderr.txt"
        environment = {
            k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "HF_TOKEN")
        } | {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(folder / "home"),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        self.environment = environment
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "hub_worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors.open("w"),
            text=True,
            env=environment,
            cwd=folder,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", self.errors.read_text()
        self.heard: list[str] = []

    def __call__(self, what: str, *arguments: object, **options: object) -> dict:
        self.begin(what, *arguments, **options)
        return self.end()

    def begin(self, what: str, *arguments: object, **options: object) -> None:
        asked = {n: options.pop(n) for n in ("environment", "fork", "xet") if n in options}
        asked |= {"call": what, "arguments": [str(a) for a in arguments], "options": options}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()

    def end(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self.errors.read_text()
        self.heard.append(line)
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@pytest.fixture(scope="module")
def hub():
    with Hub() as server:
        yield server


@pytest.fixture(scope="module")
def push(hub, tmp_path_factory):
    """Call `hub.push` and the like in the process with the real client."""
    worker = Worker(hub, tmp_path_factory.mktemp("worker"))
    yield worker
    worker.close()


@pytest.fixture(autouse=True)
def _fresh(hub):
    hub.reset()
    hub.repos.clear()
    hub.taken.clear()


def write_manifest(folder: Path, facts: dict | None = None, **more: object) -> Path:
    (folder / export_manifest.FILE).unlink(missing_ok=True)
    origin = {"checkpoint": "ab" * 32, "step": 3, "dtype": "auto", "run": facts or FACTS, **more}
    export_manifest.write(folder, export_manifest.describe_folder(folder), origin)
    return folder


def make_export(folder: Path, shard: str = "20KB", seed: int = 0) -> Path:
    """Write a tiny model in several files, with a tokenizer and a manifest."""
    folder.mkdir()
    save_byte_tokenizer(folder)
    save_tiny_model(folder, shard=shard, seed=seed)
    return write_manifest(folder)


@pytest.fixture(scope="module")
def export(tmp_path_factory) -> Path:
    return make_export(tmp_path_factory.mktemp("export") / "tiny-hf")


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """The export of an older run, in other shards."""
    return make_export(tmp_path_factory.mktemp("other") / "tiny-hf", shard="60KB", seed=1)


def contents(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in folder.iterdir()}


def holds(repo: Repo, folder: Path, branch: str = "main") -> bool:
    """Whether the repository has every file of the folder, to the byte, and a card."""
    there = repo.content(branch)
    return "README.md" in there and all(there.get(n) == c for n, c in contents(folder).items())


def every(kind: str, first: int, last: float, **more: object) -> Callable:
    """Return faults for the requests from number `first` to `last`."""
    return lambda number, method, path: (
        Fault(kind, **more) if first <= number <= last else None  # type: ignore[arg-type]
    )


# ---- One push ------------------------------------------------------------------------------------


def test_an_export_becomes_one_commit(hub, push, export):
    done = push("push", export, NAME)
    assert done["error"] is None, done["trace"]
    repo = hub.repos[NAME]
    assert repo.private
    assert holds(repo, export)
    assert len(repo.branches["main"]) == 2, "the first commit, and one"
    assert done["result"] == f"{hub.url}/{NAME}/commit/{repo.head().oid}"
    assert sum(isinstance(f, Large) for f in repo.head().files.values()) >= 3
    assert "all sizes and hashes agree" in done["said"][-1]
    # The token goes to the Hub alone, not to the store of the large files.
    assert all((s.token is None) == s.path.startswith("/store/") for s in hub.seen)

    card = repo.content()["README.md"].decode()
    digest = export_manifest_digest(export)
    for part in ("library_name: transformers", "pipeline_tag: text-generation", digest):
        assert part in card
    for part in (f'from_pretrained("{NAME}"', "toolkit verify tiny", "optim.learning_rate", "```"):
        assert part in card

    # The same again: nothing to do, no second commit, not a byte of weights.
    hub.reset()
    second = push("push", export, NAME)
    assert second["result"] == done["result"]
    assert "nothing to do" in second["said"][-1]
    assert len(repo.branches["main"]) == 2
    assert {s.method for s in hub.seen} == {"GET"}


def export_manifest_digest(folder: Path) -> str:
    return hashlib.sha256((folder / export_manifest.FILE).read_bytes()).hexdigest()


def test_what_was_pushed_loads_and_verifies(hub, push, export, tmp_path):
    push("push", export, NAME)
    for name, content in hub.repos[NAME].content().items():
        (tmp_path / name).write_bytes(content)
    from toolkit.verify import verify_export

    assert verify_export(None, tmp_path).ok


def test_an_adapter(hub, push, export, tmp_path):
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    base, folder = AutoModelForCausalLM.from_pretrained(export), tmp_path / "adapter"
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
    get_peft_model(base, config).save_pretrained(folder)
    (folder / "README.md").unlink()  # PEFT's own
    done = push("push", write_manifest(folder), NAME)
    assert "names its base by a path" in done["error"][1]
    assert NAME not in hub.repos
    file = folder / "adapter_config.json"
    said = json.loads(file.read_text()) | {"base_model_name_or_path": "me/base"}
    file.write_text(json.dumps(said))
    adapter = {
        "base": {"name": "me/base", "hub_id": "me/base"},
        "base_config": json.loads((export / "config.json").read_text()),
        "settings": {"r": 2},
    }
    done = push("push", write_manifest(folder, adapter=adapter), NAME)
    assert done["error"] is None, done["trace"]
    assert holds(hub.repos[NAME], folder)
    weights = folder / "adapter_model.safetensors"
    save_file({f"x.{k}": t for k, t in load_file(weights).items()}, weights)
    (folder / export_manifest.FILE).unlink()
    done = push("push", write_manifest(folder, adapter=adapter), NAME)
    assert "does not verify" in done["error"][1]
    assert "PEFT" in done["error"][1]


def test_weights_of_an_older_export_go_in_the_same_commit(hub, push, export, other):
    push("push", other, NAME)
    repo = hub.repos[NAME]
    read_too = {"added_tokens.json", "chat_template.jinja", "pytorch_model.bin"}
    read_too |= {"additional_chat_templates/tools.jinja", "adapter_config.json"}
    assert not read_too & set(contents(export))
    hub.add(repo, {"notes.md": b"mine"} | dict.fromkeys({"model.safetensors", *read_too}, b"old"))
    old = set(repo.content())
    seen = push("preview", export, NAME)["result"]
    push("push", export, NAME)
    gone = old - set(repo.content())
    weights = {n for n in contents(other) if n.startswith("model-")} | {"model.safetensors"}
    assert gone == weights | read_too  # a reader would take them for the new model's
    assert sorted(gone) == seen["delete"]
    assert holds(repo, export)
    assert repo.content()["notes.md"] == b"mine"
    assert len(repo.branches["main"]) == 4


def test_public_only_when_asked(hub, push, export):
    assert push("push", export, NAME, private=False)["error"] is None
    assert not hub.repos[NAME].private
    # A repository that is public already is not filled by a push that means to be private.
    hub.make("me/open", private=False)
    done = push("push", export, "me/open")
    assert done["error"][0] == "HubError"
    assert "is public" in done["error"][1]
    assert "--public" in done["error"][1]
    assert len(hub.repos["me/open"].branches["main"]) == 1
    assert push("push", export, "me/open", revision="next")["error"] is not None
    assert list(hub.repos["me/open"].branches) == ["main"]


def test_a_branch_is_created(hub, push, export, other):
    push("push", export, NAME)
    done = push("push", other, NAME, revision="runs/two")
    assert done["error"] is None, done["trace"]
    repo = hub.repos[NAME]
    assert holds(repo, export)
    assert holds(repo, other, "runs/two")
    assert not set(repo.content("runs/two")) & {"model-00003-of-00005.safetensors"}
    assert len(repo.branches["main"]) == 2


def test_cards(hub, push, export, tmp_path):
    """The folder's own card goes as it is; one that was edited on the Hub stays."""
    push("push", export, NAME)
    repo = hub.repos[NAME]
    hub.add(repo, {"README.md": b"# Better words\n"})
    done = push("push", export, NAME)
    assert "nothing to do" in done["said"][-1]
    assert repo.content()["README.md"] == b"# Better words\n"

    own = tmp_path / "own"
    shutil.copytree(export, own)
    (own / "LICENSE").write_text("terms of the base\n")
    (own / "README.md").write_text("# My words\n")
    assert push("push", own, NAME)["error"] is None
    assert repo.content()["README.md"] == b"# My words\n"
    assert repo.content()["LICENSE"] == b"terms of the base\n"
    (own / "README.md").write_bytes(b"# Meine W\xf6rter\n")
    error = push("push", own, NAME)["error"]
    assert error[0] == "ExportError"
    assert "README.md is not UTF-8" in error[1]
    (own / "README.md").write_text(f"# My words\nlogin with {TOKEN}\n")
    done = push("push", own, NAME)
    assert done["error"][0] == "ExportError"
    assert "token" in done["error"][1]
    assert repo.content()["README.md"] == b"# My words\n"


def test_dry_run(hub, push, export):
    seen = push("preview", export, NAME)["result"]
    assert set(seen["send"]) == set(contents(export)) | {"README.md"}
    assert seen["send"]["config.json"] == (export / "config.json").stat().st_size
    assert seen["card"].startswith("---\n")
    assert "would be created, private" in seen["notes"][0]
    assert not hub.repos
    assert {s.method for s in hub.seen} == {"GET"}

    push("push", export, NAME)
    seen = push("preview", export, NAME)["result"]
    assert not seen["send"]
    assert set(contents(export)) < set(seen["same"])

    # Without a token no request is made; without a network it says so and goes on.
    hub.reset()
    nobody = {"HF_TOKEN": None}
    seen = push("preview", export, NAME, environment=nobody)["result"]
    assert "hf auth login" in seen["notes"][0]
    assert not hub.seen
    hub.faults = every("before", 0, float("inf"))
    seen = push("preview", export, NAME)["result"]
    assert "could not be read" in seen["notes"][0]
    assert set(seen["send"]) == set(contents(export)) | {"README.md"}


def test_the_default_transport(hub, push, export):
    """xet: the same push, up to the blocks' content, which this server does not put together."""
    pytest.importorskip("hf_xet")
    done = push("push", export, NAME, xet=True)
    assert done["error"] is None, done["trace"]
    assert "all sizes and hashes agree" in done["said"][-1]
    repo = hub.repos[NAME]
    assert len(repo.branches["main"]) == 2
    large = {n: f.sha256 for n, f in repo.head().files.items() if isinstance(f, Large)}
    files = sorted(export.glob("*.safetensors"))
    assert large == {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
    assert not any(s.method == "PUT" for s in hub.seen)
    assert {s.token for s in hub.seen if s.path.startswith("/cas/")} == {XET_TOKEN}
    second = push("push", export, NAME, xet=True)
    assert "nothing to do" in second["said"][-1]


# ---- Refusals ------------------------------------------------------------------------------------


def test_verified_first(hub, push, export, tmp_path):
    bad = tmp_path / "bad"
    shutil.copytree(export, bad)
    file = sorted(bad.glob("*.safetensors"))[0]
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    done = push("push", bad, NAME)
    assert done["error"][0] == "ExportError"
    assert file.name in done["error"][1]
    assert push("preview", bad, NAME)["error"][0] == "ExportError"
    assert not hub.seen, "nothing was sent, not even a question"
    (bad / export_manifest.FILE).unlink()
    assert "toolkit consolidate" in push("push", bad, NAME)["error"][1]
    for name in ("checkpoints", "dcp"):
        folder = tmp_path / f"of-{name}"
        (folder / name).mkdir(parents=True)
        said = push("push", folder, NAME)["error"][1]
        assert f"toolkit consolidate {folder} --output {folder}-hf" in said
    assert "does not exist" in push("push", tmp_path / "nowhere", NAME)["error"][1]
    assert not hub.seen


def test_links_that_leave_the_folder_are_not_followed(hub, push, export, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("README.md", export_manifest.FILE, "config.json"):
        linked = tmp_path / f"linked-{name}"
        shutil.copytree(export, linked)
        if (linked / name).exists():
            shutil.move(linked / name, outside / name)
        else:
            (outside / name).write_text("# private\n")
        (linked / name).symlink_to(outside / name)
        for what in ("push", "preview"):
            done = push(what, linked, NAME)
            assert done["error"][0] == "ExportError", (name, done)
            assert "link" in done["error"][1]
            assert name in done["error"][1]
    assert not hub.seen


def test_refusals_are_one_line(hub, push, export):
    hub.taken.add("me/taken")
    hub.make("me/closed").writable = False
    cases = [
        ({"environment": {"HF_TOKEN": None}}, NAME, "run `hf auth login`, or set HF_TOKEN"),
        ({"environment": {"HF_TOKEN": "hf_wrongWrongWrongWrong"}}, NAME, "(401: "),
        ({"environment": {"HF_TOKEN": READ_TOKEN}}, NAME, "write role"),
        ({}, "tiny", "is not ORG/NAME"),
        ({}, "me/a b", "is not one"),
        ({}, "me/a/b", "is not one"),
        ({}, "others/tiny", "write role for others"),
        ({}, "me/closed", "write role for me"),
        ({}, "me/taken", "the name is taken"),
        ({"revision": "0" * 40}, "me/other", "branch"),
    ]
    for options, name, words in cases:
        hub.reset()
        done = push("push", export, name, **options)
        assert done["error"] is not None, (name, options)
        assert done["error"][0] == "HubError", done
        assert words in done["error"][1], done["error"]
        assert "\n" not in done["error"][1]
        assert len(hub.seen) < 12, "refusals are not tried again"
    assert not any(len(r.branches["main"]) > 1 for r in hub.repos.values())


def test_access_is_checked_before_a_run(hub, push):
    assert push("check_access", NAME)["error"] is None
    assert hub.repos[NAME].private
    assert push("check_access", NAME)["error"] is None
    hub.make("me/closed").writable = False
    hub.make("me/open", private=False)
    for name, options, words in [
        ("me/closed", {}, "write role"),
        ("me/open", {}, "is public"),
        ("others/x", {}, "write role"),
        (NAME, {"environment": {"HF_TOKEN": READ_TOKEN}}, "write role"),
        (NAME, {"environment": {"HF_TOKEN": None}}, "hf auth login"),
    ]:
        done = push("check_access", name, **options)
        assert words in done["error"][1], done
    for create, asked in ((False, 1), (True, 4)):  # a rehearsal does not wait for the Hub
        hub.reset()
        hub.faults = every("status", 0, float("inf"), status=503)
        assert "the Hub answered 503" in push("check_access", NAME, create=create)["error"][1]
        assert len(hub.seen) == asked


# ---- A Hub that fails ----------------------------------------------------------------------------


def again(hub: Hub, before: Repo) -> Repo:
    """Return the repository as it was."""
    hub.reset()
    hub.repos[NAME] = copy.deepcopy(before)
    return hub.repos[NAME]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["before", "after"])
def test_the_connection_breaks_at_every_request_in_turn(hub, push, export, other, kind):
    """Once at request k: the repository ends complete. From k on: unchanged, or complete."""
    assert push("push", other, NAME)["error"] is None
    before = hub.repos[NAME]
    outcomes = set()
    k = 0
    while True:
        repo = again(hub, before)
        hub.faults = every(kind, k, k)
        done = push("push", export, NAME)
        assert done["error"] is None, (k, done["error"])
        assert holds(repo, export), k
        assert len(repo.branches["main"]) == 3, "one commit, also where its answer was lost"
        if len(hub.seen) <= k:
            break
        repo = again(hub, before)
        old = repo.content()
        hub.faults = every(kind, k, float("inf"))
        done = push("push", export, NAME, tries=2)
        unchanged = repo.content() == old and len(repo.branches["main"]) == 2
        complete = holds(repo, export) and len(repo.branches["main"]) == 3
        assert unchanged or complete, k
        assert done["error"][0] == "HubError"
        assert "connection was lost" in done["error"][1]
        assert "same command again" in done["error"][1]
        outcomes.add("unchanged" if unchanged else "complete")
        # The same command completes it when the Hub is back.
        hub.reset()
        assert push("push", export, NAME)["error"] is None
        assert holds(repo, export)
        assert len(repo.branches["main"]) == 3
        k += 1
    assert k >= 10, "not every request was met"
    assert outcomes == {"unchanged", "complete"}


@pytest.mark.faults
def test_creation_breaks_at_every_request(hub, push, export):
    """The same for a repository and a branch that have yet to be made."""
    for kind in ("before", "after"):
        for k in range(5):
            hub.reset()
            hub.repos.clear()
            hub.faults = every(kind, k, k)
            done = push("push", export, NAME, revision="next")
            assert done["error"] is None, (kind, k, done["error"])
            assert holds(hub.repos[NAME], export, "next")
            assert hub.repos[NAME].private
            assert len(hub.repos[NAME].branches["next"]) == 2


@pytest.mark.faults
def test_busy_hub(hub, push, export):
    """One 429 or 5xx ends no push; other refusals are final."""
    for status in (429, 500, 502, 503, 504):
        for k in (0, 3, 6):
            hub.reset()
            hub.repos.clear()
            hub.faults = every("status", k, k, status=status)
            done = push("push", export, NAME)
            assert done["error"] is None, (status, k, done)
            assert holds(hub.repos[NAME], export)
    hub.reset()
    hub.faults = every("status", 0, float("inf"), status=418)
    assert "(418" in push("push", export, NAME)["error"][1]
    assert len(hub.seen) == 1
    hub.reset()
    hub.faults = every("status", 0, float("inf"), status=500)
    done = push("push", export, NAME, tries=3)
    assert "failed 3 times" in done["error"][1]
    assert len(hub.seen) == 3
    assert [line.count("the Hub answered 500; trying again in") for line in done["said"]] == [1, 1]


def test_a_push_that_failed_at_its_commit_goes_on(hub, push, export):
    """The client asks for it once; the second push sends nothing large again."""
    repo = hub.make(NAME)
    lost = iter([True])
    hub.faults = lambda number, method, path: (
        Fault("status", 503) if "/commit/" in path and next(lost, False) else None
    )
    done = push("push", export, NAME, tries=1)
    assert "failed 1 times: the Hub answered 503" in done["error"][1]
    assert len(repo.branches["main"]) == 1
    stored = sum(s.method == "PUT" for s in hub.seen)
    assert stored >= 3
    assert push("push", export, NAME)["error"] is None
    assert holds(repo, export)
    assert sum(s.method == "PUT" for s in hub.seen) == stored


def test_large_files_in_parts(hub, push, export):
    hub.part_size = 9_000
    hub.faults = every("before", 8, 9)
    assert push("push", export, NAME)["error"] is None
    assert holds(hub.repos[NAME], export)
    assert sum(s.method == "PUT" for s in hub.seen) > 6


def test_killed_and_the_same_command(hub, push, export, tmp_path):
    """SIGKILL in the middle of sending; then the same push sends only what was missing."""
    repo = hub.make(NAME)
    child = tmp_path / "child"
    puts = 0

    def kill_at_the_third(number: int, method: str, path: str) -> Fault | None:
        nonlocal puts
        puts += method == "PUT"
        if puts == 3 and method == "PUT":
            os.kill(int(child.read_text()), signal.SIGKILL)
            return Fault("before")
        return None

    hub.faults = kill_at_the_third
    assert push("push", export, NAME, fork=str(child))["signal"] == signal.SIGKILL
    stored = set(repo.objects)
    assert stored, "it was killed before anything was sent"
    assert len(repo.branches["main"]) == 1, "a reader sees nothing of it"
    hub.reset()
    assert push("push", export, NAME)["error"] is None
    assert holds(repo, export)
    sent = {s.path.split("/")[-1] for s in hub.seen if s.method == "PUT"}
    assert not sent & stored
    assert sent | stored == set(repo.objects)


def test_somebody_else_commits_meanwhile(hub, push, export):
    repo = hub.make(NAME)
    once = iter([True])

    def interfere(repo: Repo) -> None:
        if next(once, False):
            hub.add(repo, {"notes.md": b"theirs", "model.safetensors": b"theirs"})

    hub.before_commit = interfere
    assert push("push", export, NAME)["error"] is None
    assert holds(repo, export)
    assert repo.content()["notes.md"] == b"theirs"
    assert "model.safetensors" not in repo.content(), "it came after the first look"


def test_what_the_server_lists_is_compared(hub, push, export):
    hub.make(NAME)
    hub.faults = lambda number, method, path: (
        setattr(hub, "lists_wrong_sha", True) if "/commit/" in path else None
    )
    done = push("push", export, NAME)
    assert "lists different content" in done["error"][1]


def test_gitignore_of_the_repository_leaves_nothing_out(hub, push, export):
    hub.make(NAME, files={".gitignore": b"*.safetensors\n"})
    hub.ignores = "*.safetensors"
    assert push("push", export, NAME)["error"] is None
    assert holds(hub.repos[NAME], export)


# ---- The command line, and secrets ---------------------------------------------------------------


def test_command_line(hub, push, export):
    done = push("command", "push", export, "--repo_id", NAME)
    assert done["result"] == 0, done["err"]
    assert done["out"].endswith(f"/{NAME}/commit/{hub.repos[NAME].head().oid}\n")
    assert hub.repos[NAME].private
    dry = push("command", "push", export, "--repo_id", "me/second", "--public", "--dry_run")
    assert dry["result"] == 0, dry["err"]
    for words in ("config.json", "would be created, public", "library_name: transformers"):
        assert words in dry["out"]
    assert list(hub.repos) == [NAME]
    assert push("command", "push", export, "--repo_id", "me/second", "--public")["result"] == 0
    assert not hub.repos["me/second"].private
    bad = push("command", "push", export, "--repo_id", "tiny")
    assert bad["result"] == 1
    assert bad["err"].startswith("toolkit: error: ")
    assert bad["err"].count("\n") == 1
    assert push("command", "push", export)["result"] == 2


@pytest.mark.slow
def test_a_run_publishes_itself(hub, push, tiny_llama, text_file, tmp_path):
    """Two processes; the Hub refuses at the end; the command that the error names completes it."""
    run, root = tmp_path / "run", tmp_path / "elsewhere"
    command = [
        *torchrun(2, free_port()),
        str(ROOT / "recipes" / "pretrain.py"),
        *("--model.name_or_path", str(tiny_llama), "--data.train_files", str(text_file)),
        *("--data.sequence_length", "32", "--train.max_steps", "2", "--output_dir", str(run)),
        *("--train.logging_steps", "1", "--sharding.param_dtype", "float32"),
        *("--checkpoint.root", str(root)),
        *("--hub.push_to_hub", "true", "--hub.hub_model_id", NAME),
    ]
    hub.faults = lambda number, method, path: (
        Fault("status", 403) if "/preupload/" in path else None
    )
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=push.environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert said.index(f"created {NAME}, private") < said.index("step 1/2")
    assert [s.path.split("/")[2] for s in hub.seen][:2] == ["models", "repos"]
    assert commit.committed_steps(root)
    assert not commit.committed_steps(run)
    assert "Traceback" not in said.split("error: ")[1].split("\n")[0]
    words = said.split("publish it with: toolkit ")[1].splitlines()[0].split()
    assert words == ["push", f"{run}-hf", "--repo_id", NAME]
    hub.reset()
    assert push("command", *words)["result"] == 0
    assert holds(hub.repos[NAME], Path(f"{run}-hf"), "main")
    card = hub.repos[NAME].content("main")["README.md"].decode()
    for part in ("trained from tiny_llama", "`text.txt`", "| train.per_device_train_batch_size |"):
        assert part in card
    assert "Batch: 16 samples a step on 2 devices." in card
    assert str(tmp_path) not in card + json.dumps(export_manifest.read(Path(f"{run}-hf")))
    push.heard.append(said)


def test_zz_no_token_in_anything_said(push):
    """Runs last: over all that the tests above made the client say, log and raise."""
    said = "".join(push.heard) + push.errors.read_text()
    assert "thrown while requesting PUT" in said, "the client's log of signed addresses is there"
    for secret in (TOKEN, READ_TOKEN, XET_TOKEN, SIGNATURE):
        assert secret not in said
    assert REMOVED in said


def test_facts_of_a_run_hold_no_secret_and_no_path(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    base = tmp_path / "private" / "base"
    base.mkdir(parents=True)
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    settings = {
        "model": {"name_or_path": str(base), "init": "pretrained", "api_key": "canary-by-name"},
        "data": {"train_files": [f"{tmp_path}/private/a.txt", "https://me:canary@host/b.txt"]},
        "optim": {"learning_rate": 0.1, "note": f"login with {TOKEN}"},
        "hub": {"hub_model_id": NAME},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    lines = [{"step": s, "loss": 9.0 - s / 100, "tokens": s} for s in range(1, 601)]
    lines[399]["eval_loss"] = 5.5
    (run / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    facts = collect_run_facts(run, 500)
    text = json.dumps(facts)
    for word in ("canary", TOKEN, str(tmp_path), "private"):
        assert word not in text
    assert facts["data"]["train_files"] == ["a.txt", "b.txt"]
    assert facts["base_model"]["license"] == "apache-2.0"
    assert facts["steps"] == 500
    assert facts["metrics"]["eval_loss"] == 5.5
    assert collect_run_facts(tmp_path / "no") == {}

    manifest = {"toolkit": "0", "origin": {"run": facts}, "tensors": {}, "files": {}}
    card = model_card.render_card(manifest, NAME, "ab" * 32)
    front = yaml.safe_load(card.split("---")[1])
    assert front["license"] == "apache-2.0"
    assert "base_model" not in front, "the Hub refuses one that is not its own"
    assert model_card.is_unedited(card)
    assert not model_card.is_unedited(card.replace("Load it", "Read it"))
    assert not model_card.is_unedited("# Mine\n")
    facts["base_model"] |= {"hub_id": "org/base", "name": "org/base"}
    front = yaml.safe_load(model_card.render_card(manifest, NAME, "ab" * 32).split("---")[1])
    assert front["base_model"] == "org/base"
    bare = model_card.render_card(manifest | {"origin": {}}, NAME, "ab" * 32)
    assert "## Training" not in bare
    facts["metrics"] |= {"data_time_max": 0.125, "data_time": 0.25, "eval_accuracy": 0.375}
    timed = model_card.render_card(manifest, NAME, "ab" * 32)  # times are no results
    assert "0.375" in timed
    assert not [name for name in ("data_time", "0.125", "0.25") if name in timed]
    assert "toolkit verify tiny" in bare


def test_facts_of_a_fine_tuning(tmp_path):
    private = f"{tmp_path}/private"
    settings = {
        "model": {"name_or_path": "org/base"},
        "data": {
            "sources": [
                {"files": [f"{private}/a.jsonl", "b.jsonl"], "weight": 0.7},
                {"files": f"{private}/c.jsonl"},
                {"dataset_name": "org/chats", "dataset_split": "train", "weight": 0.3},
            ],
            "chat_template": f"{private}/template.jinja",
        },
        "train": {"eval_prompts": [f"what is in {private}?"], "max_steps": 3},
        "lora": {"r": 4},
        "preference": {"loss_type": "ipo"},
    }

    def facts() -> dict:
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
        return collect_run_facts(tmp_path)

    found = facts()
    assert "private" not in json.dumps(found)
    assert found["hyperparameters"]["train.max_steps"] == 3
    assert found["hyperparameters"]["preference.loss_type"] == "ipo"
    manifest = {"toolkit": "0", "origin": {"run": found}, "tensors": {}, "files": {}}
    card = model_card.render_card(manifest, NAME, "ab" * 32)
    line = "Data: `a.jsonl`, `b.jsonl` (weight 0.7); `c.jsonl`; `org/chats`, `train` (weight 0.3)."
    assert line in card
    assert yaml.safe_load(card.split("---")[1])["datasets"] == ["org/chats"]
    settings["data"] = {}
    assert facts()["data"]["built_in"].startswith("instructions and answers made of Python's")
    del settings["lora"]
    assert facts()["data"]["built_in"] == "the source of Python's standard library"


def test_the_card_has_the_batch_and_the_evaluation(tmp_path):
    state = {"step": 20, "world_size": 2, "data": {"global_batch": 16}}
    for step in (10, 20, 30):
        folder = tmp_path / f"checkpoints/step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps(state | {"world_size": step // 10}))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": {"eval_files": ["e.txt"]}}))
    line = {"step": 20, "loss": 2.0, "eval_loss": 1.5, "tokens": 9}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    for step, devices in ((20, "2 devices"), (25, "2 devices"), (None, "3 devices")):
        facts = collect_run_facts(tmp_path, step)
        manifest = {"toolkit": "0", "origin": {"run": facts}, "tensors": {}, "files": {}}
        card = model_card.render_card(manifest, NAME, "ab" * 32)
        assert f"Batch: 16 samples a step on {devices}." in card
    (entry,) = yaml.safe_load(card.split("---")[1])["model-index"]
    (result,) = entry["results"]
    assert result["dataset"]["name"] == "e.txt"
    assert (result["metrics"][0]["type"], result["metrics"][0]["value"]) == ("loss", 1.5)


@pytest.mark.parametrize(
    ("loss_type", "tags"),
    [
        ("sigmoid", {"preference-tuning", "dpo"}),
        ("kto", {"preference-tuning", "kto"}),
        ("reward", {"preference-tuning", "reward-model"}),
        (None, set()),
    ],
)
def test_the_card_says_which_accuracy_a_run_of_preferences_has(loss_type, tags):
    """A share of pairs is no accuracy of generated text, and the Hub's search finds the method."""
    settings = {"preference.loss_type": loss_type} if loss_type else {}
    run = {"hyperparameters": settings, "metrics": {"eval_accuracy": 1.0, "eval_loss": 0.5}}
    manifest = {"toolkit": "0", "origin": {"run": run}, "tensors": {}, "files": {}}
    front = yaml.safe_load(model_card.render_card(manifest, NAME, "ab" * 32).split("---")[1])
    assert {*front["tags"]} - {"fsdp2", "fsdp2-toolkit"} == tags
    (entry,) = front["model-index"]
    (result,) = entry["results"]
    kind = "preference-tuning" if loss_type else "text-generation"
    assert result["task"]["type"] == kind
    named = {metric["type"]: metric.get("name") for metric in result["metrics"]}
    assert named == {"accuracy": "preference accuracy" if loss_type else None, "loss": None}


def test_the_card_loads_the_class_that_config_json_names():
    """As `toolkit consolidate` says: a model for text and images by its own auto class."""
    named = {"architectures": ["Qwen3_5ForConditionalGeneration"]}
    adapter = {"base": {}, "base_config": named, "settings": {"exclude_modules": "model.visual"}}
    merged = {"adapter": adapter, "merged": True}
    manifest = {"toolkit": "0", "tensors": {}, "files": {}}
    for origin, config in (({}, named), (merged, named), ({"adapter": adapter}, None)):
        card = model_card.render_card(manifest | {"origin": origin}, NAME, "ab" * 32, config)
        assert "AutoModelForImageTextToText.from_pretrained(" in card
        assert "AutoModelForCausalLM" not in card
        assert "\npipeline_tag: image-text-to-text\n" in card
        assert ("| exclude_modules | model.visual |" in card) == bool(origin)
    card = model_card.render_card(manifest | {"origin": {}}, NAME, "ab" * 32)  # the control
    assert "AutoModelForCausalLM.from_pretrained(" in card
    assert "\npipeline_tag: text-generation\n" in card


def test_the_card_has_the_versions_of_the_machine_that_trained(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    here = collect_run_facts(tmp_path, 10)["versions"]
    starts = [{"step": step, "versions": {"torch": f"9.{step}"}} for step in (0, 5, 10)]
    (tmp_path / "starts.jsonl").write_text("".join(json.dumps(x) + "\n" for x in starts))
    assert collect_run_facts(tmp_path, 10)["versions"] == {"torch": "9.5"}, "step 10 came before"
    assert collect_run_facts(tmp_path)["versions"] == {"torch": "9.10"}
    assert here["torch"].startswith("2."), "where no start is recorded"


def test_the_card_says_what_was_true_where_the_run_trained(tmp_path, monkeypatch):
    """A folder `models/base` is no Hub id, wherever the export is made."""
    home, elsewhere = tmp_path / "project", tmp_path / "scratch"
    (home / "models/base").mkdir(parents=True)
    (home / "corpus").mkdir()
    run = elsewhere / "run"
    run.mkdir(parents=True)
    config = {
        "model": {"name_or_path": "models/base"},
        "data": {"dataset_name": "corpus"},
        "optim": {"learning_rate": 0.1},
    }
    monkeypatch.chdir(home)
    decided = select_publishable_settings(config, run)
    monkeypatch.chdir(elsewhere)
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"optim": {"learning_rate": 0.5}}))
    before = decided | {"hyperparameters": decided["hyperparameters"] | {"seed": 3}}
    starts = [{"step": 0, "run": before}, {"step": 4, "run": decided}, {"step": 9, "run": {}}]
    (run / "starts.jsonl").write_text("".join(json.dumps(x) + "\n" for x in starts))
    lines = [{"step": 4, "loss": 2.0, "eval_loss": 3.0, "tokens": 40, "skipped": 2}]
    lines += [{"step": 8, "loss": 1.0, "tokens": 80}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    folder = run / "checkpoints/step-00000009"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"step": 9, "tokens": 90, "world_size": 1}))

    facts = collect_run_facts(run, 9)
    manifest = {"toolkit": "0", "origin": {"run": facts}, "tensors": {}, "files": {}}
    card = model_card.render_card(manifest, NAME, "ab" * 32)
    front = yaml.safe_load(card.split("---")[1])
    assert not {"base_model", "datasets"} & front.keys()
    assert "huggingface.co/models/base" not in card
    assert "Length: 9 steps, 90 supervised tokens." in card
    assert "| loss, step 8 | 1 |" in card
    assert "| eval_loss, step 4 | 3 |" in card
    assert "skipped" not in card
    assert "| optim.learning_rate | 0.1 |" in card, "of the start that trained it"
    assert "Changed on the way: `seed` was 3 up to step 4." in card
    assert collect_run_facts(run, 5)["tokens"] is None, "no line and no checkpoint is of step 5"
    assert collect_run_facts(run, 3)["changes"] == {}
    (run / "starts.jsonl").unlink()  # the control: an earlier version recorded nothing
    assert collect_run_facts(run, 9)["base_model"]["hub_id"] == "models/base"


@pytest.mark.parametrize("facts", [{"versions": ["torch"]}, {"hyperparameters": "none"}])
def test_facts_that_make_no_card_are_one_error(facts, tmp_path):
    make_export(tmp_path / "export")
    write_manifest(tmp_path / "export", facts)
    with pytest.raises(ExportError, match=r"the facts of its run in .* make no model card"):
        read_export(tmp_path / "export", NAME, None)


def test_secrets_are_known_by_name_and_by_look():
    for name in ("hf_token", "hub.apiKey", "db_password", "HF_TOKEN", "aws_secret_access_key"):
        assert is_secret_name(name), name
    for name in ("train_tokenizer", "tokens_per_second", "eos_token_id", "eos_token", "seed"):
        assert not is_secret_name(name), name
    for text in (
        f"x {TOKEN} y",
        "https://me:pass@host/x",
        "Authorization: Bearer abcdefghijklmnop",
        "https://host/x?X-Amz-Signature=abc",
        "s3://key:secret@bucket",
    ):
        assert REMOVED in scrub(text), text
    for text in (
        *("a.b@c.org", "https://host/@name", "recipes/configs/tiny_llama", "hf_assets"),
        *(
            "runs/hf_llama_finetune_v1",
            "out/hf_export_step_00000100",
            "sk-learn-like-folder-name-2",
        ),
    ):
        assert scrub(text) == text


OBTAIN = """
import sys
from toolkit.config.settings import ModelConfig
from toolkit.models import build_on_meta, check_usable
cfg = ModelConfig("org/base", tokenizer_name_or_path="org/base")
if sys.argv[1] == "checked":
    check_usable(cfg, 16, "cpu")
print(sorted(build_on_meta(cfg).hf_assets.files))
"""


@pytest.mark.slow
def test_a_hub_id_brings_all_that_an_export_carries(hub, push, tmp_path):
    """Though nothing of this process has read it: a reader of the export will."""
    beside = {
        "generation_config.json": b'{"eos_token_id": [3, 5]}',
        "chat_template.jinja": b"{{ messages }}",
        "special_tokens_map.json": b"{}",
    }
    folder = save_tiny_model(tmp_path / "base")
    save_byte_tokenizer(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    hub.make("org/base", private=False, files=contents(folder) | beside)
    needed = {"tokenizer.json", "tokenizer_config.json", *beside}

    def carried(home: str, *, checked: bool, offline: bool = False) -> tuple[set[str], str]:
        more = {"HF_HOME": str(tmp_path / home)} | ({"HF_HUB_OFFLINE": "1"} if offline else {})
        done = subprocess.run(
            [sys.executable, "-c", OBTAIN, "checked" if checked else "not"],
            env=push.environment | more, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return set(ast.literal_eval(done.stdout.splitlines()[-1])), done.stdout

    assert carried("one", checked=True)[0] == needed
    hub.reset()
    found, said = carried("one", checked=True, offline=True)  # on a node without a network
    assert found == needed
    assert "WARNING" not in said
    assert carried("two", checked=False)[0] < needed  # the control
