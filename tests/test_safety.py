"""Nothing that comes from outside runs, leaves its folder, or carries a token away.

Canary payloads stand in every file of a checkpoint and of a Hugging Face folder, each sealed
anew so that hashes are no defence. An audit hook watches what Python itself does.
"""

import contextlib
import hashlib
import io
import json
import os
import pickle
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_byte_tokenizer, save_tiny_model
from safetensors.torch import save_file

from toolkit import cli, config
from toolkit.checkpoint import TrainState, resume, run_folder, save
from toolkit.checkpoint.local_folder import LocalFolder
from toolkit.checkpoint.summary import summarize
from toolkit.config.settings import CheckpointConfig, ModelConfig, PretrainConfig
from toolkit.data.tokens.tokenizer import load_tokenizer
from toolkit.errors import LoadingError, ModelError, ToolkitError
from toolkit.export import consolidate
from toolkit.formats import (
    HFAssets,
    export_manifest,
    read_header,
    read_metadata,
    weight_files,
)
from toolkit.loading.pretrained import load_pretrained, materialise
from toolkit.models.causal_lm import build_on_meta
from toolkit.verify import verify_checkpoint, verify_export

CANARY = "canary_7f3a9c51"
STEP = "step-00000002"
ran: list[str] = []
"""What the payload did, and what the audit hook saw of it."""
_watching = False


def sing(text: str) -> str:
    """What a payload calls."""
    ran.append(text)
    return text


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and (
        event in ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen")
        or (event in ("exec", "compile", "import") and CANARY in repr(arguments))
        or (event == "pickle.find_class" and arguments[-1] in ("sing", "system", "exec", "eval"))
    ):
        ran.append(f"{event} {arguments!r}"[:200])


