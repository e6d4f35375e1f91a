"""Watcher: a process beside each rank that reports its state, and ends it when the run is over.

A program of the standard library alone, started by `watchdog`: it works while its rank holds
Python's lock, is stopped or is killed. Its standard input is a file: the rank shares its state in
the first bytes (`BEAT`), and its stacks are appended. It prints orders for the rank, JSON, a line
each.

The judge is a thread in the watcher of rank 0. Every watcher sends it the rank's state every few
seconds and gets the order of the hour back, over a TCP connection that fails when the other host is
lost. When a rank is gone or ends with an error, or when none makes progress, the judge says why on
one line, and orders all to leave.
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

# What a rank shares: a count of its progress, the seconds that may pass without, its exit code,
# what it is doing, and why it ends.
BEAT = struct.Struct("<Qdi112s400s")
RUNS = -1  # instead of an exit code
IN_STEP = "step "  # how the name of what is done begins in steady steps
PREEMPTED_CODE = 75
HANG_CODE = 70  # EX_SOFTWARE of sysexits.h
LOST = 15.0  # seconds for a checkpoint in flight that may want a rank which is gone
SECRET = "TOOLKIT_WATCHDOG_SECRET"  # in the environment of a watcher
# Makes a rank write its stacks (faulthandler), which does not take Python's lock.
DUMP_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGURG)

_LET_FINISH = 300.0  # seconds for other checkpoints in flight
_GRACE = {1: 5.0, PREEMPTED_CODE: 30.0}  # exit code -> seconds for ranks to end by themselves
_TICK = 0.25
_PACE = 2.0  # seconds between two states
_SILENT = 15  # seconds without a packet until a host counts as lost
_SLOW = 60.0  # seconds for the judge to answer
_ANSWER = 5.0  # seconds for a rank to write its stacks, and to leave
_HEAR_ALL = 1.5  # seconds after the first end in which a deeper cause may be heard
_FLOW = 1 << 20  # bytes between two states that count as progress: threads that log move some
_WAITS = re.compile(r"\bwait\(|\.item\(|\.tolist\(|\.cpu\(|synchronize\(")


class Rank:
    """The rank that this process watches."""

    def __init__(self, pid: int, number: int) -> None:
        self._pid, self._number = pid, number
        self._name = f"rank {number} (pid {pid} on {socket.gethostname()})"
        self._shared = mmap.mmap(0, BEAT.size, access=mmap.ACCESS_READ)
        self._progress, self._idle = (0, 0), 0.0
        self.stacks: dict[str, str] | None = None

    def alive(self) -> bool:
        return os.getppid() == self._pid

    def code(self) -> int:
        """Return its exit code, `RUNS` before it has one."""
        alive = self.alive()  # first: what a rank says last counts
        said = BEAT.unpack(self._shared[:])[2]
        return said if alive or said != RUNS else 1

    def state(self, seconds: float) -> State:
        """Return what the judge is to know, so many seconds after the last time."""
        code = self.code()
        count, patience, said, *texts = BEAT.unpack(self._shared[:])
        doing, why = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
        before, self._progress = self._progress, (count, bytes_moved(self._pid))
        # Beside steady steps bytes that flow are progress, too.
        flows = self._progress[1] - before[1] >= _FLOW and not doing.startswith(IN_STEP)
        self._idle = 0.0 if count != before[0] or flows else self._idle + seconds
        return {
            "number": self._number,
            "name": self._name,
            "code": code,
            "why": why,
            "gone": "killed (as when memory runs out), or crashed" if code != said else "",
            "doing": doing,
            "idle": self._idle,
            "patience": patience,
            "stacks": self.stacks,
        }

    def report(self) -> None:
        """Let the rank write its stacks, and keep them with where its main thread is."""
        self._order({"report": True})
        self._signal(DUMP_SIGNAL)
        time.sleep(1.0)
        text = os.pread(0, 1 << 18, BEAT.size).decode(errors="replace")
        text = re.sub("0x[0-9a-f]+", "0x", text)  # equal stacks of ranks are to be equal
        self.stacks = {"at": place(text) or f"missing (no answer, {self._status()})", "text": text}

    def leave(self, order: State) -> None:
        """Let the rank end by itself, with what it has in flight; kill one that cannot."""
        self._order(order)
        idle, count = 0.0, 0
        while self.alive() and idle < _ANSWER:
            time.sleep(_TICK)
            before, count = count, BEAT.unpack(self._shared[:])[0]
            idle = idle + _TICK if count == before else 0.0
        self._signal(signal.SIGKILL)

    def _status(self) -> str:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{self._pid}/status").read_text()
            return status.partition("State:")[2].splitlines()[0].strip()
        return "state unknown"

    def _order(self, order: State) -> None:
        with contextlib.suppress(OSError):  # it is gone
            os.write(1, json.dumps(order).encode() + b"\n")

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            if self.alive():
                os.kill(self._pid, number)


class Judge:
    """Hears all watchers and decides when the run is over."""

    def __init__(self, listener: socket.socket, secret: str, folder: Path) -> None:
        self._listener, self._secret, self._folder = listener, secret.encode(), folder
        self._states = dict[int, State]()  # of each rank the last
        self._failed = dict[int, State]()  # in the order in which they were heard
        self._order = State()

    def accept(self) -> None:
        """Hear whoever connects, each in a thread that lives until that one leaves."""
        while True:
            link, _ = self._listener.accept()
            threading.Thread(target=self.hear, args=(link,), daemon=False).start()

    def hear(self, link: socket.socket) -> None:
        """Hear a watcher that knows the secret, and answer with what is to be done."""
        state = State(code=0)
        with contextlib.suppress(OSError, ValueError), link, link.makefile("rb") as lines:
            fail_when_lost(link)
            link.settimeout(_ANSWER)
            if not compare_digest(lines.readline(100).strip(), self._secret):
                return
            link.settimeout(None)
            state = State(code=RUNS, number=-1, name="a rank", doing="start", why="")
            for line in lines:
                state = self._states[state["number"]] = json.loads(line)
                if state["code"] > 0:
                    self._failed.setdefault(state["number"], state)
                send(link, self._order)
        if state["code"] == RUNS:
            state |= {"code": 1, "gone": "its host is lost, or its watcher was killed"}
            self._failed.setdefault(state["number"], state)

    def judge(self) -> None:
        """Wait until the run is over, and end it."""
        while True:
            time.sleep(_TICK)
            running = [state for state in [*self._states.values()] if state["code"] == RUNS]
            if self._failed:
                time.sleep(_HEAR_ALL if running else 0.0)
                self._end_for([*self._failed.values()])
                return
            if running and all(state["idle"] > state["patience"] for state in running):
                self._end_hang(sorted(state["number"] for state in running))
                return

    def _end_for(self, failed: list[State]) -> None:
        """End the run for the first of the deepest causes. One rank's end makes others fail: one
        that is gone could not say so, and a signal may be the launcher's, which sends it to all.
        """
        stopped = [state for state in failed if state["code"] == PREEMPTED_CODE]
        first = min(failed, key=lambda s: (s in stopped, not s["gone"], not s["why"]))
        code = PREEMPTED_CODE if first in stopped else 1
        if first["gone"]:
            tell(f"{first['name']} is gone: {first['gone']}; it was at: {first['doing']}")
        elif first["why"]:  # else it has said so itself
            tell(f"{first['name']} ended: {first['why']}")
        finish = LOST if first["gone"] else _LET_FINISH
        self._order = {"leave": code, "grace": _GRACE[code], "finish": finish}

    def _end_hang(self, running: list[int]) -> None:
        """Write down the stacks of the ranks, say who waits for whom, and end the run."""
        self._order = {"report": True}
        for _ in range(int(2 * _ANSWER / _TICK)):
            time.sleep(_TICK)
            states = [self._states[number] for number in running]
            if all(state["stacks"] for state in states):
                break
        waited = min(state["idle"] for state in states)
        said = [f"no rank made progress for {waited:.0f} s, at: {states[0]['doing']}"]
        places = same(states, "at", "number")
        for at in sorted(places):  # "missing" comes before "waiting"
            more = " ..." if len(places[at]) > 16 else ""
            said += [f"{at}: rank {', '.join(places[at][:16])}{more}"]
        file = self._folder / f"hang-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.txt"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            stacks = same(states, "text", "name").items()
            sections = [f"==== {', '.join(names)}\n{text}" for text, names in stacks]
            file.write_text("\n".join([*said, "", *sections]), "utf-8")
            said += [f"stacks of all ranks: {file}"]
        except OSError as error:
            said += [f"the stacks of all ranks cannot be written: {error}"]
        tell("; ".join(said))
        self._order = {"leave": HANG_CODE, "grace": 0.0, "finish": _LET_FINISH}


def same(states: list[State], what: str, who: str) -> dict[str, list[str]]:
    """Return what the stacks of ranks say of `what`, each with the ranks that say it."""
    found = defaultdict[str, list[str]](list)
    for state in states:
        stacks = state["stacks"] or {"at": "missing (no answer)", "text": "no stacks"}
        found[stacks[what]].append(str(state[who]))
    return found


def place(stacks: str) -> str:
    """Return where the main thread is, in words; empty when there are no stacks. As faulthandler
    writes them, that thread is the last, and its innermost frame the first.
    """
    frames = re.findall(r'File "(.+)", line (\d+) in (.+)', stacks.rpartition("hread 0x")[2])
    if not frames:
        return ""
    file, line, name = frames[0]
    own = next((frame for frame in frames if "/lib/python" not in frame[0]), frames[0])
    where = f"({Path(own[0]).name}:{own[1]} in {own[2]})"
    source = linecache.getline(file, int(line)).strip()
    if "torch/distributed" in file:
        return f"waiting in {name} {where}"
    return f"waiting in {source} {where}" if _WAITS.search(source) else f"missing {where}"


def bytes_moved(pid: int) -> int:
    """Return the bytes that a process and its children have read and written, where Linux tells."""
    moved = 0
    with contextlib.suppress(OSError):  # one of them has just ended
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for process in (pid, *children):
            counts = Path(f"/proc/{process}/io").read_text().splitlines()[:2]
            moved += sum(int(count.split()[1]) for count in counts)
    return moved


def tell(line: str) -> None:
    """Print one line for the run, at once and whole."""
    os.write(2, f"watchdog: {line}\n".encode())


def send(link: socket.socket, message: State) -> None:
    link.sendall(json.dumps(message).encode() + b"\n")


def fail_when_lost(link: socket.socket) -> None:
    """Let a connection fail when nothing is heard of the other host's kernel for some seconds."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT // 5)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENT // 5)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENT)


