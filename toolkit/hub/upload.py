"""Publishing: a verified export becomes one commit in a repository of the Hugging Face Hub.

    folder -> verified -> compared with the repository -> large files sent -> ONE commit -> compared

Owns what is sent and deleted, the retries, and the words in which the Hub's refusals reach a user.
The only file that imports `huggingface_hub`. Knows nothing of checkpoints or of training.

[Note: never half] A reader of the repository sees the files of its last commit. Large files are
stored beside the commits first, by their sha256; those the Hub already has are not sent again, so
that an interrupted push goes on where it stopped. Then one commit names them all. It names its
parent, too: where an answer was lost, or somebody else committed in between, the Hub refuses it,
and the repository is read and compared anew before anything else is tried.
"""

import contextlib
import hashlib
import inspect
import json
import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    get_session,
    get_token,
    hf_hub_url,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, validate_repo_id

from toolkit.checkpoint.commit import CHECKPOINTS, COMMIT
from toolkit.checkpoint.facts import is_path
from toolkit.errors import ExportError, HubError
from toolkit.formats import manifest as export_manifest
from toolkit.hub import card as model_card
from toolkit.redact import looks_like_token, scrub
from toolkit.verify.reports import verify_export

T = TypeVar("T")
Say = Callable[[str], object]

CARD = export_manifest.CARD
_NO_TOKEN = "no Hugging Face token was found; run `hf auth login`, or set HF_TOKEN"
# Weights and what names them: an older one left beside the new would be loaded, or break the load.
_WEIGHTS = re.compile(
    r"(model|adapter_model)(-\d+-of-\d+)?\.safetensors(\.index\.json)?|adapter_config\.json"
)
# Bytes up to which a file is read once and kept; the Hub keeps no larger one in git itself.
_IN_MEMORY = 10_000_000
_SILENCE = 600.0  # seconds without a byte after which a transfer counts as lost
_ANSWER = 60.0  # the same of a question that the Hub answers at once
_TRY_AGAIN = (408, 429, 500, 502, 503, 504)
_MOVED = (409, 412)  # to a commit: another one arrived since the repository was read
# huggingface_hub's own answer to a repository's .gitignore: a file that it names would be left out.
_IGNORE_NOTHING = "# every file of an export is published\n"


@dataclass(frozen=True)
class Retry:
    """How often a request is tried and how long is waited in between, doubled each time.

    The client tries transfers several times by itself; this is counted around it.
    """

    tries: int = 6
    first_wait: float = 1.0
    """Seconds."""
    longest_wait: float = 60.0
    """Seconds."""
    longest_asked: float = 600.0
    """Seconds up to which the Hub's Retry-After is obeyed; a longer one is an error."""


@dataclass(frozen=True)
class Preview:
    """What a push would do."""

    send: dict[str, int]
    """File -> bytes that would be sent or are there under another name."""
    same: dict[str, int]
    """File -> bytes that the repository has already."""
    delete: list[str]
    """Files of an older export that would be deleted in the same commit."""
    card: str
    """The model card, README.md."""
    notes: list[str]
    """What could not be found out, and what would be created."""


def push(
    folder: str | Path,
    repo_id: str,
    *,
    revision: str | None = None,
    private: bool = True,
    retry: Retry = Retry(),  # frozen
    say: Say = print,
) -> str:
    """Publish an export as one commit; return the commit's URL.

    The export is verified first and the Hub's list of files is compared with it afterwards. Nothing
    is deleted from the repository but weight files that the export does not have. Pushing the same
    again makes no commit. Interrupted, the same call goes on where it stopped. See [Note: never
    half].

    Costs one read of the export to verify it, one to hash and one to send it.

    Args:
        folder: as `toolkit consolidate` wrote it. Its README.md is published as it is; without one
            a model card is made.
        repo_id: ORG/NAME; created when there is none.
        revision: a branch, created when there is none; None: main.
        private: of a repository that is created. One that is public already is refused.
        retry: on lost connections, 429 and 5xx.
        say: takes a line of text now and then.

    Raises:
        HubError: no token, no such name, no permission, or the Hub could not be reached. The
            repository is unchanged, or complete where the error says so.
        ExportError: the folder is no export, it has a finding, or it is an adapter that names its
            base by a path.
    """
    _check_id(repo_id, revision)
    api, token = _api()
    with _redacted_logs(token):
        local = _read_export(Path(folder), repo_id, token)
        client = _Client(api, repo_id, revision, retry, say)
        state = client.open(private)
        return _publish(client, local, state)


