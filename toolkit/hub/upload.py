"""Publish a verified export as one commit in a repository of the Hugging Face Hub.

    folder -> verified -> compared with the repository -> large files sent -> ONE commit -> compared

[Note: never half] A reader of the repository sees the files of its last commit. Large files are
sent first and stored outside the commits by their sha256; a file that is stored already is not sent
again. Then one commit lists all files and names its parent, so the Hub refuses it if somebody else
committed in between. A push starts with a comparison. So a repeated push continues an interrupted
one, and a commit whose answer was lost is found instead of made twice.
"""

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import validate_repo_id
from huggingface_hub.utils.sha import git_hash

from toolkit.errors import ExportError, HubError, scrub
from toolkit.formats import ASSET_FILES
from toolkit.formats.export_manifest import FILE as MANIFEST
from toolkit.hub import card as model_card
from toolkit.hub.errors import (
    ConflictError,
    NoRepositoryError,
    NoRevisionError,
    TemporaryHubError,
    translated_errors,
)
from toolkit.hub.local import CARD, LocalExport, read_export

T = TypeVar("T")
Say = Callable[[str], object]

_NO_TOKEN = "no Hugging Face token was found; run `hf auth login`, or set HF_TOKEN"
# Files that loaders read, except assets. An old one next to the new ones would be loaded, or break
# loading.
_LOADED_FILES = re.compile(
    r"(model|adapter_model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
    r"|(adapter_)?config\.json|additional_chat_templates/[^/]+\.jinja"
)
_TIMEOUT_SECONDS = 30.0  # of requests that the Hub answers at once
# huggingface_hub skips what the repository's .gitignore lists, unless another one is passed.
_IGNORE_NOTHING = "# every file of an export is published\n"
# Before each retry. The last is as long as the window of the Hub's rate limit.
_RETRY_SECONDS = (5.0, 60.0, 300.0)


@dataclass(frozen=True)
class Preview:
    """The changes that a push would make: files to send, to keep and to delete, and notes."""

    send: dict[str, int]
    same: dict[str, int]  # already in the repository
    delete: list[str]  # files of an older export, deleted in the same commit
    card: str
    notes: list[str]  # what is unknown, and what would be created


def push(
    folder: str | Path,
    repo_id: str,
    *,
    revision: str | None = None,
    private: bool = True,
    say: Say = print,
) -> str:
    """Publish an export as one commit; return the commit's URL. See [Note: never half].

    The export is verified and hashed first, which reads it twice. Then it is compared with the
    repository. Files in the repository that model loaders would read, but the export does not have,
    are deleted; other files stay. If the repository holds this export already, no commit is made,
    and the URL is that of its last commit.

    Args:
        folder: an export of `toolkit consolidate`. If it has no README.md, a model card is made.
        repo_id: ORG/NAME; the repository is created if it is missing.
        revision: a branch, created if it is missing; None: main.
        private: create a private repository, and refuse a public one. If False, a missing one is
            created public; an existing private one stays private.
        say: called with each line to print.

    Raises:
        HubError: no token, no such name, no permission, or the Hub could not be reached. The
            repository is unchanged, or complete if the error says so.
        ExportError: the folder is no intact export, or holds a file that must not be published.
    """
    with _open_repository(repo_id, private, revision, say) as repo:
        export = read_export(Path(folder), repo_id, str(repo.api.token))
        return _retry(f"publishing on {repo_id}", lambda: repo.publish(export), say)


