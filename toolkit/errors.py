"""The errors a user can meet, on one line each; and secrets, which no message repeats.

A message says what was expected, what came and what to do next.
"""

import re
from collections.abc import Iterable

REMOVED = "[removed]"
NOT_FSDP = "the toolkit shards with FSDP2. Use a file of accelerate_configs/"
EXIT_CODE_PREEMPTED = 75
"""Of a run that a signal stopped, EX_TEMPFAIL of sysexits.h: the same command goes on."""

# Tokens of the Hub, of code hosts, of trackers and of clouds; JSON web tokens; private keys.
_TOKEN = re.compile(
    r"\bhf_[A-Za-z0-9]{30,}\b"  # 34 of them; names of files have underscores
    r"|\bapi_org_[A-Za-z0-9]{16,}"
    r"|\b(?:sk|pk|rk)-(?=[A-Za-z_-]*\d)(?=[a-z0-9_-]*[A-Z])[A-Za-z0-9_-]{20,}"
    r"|\bgh[opsur]_[A-Za-z0-9]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,}|\bglpat-[A-Za-z0-9_-]{16,}"
    r"|\bA(?:KIA|SIA)[A-Z0-9]{16}\b|\bAIza[A-Za-z0-9_-]{30,}|\bxox[abprs]-[A-Za-z0-9-]{10,}"
    r"|\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
# Where it stands: after `bearer`, before the host of a URL, in a URL's query.
_IN_PLACE = re.compile(
    r"(\bbearer\s+)[A-Za-z0-9._~+/=-]{16,}"
    r"|(\b[a-z][a-z0-9+.-]*://)[^\s/@'\"]+(?=@)"
    r"|([?&](?:[\w.-]*(?:token|secret|password|signature|credential|api_?key|key-?id)|sig|key|auth)=)"
    r"[^&\s'\"#]+",
    re.IGNORECASE,
)
# What would break a line, move the cursor, or is no character: half of a surrogate pair.
_LONGEST = 4000  # letters of an error
_UNSHOWN = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\ud800-\udfff]")
_SECRET_WORDS = {
    *("token", "password", "passwd", "passphrase", "secret", "credential", "credentials"),
    *("apikey", "authorization", "bearer", "auth"),
}
_KEY_OF = {"api", "access", "private", "secret", "account", "auth", "signing", "ssh"}
_TOKENS_OF_TEXT = ("eos", "bos", "pad", "unk", "sep", "cls", "mask")


def is_secret_name(name: str) -> bool:
    """Return whether a setting of this name holds a secret: `hf_token`, `hub.apiKey`.

    Names of other things do not: `train_tokenizer`, `tokens_per_second`, `eos_token_id`.
    """
    words = [w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]
    if not words:
        return False
    if words[-1] == "token":
        return len(words) < 2 or words[-2] not in _TOKENS_OF_TEXT
    return words[-1] in _SECRET_WORDS or (words[-1] == "key" and bool(_KEY_OF & set(words[:-1])))


def looks_secret(text: str) -> bool:
    """Return whether a text holds a token, a private key, or an address with credentials in it."""
    return scrub(text) != text


def holds_token(text: str) -> bool:
    """Return whether a text holds a token or a private key; an address with credentials is none."""
    return bool(_TOKEN.search(text))


def scrub(text: str, known: Iterable[str | None] = ()) -> str:
    """Return `text` with everything that looks like a secret, and every `known` one, removed."""
    for secret in filter(None, known):
        text = text.replace(secret, REMOVED)
    text = _TOKEN.sub(REMOVED, text)
    return _IN_PLACE.sub(lambda m: (m[1] or m[2] or m[3]) + REMOVED, text)


def one_line(problem: object, most: int = 300) -> str:
    """Return what a library says on one line of `most` characters: an exception after its class."""
    is_foreign = isinstance(problem, Exception) and not isinstance(problem, ToolkitError)
    said = f"{type(problem).__name__}: {problem}" if is_foreign else str(problem)
    text = " ".join(said.split())
    return text if len(text) <= most else text[:most] + " ..."


class ToolkitError(Exception):
    """A failure with a cause the user can act on; printed as one line, without a traceback.

    A value that a message repeats may be a token that was put into the wrong place: it is not
    repeated. It may hold line breaks and control characters: they are escaped.
    """

    def __str__(self) -> str:
        text = scrub(_UNSHOWN.sub(lambda m: repr(m[0])[1:-1], super().__str__()))
        # What is wrong stands at the front, what to do at the end.
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-500:]}"


class ConfigError(ToolkitError):
    """A setting is unknown, of the wrong type, or contradicts another one."""


class LaunchError(ToolkitError):
    """The processes of the run did not come up as the launcher was asked to start them."""


class ModelError(ToolkitError):
    """The model folder or its architecture cannot be used."""


class DataError(ToolkitError):
    """The data cannot be used; names the file and the row or column where there is one."""


class ShardingError(ToolkitError):
    """The model cannot be sharded as asked."""


class LoadingError(ToolkitError):
    """Weights and model do not fit together; names the tensors."""


class TrainingError(ToolkitError):
    """A step produced something no training should go on from."""


class CheckpointError(ToolkitError):
    """A checkpoint cannot be written, read or trusted; names the file or the tensor."""


class StorageError(CheckpointError):
    """The disk or the object store refuses; nothing is wrong with what was to be written."""


class ExportError(ToolkitError):
    """A checkpoint cannot be turned into a Hugging Face folder."""


class HubError(ToolkitError):
    """The Hub cannot be reached, or refuses; the message says what to do and holds no secret."""


class ReportError(ToolkitError):
    """A report cannot be written: no run's folder, or a package is missing."""