def preview(
    folder: str | Path,
    repo_id: str,
    *,
    revision: str | None = None,
    private: bool = True,
) -> Preview:
    """Return what `push` would do. Sends nothing; reads the repository where there is a token.

    Works offline: what could not be read is said in the notes.

    Raises:
        HubError: the repository id is not one, or the repository is public and `private` was asked.
        ExportError: the folder is no export, it has a finding, or it is an adapter that names its
            base by a path.
    """
    _check_id(repo_id, revision)
    token = get_token()
    notes: list[str] = []
    state = None
    with _redacted_logs(token):
        local = _read_export(Path(folder), repo_id, token)
        if token is None:
            notes.append(f"the repository was not read: {_NO_TOKEN}")
        else:
            client = _Client(_api()[0], repo_id, revision, Retry(tries=1), lambda _: None)
            try:
                state = client.read(timeout=10.0)
            except _NoRevisionError:
                notes.append(f"branch {revision} would be created from main")
                state = client.read(main=True, timeout=10.0)
            except _NoRepositoryError:
                kind = "private" if private else "public"
                notes.append(f"{repo_id} would be created, {kind}")
            except HubError as error:
                notes.append(f"the repository was not read: {error}")
        if state is not None:
            _check_visibility(repo_id, state, private)
    sizes = {name: item.size for name, item in local.files.items()}
    if state is None:
        return Preview(sizes, {}, [], local.card, notes)
    if state.keeps_card(local):
        notes.append(f"{CARD} of the repository was edited there and would stay")
    send, delete = _difference(local, state)
    same = {n: s for n, s in sizes.items() if n not in send}
    if state.keeps_card(local):
        same.pop(CARD, None)
    return Preview({n: sizes[n] for n in send}, same, delete, local.card, notes)


def check_access(
    repo_id: str,
    *,
    private: bool = True,
    retry: Retry = Retry(),  # frozen
    say: Say = print,
) -> None:
    """Refuse now what a later `push` would be refused for; create the repository when there is
    none.

    Raises:
        HubError: no token or not a valid one, no such name, no permission to write, or a public
            repository where a private one was asked for.
    """
    _check_id(repo_id)
    api, token = _api()
    with _redacted_logs(token):
        client = _Client(api, repo_id, None, retry, say)
        client.check_token()
        client.create_if_missing(private)


# --------------------------------------------------------------------------------------------------
# The folder
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _File:
    """A file as it is to be published."""

    size: int
    sha256: str
    blob: str | None
    """Git's id of its content; None for those that are too large to be kept in git."""
    content: Path | bytes


@dataclass(frozen=True)
class _Export:
    files: dict[str, _File]
    """Name in the repository -> file; the card is one of them."""
    card: str
    own_card: bool
    """Whether the card is the folder's own README.md."""
    digest: str
    """sha256 of the export's manifest file."""


def _read_export(folder: Path, repo_id: str, token: str | None) -> _Export:
    folder = folder.expanduser()
    _check_kind(folder)
    report = verify_export(None, folder)
    if not report.ok:
        found, tensor, what = report.findings[0]
        more = f" (and {len(report.findings) - 1} more)" if len(report.findings) > 1 else ""
        name = f"{found}, tensor {tensor}" if tensor else found
        raise ExportError(
            f"{folder} is not published, it does not verify: {name}: {what}{more}; see `toolkit "
            f"verify {folder}`, or consolidate again"
        )
    _check_adapter(folder)
    manifest = export_manifest.read(folder)
    files = {name: _read_file(folder / name, entry) for name, entry in manifest["files"].items()}
    raw = (folder / export_manifest.FILE).read_bytes()
    files[export_manifest.FILE] = _in_memory(raw)
    digest = files[export_manifest.FILE].sha256
    own = folder / CARD
    if own.is_file():
        card = own.read_text("utf-8")
        if looks_like_token(card):
            raise ExportError(f"{own} holds what looks like a token; remove it before it is public")
    else:
        card = model_card.render(manifest, repo_id, digest)
    files[CARD] = _in_memory(card.encode())
    for name, file in files.items():
        if token and isinstance(file.content, bytes) and token.encode() in file.content:
            raise ExportError(
                f"{folder / name} holds your Hugging Face token; remove it before it is public"
            )
    return _Export(files, card, own.is_file(), digest)


