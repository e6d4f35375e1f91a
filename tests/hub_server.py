"""A small Hub: the endpoints that `huggingface_hub` uses to publish and to read a model, in memory.

Speaks to the real client through HF_ENDPOINT: whoami, repos/create, model info, branches,
preupload, LFS (batch, PUT in one or many parts, completion, verify), commit, resolve. Repositories
have commits; a commit is made as a whole or not at all. Fails on demand: see `Hub.faults`.

Of xet, the client's other transport, only the client's side of the talk is served: blocks are
taken, and the sha256 of a file is known from the shard that describes it. The file is not put
together again, so what it holds cannot be compared.
"""

import base64
import hashlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_canaryCanaryCanaryCanaryCanaryCa"
READ_TOKEN = "hf_readerReaderReaderReaderReaderRe"
XET_TOKEN = "xetTokenForTheStoreAlone"
SIGNATURE = "SignedAddressThatMustNotBeLogged"
REGULAR_LIMIT = 10_000_000


@dataclass(frozen=True)
class Large:
    """A file that is kept beside git, by its sha256."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Commit:
    oid: str
    files: dict[str, bytes | Large]
    message: str
    parent: str | None


@dataclass
class Repo:
    private: bool
    branches: dict[str, list[Commit]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    """sha256 -> content of the large files, those that no commit names yet included."""
    parts: dict[tuple[str, int], bytes] = field(default_factory=dict)
    writable: bool = True

    def head(self, branch: str = "main") -> Commit:
        return self.branches[branch][-1]

    def content(self, branch: str = "main") -> dict[str, bytes]:
        """Return what a reader of the branch gets, file by file."""
        return {
            name: self.objects[f.sha256] if isinstance(f, Large) else f
            for name, f in self.head(branch).files.items()
        }


@dataclass(frozen=True)
class Fault:
    """What happens to a request instead of, or after, being served."""

    kind: str
    """`before`: the connection breaks before the request is read. `after`: it is served, then the
    connection breaks before the answer. `status`: an answer of that status, not served."""
    status: int = 0


@dataclass(frozen=True)
class Seen:
    """A request as it came."""

    method: str
    path: str
    token: str | None
    body: int


class Refused(Exception):
    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class Hub:
    """The server and its repositories. `with Hub() as hub: ... hub.url`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.repos: dict[str, Repo] = {}
        self.taken: set[str] = set()
        """Names that repositories of another type have."""
        self.seen: list[Seen] = []
        self.faults: Callable[[int, str, str], Fault | None] = lambda number, method, path: None
        """(number of the request from 0, method, path) -> what goes wrong."""
        self.part_size: int | None = None
        """Large files above it are uploaded in parts."""
        self.shards: list[bytes] = []
        """What xet's client sent to describe files."""
        self.lists_wrong_sha = False
        self.ignores: str | None = None
        """Content of the repository's .gitignore, as the server applies it to suffixes."""
        self.before_commit: Callable[[Repo], None] = lambda repo: None
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> "Hub":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def reset(self) -> None:
        """Forget the requests and the faults; keep the repositories."""
        with self.lock:
            self.seen, self.faults = [], lambda number, method, path: None
            self.part_size, self.lists_wrong_sha, self.ignores = None, False, None
            self.before_commit = lambda repo: None

    def make(self, name: str, private: bool = True, files: dict[str, bytes] | None = None) -> Repo:
        """Create a repository, with a first commit as the Hub makes it and one of `files`."""
        repo = self.repos[name] = Repo(private)
        attributes: dict[str, bytes | Large] = {
            ".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
        }
        repo.branches["main"] = [_commit(None, attributes, "initial commit")]
        if files:
            self.add(repo, files)
        return repo

    def add(self, repo: Repo, files: dict[str, bytes], branch: str = "main") -> None:
        """Commit files, as if somebody else did."""
        tree = dict(repo.head(branch).files)
        for name, content in files.items():
            if is_large(name, len(content)):
                sha256 = hashlib.sha256(content).hexdigest()
                repo.objects[sha256] = content
                tree[name] = Large(sha256, len(content))
            else:
                tree[name] = content
        repo.branches[branch].append(_commit(repo.head(branch), tree, "somebody's"))


def is_large(name: str, size: int) -> bool:
    return name.endswith((".safetensors", ".bin")) or size > REGULAR_LIMIT


