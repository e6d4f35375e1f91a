"""Requests of an upload that are tried again after a failure of the Hub, and errors of others."""

import contextlib
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from huggingface_hub import HfApi, get_session
from huggingface_hub.errors import (
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from toolkit.errors import HubError, scrub

T = TypeVar("T")
Say = Callable[[str], object]

# The client tries transfers several times by itself; this is counted around it.
TRIES = 6
FIRST_WAIT = 1.0  # seconds, doubled each time
LONGEST_WAIT = 60.0
LONGEST_ASKED = 600.0  # seconds up to which the Hub's Retry-After is obeyed
TRY_AGAIN = (408, 429, 500, 502, 503, 504)
_CONFLICT = (409, 412)  # another commit arrived since the repository was read
_SILENCE = 600.0  # seconds without a byte after which a transfer counts as lost
_jitter = random.Random()  # of its own: the run's random state must not change


class TryAgainError(HubError):
    """A failure that may pass; `wait`: the seconds that the Hub asked for."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


class ConflictError(TryAgainError):
    """The repository changed since it was read."""


class NoRepositoryError(HubError):
    """The repository does not exist, or the token may not read it."""


class NoRevisionError(HubError):
    """The repository has no such branch."""


def retried(what: str, fn: Callable[[], T], say: Say) -> T:
    """Return what `fn` returns; call it again after each `TryAgainError`.

    HubError: the last try failed, or the Hub asks to wait too long.
    """
    tries = 0
    while True:
        tries += 1
        try:
            return fn()
        except TryAgainError as error:
            if tries >= TRIES or error.wait > LONGEST_ASKED:
                asked = f" (it asks to wait {error.wait:.0f} s)" if error.wait else ""
                raise HubError(
                    f"{what} failed {tries} time{'s' * (tries > 1)}: {error}{asked}. The "
                    "repository is unchanged or complete; run the same command again to go on"
                ) from None
            doubled = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (tries - 1))
            # Not all at once: many processes may have been refused together.
            delay = max(error.wait, doubled * _jitter.uniform(0.5, 1.0))
            say(f"{what}: {error}; trying again in {delay:.0f} s")
            time.sleep(delay)


@contextlib.contextmanager
def translated(api: HfApi, repo_id: str, what: str) -> Iterator[None]:
    """Raise what the client raises as a `HubError` in plain words, without a secret."""
    session = get_session()
    if getattr(session, "timeout", None) is not None:  # the client's own is to wait for ever
        session.timeout = _SILENCE
    try:
        yield
    except HubError:
        raise
    except Exception as error:
        # Without its context: headers and addresses of the request hang on it.
        raise _translation(error, api, repo_id, what) from None


def _translation(error: Exception, api: HfApi, repo_id: str, what: str) -> HubError:
    known = (OfflineModeIsEnabled, HTTPError, ConnectionError, TimeoutError, json.JSONDecodeError)
    cause: BaseException = error
    while not isinstance(cause, known) and cause.__cause__ is not None:
        cause = cause.__cause__  # the threads of an upload wrap their errors
    lines = str(getattr(cause, "server_message", None) or cause).split("\n")
    reason = next((line.strip() for line in lines if line.strip()), type(cause).__name__)
    reason = scrub(reason, [str(api.token)])[:300]
    response = getattr(cause, "response", None)
    match cause:
        case OfflineModeIsEnabled():
            return HubError(f"{what}: HF_HUB_OFFLINE is set; unset it to reach the Hub")
        case RevisionNotFoundError():
            return NoRevisionError(f"{what}: there is no such branch")
        case RepositoryNotFoundError():
            return NoRepositoryError(f"{repo_id} does not exist, or this token may not read it")
        case HTTPError() if response is not None:
            reason = f"{response.status_code}: {reason}"
        case HTTPError() | ConnectionError() | TimeoutError():
            return TryAgainError(f"the connection was lost ({type(cause).__name__}: {reason})")
        case json.JSONDecodeError():
            return TryAgainError("the answer was cut off or no JSON")
        case _:
            return HubError(f"{what}: {reason}")
    status, headers = response.status_code, response.headers
    if status in TRY_AGAIN:
        limit = re.search(r"\bt=(\d+)", headers.get("RateLimit") or "")
        asked = re.fullmatch(r"(\d+)", headers.get("Retry-After") or "") or limit
        return TryAgainError(f"the Hub answered {status}", float(asked[1]) if asked else 0.0)
    if status in _CONFLICT:
        return ConflictError(f"the repository changed meanwhile ({reason})")
    if status in (401, 403):
        return HubError(
            f"{what}: the Hub does not accept the token for that ({reason}); it needs the write "
            f"role for {repo_id.split('/')[0]} ({api.endpoint}/settings/tokens); run `hf auth "
            "login` again, or set HF_TOKEN"
        )
    return HubError(f"{what}: the Hub refused ({reason})")
