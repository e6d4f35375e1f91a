"""The errors that a user can meet, each on one line, and the removal of secrets from messages.

A message says what was expected, what was found and what to do next.
"""

import re
from collections.abc import Iterable

REMOVED = "[removed]"
NOT_FSDP = "the toolkit shards with FSDP2. Use a file of accelerate_configs/"
EXIT_CODE_PREEMPTED = 75
"""Exit code of a run that a signal stopped (EX_TEMPFAIL); the same command resumes it."""

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
# Secrets that only their place reveals: after `bearer`, before the host of a URL, in its query.
_IN_PLACE = re.compile(
    r"(\bbearer\s+)[A-Za-z0-9._~+/=-]{16,}"
    r"|(\b[a-z][a-z0-9+.-]*://)[^\s/@'\"]+(?=@)"
    r"|([?&](?:[\w.-]*(?:token|secret|password|signature|credential|api_?key|key-?id)|sig|key|auth)=)"
    r"[^&\s'\"#]+",
    re.IGNORECASE,
)
_MAX_MESSAGE = 4000  # characters
# Line breaks, characters that move the cursor, and halves of surrogate pairs.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\ud800-\udfff]")
_SECRET_WORDS = {
    *("token", "password", "passwd", "passphrase", "secret", "credential", "credentials"),
    *("apikey", "authorization", "bearer", "auth"),
}
_KEY_OF = {"api", "access", "private", "secret", "account", "auth", "signing", "ssh"}
_TOKENS_OF_TEXT = ("eos", "bos", "pad", "unk", "sep", "cls", "mask")


def is_secret_name(name: str) -> bool:
    """Return True if a setting's name says that it holds a secret: `hf_token`, `hub.apiKey`.

    False for `train_tokenizer`, `tokens_per_second` or `eos_token_id`.
    """
    words = [w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]
    if not words:
        return False
    if words[-1] == "token":
        return len(words) < 2 or words[-2] not in _TOKENS_OF_TEXT
    return words[-1] in _SECRET_WORDS or (words[-1] == "key" and bool(_KEY_OF & set(words[:-1])))


def looks_secret(text: str) -> bool:
    """Return True if a text holds a token, a private key, or a URL with credentials."""
    return scrub(text) != text


def holds_token(text: str) -> bool:
    """Return True if a text holds an access token or a private key.

    URLs with credentials do not count. A token is a secret here, not a unit of text.
    """
    return bool(_TOKEN.search(text))


def scrub(text: str, secrets: Iterable[str | None] = ()) -> str:
    """Replace tokens, keys, URL credentials and each text in `secrets` by `[removed]`."""
    for secret in filter(None, secrets):
        text = text.replace(secret, REMOVED)
    text = _TOKEN.sub(REMOVED, text)
    return _IN_PLACE.sub(lambda m: (m[1] or m[2] or m[3]) + REMOVED, text)


def one_line(problem: object, max_length: int = 300) -> str:
    """Format an exception or a text on one line.

    Only the first `max_length` characters are kept, followed by " ..." if there are more. An
    exception that is no `ToolkitError` is preceded by the name of its class.
    """
    is_foreign = isinstance(problem, Exception) and not isinstance(problem, ToolkitError)
    message = f"{type(problem).__name__}: {problem}" if is_foreign else str(problem)
    text = " ".join(message.split())
    return text if len(text) <= max_length else text[:max_length] + " ..."


class ToolkitError(Exception):
    """A failure with a cause that the user can act on; printed on one line, without a traceback.

    A message may quote any value. So secrets are removed, line breaks and control characters are
    escaped, and a very long text is shortened in the middle.
    """

    def __str__(self) -> str:
        text = scrub(_UNPRINTABLE.sub(lambda m: repr(m[0])[1:-1], super().__str__()))
        # Keep the front, which says what is wrong, and the end, which says what to do.
        return (
            text if len(text) <= _MAX_MESSAGE else f"{text[: _MAX_MESSAGE // 2]} ... {text[-500:]}"
        )


class ConfigError(ToolkitError):
    """A setting is unknown, of the wrong type, or contradicts another one."""


class LaunchError(ToolkitError):
    """The launcher did not start the processes that the launch configuration requests."""


class ModelError(ToolkitError):
    """The model folder or its architecture cannot be used."""


class DataError(ToolkitError):
    """The data cannot be used; the message names the file, row and column."""


class ShardingError(ToolkitError):
    """The model cannot be sharded as the settings request."""


class LoadingError(ToolkitError):
    """Weight files are damaged, or do not fit the model; the message names the file or tensor."""


class TrainingError(ToolkitError):
    """A step produced values that training must not continue from."""


class CheckpointError(ToolkitError):
    """A checkpoint cannot be written, read or trusted; the message names the file or tensor."""


class StorageError(CheckpointError):
    """The disk or the object store refuses an operation; the data itself is not at fault."""


class ExportError(ToolkitError):
    """A checkpoint cannot be turned into a Hugging Face folder."""


class HubError(ToolkitError):
    """The Hub cannot be reached, or refuses a request; the message says what to do."""


class ReportError(ToolkitError):
    """A report cannot be written: a folder is not that of a run, or a package is missing."""
