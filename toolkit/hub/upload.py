"""Publishing: a verified export becomes one commit in a repository of the Hugging Face Hub.

    folder -> verified -> compared with the repository -> large files sent -> ONE commit -> compared

[Note: never half] A reader of the repository sees the files of its last commit. Large files are
stored beside the commits first, by their sha256; those the Hub already has are not sent again, so
that an interrupted push goes on where it stopped. Then one commit names them all. It names its
parent, too: where an answer was lost, or somebody else committed in between, the Hub refuses it,
and the repository is read and compared anew before anything else is tried. So the whole attempt
may be repeated, and is.
"""

import contextlib
import inspect
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelInfo,
    get_session,
    get_token,
    hf_hub_url,
)
from huggingface_hub.errors import HFValidationError
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import build_hf_headers, validate_repo_id

from toolkit.errors import ExportError, HubError, scrub
from toolkit.formats.export_manifest import FILE as MANIFEST
from toolkit.hub import card as model_card
from toolkit.hub.local import CARD, LocalExport, read_export
from toolkit.hub.retries import (
    ConflictError,
    NoRepositoryError,
    NoRevisionError,
    Say,
    TryAgainError,
    retried,
    translated,
)

_NO_TOKEN = "no Hugging Face token was found; run `hf auth login`, or set HF_TOKEN"
# Weights and what names them: an older one left beside the new would be loaded, or break the load.
_WEIGHTS = re.compile(
    r"(model|adapter_model)(-\d+-of-\d+)?\.safetensors(\.index\.json)?|adapter_config\.json"
)
_ANSWER = 60.0  # seconds without a byte of an answer that the Hub gives at once
# huggingface_hub leaves out what the repository's .gitignore names, unless it is given another.
_IGNORE_NOTHING = "# every file of an export is published\n"


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
    say: Say = print,
) -> str:
    """Publish an export as one commit; return the commit's URL.

    The export is verified first and the Hub's list of files is compared with it afterwards. Nothing
    is deleted from the repository but weight files that the export does not have. Pushing the same
    again makes no commit. See [Note: never half].

    Costs one read of the export to verify it, one to hash and one to send it.

    Args:
        folder: as `toolkit consolidate` wrote it. Its README.md is published as it is; without one
            a model card is made.
        repo_id: ORG/NAME; created when there is none.
        revision: a branch, created when there is none; None: main.
        private: of a repository that is created. One that is public already is refused.
        say: takes a line of text now and then.

    Raises:
        HubError: no token, no such name, no permission, or the Hub could not be reached. The
            repository is unchanged, or complete where the error says so.
        ExportError: the folder is no export, it has a finding, or it holds what must not be
            published.
    """
    _check_id(repo_id, revision)
    api = _api()
    with _scrubbed_logs(api.token):
        export = read_export(Path(folder), repo_id, str(api.token))
        attempt = _Push(_Repository(api, repo_id, revision, say), export)
        return retried(f"publishing on {repo_id}", lambda: attempt.once(private), say)


def preview(
    folder: str | Path, repo_id: str, *, revision: str | None = None, private: bool = True
) -> Preview:
    """Return what `push` would do. Sends nothing; reads the repository where there is a token.

    Works offline: what could not be read is in the notes.

    Raises:
        HubError: the repository id is not one, or the repository is public and `private` was asked.
        ExportError: as `push`.
    """
    _check_id(repo_id, revision)
    token, notes, state = get_token(), [], None
    with _scrubbed_logs(token):
        export = read_export(Path(folder), repo_id, token)
        if token is None:
            notes.append(f"the repository was not read: {_NO_TOKEN}")
        else:
            repo = _Repository(_api(), repo_id, revision, lambda _: None, answer=10.0)
            try:
                state = repo.read()
            except NoRevisionError:
                notes.append(f"branch {revision} would be created from main")
                state = repo.read(main=True)
            except NoRepositoryError:
                notes.append(f"{repo_id} would be created, {'private' if private else 'public'}")
            except HubError as error:
                notes.append(f"the repository was not read: {error}")
        if state is not None:
            repo.check_visibility(state, private)
    card = bytes(export.contents[CARD]).decode()
    sizes = {name: entry["size"] for name, entry in export.entries.items()}
    if state is None:
        return Preview(sizes, {}, [], card, notes)
    send, delete = state.difference(export)
    same = {n: s for n, s in sizes.items() if n not in send}
    if state.keeps_card(export):
        notes.append(f"{CARD} of the repository was edited there and would stay")
        same.pop(CARD, None)
    return Preview({n: sizes[n] for n in send}, same, delete, card, notes)


