"""Publishing: a verified export becomes one commit in a repository of the Hugging Face Hub.

    folder -> verified -> compared with the repository -> large files sent -> ONE commit -> compared

[Note: never half] A reader of the repository sees the files of its last commit. Large files are
stored beside the commits first, by their sha256; those that are there are not sent again. One
commit then names them all, and its parent: where somebody else committed in between, the Hub
refuses it. A push begins by comparing, so the same push again goes on where one broke off, and a
commit whose answer was lost is found, not made twice.
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
    PassingHubError,
    translated,
)
from toolkit.hub.local import CARD, LocalExport, read_export

T = TypeVar("T")
Say = Callable[[str], object]

_NO_TOKEN = "no Hugging Face token was found; run `hf auth login`, or set HF_TOKEN"
# Files that loaders read beside assets: an older one beside the new would be loaded, or break.
_READ = re.compile(
    r"(model|adapter_model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
    r"|(adapter_)?config\.json|additional_chat_templates/[^/]+\.jinja"
)
_ANSWER = 30.0  # seconds without a byte of an answer that the Hub gives at once
# huggingface_hub leaves out what the repository's .gitignore names, unless it is given another.
_IGNORE_NOTHING = "# every file of an export is published\n"
# Seconds before the next try; the last is as long as the Hub counts requests for its rate limit.
_WAITS = (5.0, 60.0, 300.0)


@dataclass(frozen=True)
class Preview:
    """The changes that a push would make; file -> bytes."""

    send: dict[str, int]
    same: dict[str, int]  # what the repository has already
    delete: list[str]  # files of an older export, deleted in the same commit
    card: str
    notes: list[str]  # what could not be found out, and what would be created


def push(
    folder: str | Path,
    repo_id: str,
    *,
    revision: str | None = None,
    private: bool = True,
    say: Say = print,
) -> str:
    """Publish an export as one commit; return the commit's URL. See [Note: never half].

    The export is verified and hashed first, which reads it twice, and the Hub's list of files is
    compared with it afterwards. Nothing is deleted but what loaders read and the export does not
    have. Pushing the same again makes no commit.

    Args:
        folder: as `toolkit consolidate` wrote it; without a README.md a model card is made.
        repo_id: ORG/NAME; created when there is none.
        revision: a branch, created when there is none; None: main.
        private: of a repository that is created. One that is public already is refused.

    Raises:
        HubError: no token, no such name, no permission, or the Hub could not be reached. The
            repository is unchanged, or complete where the error says so.
        ExportError: the folder is no verified export, or holds what must not be published.
    """
    with _repository(repo_id, private, revision, say) as repo:
        export = read_export(Path(folder), repo_id, str(repo.api.token))
        return _tried(f"publishing on {repo_id}", lambda: repo.publish(export), say)


def preview(
    folder: str | Path, repo_id: str, *, revision: str | None = None, private: bool = True
) -> Preview:
    """Return what `push` would do; raises as it does. Sends nothing, and works offline."""
    token, notes, state = get_token(), [], None
    with _repository(repo_id, private, revision, token=token or False) as repo:
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
            notes.append(f"the repository was not read: {error}")
    sizes = {name: entry["size"] for name, entry in export.entries.items()}
    card = bytes(export.contents[CARD]).decode()
    if state is None:
        return Preview(sizes, {}, [], card, notes)
    repo.check_visibility(state)
    send, delete = state.difference(export)
    if state.keeps_card(export):
        notes.append(f"{CARD} of the repository was edited there and would stay")
        del sizes[CARD]
    same = {name: size for name, size in sizes.items() if name not in send}
    return Preview({name: sizes[name] for name in send}, same, delete, card, notes)


def check_access(
    repo_id: str, *, private: bool = True, say: Say = print, create: bool = True
) -> None:
    """Refuse now what `push` would be refused for; create the repository when there is none, or
    with `create` off ask once, and only whether the token's owner may.
    """
    with _repository(repo_id, private, None, say) as repo:
        if create:
            _tried(f"asking for access to {repo_id}", lambda: repo.check_access(create), say)
        else:
            repo.check_access(create)


def check_name(repo_id: str) -> None:
    """Refuse what is no ORG/NAME; asks nobody."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise HubError(f"repo id {repo_id!r} is not one: {error}") from None
    if repo_id.count("/") != 1:
        raise HubError(f"repo id {repo_id!r} is not ORG/NAME: put your user name before it")


def _tried(what: str, attempt: Callable[[], T], say: Say) -> T:
    """Return what `attempt` returns; repeat it after a failure that may pass. The client repeats
    transfers itself, but not the commit and not what is asked before and after it.
    """
    waits = iter(_WAITS)
    while True:
        try:
            return attempt()
        except PassingHubError as error:
            if (wait := next(waits, None)) is None:
                raise HubError(
                    f"{what} failed {len(_WAITS) + 1} times: {error}. The repository is unchanged "
                    "or complete; run the same command again to go on"
                ) from None
            say(f"{what}: {error}; trying again in {wait:.0f} s")
            time.sleep(wait)


@dataclass(frozen=True)
class _Revision:
    """A revision of the repository at one moment."""

    head: str
    private: bool
    files: dict[str, RepoSibling]
    card_is_ours: bool  # whether README.md is missing, or as an earlier push wrote it

    def keeps_card(self, export: LocalExport) -> bool:
        """Return whether the repository's card was edited there, and the folder has none."""
        return not self.card_is_ours and not export.own_card

    def difference(self, export: LocalExport) -> tuple[list[str], list[str]]:
        """Return the names to send and the names to delete."""
        send = [name for name in export.entries if not self._holds(name, export)]
        read = [n for n in self.files if _READ.fullmatch(n) or n in ASSET_FILES]
        stale = [n for n in read if n not in export.entries]
        return send, sorted(stale)

    def _holds(self, name: str, export: LocalExport) -> bool:
        if name == CARD and self.keeps_card(export):
            return True
        remote, content = self.files.get(name), export.contents[name]
        if remote is None:
            return False
        if remote.lfs:
            return remote.lfs.sha256 == export.entries[name]["sha256"]
        return isinstance(content, bytes) and remote.blob_id == git_hash(content)