def check_base(name_or_path: str) -> None:
    """Refuse a base that readers of a published adapter could not find: it is no Hub id.

    Nothing is asked of the Hub.

    Raises:
        HubError: it is a path, of this machine or relative.
    """
    if is_path(name_or_path):
        raise HubError(
            f"the base {name_or_path!r} is a path of this machine, and a published adapter names "
            "its base: no reader would find it there, and the path would be told to all. Give the "
            "base's Hub id as model.name_or_path, or leave hub.push_to_hub out and export with "
            "`toolkit consolidate RUN --output FOLDER --hf_assets ORG/NAME` (or --merge) before "
            "`toolkit push`"
        )


def _check_adapter(folder: Path) -> None:
    """Refuse an adapter whose config names its base by a path, which nobody should read."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        return
    base = json.loads(file.read_text("utf-8")).get("base_model_name_or_path")
    if is_path(str(base or ""), folder):
        raise ExportError(
            f"{folder} is not published: {file.name} names its base by a path, {base!r}, where no "
            "reader finds it, and which would be told to all. Export again with --hf_assets "
            "ORG/NAME, the base's id on the Hub, or with --merge"
        )


def _check_kind(folder: Path) -> None:
    """Refuse what is not an export; a run or a checkpoint with the command that makes one."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ExportError(f"{folder} {what}; give the folder that `toolkit consolidate` wrote")
    if (folder / export_manifest.FILE).is_file():
        return
    if (folder / CHECKPOINTS).is_dir() or (folder / COMMIT).is_file() or (folder / "dcp").is_dir():
        kind = "a run" if (folder / CHECKPOINTS).is_dir() else "a checkpoint"
        raise ExportError(
            f"{folder} is {kind}, not an export; make one first: toolkit consolidate {folder} "
            f"--output {folder}-hf"
        )
    raise ExportError(
        f"{folder} has no {export_manifest.FILE}, so nothing proves its content; publish a folder "
        "that `toolkit consolidate` wrote"
    )


def _read_file(path: Path, entry: dict[str, Any]) -> _File:
    """Return a file of the manifest. A small one is read now, so that what is sent is what was
    verified; of the others the client's own hash is compared before the commit.
    """
    if entry["size"] > _IN_MEMORY:
        return _File(entry["size"], entry["sha256"], None, path)
    file = _in_memory(path.read_bytes())
    if file.sha256 != entry["sha256"]:
        raise ExportError(f"{path} changed while it was read; push again")
    return file


def _in_memory(content: bytes) -> _File:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    return _File(len(content), hashlib.sha256(content).hexdigest(), blob, content)


# --------------------------------------------------------------------------------------------------
# The repository
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Remote:
    """A file as the Hub lists it."""

    size: int | None
    sha256: str | None
    """Of a large file."""
    blob: str | None
    """Git's id of a small file's content."""

    def equals(self, file: _File) -> bool:
        if self.size is not None and self.size != file.size:
            return False
        return self.sha256 == file.sha256 if self.sha256 else self.blob == file.blob


@dataclass(frozen=True)
class _State:
    """A revision of the repository at one moment."""

    head: str
    private: bool
    files: dict[str, _Remote]
    card_is_ours: bool = True
    """Whether README.md is missing, or as an earlier push wrote it."""

    def keeps_card(self, local: _Export) -> bool:
        """Whether the repository's card was edited there, and the folder has none to replace it."""
        return not self.card_is_ours and not local.own_card


class _NoRepositoryError(HubError):
    pass


class _NoRevisionError(HubError):
    pass


def _difference(local: _Export, state: _State) -> tuple[list[str], list[str]]:
    """Return the names to send and the names to delete."""
    send = [
        name
        for name, file in local.files.items()
        if not (name in state.files and state.files[name].equals(file))
        and not (name == CARD and state.keeps_card(local))
    ]
    stale = [n for n in state.files if _WEIGHTS.fullmatch(n) and n not in local.files]
    return send, sorted(stale)


def _check_visibility(repo_id: str, state: _State, private: bool) -> None:
    if private and not state.private:
        raise HubError(
            f"{repo_id} is public, and a push is private unless it is told otherwise; add --public "
            "(private=False) to publish there, or give another --repo_id"
        )