sys.addaudithook(_watch)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Watch what happens inside; nothing of the canary may be heard."""
    global _watching
    ran.clear()
    _watching = True
    try:
        yield
    finally:
        _watching = False
    assert ran == []


class Payload:
    """Calls `sing` where it is unpickled."""

    def __reduce__(self) -> Any:
        return sing, (CANARY,)


PICKLE = pickle.dumps(Payload())
TEXT = f"__import__('test_safety').sing('{CANARY}')"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder {source, run (one step, unsharded), export}."""
    root = tmp_path_factory.mktemp("safety")
    save_byte_tokenizer(root / "source")
    save_tiny_model(root / "source", num_hidden_layers=2)
    model = fresh(root / "source")
    load_pretrained(model, root / "source", "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.arange(16).view(1, 16)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    save(TrainState(model, optimizer, step=2), root / "run", CheckpointConfig())
    consolidate(root / "run", root / "export")
    return root


def fresh(source: Path) -> Any:
    return build_on_meta(ModelConfig(name_or_path=str(source)))


@pytest.fixture
def work(root: Path, tmp_path: Path) -> Path:
    """A copy of the run and of the export, to be spoilt."""
    for name in ("run", "export"):
        shutil.copytree(root / name, tmp_path / name)
    return tmp_path


def checkpoint_of(work: Path) -> Path:
    return work / "run" / "checkpoints" / STEP


def seal(checkpoint: Path, names: Callable[[dict[str, Any]], Any] = lambda files: None) -> None:
    """Let manifest and COMMIT agree with what is there; `names` may then change the manifest."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    files = {}
    for name in sorted(set(LocalFolder(checkpoint).files()) - {"manifest.json", "COMMIT"}):
        raw = (checkpoint / name).read_bytes()
        files[name] = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    manifest["files"] = files
    names(files)
    text = json.dumps(manifest, indent=1, sort_keys=True)
    (checkpoint / "manifest.json").write_text(text)
    (checkpoint / "COMMIT").write_text(hashlib.sha256(text.encode()).hexdigest() + "\n")


def seal_export(export: Path) -> None:
    origin = {"checkpoint": None, "step": 2, "dtype": "auto", "run": None}
    described = {"files": {}, "tensors": {}}
    with contextlib.suppress(ToolkitError):
        described = export_manifest.describe_folder(export)
    export_manifest.write(export, described, origin)


def resume_run(work: Path, source: Path) -> None:
    model = fresh(source)
    materialise(model, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with contextlib.redirect_stdout(io.StringIO()):
        resume(TrainState(model, optimizer), work / "run", CheckpointConfig())


def try_everything(work: Path, root: Path) -> list[str]:
    """Put a run through all that reads it; return what was said. Only our own errors may come."""
    said = []

    def attempt(do: Callable[[], Any]) -> None:
        try:
            result = do()
        except ToolkitError as error:
            said.append(str(error))
        else:
            said.extend(": ".join(map(str, f)) for f in getattr(result, "findings", ()))

    attempt(lambda: verify_checkpoint(work / "run"))
    attempt(lambda: summarize(work / "run"))
    attempt(lambda: verify_export(work / "run", root / "export"))
    attempt(lambda: consolidate(work / "run", work / "out"))
    attempt(lambda: verify_export(None, work / "out") if (work / "out").exists() else None)
    attempt(lambda: resume_run(work, root / "source"))  # last: it may set the checkpoint aside
    return said


# --------------------------------------------------------------------------------------------------
# Code
# --------------------------------------------------------------------------------------------------


def test_the_canary_sings_where_it_may(tmp_path: Path) -> None:
    """The payloads do what the tests below say that they do not."""
    for payload in (PICKLE, malicious_blob(2000)):
        (tmp_path / "x").write_bytes(payload)
        read = (
            pickle.loads
            if payload is PICKLE
            else lambda raw: torch.load(io.BytesIO(raw), weights_only=False)
        )
        with pytest.raises(AssertionError), silence():
            read(payload)
    with pytest.raises(AssertionError), silence():
        eval(TEXT)
    with pytest.raises(AssertionError), silence():
        exec(compile(TEXT, "text", "exec"))


def malicious_blob(length: int) -> bytes:
    """Return a torch file of `length` bytes that calls `sing` when it is unpickled."""
    stream = io.BytesIO()
    torch.save(Payload(), stream)
    with zipfile.ZipFile(stream, "a") as archive:
        archive.comment = b"x"
    raw = stream.getvalue()[:-1]
    room = length - len(raw)
    return raw[:-2] + struct.pack("<H", room) + b" " * room


def in_metadata(folder: Path) -> None:
    (folder / "dcp/.metadata").write_bytes(PICKLE)


def inside_metadata(folder: Path) -> None:
    metadata = pickle.loads((folder / "dcp/.metadata").read_bytes())
    metadata.planner_data = {"x": Payload()}
    (folder / "dcp/.metadata").write_bytes(pickle.dumps(metadata))


def in_every_blob(folder: Path) -> None:
    metadata = read_metadata(folder / "dcp")
    for info in metadata.storage_data.values():
        file = folder / "dcp" / info.relative_path
        content = bytearray(file.read_bytes())
        try:
            blob = malicious_blob(info.length)
        except struct.error:  # too long for a comment
            blob = PICKLE.ljust(info.length, b"\0")
        if len(blob) == info.length:
            content[info.offset : info.offset + info.length] = blob
        file.write_bytes(content)


def in_text(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(TEXT) and None


def as_pickle(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(PICKLE) and None


def in_json(name: str, *keys: str) -> Callable[[Path], None]:
    def put(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        for key in keys or list(content):
            content[key] = TEXT
        (folder / name).write_text(json.dumps(content))

    return put


def custom_code(kind: str) -> Callable[[Path], None]:
    """Let config.json ask for Python code that comes along."""

    def put(folder: Path) -> None:
        hf = folder / "hf" if (folder / "hf").is_dir() else folder
        (hf / f"{CANARY}.py").write_text(f"import test_safety\ntest_safety.sing({CANARY!r})\n")
        config = json.loads((hf / "config.json").read_text())
        config |= {
            "model_type": kind,
            "auto_map": {
                "AutoConfig": f"{CANARY}.Config",
                "AutoModelForCausalLM": f"{CANARY}.Model",
                "AutoTokenizer": [f"{CANARY}.Tokenizer", None],
            },
        }
        (hf / "config.json").write_text(json.dumps(config))
        tokenizer = json.loads((hf / "tokenizer_config.json").read_text())
        tokenizer |= {"auto_map": config["auto_map"], "tokenizer_class": f"{CANARY}Tokenizer"}
        (hf / "tokenizer_config.json").write_text(json.dumps(tokenizer))

    return put


def in_header(folder: Path) -> None:
    for file in folder.rglob("*.safetensors"):
        save_file({TEXT: torch.zeros(2)}, file, {TEXT: TEXT})


def beside(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(PICKLE) and None


PAYLOADS: dict[str, Callable[[Path], None]] = {
    ".metadata is a pickle": in_metadata,
    "a pickle inside .metadata": inside_metadata,
    "every blob": in_every_blob,
    "a shard is a pickle": as_pickle("dcp/__0_0.distcp"),
    "random state is a pickle": as_pickle("rng/rank-00000.safetensors"),
    "random state's header": in_header,
    "state.json is code": in_text("state.json"),
    "state.json holds code": in_json("state.json"),
    "state.json holds code for numbers": in_json("state.json", "step", "tokens", "world_size"),
    "config.json is code": in_text("hf/config.json"),
    "config.json holds code": in_json("hf/config.json"),
    "config.json of a known type": custom_code("llama"),
    "config.json of an unknown type": custom_code(CANARY),
    "source.json is code": in_text("hf/source.json"),
    "source.json holds code": in_json("hf/source.json"),
    "tokenizer.json is code": in_text("hf/tokenizer.json"),
    "tokenizer_config.json holds code": in_json("hf/tokenizer_config.json"),
    "generation_config.json holds code": in_json("hf/generation_config.json"),
    "pytorch_model.bin": beside("hf/pytorch_model.bin"),
    "training_args.bin": beside("hf/training_args.bin"),
}


@pytest.mark.parametrize("name", PAYLOADS)
def test_code_in_a_checkpoint_never_runs(root: Path, work: Path, name: str) -> None:
    PAYLOADS[name](checkpoint_of(work))
    seal(checkpoint_of(work))
    with silence():
        try_everything(work, root)


def test_code_in_a_manifest_never_runs(root: Path, work: Path) -> None:
    folder = checkpoint_of(work)
    for text in (TEXT, json.dumps(TEXT), json.dumps({"files": TEXT, "tensors": TEXT})):
        (folder / "manifest.json").write_text(text)
        (folder / "COMMIT").write_text(hashlib.sha256(text.encode()).hexdigest() + "\n")
        with silence():
            assert try_everything(work, root)
        for aside in folder.parent.glob(f"{STEP}.bad-*"):
            aside.rename(folder)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        export_manifest.FILE,
        "code of a known type",
        "code of an unknown type",
        "header",
        "only pytorch_model.bin",
        "pytorch_model.bin beside",
        "model.safetensors is a pickle",
    ],
)
def test_code_in_a_hugging_face_folder_never_runs(root: Path, work: Path, name: str) -> None:
    export = work / "export"
    if name.endswith("json"):
        (export / name).write_text(TEXT)
    elif name.startswith("code"):
        custom_code("llama" if "a known" in name else CANARY)(export)
    elif name == "header":
        in_header(export)
    elif "bin" in name:
        (export / "pytorch_model.bin").write_bytes(PICKLE)
        if name.startswith("only"):
            (export / "model.safetensors").unlink()
    else:
        (export / "model.safetensors").write_bytes(PICKLE)
    if name != export_manifest.FILE:
        seal_export(export)
    with silence():
        verify_export(None, export, logits=True)
        verify_export(root / "run", export)
        for do in (
            lambda: load_pretrained(fresh(root / "source"), export, "cpu"),
            lambda: load_pretrained(fresh(export), export, "cpu"),
            lambda: load_tokenizer(ModelConfig(str(export), tokenizer_name_or_path=str(export))),
            lambda: consolidate(root / "run", work / "out", hf_assets=export),
        ):
            with contextlib.suppress(ToolkitError):
                do()


def test_code_of_a_checkpoint_needs_a_word(work: Path) -> None:
    custom_code(CANARY)(work / "export")
    with silence(), pytest.raises(ModelError, match="trust_remote_code"):
        fresh(work / "export")
    assert ModelConfig("x").trust_remote_code is False


# --------------------------------------------------------------------------------------------------
# Ways out of the folder
# --------------------------------------------------------------------------------------------------

OUTSIDE = [
    "../{}",
    "../../{}",
    "{abs}",
    "sub/../../{}",
    "./{}",
    "sub/{}",
    "..\\{}",
    "a\\{}",
    "",
    ".",
    "..",
    "{}\0",
    "//{}",
    "~/{}/..",
]


def outside(vector: str, target: Path) -> str:
    return vector.format(target.name, abs=target)


@pytest.mark.parametrize("vector", OUTSIDE)
def test_metadata_names_nothing_outside(root: Path, work: Path, vector: str) -> None:
    folder = checkpoint_of(work)
    secret = shutil.copy(folder / "dcp/__0_0.distcp", folder / "secret")
    metadata = pickle.loads((folder / "dcp/.metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = outside(vector, Path(secret))
    (folder / "dcp/.metadata").write_bytes(pickle.dumps(metadata))
    seal(folder)
    said = try_everything(work, root)
    assert sum("no file of its folder" in text for text in said) >= 3, said
    assert not (work / "out").exists()


@pytest.mark.parametrize("vector", OUTSIDE)
def test_an_index_names_nothing_outside(root: Path, work: Path, vector: str) -> None:
    export = work / "export"
    secret = Path(shutil.move(export / "model.safetensors", work / "secret.safetensors"))
    places = dict.fromkeys(read_header(secret), outside(vector, secret))
    (export / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    seal_export(export)
    with pytest.raises(LoadingError, match="not a file of its folder"):
        weight_files(export)
    with pytest.raises(LoadingError, match="not a file of its folder"):
        load_pretrained(fresh(root / "source"), export, "cpu")
    assert any("not a file of its folder" in w for _, _, w in verify_export(None, export).findings)


@pytest.mark.parametrize("vector", OUTSIDE)
def test_manifests_name_nothing_outside(root: Path, work: Path, vector: str) -> None:
    if vector not in ("sub/{}", "..\\{}", "a\\{}"):  # a checkpoint has folders, and Unix's names
        folder = checkpoint_of(work)
        (folder.parent / "secret").write_bytes(b"x")
        entry = {"size": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
        name = outside(vector, folder.parent / "secret")
        seal(folder, lambda files: files.update({name: entry}))
        said = [w for _, _, w in verify_checkpoint(folder).findings]
        assert any("no file of the checkpoint" in text for text in said), said
        with pytest.raises(ToolkitError, match="no file of the checkpoint"):
            consolidate(work / "run", work / "out")
    described = export_manifest.describe_folder(work / "export")
    described["files"][outside(vector, work / "secret")] = described["files"]["config.json"]
    export_manifest.write(work / "export", described, {})
    said = [w for _, _, w in verify_export(None, work / "export").findings]
    assert any("no file of its folder" in text for text in said), said


@pytest.mark.parametrize(
    "what",
    [
        "dcp/__0_0.distcp",
        "dcp",
        "rng",
        "hf",
        "hf/config.json",
        "state.json",
        "dcp/.metadata",
        "manifest.json",
        "COMMIT",
    ],
)
def test_links_out_of_a_checkpoint_are_refused(root: Path, work: Path, what: str) -> None:
    folder = checkpoint_of(work)
    elsewhere = shutil.move(folder / what, work / "elsewhere")
    (folder / what).symlink_to(elsewhere)
    assert any(f == what for f, _, _ in verify_checkpoint(folder).findings)
    resume_run(work, root / "source")
    assert not folder.exists()  # set aside, not used
    assert next(folder.parent.glob(f"{STEP}.bad-*")).is_dir()


def test_links_out_of_an_export_are_refused(work: Path) -> None:
    for name in ("model.safetensors", "config.json", export_manifest.FILE):
        elsewhere = shutil.move(work / "export" / name, work / name)
        (work / "export" / name).symlink_to(elsewhere)
        found = {f for f, _, _ in verify_export(None, work / "export").findings}
        assert name in found


# --------------------------------------------------------------------------------------------------
# Headers
# --------------------------------------------------------------------------------------------------


def entry(begin: int, end: int, **changes: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]} | changes


HEADERS: dict[str, tuple[bytes | dict[str, Any], str]] = {
    "doubled name": (
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
        b'"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}',
        "'a' occurs twice",
    ),
    "doubled field": (
        b'{"a":{"dtype":"U8","shape":[8],"shape":[8],"data_offsets":[0,8]}}',
        "'shape' occurs twice",
    ),
    "overlap": ({"a": entry(0, 5), "b": entry(4, 8)}, "b overlaps a"),
    "one inside another": ({"a": entry(0, 8), "b": entry(2, 4)}, "b overlaps a"),
    "hole": ({"a": entry(0, 3), "b": entry(4, 8)}, "b leaves a hole after a"),
    "hole at the beginning": ({"a": entry(1, 8)}, "a leaves a hole after the header"),
    "beyond the end": ({"a": entry(0, 9)}, "bytes long by its header"),
    "short of the end": ({"a": entry(0, 7)}, "bytes long by its header"),
    "negative offset": ({"a": entry(-8, 8)}, "do not hold"),
    "backwards": ({"a": entry(8, 0, shape=[8])}, "do not hold"),
    "negative shape": ({"a": entry(0, 8, shape=[-2, -4])}, "a list of sizes"),
    "huge shape": ({"a": entry(0, 8, shape=[2**63])}, "a list of sizes"),
    "huge product": ({"a": entry(0, 8, shape=[2**62, 2**62])}, "do not hold"),
    "overflowing product": ({"a": entry(0, 8, shape=[2**61, 8, 8])}, "do not hold"),
    "float shape": ({"a": entry(0, 8, shape=[8.0])}, "a list of sizes"),
    "bool shape": ({"a": entry(0, 8, shape=[True, 8])}, "a list of sizes"),
    "text for a shape": ({"a": entry(0, 8, shape="8")}, "a list of sizes"),
    "text for offsets": ({"a": entry(0, 8, data_offsets="08")}, "two numbers"),
    "three offsets": ({"a": entry(0, 8, data_offsets=[0, 8, 8])}, "two numbers"),
    "unknown dtype": ({"a": entry(0, 8, dtype="U9")}, "has dtype 'U9'"),
    "list for a dtype": ({"a": entry(0, 8, dtype=[])}, "has dtype"),
    "no dtype": ({"a": {"shape": [8], "data_offsets": [0, 8]}}, "must have dtype"),
    "a list": (b"[1, 2]", "no JSON object"),
    "NaN": (b'{"a":NaN}', "NaN is no number"),
    "metadata that is no text": ({"__metadata__": {"a": 1}, "a": entry(0, 8)}, "__metadata__"),
    "deep": (b'{"a":' * 100_000, "damaged safetensors header"),
    "no UTF-8": (b'{"\xff":1}', "damaged safetensors header"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_absurd_headers_are_refused(tmp_path: Path, name: str) -> None:
    header, what = HEADERS[name]
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(8))
    with pytest.raises(LoadingError) as caught:
        read_header(file)
    assert what in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100 * 2**20 + 1, 10**6])
def test_absurd_lengths_of_headers_are_refused(tmp_path: Path, length: int) -> None:
    file = tmp_path / "model.safetensors"
    with open(file, "wb") as f:
        f.write(struct.pack("<Q", length))
        if length == 100 * 2**20 + 1:  # long enough, and still refused; a hole takes no space
            f.truncate(length + 100)
    with pytest.raises(LoadingError, match="not a safetensors file"):
        read_header(file)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"keys": 1, "tied": {}}',
        '{"keys": {"a": 1}, "tied": {}}',
        '{"keys": {}}',
        '{"keys": {}, "tied": {}, "tied": {}}',
        "{" * 100_000,
    ],
)
def test_absurd_source_names_are_refused(work: Path, text: str) -> None:
    hf = checkpoint_of(work) / "hf"
    (hf / "source.json").write_text(text)
    with pytest.raises(ModelError, match=r"source\.json"):
        HFAssets.load(hf)


# --------------------------------------------------------------------------------------------------
# Tokens
# --------------------------------------------------------------------------------------------------

TOKEN = "hf_" + "CanaryToken7f3a9c51" * 2


def test_no_token_is_written_or_said(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, TOKEN)
    source = Path(shutil.copytree(root / "source", tmp_path / "source"))
    cfg = PretrainConfig(model=ModelConfig(str(source)), output_dir=str(tmp_path / "run"))
    spoilt = ["--model.name_or_path", str(source), "--model.tokenizer_name_or_path", TOKEN]
    with pytest.raises(ToolkitError, match="token or a password") as refused:
        config.parse(PretrainConfig, spoilt)
    assert TOKEN not in str(refused.value)
    run_folder.save_config(cfg)
    model = fresh(source)
    load_pretrained(model, source, "cpu")
    save(TrainState(model, step=1), tmp_path / "run", CheckpointConfig())
    assert cli.main(["consolidate", str(tmp_path / "run"), "--output", str(tmp_path / "out")]) == 0
    assert cli.main(["verify", str(tmp_path / "run"), str(tmp_path / "out"), "--json"]) == 0
    for wrong in (
        ["consolidate", TOKEN, "--output", str(tmp_path / "no")],
        [
            "consolidate",
            str(tmp_path / "run"),
            "--output",
            str(tmp_path / "no"),
            "--dtype",
            "auto",
            "--max_shard_size",
            TOKEN,
        ],
        ["verify", TOKEN],
        ["verify", str(tmp_path / "run"), TOKEN],
        ["inspect", TOKEN],
    ):
        assert cli.main(wrong) != 0
    with pytest.raises(ToolkitError) as caught:
        build_on_meta(ModelConfig(name_or_path=TOKEN))
    assert TOKEN not in str(caught.value)
    out, err = capfd.readouterr()
    assert TOKEN not in out + err
    assert "error" in err
    written = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert len(written) > 20
    holding = [str(p.relative_to(tmp_path)) for p in written if TOKEN.encode() in p.read_bytes()]
    assert holding == []
    assert os.environ["HF_TOKEN"] == TOKEN