def preview(
    folder: str | Path, repo_id: str, *, revision: str | None = None, private: bool = True
) -> Preview:
    """Compute the changes that `push` would make, without sending anything.

    The export is verified and hashed. If the repository cannot be read, for example offline, a note
    says so. For arguments and errors see `push`.
    """
    token = get_token()
    notes = []
    state = None
    with _open_repository(repo_id, private, revision, token=token or False) as repo:
        export = read_export(Path(folder), repo_id, token)
        try:
            if token is None:
                raise HubError(_NO_TOKEN)
            state = repo.read()
        except NoRevisionError:
            notes.append(f"branch {revision} would be created from main")
            state = repo.read(main=True)
        except NoRepositoryError:
            notes.append(f"{repo_id} would be created, {'private' if private else 'public'}")
        except HubError as error:
            notes.append(f"the repository could not be read: {error}")
    sizes = {name: entry["size"] for name, entry in export.entries.items()}
    card = bytes(export.contents[CARD]).decode()
    if state is None:
        return Preview(sizes, {}, [], card, notes)
    repo.check_visibility(state)
    send, delete = state.find_changes(export)
    if state.keeps_card(export):
        notes.append(f"{CARD} of the repository was edited there and would be kept")
        del sizes[CARD]
    same = {name: size for name, size in sizes.items() if name not in send}
    return Preview({name: sizes[name] for name in send}, same, delete, card, notes)


def check_access(
    repo_id: str, *, private: bool = True, say: Say = print, create: bool = True
) -> None:
    """Raise a HubError if the token may not push to a repository.

    Args:
        repo_id: ORG/NAME.
        private: create a private repository, and refuse a public one.
        say: called with each line to print.
        create: create the repository if it is missing, and retry temporary failures. If False,
            nothing is created or retried; for a missing repository, the rights of the token's owner
            are checked.

    Raises:
        HubError: the token may not write, or the repository is public and `private` is True.
    """
    with _open_repository(repo_id, private, None, say) as repo:
        if create:
            _retry(f"checking access to {repo_id}", lambda: repo.check_access(create), say)
        else:
            repo.check_access(create)