def check_access(repo_id: str, *, private: bool = True, say: Say = print) -> None:
    """Refuse now what `push` would be refused for; create the repository when there is none.

    Raises:
        HubError: no token or not a valid one, no such name, no permission to write, or a public
            repository where a private one was asked for.
    """
    _check_id(repo_id)
    api = _api()
    with _scrubbed_logs(api.token):
        repo = _Repository(api, repo_id, None, say)
        retried(f"asking for access to {repo_id}", lambda: repo.check_access(private), say)


# --------------------------------------------------------------------------------------------------
# The repository
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _State:
    """A revision of the repository at one moment."""

    head: str
    private: bool
    files: dict[str, RepoSibling]
    card_is_ours: bool
    """Whether README.md is missing, or as an earlier push wrote it."""

    def keeps_card(self, export: LocalExport) -> bool:
        """Return whether the repository's card was edited there, and the folder has none."""
        return not self.card_is_ours and not export.own_card

    def difference(self, export: LocalExport) -> tuple[list[str], list[str]]:
        """Return the names to send and the names to delete."""
        send = [
            name
            for name in export.entries
            if not (name in self.files and _equal(self.files[name], export, name))
            and not (name == CARD and self.keeps_card(export))
        ]
        stale = [n for n in self.files if _WEIGHTS.fullmatch(n) and n not in export.entries]
        return send, sorted(stale)


def _equal(remote: RepoSibling, export: LocalExport, name: str) -> bool:
    if remote.lfs:
        return remote.lfs.sha256 == export.entries[name]["sha256"]
    return remote.blob_id == export.blob(name)


@dataclass
class _Repository:
    """A revision of one repository through the Hub's client."""

    api: HfApi
    repo_id: str
    revision: str | None
    say: Say
    answer: float = _ANSWER

    def request(self, what: str) -> contextlib.AbstractContextManager[None]:
        return translated(self.api, self.repo_id, what)

    def read(self, main: bool = False) -> _State:
        """Return the state of the revision (or of main)."""
        revision = None if main else self.revision
        with self.request(f"reading {self.repo_id}"):
            info = self.api.model_info(
                self.repo_id, revision=revision, files_metadata=True, timeout=self.answer
            )
            files = {s.rfilename: s for s in info.siblings or []}
            ours = CARD not in files or self._card_is_ours(info)
            return _State(str(info.sha), bool(info.private), files, ours)

    def _card_is_ours(self, info: ModelInfo) -> bool:
        url = hf_hub_url(self.repo_id, CARD, revision=info.sha, endpoint=self.api.endpoint)
        headers = build_hf_headers(token=self.api.token)
        answer = get_session().get(url, headers=headers, timeout=self.answer)
        answer.raise_for_status()
        return model_card.is_unedited(answer.text)

    def open(self, private: bool) -> _State:
        """Return the revision's state; create the repository and the branch when missing."""
        try:
            state = self.read(main=True)
        except NoRepositoryError:
            state = self._create(private)
        # The visibility of the whole is decided before anything is added to it.
        self.check_visibility(state, private)
        if not private and state.private:
            self.say(f"{self.repo_id} is private and stays so; its settings page makes it public")
        if self.revision is None:
            return state
        with self.request(f"creating branch {self.revision}"):
            self.api.create_branch(self.repo_id, branch=self.revision, exist_ok=True)
        return self.read()

    def check_visibility(self, state: _State, private: bool) -> None:
        if private and not state.private:
            raise HubError(
                f"{self.repo_id} is public, and a push is private unless it is told otherwise; add "
                "--public (private=False) to publish there, or give another --repo_id"
            )

    def check_access(self, private: bool) -> None:
        """Refuse a token that may not write; create the repository when missing."""
        with self.request("asking whose the token is"):
            who = self.api.whoami()
        if ((who.get("auth") or {}).get("accessToken") or {}).get("role") == "read":
            raise HubError(
                "the Hugging Face token may only read; make one with the write role at "
                f"{self.api.endpoint}/settings/tokens and run `hf auth login`, or set HF_TOKEN"
            )
        try:
            state = self.read(main=True)
        except NoRepositoryError:
            self._create(private)
            return
        self.check_visibility(state, private)
        if "write" in inspect.signature(self.api.auth_check).parameters:  # huggingface_hub 2
            with self.request("asking for permission to write"):
                self.api.auth_check(self.repo_id, write=True)

    def _create(self, private: bool) -> _State:
        # There already: an earlier try arrived and its answer did not, or the name is taken.
        with contextlib.suppress(ConflictError), self.request(f"creating {self.repo_id}"):
            self.api.create_repo(self.repo_id, private=private)
        try:
            state = self.read(main=True)
        except NoRepositoryError:
            raise HubError(
                f"{self.repo_id} cannot be created: the name is taken, and not by a model that "
                "this token may read; give another --repo_id"
            ) from None
        self.say(f"created {self.repo_id}, {'private' if private else 'public'}")
        return state


