"""Watcher: a process next to each rank that reports its state, and ends it when the run is over.

This program is started by `watchdog` and uses only the standard library. It works even while its
rank holds Python's lock, is stopped or is killed. Its standard input is a file: the rank shares its
state in the first bytes (`BEAT`), and appends its stacks. The watcher prints orders for the rank as
JSON, one per line.

The judge is a thread in the watcher of rank 0. Every watcher sends the state of its rank to the
judge every few seconds and receives the current order, over a TCP connection that fails when the
other host is lost. If a rank is gone or ends with an error, or if no rank makes progress, the judge
reports the cause on one line, and orders all ranks to leave.
"""

import contextlib
import json
import linecache
import mmap
import os
import re
import signal
import socket
import struct
import sys
import threading
import time
from collections import defaultdict
from hmac import compare_digest
from pathlib import Path
from typing import Any

State = dict[str, Any]

# The values that a rank shares: a progress count, the seconds that may pass without progress, its
# exit code, its current activity, and why it ends.
BEAT = struct.Struct("<Qdi112s400s")
RUNNING = -1  # instead of an exit code
IN_STEP = "step "  # prefix of the activity in steady steps
PREEMPTED_CODE = 75
HANG_CODE = 70  # EX_SOFTWARE of sysexits.h
# Seconds to finish a checkpoint when a rank is gone, which the checkpoint may need.
LOST_SECONDS = 15.0
SECRET = "TOOLKIT_WATCHDOG_SECRET"  # in the environment of a watcher
# Makes a rank write its stacks (faulthandler), for which Python's lock is not needed.
DUMP_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGURG)

_FINISH_SECONDS = 300.0  # to finish a checkpoint in all other cases
_GRACE = {1: 5.0, PREEMPTED_CODE: 30.0}  # exit code -> seconds for ranks to end by themselves
_TICK = 0.25
_STATE_INTERVAL = 2.0  # seconds between two states
_SILENT = 15  # seconds without a packet until a host counts as lost
_JUDGE_TIMEOUT = 60.0  # seconds for the judge to answer
_RANK_TIMEOUT = 5.0  # seconds for a rank to write its stacks, and to leave
_COLLECT_SECONDS = 1.5  # after the first failure, to receive failures that may have caused it
# Bytes between two states from which file traffic counts as progress. Log threads write less.
_PROGRESS_BYTES = 1 << 20
_WAITS = re.compile(r"\bwait\(|\.item\(|\.tolist\(|\.cpu\(|synchronize\(")