@dataclass
class _Repository:
    """A revision of one repository through the Hub's client."""

    api: HfApi
    repo_id: str
    private: bool
    revision: str | None
    say: Say

    def request(self, what: str) -> contextlib.AbstractContextManager[None]:
        return translated(self.api, self.repo_id, what)

    def read(self, main: bool = False) -> _Revision:
        """Return the state of the revision (or of main)."""
        revision = None if main else self.revision
        with self.request(f"reading {self.repo_id}"):
            options: Any = {"revision": revision, "files_metadata": True, "timeout": _ANSWER}
            info = self.api.model_info(self.repo_id, **options)
            files = {s.rfilename: s for s in info.siblings or []}
            ours = True
            if CARD in files:
                own: Any = {"revision": info.sha, "etag_timeout": _ANSWER}
                card = Path(self.api.hf_hub_download(self.repo_id, CARD, **own))
                ours = model_card.is_unedited(card.read_text("utf-8", errors="replace"))
            return _Revision(str(info.sha), bool(info.private), files, ours)

    def open_main(self) -> _Revision:
        """Return the state of main; create the repository when missing."""
        try:
            state = self.read(main=True)
        except NoRepositoryError:
            # There already: an earlier try arrived and its answer did not, or the name is taken.
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
        # The visibility of the whole is decided before anything is added to it.
        self.check_visibility(state)
        return state

    def check_visibility(self, state: _Revision) -> None:
        if self.private and not state.private:
            raise HubError(
                f"{self.repo_id} is public; add --public (private=False) to publish there, or give "
                "another --repo_id"
            )

    def check_access(self, create: bool) -> None:
        """Refuse a token that may not write, or not `create` the missing repository."""
        try:
            if create:
                self.open_main()
            else:
                self.check_visibility(self.read(main=True))
        except NoRepositoryError:
            with self.request("asking whose token this is"):
                owner = self.api.whoami()
            groups = [g["name"] for g in owner.get("orgs", []) if g.get("roleInOrg") != "read"]
            role = owner.get("auth", {}).get("accessToken", {}).get("role")
            if role == "read" or self.repo_id.split("/")[0] not in (owner["name"], *groups):
                raise HubError(
                    f"{self.repo_id} does not exist, and this token may not create it: the token "
                    f"({role or 'of unknown role'}) is of {owner['name']}, who may create in "
                    f"{', '.join([owner['name'], *groups])}; give another id"
                ) from None
            return
        with self.request("asking for permission to write"):
            self.api.auth_check(self.repo_id, write=True)

    def publish(self, export: LocalExport) -> str:
        """Make the commit, or find that it is there; return its URL. May be called again."""
        state = self.open_main()
        if not self.private and state.private:
            self.say(f"{self.repo_id} is private and stays so; its settings page makes it public")
        if self.revision is not None:
            with self.request(f"creating branch {self.revision}"):
                self.api.create_branch(self.repo_id, branch=self.revision, exist_ok=True)
            state = self.read()
        send, delete = state.difference(export)
        where = f"{self.repo_id} ({self.revision or 'main'})"
        if not send and not delete:
            self.say(f"nothing to do: {where} holds this export, all sizes and hashes agree")
            return f"{self.api.endpoint}/{self.repo_id}/commit/{state.head}"
        if state.keeps_card(export):
            instead = f"put a {CARD} into the folder to replace it"
            self.say(f"{CARD} of {self.repo_id} was edited there and stays; {instead}")
        sizes = {name: entry["size"] for name, entry in export.entries.items()}
        total = sum(sizes[name] for name in send)
        self.say(f"sending {len(send)} files, {total:,} bytes; deleting {len(delete)}")
        url = self._commit(export, state.head, send, delete)
        state = self.read()
        if wrong := [name for names in state.difference(export) for name in names]:
            if not url.endswith(state.head):
                raise PassingHubError("the Hub does not list the commit yet")
            raise HubError(
                f"{url} was made, but the Hub lists other content of {', '.join(wrong[:3])}; push "
                "again, and look at the history"
            )
        self.say(
            f"{where} holds the export: {len(sizes)} files, {sum(sizes.values()):,} bytes, all "
            "sizes and hashes agree"
        )
        return url

    def _commit(self, export: LocalExport, parent: str, send: list[str], delete: list[str]) -> str:
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
def _repository(
    repo_id: str,
    private: bool,
    revision: str | None,
    say: Say = print,
    *,
    token: str | bool | None = None,
) -> Iterator[_Repository]:
    """Yield the repository; keep secrets out of what the client logs meanwhile. Without `token` the
    machine's own is needed.
    """
    check_name(repo_id)
    if revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision):
        raise HubError(f"revision {revision} is a commit; give the name of a branch")
    token = get_token() if token is None else token
    if token is None:
        raise HubError(_NO_TOKEN)
    api = HfApi(token=token, library_name="fsdp2-toolkit")

    record_of = logging.getLogRecordFactory()

    def clean(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = record_of(*args, **kwargs)  # of signed addresses, when the client tries again
        record.msg, record.args = scrub(record.getMessage(), [str(token or "")]), None
        return record

    logging.setLogRecordFactory(clean)
    try:
        yield _Repository(api, repo_id, private, revision, say)
    finally:
        logging.setLogRecordFactory(record_of)