def watch(rank: Rank, link: socket.socket) -> None:
    """Report to the judge and do what it answers, until the rank has ended or has to leave."""
    seconds, code = 0.0, RUNS
    with link, link.makefile() as answers:
        while code != 0:
            state = rank.state(seconds)
            send(link, state)
            order, code = json.loads(answers.readline()), state["code"]
            if "leave" in order:
                rank.leave(order)
                return
            seconds = 0.0
            if "report" in order and rank.stacks is None:
                rank.report()
                continue
            while seconds < _PACE and rank.code() == code:
                time.sleep(_TICK)  # counted so, time stops while the machine sleeps
                seconds += _TICK


def main(pid: int, number: int, folder: str, to_judge: int, listener: int | None = None) -> None:
    """Watch a rank, given descriptors of its connection to the judge and, in rank 0's, of the
    socket at which the judge listens.
    """
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)  # they are the rank's affair
    if listener is not None:
        judge = Judge(socket.socket(fileno=listener), os.environ[SECRET], Path(folder))
        for role in (judge.accept, judge.judge):
            threading.Thread(target=role, daemon=True).start()
    rank, link = Rank(pid, number), socket.socket(fileno=to_judge)
    try:
        fail_when_lost(link)
        link.settimeout(_SLOW)
        watch(rank, link)
    except (OSError, ValueError):  # no answer, or half of one
        if rank.alive() and rank.code() != 0:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                tell("the watcher of rank 0 is gone, or its host")
            rank.leave({"leave": 1, "grace": 0.0, "finish": LOST})


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