class Rank:
    """The process of a rank, as its watcher sees and controls it.

    Args:
        pid: process id of the rank, which is the parent of this process.
        number: the rank.
    """

    def __init__(self, pid: int, number: int) -> None:
        self._pid, self._number = pid, number
        self._name = f"rank {number} (pid {pid} on {socket.gethostname()})"
        self._shared = mmap.mmap(0, BEAT.size, access=mmap.ACCESS_READ)
        self._progress, self._idle = (0, 0), 0.0
        self.stacks: dict[str, str] | None = None

    def is_alive(self) -> bool:
        """Return True while the rank's process exists."""
        return os.getppid() == self._pid

    def exit_code(self) -> int:
        """Return the exit code that the rank has reported, or -1 (`RUNNING`) if it runs.

        If the process is gone without a report, return 1.
        """
        # First, because a rank may share its code just before it ends.
        is_alive = self.is_alive()
        shared_code = BEAT.unpack(self._shared[:])[2]
        return shared_code if is_alive or shared_code != RUNNING else 1

    def report_for_judge(self, seconds: float) -> State:
        """Build the report for the judge, and update the rank's time without progress.

        Args:
            seconds: time since the last report.

        Returns:
            The rank's number and name, exit code (`code`, `why`, `gone`), activity (`doing`),
            seconds without progress (`idle`) and their limit (`patience`), and `stacks` or None.
        """
        code = self.exit_code()
        count, patience, shared_code, *texts = BEAT.unpack(self._shared[:])
        activity, reason = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
        before, self._progress = self._progress, (count, count_io_bytes(self._pid))
        # Outside of steady steps, reading and writing files counts as progress, too.
        moved_bytes = self._progress[1] - before[1]
        has_io = moved_bytes >= _PROGRESS_BYTES and not activity.startswith(IN_STEP)
        self._idle = 0.0 if count != before[0] or has_io else self._idle + seconds
        return {
            "number": self._number,
            "name": self._name,
            "code": code,
            "why": reason,
            "gone": "killed (as when memory runs out), or crashed" if code != shared_code else "",
            "doing": activity,
            "idle": self._idle,
            "patience": patience,
            "stacks": self.stacks,
        }

    def dump_stacks(self) -> None:
        """Let the rank write its stacks; store them and its main thread's position in `stacks`.

        Waits one second for the rank.
        """
        self._send_order({"report": True})
        self._send_signal(DUMP_SIGNAL)
        time.sleep(1.0)
        text = os.pread(0, 1 << 18, BEAT.size).decode(errors="replace")
        # Without addresses, so that equal stacks of ranks compare equal.
        text = re.sub("0x[0-9a-f]+", "0x", text)
        position = describe_position(text) or f"missing (no answer, {self._process_state()})"
        self.stacks = {"at": position, "text": text}

    def leave(self, order: State) -> None:
        """Order the rank to end, wait until it is gone, and kill it if it hangs for 5 seconds.

        The rank may take longer, for example to finish a checkpoint, as long as it reports
        progress.

        Args:
            order: an order to leave; see `Judge`.
        """
        self._send_order(order)
        idle, count = 0.0, 0
        while self.is_alive() and idle < _RANK_TIMEOUT:
            time.sleep(_TICK)
            before, count = count, BEAT.unpack(self._shared[:])[0]
            idle = idle + _TICK if count == before else 0.0
        self._send_signal(signal.SIGKILL)

    def _process_state(self) -> str:
        """Return the state of the rank's process from /proc, such as `D (disk sleep)`.

        Returns `state unknown` if it cannot be read.
        """
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{self._pid}/status").read_text()
            return status.partition("State:")[2].splitlines()[0].strip()
        return "state unknown"

    def _send_order(self, order: State) -> None:
        """Send an order to the rank as a line of JSON on stdout; do nothing if the rank is gone."""
        # The rank may be gone.
        with contextlib.suppress(OSError):
            os.write(1, json.dumps(order).encode() + b"\n")

    def _send_signal(self, number: int) -> None:
        """Send a signal to the rank's process; do nothing if it is gone."""
        # The rank may have just ended.
        with contextlib.suppress(ProcessLookupError):
            if self.is_alive():
                os.kill(self._pid, number)