class _Client:
    """One repository through the Hub's client: every request with its retries and plain words."""

    def __init__(
        self, api: HfApi, repo_id: str, revision: str | None, retry: Retry, say: Say
    ) -> None:
        self.api, self.repo_id, self.revision = api, repo_id, revision
        self.say, self._retry = say, retry
        self._secrets = (api.token if isinstance(api.token, str) else None,)

    def check_token(self) -> None:
        """Refuse a token that the Hub does not know, or that may only read."""
        who = self.tried("asking whose the token is", self.api.whoami)
        role = ((who.get("auth") or {}).get("accessToken") or {}).get("role")
        if role == "read":
            raise HubError(
                "the Hugging Face token may only read; make one with the write role at "
                f"{self.api.endpoint}/settings/tokens and run `hf auth login`, or set HF_TOKEN"
            )

    def open(self, private: bool) -> _State:
        """Return the revision's state; create the repository and the branch when missing."""
        try:
            state = self.read()
        except _NoRepositoryError:
            self.create(private)
            state = self.open_branch()
        except _NoRevisionError:
            # The visibility of the whole is decided before anything is added to it.
            _check_visibility(self.repo_id, self.read(main=True), private)
            state = self.open_branch()
        _check_visibility(self.repo_id, state, private)
        if not private and state.private:
            self.say(f"{self.repo_id} is private and stays so; its settings page makes it public")
        return state

    def create_if_missing(self, private: bool) -> None:
        """Create the repository, or find out whether this token may write to it."""
        try:
            state = self.read(main=True)
        except _NoRepositoryError:
            self.create(private)
            return
        _check_visibility(self.repo_id, state, private)
        if "write" in inspect.signature(self.api.auth_check).parameters:  # huggingface_hub 2
            self.tried(
                "asking for permission to write",
                lambda: self.api.auth_check(self.repo_id, write=True),
            )

    def open_branch(self) -> _State:
        try:
            return self.read()
        except _NoRevisionError:
            branch = str(self.revision)
            self.tried(
                f"creating branch {branch}",
                lambda: self.api.create_branch(self.repo_id, branch=branch, exist_ok=True),
            )
            return self.read()

    def create(self, private: bool) -> None:
        def once() -> None:
            try:
                self.api.create_repo(self.repo_id, private=private)
            except HfHubHTTPError as error:
                # There by now: an earlier try arrived and its answer did not, or another's name.
                if error.response.status_code != 409:
                    raise

        self.tried(f"creating {self.repo_id}", once)
        try:
            self.read(main=True)
        except _NoRepositoryError:
            raise HubError(
                f"{self.repo_id} cannot be created: the name is taken, and not by a model that "
                "this token may read; give another --repo_id"
            ) from None
        self.say(f"created {self.repo_id}, {'private' if private else 'public'}")

    def read(self, main: bool = False, timeout: float = _ANSWER) -> _State:
        """Return the state of the revision (or of main)."""
        revision = None if main else self.revision

        def once() -> _State:
            info = self.api.model_info(
                self.repo_id, revision=revision, files_metadata=True, timeout=timeout
            )
            files = {
                s.rfilename: _Remote(s.size, s.lfs.sha256 if s.lfs else None, s.blob_id)
                for s in info.siblings or []
            }
            ours = CARD not in files or self._card_is_ours(str(info.sha), timeout)
            return _State(str(info.sha), bool(info.private), files, ours)

        return self.tried(f"reading {self.repo_id}", once)

    def _card_is_ours(self, head: str, timeout: float) -> bool:
        url = hf_hub_url(self.repo_id, CARD, revision=head, endpoint=self.api.endpoint)
        headers = build_hf_headers(token=self.api.token)
        answer = get_session().get(url, headers=headers, timeout=timeout)
        answer.raise_for_status()
        return model_card.is_unedited(answer.text)

    def tried(self, what: str, fn: Callable[[], T]) -> T:
        """Return what `fn` returns; try again where that may help, translate what it raises."""
        tries = 0
        while True:
            tries += 1
            try:
                return self.once(what, fn)
            except _Again as again:
                self.pause(what, again, tries)

    def once(self, what: str, fn: Callable[[], T]) -> T:
        """Return what `fn` returns. Raises `_Again` where another try may help."""
        session = get_session()
        if getattr(session, "timeout", None) is not None:  # the client's own is to wait for ever
            session.timeout = _SILENCE
        try:
            return fn()
        except HubError:
            raise
        except Exception as error:
            # Without its context: headers and addresses of the request hang on it.
            raise self._translated(what, error) from None

    def pause(self, what: str, again: "_Again", tries: int) -> None:
        """Wait before the next try; raise when there is none left."""
        if tries >= self._retry.tries or again.wait > self._retry.longest_asked:
            patience = f" (it asks to wait {again.wait:.0f} s)" if again.wait else ""
            raise HubError(
                f"{what} failed {tries} time{'s' * (tries > 1)}: {again.reason}{patience}. Run the "
                "same command again: it goes on where it stopped"
            ) from None
        doubled = min(self._retry.longest_wait, self._retry.first_wait * 2 ** (tries - 1))
        # Not all at once: many processes may have been refused together.
        delay = max(again.wait, doubled * _dice.uniform(0.5, 1.0))
        self.say(f"{what}: {again.reason}; trying again in {delay:.0f} s")
        time.sleep(delay)

    def clean(self, text: object) -> str:
        """Return the first line of a text, with no secret in it."""
        lines = [line.strip() for line in str(text).splitlines() if line.strip()]
        return scrub(lines[0] if lines else type(text).__name__, self._secrets)[:300]

    def _translated(self, what: str, error: Exception) -> HubError:
        for cause in _chain(error):
            if isinstance(cause, OfflineModeIsEnabled):
                return HubError(f"{what}: HF_HUB_OFFLINE is set; unset it to reach the Hub")
            if isinstance(cause, RevisionNotFoundError):
                return _NoRevisionError(f"{self.repo_id} has no revision {self.revision}")
            if isinstance(cause, RepositoryNotFoundError):
                return _NoRepositoryError(
                    f"{self.repo_id} does not exist, or this token may not read it"
                )
            response = getattr(cause, "response", None)
            if isinstance(cause, HTTPError) and response is not None:
                return self._refused(what, response, cause)
            if isinstance(cause, HTTPError | ConnectionError | TimeoutError):
                reason = self.clean(cause)
                return _Again(f"the connection was lost ({type(cause).__name__}: {reason})")
            if isinstance(cause, json.JSONDecodeError):
                return _Again("the answer was cut off or no JSON")
        return HubError(f"{what}: {self.clean(error)}")

    def _refused(self, what: str, response: Any, error: BaseException) -> HubError:
        status = response.status_code
        said = self.clean(getattr(error, "server_message", None) or error)
        if status in _TRY_AGAIN:
            return _Again(f"the Hub answered {status}", _asked_to_wait(response.headers))
        if status in _MOVED:
            return _MovedError(f"the repository changed meanwhile ({status}: {said})")
        if status == 401:
            return HubError(
                "the Hub does not accept the token (401); run `hf auth login` again, or set "
                "HF_TOKEN to a token that is valid"
            )
        if status == 403:
            return HubError(
                f"{what}: the token may not do that (403: {said}); it needs the write role for "
                f"{self.repo_id.split('/')[0]}: {self.api.endpoint}/settings/tokens"
            )
        return HubError(f"{what}: the Hub refused ({status}: {said})")