def check_name(repo_id: str) -> None:
    """Raise HubError if `repo_id` is not ORG/NAME. Sends no request."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise HubError(f"repo id {repo_id!r} is not one: {error}") from None
    if repo_id.count("/") != 1:
        raise HubError(f"repo id {repo_id!r} is not ORG/NAME: put your user name before it")


def _retry(action: str, attempt: Callable[[], T], say: Say) -> T:
    """Call `attempt` and return its result; repeat it after a temporary failure.

    Waits 5 s, 60 s and 300 s before the repetitions. The Hub's client repeats transfers itself, but
    neither the commit nor the requests around it.

    Args:
        action: the current action, for messages.
        attempt: the function to call.
        say: prints a line before each wait.

    Raises:
        HubError: all attempts failed, or the failure is not temporary.
    """
    waits = iter(_RETRY_SECONDS)
    while True:
        try:
            return attempt()
        except TemporaryHubError as error:
            if (wait := next(waits, None)) is None:
                raise HubError(
                    f"{action} failed {len(_RETRY_SECONDS) + 1} times: {error}. The repository is "
                    "unchanged or complete; run the same command again to continue"
                ) from None
            say(f"{action}: {error}; trying again in {wait:.0f} s")
            time.sleep(wait)


@dataclass(frozen=True)
class _Revision:
    """A snapshot of a branch on the Hub: its commit, its files, and if its card was edited."""

    head: str
    private: bool
    files: dict[str, RepoSibling]
    card_is_ours: bool  # README.md is missing, or unchanged since an earlier push

    def keeps_card(self, export: LocalExport) -> bool:
        """Return True if a push must keep the repository's model card.

        It must if the card was edited on the Hub and the export's folder has no README.md.
        """
        return not self.card_is_ours and not export.has_own_card

    def find_changes(self, export: LocalExport) -> tuple[list[str], list[str]]:
        """Compare the snapshot with an export.

        Returns:
            (names of the files to send, sorted names of the files to delete).
        """
        send = [name for name in export.entries if not self._holds(name, export)]
        loaded = [n for n in self.files if _LOADED_FILES.fullmatch(n) or n in ASSET_FILES]
        stale = [n for n in loaded if n not in export.entries]
        return send, sorted(stale)

    def _holds(self, name: str, export: LocalExport) -> bool:
        """Return True if the repository has the file `name` as in the export, by its hash.

        Also True for a model card that a push must keep.
        """
        if name == CARD and self.keeps_card(export):
            return True
        remote = self.files.get(name)
        content = export.contents[name]
        if remote is None:
            return False
        if remote.lfs:
            return remote.lfs.sha256 == export.entries[name]["sha256"]
        return isinstance(content, bytes) and remote.blob_id == git_hash(content)


@dataclass
class _Repository:
    """One branch of a repository on the Hub, accessed through the Hub's client."""

    api: HfApi
    repo_id: str
    private: bool
    revision: str | None
    say: Say

    def request(self, action: str) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that converts errors of a request to a `HubError`.

        `action` begins the error's message.
        """
        return translated_errors(self.api, self.repo_id, action)

    def read(self, main: bool = False) -> _Revision:
        """Read a snapshot of the branch, or of main if `main` is True.

        Also downloads the model card to find out if it was edited.

        Raises:
            NoRepositoryError, NoRevisionError: the repository or branch does not exist.
        """
        revision = None if main else self.revision
        with self.request(f"reading {self.repo_id}"):
            options: Any = {
                "revision": revision,
                "files_metadata": True,
                "timeout": _TIMEOUT_SECONDS,
            }
            info = self.api.model_info(self.repo_id, **options)
            files = {s.rfilename: s for s in info.siblings or []}
            ours = True
            if CARD in files:
                options = {"revision": info.sha, "etag_timeout": _TIMEOUT_SECONDS}
                card = Path(self.api.hf_hub_download(self.repo_id, CARD, **options))
                ours = model_card.is_unedited(card.read_text("utf-8", errors="replace"))
            return _Revision(str(info.sha), bool(info.private), files, ours)

    def open_main(self) -> _Revision:
        """Read a snapshot of main; create the repository if it is missing.

        Raises:
            HubError: the repository is public and a private one is requested, or it cannot be
                created.
        """
        try:
            state = self.read(main=True)
        except NoRepositoryError:
            # A conflict means that an earlier try has created it, or that the name is taken.
            with (
                contextlib.suppress(ConflictError),
                self.request(f"creating {self.repo_id}"),
            ):
                self.api.create_repo(self.repo_id, private=self.private)
            try:
                state = self.read(main=True)
            except NoRepositoryError:
                raise HubError(
                    f"{self.repo_id} cannot be created: the name is taken, and not by a model that "
                    "this token may read; give another"
                ) from None
            self.say(f"created {self.repo_id}, {'private' if self.private else 'public'}")
        # Check the visibility before anything is sent.
        self.check_visibility(state)
        return state

    def check_visibility(self, state: _Revision) -> None:
        """Raise HubError if the repository is public and a private one is requested."""
        if self.private and not state.private:
            raise HubError(
                f"{self.repo_id} is public; add --public (private=False) to publish there, or give "
                "another --repo_id"
            )

    def check_access(self, create: bool) -> None:
        """Raise HubError if the token may not write to the repository.

        If the repository is missing, it is created if `create` is True. If False, it is only
        checked that the token's owner may create it.
        """
        try:
            if create:
                self.open_main()
            else:
                self.check_visibility(self.read(main=True))
        except NoRepositoryError:
            with self.request("reading the owner of the token"):
                owner = self.api.whoami()
            groups = [g["name"] for g in owner.get("orgs", []) if g.get("roleInOrg") != "read"]
            role = owner.get("auth", {}).get("accessToken", {}).get("role")
            if role == "read" or self.repo_id.split("/")[0] not in (owner["name"], *groups):
                raise HubError(
                    f"{self.repo_id} does not exist, and this token may not create it: the token "
                    f"({role or 'of unknown role'}) belongs to {owner['name']}, who may create in "
                    f"{', '.join([owner['name'], *groups])}; give another id"
                ) from None
            return
        with self.request("checking the permission to write"):
            self.api.auth_check(self.repo_id, write=True)

    def publish(self, export: LocalExport) -> str:
        """Commit the export if the branch differs from it; return the commit's URL.

        Creates the repository and the branch if they are missing. After the commit, the branch is
        compared with the export again. The call may be repeated after a failure.
        """
        state = self.open_main()
        if not self.private and state.private:
            self.say(
                f"{self.repo_id} is private and stays private; its settings page can make it public"
            )
        if self.revision is not None:
            with self.request(f"creating branch {self.revision}"):
                self.api.create_branch(self.repo_id, branch=self.revision, exist_ok=True)
            state = self.read()
        send, delete = state.find_changes(export)
        where = f"{self.repo_id} ({self.revision or 'main'})"
        if not send and not delete:
            self.say(f"nothing to do: {where} holds this export, all sizes and hashes agree")
            return f"{self.api.endpoint}/{self.repo_id}/commit/{state.head}"
        if state.keeps_card(export):
            instead = f"put a {CARD} into the folder to replace it"
            self.say(f"{CARD} of {self.repo_id} was edited there and is kept; {instead}")
        sizes = {name: entry["size"] for name, entry in export.entries.items()}
        total = sum(sizes[name] for name in send)
        self.say(f"sending {len(send)} files, {total:,} bytes; deleting {len(delete)}")
        url = self._commit(export, state.head, send, delete)
        state = self.read()
        if wrong := [name for names in state.find_changes(export) for name in names]:
            if not url.endswith(state.head):
                raise TemporaryHubError("the Hub does not list the commit yet")
            raise HubError(
                f"{url} was made, but the Hub lists different content of {', '.join(wrong[:3])}; "
                "push again, and look at the history"
            )
        self.say(
            f"{where} holds the export: {len(sizes)} files, {sum(sizes.values()):,} bytes, all "
            "sizes and hashes agree"
        )
        return url

    def _commit(self, export: LocalExport, parent: str, send: list[str], delete: list[str]) -> str:
        """Send files, make one commit on top of `parent`, and return its URL.

        Args:
            export: the export.
            parent: hash of the commit that must be the newest one of the branch.
            send: names of the files to send.
            delete: names of the files to delete.
        """
        additions = [CommitOperationAdd(name, export.contents[name]) for name in send]
        for added in additions:
            if added.upload_info.sha256.hex() != export.entries[added.path_in_repo]["sha256"]:
                raise ExportError(
                    f"{added.path_in_repo} changed after it was verified; consolidate again"
                )
        with self.request("sending files"):
            self.api.preupload_lfs_files(
                self.repo_id,
                additions,
                revision=self.revision,
                free_memory=False,
                gitignore_content=_IGNORE_NOTHING,
            )
        with self.request("making the commit"):
            info = self.api.create_commit(
                self.repo_id,
                [*additions, *map(CommitOperationDelete, delete)],
                commit_message="Upload a verified export",
                commit_description=f"sha256 of its manifest: {export.entries[MANIFEST]['sha256']}",
                revision=self.revision,
                parent_commit=parent,
            )
        return str(info.commit_url)


@contextlib.contextmanager
def _open_repository(
    repo_id: str,
    private: bool,
    revision: str | None,
    say: Say = print,
    *,
    token: str | bool | None = None,
) -> Iterator[_Repository]:
    """Yield a branch of a repository on the Hub, as a context manager. Sends no request.

    Inside the context, secrets are removed from all log records of this process.

    Args:
        repo_id: ORG/NAME.
        private: create a private repository, and refuse a public one.
        revision: a branch; None: main.
        say: called with each line to print.
        token: token of the Hub; None: the one of this machine; False: no token.

    Raises:
        HubError: the name is invalid, `revision` is a commit, or `token` is None and this machine
            has no token.
    """
    check_name(repo_id)
    if revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision):
        raise HubError(f"revision {revision} is a commit; give the name of a branch")
    token = get_token() if token is None else token
    if token is None:
        raise HubError(_NO_TOKEN)
    api = HfApi(token=token, library_name="fsdp2-toolkit")

    make_record = logging.getLogRecordFactory()

    def make_clean_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        """Create a log record whose message has no secrets."""
        record = make_record(*args, **kwargs)
        # The client logs signed addresses when it tries again.
        record.msg = scrub(record.getMessage(), [str(token or "")])
        record.args = None
        return record

    logging.setLogRecordFactory(make_clean_record)
    try:
        yield _Repository(api, repo_id, private, revision, say)
    finally:
        logging.setLogRecordFactory(make_record)
