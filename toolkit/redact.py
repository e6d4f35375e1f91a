"""What must not leave this machine: tokens, passwords, keys, and addresses that carry them.

Owns what such a thing looks like. Knows nothing of where texts come from or go to. A text that
looks like none of these and yet is one cannot be recognised: pass it as `known`.
"""

import re
from collections.abc import Iterable
from typing import Any

REMOVED = "[removed]"

# By its look: tokens of the Hub, of code hosts, of trackers and of clouds; JSON web tokens.
_LOOKS = re.compile(
    r"\bhf_[A-Za-z0-9]{30,}\b"  # 34 of them; names of files have underscores
    r"|\bapi_org_[A-Za-z0-9]{16,}"
    r"|\b(?:sk|pk|rk)-(?=[A-Za-z_-]*\d)(?=[a-z0-9_-]*[A-Z])[A-Za-z0-9_-]{20,}"
    r"|\bgh[opsur]_[A-Za-z0-9]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,}|\bglpat-[A-Za-z0-9_-]{16,}"
    r"|\bA(?:KIA|SIA)[A-Z0-9]{16}\b|\bAIza[A-Za-z0-9_-]{30,}|\bxox[abprs]-[A-Za-z0-9-]{10,}"
    r"|\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
_BEARER = re.compile(r"(?i)\b(bearer)\s+[A-Za-z0-9._~+/=-]{16,}")
_USER_IN_URL = re.compile(r"\b([a-z][a-z0-9+.-]*://)[^\s/@'\"]+@", re.IGNORECASE)
_QUERY = re.compile(
    r"([?&](?:[\w.-]*(?:token|secret|password|signature|credential|api_?key|key-?id)|sig|key|auth)=)"
    r"[^&\s'\"#]+",
    re.IGNORECASE,
)
_SECRET_WORDS = {
    *("token", "password", "passwd", "passphrase", "secret", "credential", "credentials"),
    *("apikey", "authorization", "bearer", "auth"),
}
_KEY_OF = {"api", "access", "private", "secret", "account", "auth", "signing", "ssh"}


def is_secret_name(name: str) -> bool:
    """Whether a setting of this name holds a secret: `hf_token`, `hub.apiKey`, `db_password`.

    Names of other things do not: `train_tokenizer`, `tokens_per_second`, `eos_token_id`.
    """
    words = [w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]
    if not words:
        return False
    if words[-1] == "token":  # `eos_token`, `pad_token` are texts of a tokenizer
        return len(words) < 2 or words[-2] not in ("eos", "bos", "pad", "unk", "sep", "cls", "mask")
    return words[-1] in _SECRET_WORDS or (words[-1] == "key" and bool(_KEY_OF & set(words[:-1])))


def looks_secret(text: str) -> bool:
    """Whether a text holds a token, a private key, or an address with credentials in it."""
    return scrub(text) != text


def looks_like_token(text: str) -> bool:
    """Whether a text holds a token or a private key. Unlike `looks_secret` it takes no example
    (`https://user:password@host`) for one.
    """
    return bool(_LOOKS.search(text))


def scrub(text: str, known: Iterable[str | None] = ()) -> str:
    """Return `text` with everything that looks like a secret, and every `known` one, removed."""
    for secret in known:
        if secret:
            text = text.replace(secret, REMOVED)
    text = _LOOKS.sub(REMOVED, text)
    text = _BEARER.sub(rf"\1 {REMOVED}", text)
    text = _USER_IN_URL.sub(rf"\1{REMOVED}@", text)
    return _QUERY.sub(rf"\1{REMOVED}", text)


def without_secrets(value: Any) -> Any:
    """Return JSON values without the entries that a secret's name stands for, texts scrubbed."""
    if isinstance(value, dict):
        return {
            scrub(str(k)): without_secrets(v)
            for k, v in value.items()
            if not is_secret_name(str(k))
        }
    if isinstance(value, list | tuple):
        return [without_secrets(v) for v in value]
    return scrub(value) if isinstance(value, str) else value