# --------------------------------------------------------------------------------------------------
# One commit
# --------------------------------------------------------------------------------------------------


@dataclass
class _Push:
    """One export on its way to one repository; `once` may be called again after a failure."""

    repo: _Repository
    export: LocalExport
    additions: dict[str, CommitOperationAdd] = field(default_factory=dict)
    """Kept between tries: they remember what was hashed and sent."""

    def once(self, private: bool) -> str:
        """Make the commit, or find that it is there; return its URL."""
        repo = self.repo
        state = repo.open(private)
        send, delete = state.difference(self.export)
        where = f"{repo.repo_id} ({repo.revision or 'main'})"
        if not send and not delete:
            repo.say(f"nothing to do: {where} holds this export, all sizes and hashes agree")
            return f"{repo.api.endpoint}/{repo.repo_id}/commit/{state.head}"
        if state.keeps_card(self.export):
            repo.say(
                f"{CARD} of {repo.repo_id} was edited there and stays; put a {CARD} into the "
                "folder to replace it"
            )
        sizes = {name: entry["size"] for name, entry in self.export.entries.items()}
        total = sum(sizes[name] for name in send)
        repo.say(f"sending {len(send)} files, {total:,} bytes; deleting {len(delete)}")
        try:
            url = self._commit(state.head, [self._addition(name) for name in send], delete)
        except ConflictError:
            self.additions.clear()  # what they remember of the repository is old
            raise
        self._compare(url)
        repo.say(
            f"{where} holds the export: {len(sizes)} files, {sum(sizes.values()):,} bytes, all "
            "sizes and hashes agree"
        )
        return url

    def _addition(self, name: str) -> CommitOperationAdd:
        """Return the client's operation, which hashes the file."""
        if name not in self.additions:
            added = CommitOperationAdd(name, self.export.contents[name])
            if added.upload_info.sha256.hex() != self.export.entries[name]["sha256"]:
                raise ExportError(
                    f"{name} changed after it was verified; nothing was committed: consolidate "
                    "again"
                )
            self.additions[name] = added
        return self.additions[name]

    def _commit(self, parent: str, send: list[CommitOperationAdd], delete: list[str]) -> str:
        repo = self.repo
        with repo.request("sending files"):
            repo.api.preupload_lfs_files(
                repo.repo_id,
                send,
                revision=repo.revision,
                free_memory=False,
                gitignore_content=_IGNORE_NOTHING,
            )
        digest = self.export.entries[MANIFEST]["sha256"]
        with repo.request("making the commit"):
            info = repo.api.create_commit(
                repo.repo_id,
                [*send, *(CommitOperationDelete(name) for name in delete)],
                commit_message="Upload a verified export",
                commit_description=f"sha256 of its manifest: {digest}",
                revision=repo.revision,
                parent_commit=parent,
            )
        return str(info.commit_url)

    def _compare(self, url: str) -> None:
        """Refuse a commit after which the Hub lists other content than the export's."""
        state = self.repo.read()
        send, delete = state.difference(self.export)
        if not send and not delete:
            return
        if not url.endswith(state.head):
            raise TryAgainError("the Hub does not list the commit yet")
        raise HubError(
            f"{url} was made, but the Hub lists other content of "
            f"{', '.join([*send, *delete][:3])}; push again, and look at the repository's history"
        )


# --------------------------------------------------------------------------------------------------
# The client
# --------------------------------------------------------------------------------------------------


def _api() -> HfApi:
    token = get_token()
    if not token:
        raise HubError(_NO_TOKEN)
    return HfApi(token=token, library_name="fsdp2-toolkit")


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
def _scrubbed_logs(token: str | bool | None) -> Iterator[None]:
    """Keep secrets out of what the client logs: it writes signed addresses when it tries again."""

    def clean(record: logging.LogRecord) -> bool:
        record.msg, record.args = scrub(record.getMessage(), [str(token or "")]), None
        return True

    handlers = [*logging.getLogger("huggingface_hub").handlers, *logging.getLogger().handlers]
    for handler in handlers:
        handler.addFilter(clean)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(clean)