def git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _commit(parent: Commit | None, files: dict[str, bytes | Large], message: str) -> Commit:
    listed = sorted((n, f.sha256 if isinstance(f, Large) else git_id(f)) for n, f in files.items())
    text = json.dumps([parent.oid if parent else None, listed, message])
    oid = hashlib.sha1(text.encode()).hexdigest()
    return Commit(oid, files, message, parent.oid if parent else None)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body in one packet, or each answer waits for an acknowledgement
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:  # the base class's name
        pass

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PUT = do_HEAD = do_GET

    def _serve(self) -> None:
        hub, parts = self.hub, urlsplit(self.path)
        path, query = unquote(parts.path), parse_qs(parts.query)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        length = int(self.headers.get("Content-Length") or 0)
        with hub.lock:
            fault = hub.faults(len(hub.seen), self.command, path)
            hub.seen.append(Seen(self.command, path, token, length))
        if fault is not None and fault.kind == "before":
            self._break()
            return
        body = self._body(length)
        if fault is not None and fault.kind == "status":
            self._answer(fault.status, {"error": "not now"}, {})
            return
        try:
            with hub.lock:
                status, answer, extra = self._route(path, query, token, body)
        except Refused as error:
            extra = {"X-Error-Message": error.message}
            if error.code:
                extra["X-Error-Code"] = error.code
            status, answer = error.status, {"error": error.message}
        if fault is not None:
            self._break()
        else:
            self._answer(status, answer, extra)

    def _body(self, length: int) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(length)
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _break(self) -> None:
        """Reset the connection: the client sees it break, not end."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def _answer(self, status: int, answer: Any, extra: dict[str, str]) -> None:
        raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.send_header("Content-Type", "application/json")
            for name, value in extra.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(raw)
            self.wfile.flush()
        except (BrokenPipeError, ConnectionResetError):  # the client was killed
            self.close_connection = True

    # ---- Endpoints -------------------------------------------------------------------------------

    def _route(
        self, path: str, query: dict[str, list[str]], token: str | None, body: bytes
    ) -> tuple[int, Any, dict[str, str]]:
        words = path.strip("/").split("/")
        if words[0] == "store":  # as a store of objects has it: a signed address, no token
            return self._store("/".join(words[1:3]), words[3], query, body)
        if words[0] == "cas" and token == XET_TOKEN:
            return self._xet("/".join(words[1:]), body)
        if token not in (TOKEN, READ_TOKEN):
            raise Refused(401, "Invalid credentials in Authorization header")
        if words[:2] == ["api", "whoami-v2"]:
            role = "read" if token == READ_TOKEN else "write"
            return 200, {"name": "me", "auth": {"accessToken": {"role": role}}}, {}
        if words[:2] == ["api", "validate-yaml"]:
            return self._validate(json.loads(body)["content"])
        if words[:3] == ["api", "repos", "create"]:
            return self._create(json.loads(body), token)
        if words[:2] == ["api", "models"]:
            repo = self._find("/".join(words[2:4]))
            return self._model("/".join(words[2:4]), repo, words[4:], query, token, body)
        name = "/".join(words[:2])
        if words[2:5] == ["info", "lfs", "objects"]:
            name = name.removesuffix(".git")
            repo = self._find(name)
            self._may_write(repo, token)
            return self._lfs(name, repo, words[5], json.loads(body))
        if words[2:3] == ["resolve"]:
            return self._resolve(self._find(name), words[3], "/".join(words[4:]))
        raise Refused(404, f"no such address: {self.command} {path}")

    def _find(self, name: str) -> Repo:
        if name not in self.hub.repos:
            raise Refused(404, "Repository not found", "RepoNotFound")
        return self.hub.repos[name]

    def _may_write(self, repo: Repo, token: str | None) -> None:
        if token != TOKEN or not repo.writable:
            raise Refused(403, "You don't have the rights to write here")

    def _create(self, asked: dict[str, Any], token: str | None) -> tuple[int, Any, dict[str, str]]:
        name = f"{asked['organization'] or 'me'}/{asked['name']}"
        if name in self.hub.repos or name in self.hub.taken:
            raise Refused(409, "You already created this repo")
        if token != TOKEN or name.startswith("others/"):
            raise Refused(403, "You don't have the rights to create a model here")
        private = asked.get("visibility") == "private" or asked.get("private") is True
        self.hub.make(name, private)
        return 200, {"url": f"{self.hub.url}/{name}", "name": name}, {}

    def _model(
        self,
        name: str,
        repo: Repo,
        words: list[str],
        query: dict[str, list[str]],
        token: str | None,
        body: bytes,
    ) -> tuple[int, Any, dict[str, str]]:
        what, rest = (words[0] if words else "revision"), "/".join(words[1:])
        branch = rest or "main"
        if what == "auth-check":
            if rest == "write":
                self._may_write(repo, token)
            return 200, {}, {}
        if what == "branch":
            self._may_write(repo, token)
            if branch in repo.branches:
                raise Refused(409, "Reference already exists")
            repo.branches[branch] = list(repo.branches["main"])
            return 200, {}, {}
        if what == "xet-write-token":
            self._may_write(repo, token)
            address, until = f"{self.hub.url}/cas", int(time.time()) + 3600
            return 200, {"casUrl": address, "exp": until, "accessToken": XET_TOKEN}, {}
        commits = [c for line in repo.branches.values() for c in line if c.oid == branch]
        if branch not in repo.branches and not commits:
            raise Refused(404, f"Invalid rev id: {branch}", "RevisionNotFound")
        commit = repo.head(branch) if branch in repo.branches else commits[0]
        if what == "revision":
            return 200, self._info(name, repo, commit, "blobs" in query), {}
        if what == "tree":
            return 200, self._tree(commit), {}
        self._may_write(repo, token)
        if what == "preupload":
            asked = json.loads(body)
            return 200, {"files": [self._mode(f, commit, asked) for f in asked["files"]]}, {}
        if what == "commit":
            return self._make_commit(name, repo, branch, body)
        raise Refused(404, f"no such address: {what}")

    def _info(self, name: str, repo: Repo, commit: Commit, blobs: bool) -> dict[str, Any]:
        siblings = []
        for file, content in commit.files.items():
            entry: dict[str, Any] = {"rfilename": file}
            if blobs and isinstance(content, Large):
                sha256 = content.sha256[::-1] if self.hub.lists_wrong_sha else content.sha256
                entry |= {"size": content.size, "blobId": "0" * 40}
                entry["lfs"] = {"sha256": sha256, "size": content.size, "pointerSize": 134}
            elif blobs:
                entry |= {"size": len(content), "blobId": git_id(content)}
            siblings.append(entry)
        return {
            "id": name,
            "modelId": name,
            "sha": commit.oid,
            "private": repo.private,
            "siblings": siblings,
        }

    def _tree(self, commit: Commit) -> list[dict[str, Any]]:
        listed = []
        for file, content in commit.files.items():
            entry: dict[str, Any] = {"type": "file", "path": file}
            if isinstance(content, Large):
                entry |= {"size": content.size, "oid": "0" * 40}
                entry["lfs"] = {"oid": content.sha256, "size": content.size, "pointerSize": 134}
            else:
                entry |= {"size": len(content), "oid": git_id(content)}
            listed.append(entry)
        return listed

    def _mode(self, file: dict[str, Any], commit: Commit, asked: dict[str, Any]) -> dict[str, Any]:
        there = commit.files.get(file["path"])
        oid = None
        if there is not None:
            oid = there.sha256 if isinstance(there, Large) else git_id(there)
        ignore = asked.get("gitIgnore") or self.hub.ignores or ""
        return {
            "path": file["path"],
            "uploadMode": "lfs" if is_large(file["path"], file["size"]) else "regular",
            "shouldIgnore": any(
                file["path"].endswith(line.lstrip("*"))
                for line in ignore.splitlines()
                if line and not line.startswith("#")
            ),
            "oid": oid,
        }

    def _validate(self, card: str) -> tuple[int, Any, dict[str, str]]:
        import yaml

        front = yaml.safe_load(card.split("---")[1]) if card.startswith("---") else {}
        base = front.get("base_model")
        if base is not None and (base.startswith(("/", ".")) or base.count("/") > 1):
            message = f'"base_model" with value "{base}" is not valid.'
            return 400, {"errors": [{"message": message}], "warnings": []}, {}
        return 200, {"errors": [], "warnings": []}, {}

    def _lfs(
        self, name: str, repo: Repo, what: str, asked: dict[str, Any]
    ) -> tuple[int, Any, dict[str, str]]:
        if what == "verify":
            held = repo.objects.get(asked["oid"])
            if held is None or len(held) != asked["size"]:
                raise Refused(404, "the object was not uploaded")
            return 200, {}, {}
        objects = []
        for item in asked["objects"]:
            entry = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in repo.objects:
                entry["actions"] = self._actions(name, item["oid"], item["size"])
            objects.append(entry)
        return 200, {"transfer": "basic", "objects": objects}, {}

    def _actions(self, name: str, oid: str, size: int) -> dict[str, Any]:
        place = f"{self.hub.url}/store/{name}/{oid}?X-Amz-Signature={SIGNATURE}"
        upload: dict[str, Any] = {"href": place}
        part = self.hub.part_size
        if part is not None and size > part:
            count = -(-size // part)
            upload["href"] = f"{place}&complete=1"
            upload["header"] = {"chunk_size": str(part)} | {
                str(i + 1): f"{place}&part={i + 1}" for i in range(count)
            }
        verify = f"{self.hub.url}/{name}.git/info/lfs/objects/verify"
        return {"upload": upload, "verify": {"href": verify}}

    def _store(
        self, name: str, oid: str, query: dict[str, list[str]], body: bytes
    ) -> tuple[int, Any, dict[str, str]]:
        if query.get("X-Amz-Signature") != [SIGNATURE]:
            raise Refused(403, "the signature does not match")
        repo = self._find(name)
        if "part" in query:
            repo.parts[oid, int(query["part"][0])] = body
            return 200, {}, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}
        if "complete" in query:
            count = len(json.loads(body)["parts"])
            body = b"".join(repo.parts[oid, i + 1] for i in range(count))
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refused(422, "the content does not have its sha256")
        repo.objects[oid] = body
        return 200, {}, {}

    def _xet(self, path: str, body: bytes) -> tuple[int, Any, dict[str, str]]:
        if path.startswith("v1/xorbs/"):
            return 200, {"was_inserted": True}, {}
        if path == "v1/shards":
            self.hub.shards.append(body)
            return 200, {"result": 1}, {}
        raise Refused(404, "not offered: the client has another way")

    def _is_described(self, sha256: str) -> bool:
        """Whether a shard names a file of this sha256: it holds the words the other way round."""
        raw = bytes.fromhex(sha256)
        turned = b"".join(raw[i : i + 8][::-1] for i in range(0, 32, 8))
        return any(turned in shard for shard in self.hub.shards)

    def _make_commit(
        self, name: str, repo: Repo, branch: str, body: bytes
    ) -> tuple[int, Any, dict[str, str]]:
        if branch not in repo.branches:
            raise Refused(400, "a commit goes to a branch")
        self.hub.before_commit(repo)
        lines = [json.loads(line) for line in body.splitlines()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        head = repo.head(branch)
        if header.get("parentCommit", head.oid) != head.oid:
            raise Refused(412, "A commit has happened since. Please refresh and try again.")
        files = dict(head.files)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in repo.objects and not self._is_described(value["oid"]):
                    raise Refused(400, f"{value['path']}: its content was not uploaded")
                files[value["path"]] = Large(value["oid"], value["size"])
            elif line["key"] == "deletedFile" and files.pop(value["path"], None) is None:
                raise Refused(404, "A file with this name doesn't exist", "EntryNotFound")
        made = _commit(head, files, header["summary"])
        repo.branches[branch].append(made)
        url = f"{self.hub.url}/{name}/commit/{made.oid}"
        return 200, {"success": True, "commitOid": made.oid, "commitUrl": url}, {}

    def _resolve(self, repo: Repo, revision: str, file: str) -> tuple[int, Any, dict[str, str]]:
        commits = [c for line in repo.branches.values() for c in line if c.oid == revision]
        if revision in repo.branches:
            commits = [repo.head(revision)]
        if not commits or file not in commits[0].files:
            raise Refused(404, "Entry not found", "EntryNotFound")
        content = commits[0].files[file]
        raw = repo.objects[content.sha256] if isinstance(content, Large) else content
        etag = content.sha256 if isinstance(content, Large) else git_id(raw)
        return 200, raw, {"X-Repo-Commit": commits[0].oid, "ETag": f'"{etag}"'}
