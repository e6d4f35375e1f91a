"""Translate errors of the Hub's client into plain words, without secrets."""

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

_TEMPORARY = (408, 429, 500, 502, 503, 504)
_CONFLICT = (409, 412)  # another commit arrived since the repository was read
_TIMEOUT_SECONDS = 600.0  # without a byte of a transfer


class TemporaryHubError(HubError):
    """A failure that a retry of the same request may overcome."""


class ConflictError(TemporaryHubError):
    """The repository changed since it was read."""


class NoRepositoryError(HubError):
    """The repository does not exist, or the token may not read it."""


class NoRevisionError(HubError):
    """The repository has no such branch."""


@contextlib.contextmanager
def translated_errors(api: HfApi, repo_id: str, action: str) -> Iterator[None]:
    """Convert any error in the context to a `HubError` in plain words, without secrets.

    Also sets the timeout of the Hub client's requests, for the entire process. A `HubError` is
    raised unchanged.

    Args:
        api: the Hub's client.
        repo_id: ORG/NAME.
        action: the current action, such as "making the commit"; begins the message.
    """
    # The client's own default is to wait for ever.
    get_session().timeout = _TIMEOUT_SECONDS
    try:
        yield
    except HubError:
        raise
    except Exception as error:
        # Without its context, which holds headers and addresses of the request.
        raise _translate(error, api, repo_id, action) from None


def _translate(error: Exception, api: HfApi, repo_id: str, action: str) -> HubError:
    """Build the `HubError` that describes an error of the Hub's client, without secrets.

    Its subclass says if a retry is useful, or if the repository or branch is missing.
    """
    expected = (
        OfflineModeIsEnabled,
        HTTPError,
        ConnectionError,
        TimeoutError,
        json.JSONDecodeError,
    )
    cause: BaseException = error
    while not isinstance(cause, expected) and cause.__cause__ is not None:
        cause = cause.__cause__  # the threads of an upload wrap their errors
    lines = str(getattr(cause, "server_message", None) or cause).split("\n")
    reason = next((line.strip() for line in lines if line.strip()), type(cause).__name__)
    reason = scrub(reason, [str(api.token)])[:300]
    response = getattr(cause, "response", None)
    match cause:
        case OfflineModeIsEnabled():
            return HubError(f"{action}: HF_HUB_OFFLINE is set; unset it to reach the Hub")
        case RevisionNotFoundError():
            return NoRevisionError(f"{action}: there is no such branch")
        case RepositoryNotFoundError():
            return NoRepositoryError(f"{repo_id} does not exist, or this token may not read it")
        case HTTPError() if response is not None:
            reason = f"{response.status_code}: {reason}"
        case HTTPError() | ConnectionError() | TimeoutError():
            return TemporaryHubError(f"the connection was lost ({type(cause).__name__}: {reason})")
        case json.JSONDecodeError():
            return TemporaryHubError("the answer was cut off or no JSON")
        case _:
            return HubError(f"{action}: {reason}")
    if response.status_code in _TEMPORARY:
        return TemporaryHubError(f"the Hub answered {response.status_code}")
    if response.status_code in _CONFLICT:
        return ConflictError(f"the repository changed meanwhile ({reason})")
    if response.status_code in (401, 403):
        return HubError(
            f"{action}: the Hub does not accept the token for that ({reason}); it needs the write "
            f"role for {repo_id.split('/')[0]} ({api.endpoint}/settings/tokens); run `hf auth "
            "login` again, or set HF_TOKEN"
        )
    return HubError(f"{action}: the Hub refused ({reason})")