class _Again(HubError):  # a reason to try once more, an error only after the last try
    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.reason, self.wait = reason, wait


class _MovedError(_Again):
    pass


_dice = random.Random()  # of its own: the run's random state is not ours to draw from


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and what it was raised from: an upload's threads wrap theirs."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def _asked_to_wait(headers: Any) -> float:
    """Return the seconds that Retry-After (a number or a date) or the rate limit's reset asks
    for.
    """
    value = (headers.get("Retry-After") or "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    if value:
        with contextlib.suppress(ValueError, TypeError):  # no date either: our own wait
            return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    limit = re.search(r"\br=0\b.*\bt=(\d+)", headers.get("RateLimit") or "")
    return float(limit[1]) if limit else 0.0


# --------------------------------------------------------------------------------------------------
# One commit
# --------------------------------------------------------------------------------------------------


@dataclass
class _Operations:
    """The client's additions, kept between tries: they remember what was hashed and sent."""

    local: _Export
    made: dict[str, CommitOperationAdd] = field(default_factory=dict)

    def add(self, name: str) -> CommitOperationAdd:
        if name not in self.made:
            self.made[name] = CommitOperationAdd(name, self.local.files[name].content)
        return self.made[name]


def _publish(client: _Client, local: _Export, state: _State) -> str:
    operations, tries, lost = _Operations(local), 0, False
    while True:
        tries += 1
        send, delete = _difference(local, state)
        if not send and not delete:
            url = f"{client.api.endpoint}/{client.repo_id}/commit/{state.head}"
            done = "the commit had arrived" if lost else "nothing to do"
            client.say(f"{done}: {_where(client)} holds this export, all sizes and hashes agree")
            return url
        if state.keeps_card(local):
            client.say(
                f"{CARD} of {client.repo_id} was edited there and stays; put a {CARD} into the "
                "folder to replace it"
            )
        additions = [operations.add(name) for name in send]
        total = sum(local.files[n].size for n in send)
        client.say(f"sending {len(send)} files, {total:,} bytes; deleting {len(delete)}")
        client.tried("sending files", lambda ops=additions: _send(client, ops))  # type: ignore[misc]
        _check_sent(local, send, operations)
        try:
            url = client.once(
                "making the commit",
                lambda s=state, ops=additions, gone=delete: _commit(client, local, s, ops, gone),  # type: ignore[misc]
            )
        except _Again as again:
            try:
                client.pause("making the commit", again, tries)
                state = client.read()
            except HubError as error:
                raise HubError(
                    f"{error}. Whether the commit arrived is not known: {client.repo_id} is "
                    "unchanged or complete"
                ) from None
            if isinstance(again, _MovedError):
                operations = _Operations(local)  # what they remember of the repository is old
            lost = True
            continue
        return _compared(client, local, url)


def _send(client: _Client, additions: list[CommitOperationAdd]) -> None:
    """Store the large files beside the commits; those that the Hub has are not sent."""
    client.api.preupload_lfs_files(
        client.repo_id,
        additions,
        revision=client.revision,
        free_memory=False,
        gitignore_content=_IGNORE_NOTHING,
    )


def _check_sent(local: _Export, names: list[str], operations: _Operations) -> None:
    """Refuse to commit a file that is no longer the one that was verified."""
    for name in names:
        file = local.files[name]
        if isinstance(file.content, Path):
            sent = operations.add(name).upload_info.sha256.hex()
            if sent != file.sha256:
                raise ExportError(
                    f"{file.content} changed after it was verified (its sha256 is {sent[:12]}..., "
                    f"was {file.sha256[:12]}...); nothing was committed: consolidate again"
                )


def _commit(
    client: _Client,
    local: _Export,
    state: _State,
    additions: list[CommitOperationAdd],
    delete: list[str],
) -> str:
    info = client.api.create_commit(
        client.repo_id,
        [*additions, *(CommitOperationDelete(name) for name in delete)],
        commit_message="Upload a verified export",
        commit_description=f"sha256 of its manifest: {local.digest}",
        revision=client.revision,
        parent_commit=state.head,
    )
    return str(info.commit_url)


def _compared(client: _Client, local: _Export, url: str) -> str:
    """Compare the Hub's list of files with the export after the commit."""

    def listed() -> list[str]:
        state = client.read()
        send, delete = _difference(local, state)
        if (send or delete) and not url.endswith(state.head):
            raise _Again("the Hub does not list the commit yet")
        return [*send, *delete]

    if wrong := client.tried(f"comparing what {url} holds", listed):
        raise HubError(
            f"{url} was made, but the Hub lists other content of {', '.join(wrong[:3])}; push "
            "again, and look at the repository's history"
        )
    total = sum(file.size for file in local.files.values())
    client.say(
        f"{_where(client)} holds the export: {len(local.files)} files, {total:,} bytes, all sizes "
        "and hashes agree"
    )
    return url


def _where(client: _Client) -> str:
    return f"{client.repo_id} ({client.revision or 'main'})"


# --------------------------------------------------------------------------------------------------
# The client
# --------------------------------------------------------------------------------------------------


def _api() -> tuple[HfApi, str]:
    """Return the client and its token."""
    token = get_token()
    if not token:
        raise HubError(_NO_TOKEN)
    return HfApi(token=token, library_name="fsdp2-toolkit"), token


def _check_id(repo_id: str, revision: str | None = None) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise HubError(f"repo id {scrub(repo_id)!r} is not one: {scrub(str(error))}") from None
    if repo_id.count("/") != 1:
        raise HubError(f"repo id {scrub(repo_id)!r} is not ORG/NAME: put your user name before it")
    if revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision):
        raise HubError(f"revision {revision} is a commit; give the name of a branch")


@contextlib.contextmanager
def _redacted_logs(token: str | None) -> Iterator[None]:
    """Keep secrets out of what the client logs: it writes signed addresses when it tries again."""

    def clean(record: logging.LogRecord) -> bool:
        record.msg, record.args = scrub(record.getMessage(), (token,)), None
        return True

    handlers = [*logging.getLogger("huggingface_hub").handlers, *logging.getLogger().handlers]
    for handler in handlers:
        handler.addFilter(clean)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(clean)