class Judge:
    """Receives the reports of all watchers, and decides when and how the run ends.

    Each report is answered with the current order, a dict. It is empty, or has `report` (write the
    stacks), or `leave` with the exit code. `leave` comes with two numbers of seconds: `grace` to
    end, and `finish` to complete a checkpoint.

    Args:
        listener: the socket to which watchers connect.
        secret: text that a watcher must send first.
        folder: folder for the report of a hang.
    """

    def __init__(self, listener: socket.socket, secret: str, folder: Path) -> None:
        self._listener = listener
        self._secret = secret.encode()
        self._folder = folder
        self._states = dict[int, State]()  # the last report of each rank
        self._failed = dict[int, State]()  # reports of failed ranks in the order of arrival
        self._order = State()

    def accept(self) -> None:
        """Accept connections forever, and serve each one in a separate thread."""
        while True:
            link, _ = self._listener.accept()
            threading.Thread(target=self.serve, args=(link,), daemon=False).start()

    def serve(self, link: socket.socket) -> None:
        """Receive the reports of one watcher, and answer each with the current order.

        A connection that does not begin with the secret is closed. If a connection ends while its
        rank runs, the rank counts as failed.

        Args:
            link: the connection.
        """
        state = State(code=0)
        with contextlib.suppress(OSError, ValueError), link, link.makefile("rb") as lines:
            fail_when_lost(link)
            link.settimeout(_RANK_TIMEOUT)
            if not compare_digest(lines.readline(100).strip(), self._secret):
                return
            link.settimeout(None)
            state = State(code=RUNNING, number=-1, name="a rank", doing="start", why="")
            for line in lines:
                state = self._states[state["number"]] = json.loads(line)
                if state["code"] > 0:
                    self._failed.setdefault(state["number"], state)
                send_message(link, self._order)
        if state["code"] == RUNNING:
            state |= {"code": 1, "gone": "its host is lost, or its watcher was killed"}
            self._failed.setdefault(state["number"], state)

    def judge(self) -> None:
        """Wait until a rank fails or all running ranks hang, and then end the run.

        It is ended by the order that the watchers receive. A rank hangs if it made no progress for
        its timeout.
        """
        while True:
            time.sleep(_TICK)
            running = [state for state in [*self._states.values()] if state["code"] == RUNNING]
            if self._failed:
                time.sleep(_COLLECT_SECONDS if running else 0.0)
                self._end_after_failure([*self._failed.values()])
                return
            if running and all(state["idle"] > state["patience"] for state in running):
                self._end_after_hang(sorted(state["number"] for state in running))
                return

    def _end_after_failure(self, failed: list[State]) -> None:
        """Print the root cause of the failures, and set the order to end the run.

        The end of one rank makes others fail. So a rank that is gone without a report is the first
        choice for the cause, and a rank with an error the second. A rank that ended because of a
        signal comes last, since the launcher may have sent the signal to all ranks.

        Args:
            failed: reports of the failed ranks in the order of arrival.
        """
        preempted = [state for state in failed if state["code"] == PREEMPTED_CODE]
        root = min(failed, key=lambda s: (s in preempted, not s["gone"], not s["why"]))
        code = PREEMPTED_CODE if root in preempted else 1
        if root["gone"]:
            print_line(f"{root['name']} is gone: {root['gone']}; it was at: {root['doing']}")
        elif root["why"]:  # without a reason, the rank has printed it itself
            print_line(f"{root['name']} ended: {root['why']}")
        finish = LOST_SECONDS if root["gone"] else _FINISH_SECONDS
        self._order = {"leave": code, "grace": _GRACE[code], "finish": finish}

    def _end_after_hang(self, running: list[int]) -> None:
        """Collect the stacks of all running ranks, print which ranks wait where, and end the run.

        The stacks are written to a file `hang-TIME.txt` in the folder.

        Args:
            running: numbers of the ranks that run.
        """
        self._order = {"report": True}
        for _ in range(int(2 * _RANK_TIMEOUT / _TICK)):
            time.sleep(_TICK)
            states = [self._states[number] for number in running]
            if all(state["stacks"] for state in states):
                break
        idle = min(state["idle"] for state in states)
        lines = [f"no rank made progress for {idle:.0f} s, at: {states[0]['doing']}"]
        ranks_by_position = group_by_stacks(states, "at", "number")
        # Sorted, so that "missing" comes before "waiting".
        for position in sorted(ranks_by_position):
            numbers = ranks_by_position[position]
            more = " ..." if len(numbers) > 16 else ""
            lines += [f"{position}: rank {', '.join(numbers[:16])}{more}"]
        file = self._folder / f"hang-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.txt"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            stacks = group_by_stacks(states, "text", "name").items()
            sections = [f"==== {', '.join(names)}\n{text}" for text, names in stacks]
            file.write_text("\n".join([*lines, "", *sections]), "utf-8")
            lines += [f"stacks of all ranks: {file}"]
        except OSError as error:
            lines += [f"the stacks of all ranks cannot be written: {error}"]
        print_line("; ".join(lines))
        self._order = {"leave": HANG_CODE, "grace": 0.0, "finish": _FINISH_SECONDS}


def group_by_stacks(states: list[State], key: str, label: str) -> dict[str, list[str]]:
    """Group the ranks that have equal stacks.

    Args:
        states: reports of the ranks.
        key: what to compare: `at` for the position of the main thread, or `text` for all stacks.
        label: how to name a rank in the result: `number` or `name`.

    Returns:
        Position or text of the stacks -> labels of the ranks that have it.
    """
    groups = defaultdict[str, list[str]](list)
    for state in states:
        stacks = state["stacks"] or {"at": "missing (no answer)", "text": "no stacks"}
        groups[stacks[key]].append(str(state[label]))
    return groups


