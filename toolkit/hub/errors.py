"""Errors of the Hub's client in plain words, without secrets; which of them may pass."""

import contextlib
import json
from collections.abc import Iterator

from huggingface_hub import HfApi, get_session
from huggingface_hub.errors import (
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from toolkit.errors import HubError, scrub

_PASSING = (408, 429, 500, 502, 503, 504)
_CONFLICT = (409, 412)  # another commit arrived since the repository was read
_SILENCE = 600.0  # seconds without a byte after which a transfer counts as lost


class PassingHubError(HubError):
    """A failure that may be over when the same is asked again."""


class ConflictError(PassingHubError):
    """The repository changed since it was read."""


class NoRepositoryError(HubError):
    """The repository does not exist, or the token may not read it."""


class NoRevisionError(HubError):
    """The repository has no such branch."""


@contextlib.contextmanager
def translated(api: HfApi, repo_id: str, what: str) -> Iterator[None]:
    """Raise what the client raises as a `HubError` in plain words, without a secret."""
    get_session().timeout = _SILENCE  # the client's own is to wait for ever
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
            return PassingHubError(f"the connection was lost ({type(cause).__name__}: {reason})")
        case json.JSONDecodeError():
            return PassingHubError("the answer was cut off or no JSON")
        case _:
            return HubError(f"{what}: {reason}")
    if response.status_code in _PASSING:
        return PassingHubError(f"the Hub answered {response.status_code}")
    if response.status_code in _CONFLICT:
        return ConflictError(f"the repository changed meanwhile ({reason})")
    if response.status_code in (401, 403):
        return HubError(
            f"{what}: the Hub does not accept the token for that ({reason}); it needs the write "
            f"role for {repo_id.split('/')[0]} ({api.endpoint}/settings/tokens); run `hf auth "
            "login` again, or set HF_TOKEN"
        )
    return HubError(f"{what}: the Hub refused ({reason})")
