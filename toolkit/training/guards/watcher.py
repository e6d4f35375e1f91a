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
    """The rank that this process watches.

    Args:
        pid: its process.
        number: its rank.
    """

    def __init__(self, pid: int, number: int) -> None:
        self._pid, self._number = pid, number
        self._name = f"rank {number} (pid {pid} on {socket.gethostname()})"
        self._shared = mmap.mmap(0, BEAT.size, access=mmap.ACCESS_READ)
        self._progress, self._idle = (0, 0), 0.0
        self.stacks: dict[str, str] | None = None

    def is_alive(self) -> bool:
        """Return True if the rank's process exists."""
        return os.getppid() == self._pid

    def exit_code(self) -> int:
        """Return the exit code of the rank: `RUNNING` before it ends, 1 if it is gone without."""
        # First, because a rank may share its code just before it ends.
        is_alive = self.is_alive()
        shared_code = BEAT.unpack(self._shared[:])[2]
        return shared_code if is_alive or shared_code != RUNNING else 1

    def report_for_judge(self, seconds: float) -> State:
        """Build the report for the judge.

        Args:
            seconds: time since the last report.
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
        """Let the rank write its stacks; keep them, with the position of its main thread."""
        self._send_order({"report": True})
        self._send_signal(DUMP_SIGNAL)
        time.sleep(1.0)
        text = os.pread(0, 1 << 18, BEAT.size).decode(errors="replace")
        # Without addresses, so that equal stacks of ranks compare equal.
        text = re.sub("0x[0-9a-f]+", "0x", text)
        position = describe_position(text) or f"missing (no answer, {self._process_state()})"
        self.stacks = {"at": position, "text": text}

    def leave(self, order: State) -> None:
        """Order the rank to end, so that it can finish a checkpoint; kill it if it hangs."""
        self._send_order(order)
        idle, count = 0.0, 0
        while self.is_alive() and idle < _RANK_TIMEOUT:
            time.sleep(_TICK)
            before, count = count, BEAT.unpack(self._shared[:])[0]
            idle = idle + _TICK if count == before else 0.0
        self._send_signal(signal.SIGKILL)

    def _process_state(self) -> str:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{self._pid}/status").read_text()
            return status.partition("State:")[2].splitlines()[0].strip()
        return "state unknown"

    def _send_order(self, order: State) -> None:
        # The rank may be gone.
        with contextlib.suppress(OSError):
            os.write(1, json.dumps(order).encode() + b"\n")

    def _send_signal(self, number: int) -> None:
        # The rank may have just ended.
        with contextlib.suppress(ProcessLookupError):
            if self.is_alive():
                os.kill(self._pid, number)


class Judge:
    """Receives the reports of all watchers, and decides when the run is over.

    Args:
        listener: the socket to which watchers connect.
        secret: a watcher must send it first.
        folder: for the report of a hang.
    """

    def __init__(self, listener: socket.socket, secret: str, folder: Path) -> None:
        self._listener = listener
        self._secret = secret.encode()
        self._folder = folder
        self._states = dict[int, State]()  # the last report of each rank
        self._failed = dict[int, State]()  # reports of failed ranks in the order of arrival
        self._order = State()

    def accept(self) -> None:
        """Accept connections forever; a thread serves each until its watcher leaves."""
        while True:
            link, _ = self._listener.accept()
            threading.Thread(target=self.serve, args=(link,), daemon=False).start()

    def serve(self, link: socket.socket) -> None:
        """Receive the reports of a watcher that knows the secret, and answer with orders."""
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
                send(link, self._order)
        if state["code"] == RUNNING:
            state |= {"code": 1, "gone": "its host is lost, or its watcher was killed"}
            self._failed.setdefault(state["number"], state)

    def judge(self) -> None:
        """Wait until a rank fails or all ranks hang, and end the run."""
        while True:
            time.sleep(_TICK)
            running = [state for state in [*self._states.values()] if state["code"] == RUNNING]
            if self._failed:
                time.sleep(_COLLECT_SECONDS if running else 0.0)
                self._end_failed([*self._failed.values()])
                return
            if running and all(state["idle"] > state["patience"] for state in running):
                self._end_hang(sorted(state["number"] for state in running))
                return

    def _end_failed(self, failed: list[State]) -> None:
        """Report the root cause, and end the run.

        One rank's end makes others fail. So a rank that is gone, and could not report it, comes
        before a rank with an error. A signal comes last, since the launcher may have sent it to all
        ranks.
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

    def _end_hang(self, running: list[int]) -> None:
        """Write the stacks of the ranks to a file, report which ranks wait, and end the run."""
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
    """Group ranks with equal stacks.

    Args:
        states: reports of the ranks.
        key: the entry of a rank's stacks to compare: `at` or `text`.
        label: the entry of a report that names the rank: `number` or `name`.

    Returns:
        Value of the stacks -> labels of the ranks that have it.
    """
    groups = defaultdict[str, list[str]](list)
    for state in states:
        stacks = state["stacks"] or {"at": "missing (no answer)", "text": "no stacks"}
        groups[stacks[key]].append(str(state[label]))
    return groups


def describe_position(stacks: str) -> str:
    """Describe the position of the main thread; empty if there are no stacks.

    faulthandler writes the main thread last, and its innermost frame first.
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
    """Count the bytes that a process and its children have read and written; 0 outside Linux."""
    total = 0
    # A process may end while it is read.
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for process in (pid, *children):
            counts = Path(f"/proc/{process}/io").read_text().splitlines()[:2]
            total += sum(int(count.split()[1]) for count in counts)
    return total


def print_line(line: str) -> None:
    """Print a line to stderr in one write, so that lines of processes do not mix."""
    os.write(2, f"watchdog: {line}\n".encode())


def send(link: socket.socket, message: State) -> None:
    """Send a message as one line of JSON."""
    link.sendall(json.dumps(message).encode() + b"\n")


def fail_when_lost(link: socket.socket) -> None:
    """Let a connection fail if the other host's kernel is silent for 15 seconds."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT // 5)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENT // 5)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENT)


def watch(rank: Rank, link: socket.socket) -> None:
    """Report to the judge and follow its orders, until the rank has ended or must leave."""
    seconds, code = 0.0, RUNNING
    with link, link.makefile() as answers:
        while code != 0:
            state = rank.report_for_judge(seconds)
            send(link, state)
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
    """Watch a rank until it ends; in rank 0's watcher, also run the judge.

    Args:
        pid: process of the rank.
        number: its rank.
        folder: for the report of a hang.
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