def describe_position(stacks: str) -> str:
    """Describe where a rank's main thread is, and whether it waits for other ranks or its device.

    Args:
        stacks: output of faulthandler, which writes the main thread last and its innermost frame
            first.

    Returns:
        `waiting in CALL (FILE:LINE in FUNCTION)` or `missing (FILE:LINE in FUNCTION)`; empty
        without stacks.
    """
    frames = re.findall(r'File "(.+)", line (\d+) in (.+)', stacks.rpartition("hread 0x")[2])
    if not frames:
        return ""
    file, line, name = frames[0]
    # The innermost frame outside of installed packages tells users most.
    user_frame = next((frame for frame in frames if "/lib/python" not in frame[0]), frames[0])
    where = f"({Path(user_frame[0]).name}:{user_frame[1]} in {user_frame[2]})"
    source = linecache.getline(file, int(line)).strip()
    if "torch/distributed" in file:
        return f"waiting in {name} {where}"
    return f"waiting in {source} {where}" if _WAITS.search(source) else f"missing {where}"


def count_io_bytes(pid: int) -> int:
    """Count the bytes that a process and its children have read and written; 0 if not on Linux."""
    total = 0
    # A process may end while it is read.
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for process in (pid, *children):
            counts = Path(f"/proc/{process}/io").read_text().splitlines()[:2]
            total += sum(int(count.split()[1]) for count in counts)
    return total


def print_line(line: str) -> None:
    """Print a line to stderr in one write, with the prefix `watchdog: `.

    So lines of different processes do not mix.
    """
    os.write(2, f"watchdog: {line}\n".encode())


def send_message(link: socket.socket, message: State) -> None:
    """Send a message over a socket as one line of JSON."""
    link.sendall(json.dumps(message).encode() + b"\n")


def fail_when_lost(link: socket.socket) -> None:
    """Configure a socket to fail if the other host does not answer for 15 seconds.

    On other systems than Linux, only keep-alive is enabled, with the system's timeout.
    """
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT // 5)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENT // 5)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENT)


def watch(rank: Rank, link: socket.socket) -> None:
    """Report a rank to the judge every 2 s, and follow the judge's orders, until the rank ends.

    Raises an OSError or ValueError if the judge does not answer.
    """
    seconds, code = 0.0, RUNNING
    with link, link.makefile() as answers:
        while code != 0:
            state = rank.report_for_judge(seconds)
            send_message(link, state)
            order, code = json.loads(answers.readline()), state["code"]
            if "leave" in order:
                rank.leave(order)
                return
            seconds = 0.0
            if "report" in order and rank.stacks is None:
                rank.dump_stacks()
                continue
            while seconds < _STATE_INTERVAL and rank.exit_code() == code:
                # Counting ticks excludes the time in which the machine sleeps.
                time.sleep(_TICK)
                seconds += _TICK


def main(pid: int, number: int, folder: str, to_judge: int, listener: int | None = None) -> None:
    """Watch a rank until it ends. In the watcher of rank 0, also run the judge.

    If the judge cannot be reached any more, the rank is ended.

    Args:
        pid: process id of the rank.
        number: the rank.
        folder: folder for the report of a hang.
        to_judge: file descriptor of the connection to the judge.
        listener: file descriptor of the socket on which the judge listens; only for rank 0.
    """
    # Signals are for the rank, which decides when to end.
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)
    if listener is not None:
        judge = Judge(socket.socket(fileno=listener), os.environ[SECRET], Path(folder))
        for role in (judge.accept, judge.judge):
            threading.Thread(target=role, daemon=True).start()
    rank, link = Rank(pid, number), socket.socket(fileno=to_judge)
    try:
        fail_when_lost(link)
        link.settimeout(_JUDGE_TIMEOUT)
        watch(rank, link)
    except (OSError, ValueError):  # no answer, or an incomplete one
        if rank.is_alive() and rank.exit_code() != 0:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                print_line("the watcher of rank 0 is gone, or its host")
            rank.leave({"leave": 1, "grace": 0.0, "finish": LOST_SECONDS})


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
