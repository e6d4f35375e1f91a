"""A process that publishes: reads calls from stdin, one JSON line each, and answers with one.

`huggingface_hub` reads its address and its offline switch when it is imported, and the tests run
offline; so the real client lives here, with the address of the tests' server in its environment.
"""

import contextlib
import io
import json
import os
import sys
import traceback

import huggingface_hub.utils._http as client_http
import warm
from huggingface_hub import constants

from toolkit import cli
from toolkit.hub import upload as hub

# The client's own waits between its tries are arguments with a default: shorter here, no clock is
# faked.
client_http.http_backoff.__kwdefaults__.update(base_wait_time=0.001, max_wait_time=0.002)


def call(asked: dict) -> dict:
    said: list[str] = []
    options = asked.get("options", {})
    # Read from HF_HUB_DISABLE_XET when the client was imported.
    constants.HF_HUB_DISABLE_XET = not asked.get("xet", False)
    if asked["call"] in ("push", "check_access"):
        hub._RETRY_SECONDS = (0.001,) * (options.pop("tries", 4) - 1)
        options["say"] = said.append
    out, err = io.StringIO(), io.StringIO()
    result, error, trace = None, None, ""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            if asked["call"] == "command":
                result = cli.main(asked["arguments"])
            else:
                result = getattr(hub, asked["call"])(*asked["arguments"], **options)
        except Exception as raised:
            error, trace = [type(raised).__name__, str(raised)], traceback.format_exc()
    if isinstance(result, hub.Preview):
        result = vars(result)
    told = {"out": out.getvalue(), "err": err.getvalue()}
    return {"result": result, "error": error, "trace": trace, "said": said, **told}


def main() -> None:
    warm.give_forks_a_thread_pool()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes where the tests look for tokens
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        with contextlib.ExitStack() as undo:
            for name, value in asked.get("environment", {}).items():
                before = os.environ.get(name)
                undo.callback(_set, name, before)
                _set(name, value)
            answer = _forked(asked) if asked.get("fork") else call(asked)
        print(json.dumps(answer), file=answers, flush=True)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _forked(asked: dict) -> dict:
    """Make the call in a child that may be killed; return how it ended."""
    child = os.fork()
    if child == 0:
        call(asked)
        os._exit(0)
    with open(asked["fork"], "w") as f:
        f.write(str(child))
    _, status = os.waitpid(child, 0)
    return {"signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None}


if __name__ == "__main__":
    main()
