"""The process beside each rank that sees whether the rank lives and gets on.

A program of the standard library alone, started by `watchdog`: it answers while its rank holds
Python's lock, is stopped or is killed. Each reports to the judge, in rank 0's watcher, over a TCP
connection of its own. The judge ends all ranks where one is gone, ends with an error, or none of
them gets on; then it says why on one line, after it has asked every rank for its stacks.

Messages are JSON, one a line. A watcher sends `hello`, then `beat` every few seconds, `gone` or
`end`, and `stacks` when asked. The judge sends `beat`, `report` and `leave`.
"""

import contextlib
import json
import mmap
import os
import resource
import secrets
import select
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

BEAT = struct.Struct("<Qd112s")
"""What a rank writes to shared memory: a counter, seconds that may pass without a change of it, and
what it is doing."""
IN_STEP = "step "
"""How the name of what is done begins in steady steps."""
HANG_CODE = 70
"""Exit code of ranks that did not get on (EX_SOFTWARE of sysexits.h)."""
PREEMPTED_CODE = 75
SECRET = "TOOLKIT_WATCHDOG_SECRET"
"""Variable of a watcher's environment: what tells watchers of this run from others that connect."""
DUMP_SIGNAL = getattr(signal, "SIGRTMIN", 0) and signal.SIGRTMIN + 9
"""Makes a rank write its stacks without taking Python's lock; 0 where there is none (macOS)."""

_TICK = 0.5
_SILENT = 20.0  # seconds without a word until a host counts as lost
_ANSWER = 5.0  # seconds that a rank has to tell its stacks, and then to leave
_SUSPENDED = 10.0  # a tick that took so long: this machine slept, and others are not to blame
_IO = 1 << 20  # bytes that count as work
_BUSY = 0.05  # of a processor, that counts as work: idle workers wake up now and then
_TICKS = os.sysconf("SC_CLK_TCK")  # of the processor's time, a second
_LONGEST = 1 << 24  # bytes of a message
_GRACE = {1: 5.0, PREEMPTED_CODE: 30.0}  # code -> seconds in which ranks may end by themselves
_HEAR_ALL = 1.5  # seconds after the first end in which a deeper cause may be heard


class Lines:
    """A socket that carries JSON, one value a line."""

    def __init__(self, link: socket.socket) -> None:
        self.link, self._rest, self._lock = link, b"", threading.Lock()

    def fileno(self) -> int:
        return self.link.fileno()

    def send(self, **message: Any) -> bool:
        """Send a message; whether the other side took it."""
        try:
            with self._lock:
                self.link.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the messages that have come, after waiting for bytes; None at the end."""
        try:
            content = self.link.recv(1 << 16)
        except OSError:
            return None
        if not content or len(self._rest) > _LONGEST:
            return None
        *whole, self._rest = (self._rest + content).split(b"\n")
        return [json.loads(line) for line in whole]


class Rank:
    """The rank that this process watches."""

    def __init__(self, pid: int, beat: int, stacks: int) -> None:
        self.pid, self._stacks = pid, stacks
        self._map = mmap.mmap(beat, BEAT.size, access=mmap.ACCESS_READ)
        self._seen: tuple[Any, ...] = ()
        self._looked = time.monotonic()
        self._kills = _memory_kills()
        self.ends: int | None = None  # a descriptor that is readable when it has ended
        with contextlib.suppress(OSError, AttributeError):  # then that is seen within a tick
            self.ends = os.pidfd_open(pid)

    def alive(self) -> bool:
        readable = self.ends is not None and select.select([self.ends], [], [], 0)[0]
        return not readable and os.getppid() == self.pid

    def beat(self) -> dict[str, Any]:
        """Return whether it got on since the last call, its patience and what it does."""
        count, patience, text = BEAT.unpack(self._map[:])
        work, now = _work(self.pid), time.monotonic()
        before, self._seen = self._seen or (count, work), (count, work)
        ticks = _BUSY * _TICKS * (now - self._looked)
        self._looked = now
        moved = any(
            new - old >= least
            for new, old, least in zip(work, before[1], (max(1, ticks), _IO), strict=True)
        )
        doing = text.rstrip(b"\0").decode(errors="replace")
        # Beside steady steps, children at work and bytes that flow are progress, too.
        got_on = count != before[0] or (moved and not doing.startswith(IN_STEP))
        return {"got_on": got_on, "patience": patience, "doing": doing}

    def state(self) -> str:
        """Return the process's state as ps(1) writes it; empty where that is not known."""
        return "".join(_stat(self.pid)[:1])

    def was_killed_for_memory(self) -> bool:
        return _memory_kills() > self._kills

    def dump(self) -> str:
        """Return its stacks as the C level of Python writes them; empty where it does not."""
        if not DUMP_SIGNAL or self.state() in ("T", "t", ""):
            return ""
        start = os.fstat(self._stacks).st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, DUMP_SIGNAL)
        time.sleep(1.0)
        return os.pread(self._stacks, 1 << 18, start).decode(errors="replace")

    def kill(self) -> None:
        if self.alive():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, signal.SIGKILL)


class Watcher:
    """Watches one rank: reports to the judge, and does what that says."""

    def __init__(self, rank: Rank, link: Lines, judge: Lines, pace: float) -> None:
        self._rank, self._link, self._judge, self._pace = rank, link, judge, pace
        self._heard = self._sent = time.monotonic()
        self._asked: float | None = None  # when the judge asked for stacks
        self._ended = self._left = False

    def run(self) -> None:
        """Watch until the rank has ended and the judge knows."""
        ready = selectors.DefaultSelector()
        for link in (self._link, self._judge):
            ready.register(link, selectors.EVENT_READ)
        if self._rank.ends is not None:
            ready.register(self._rank.ends, selectors.EVENT_READ)
        while not self._left:
            begun = time.monotonic()
            for key, _ in ready.select(_TICK):
                if not isinstance(key.fileobj, Lines):
                    continue
                messages = key.fileobj.receive()
                if messages is None:
                    ready.unregister(key.fileobj)
                for message in messages or []:
                    self._take(message, from_rank=key.fileobj is self._link)
                if messages is None and key.fileobj is self._judge:
                    why = "the watcher of rank 0 is gone, or its host"
                    self._leave(1, why, lost=True, say=True)
            if self._left:
                return
            if not self._rank.alive():
                self._hear_last()
                if not self._ended:
                    doing = self._rank.beat()["doing"]
                    self._judge.send(gone=doing, memory=self._rank.was_killed_for_memory())
                return
            now = time.monotonic()
            if now - begun > _SUSPENDED:
                self._heard = now
            if now - self._heard > _SILENT:
                why = f"nothing heard of rank 0's host for {_SILENT:.0f} s"
                self._leave(1, why, lost=True, say=True)
            if now - self._sent >= self._pace and not self._ended:
                self._judge.send(beat=self._rank.beat())
                self._sent = now
            if self._asked is not None and now - self._asked > _ANSWER:
                self._asked = None
                self._judge.send(stacks={"state": self._rank.state(), "text": self._rank.dump()})

    def _hear_last(self) -> None:
        """Take what the rank said after the last look, before it ended."""
        self._link.link.setblocking(False)
        while (messages := self._link.receive()) is not None:
            for message in messages:
                self._take(message, from_rank=True)

    def _take(self, message: dict[str, Any], *, from_rank: bool) -> None:
        if from_rank and "bye" in message:
            self._judge.send(end=0)
            self._left = True
            return
        if from_rank:
            self._ended = self._ended or "end" in message
            self._asked = None if "stacks" in message else self._asked
            self._judge.send(**message)
            return
        self._heard = time.monotonic()
        if "report" in message:
            self._asked = self._heard
            self._link.send(**message)
        elif "leave" in message:
            self._leave(**message)

    def _leave(
        self, leave: int, why: str, *, grace: float = 0.0, lost: bool = False, say: bool = False
    ) -> None:
        """Let the rank end, and end it where it does not; then end. `lost`: a rank is gone."""
        if say and self._rank.alive() and os.environ.get("LOCAL_RANK", "0") == "0":
            tell(why)
        self._link.send(leave=leave, grace=grace, lost=lost)
        until = time.monotonic() + grace + _ANSWER
        while self._rank.alive() and time.monotonic() < until:
            time.sleep(0.05)
            # A rank that has a checkpoint in flight asks for more.
            self._link.link.settimeout(0.05)
            for message in self._link.receive() or []:
                until = max(until, time.monotonic() + message.get("more", 0.0))
        self._rank.kill()
        self._left = True


class Seen:
    """What the judge knows of a rank."""

    def __init__(self, link: Lines, number: int, host: str, pid: int) -> None:
        self.link, self.number, self.name = link, number, f"rank {number} (pid {pid} on {host})"
        self.heard = self.got_on = time.monotonic()
        self.patience, self.doing = 0.0, ""
        self.ended: int | None = None
        self.stacks: dict[str, Any] | None = None


class Judge:
    """Hears all watchers and decides when the run is over."""

    def __init__(self, listener: socket.socket, settings: dict[str, Any], rank: Rank) -> None:
        self._rank = rank  # 0: without it no other watcher comes
        self._listener, self._secret = listener, settings["secret"]
        self._world, self._patience = settings["world"], settings["patience"]
        self._folder = Path(settings["folder"])
        self._seen: dict[int, Seen] = {}
        self._connected: dict[int, Seen] = {}  # by the link's descriptor
        self._ready = selectors.DefaultSelector()
        self._causes = list[tuple[int, Seen, int, str]]()  # depth (0: deepest), rank, code, words
        self._decide_at: float | None = None
        self._over = False

    def run(self) -> None:
        """Judge until every watcher has left."""
        self._ready.register(self._listener, selectors.EVENT_READ)
        sent = time.monotonic()
        while not self._all_left():
            begun = time.monotonic()
            for key, _ in self._ready.select(_TICK):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.fd)
            now = time.monotonic()
            for seen in self._seen.values() if now - begun > _SUSPENDED else ():
                seen.heard = seen.got_on = now
            if now - sent >= _SILENT / 6:
                sent = now
                for seen in self._connected.values():
                    seen.link.send(beat=True)
            if not self._over:
                self._look(now)
        if self._causes and not self._over:
            self._decide()

    def _all_left(self) -> bool:
        whole = len(self._seen) == self._world or not self._rank.alive()
        return whole and not self._connected

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(_ANSWER)
        link, hello = Lines(connection), list[dict[str, Any]]()
        with contextlib.suppress(ValueError, AttributeError):  # a stranger's bytes
            while (more := link.receive()) is not None and not (hello := more):
                pass
        said = str(hello[0].get("secret")) if hello and isinstance(hello[0], dict) else ""
        if not secrets.compare_digest(said.encode(), self._secret.encode()):
            connection.close()
            return
        number = int(hello[0]["hello"])
        seen = Seen(link, number, hello[0]["host"], hello[0]["pid"])
        self._seen[number] = self._connected[link.fileno()] = seen
        for message in hello[1:]:
            self._hear(seen, message)
        self._ready.register(link, selectors.EVENT_READ)

    def _read(self, descriptor: int) -> None:
        seen = self._connected[descriptor]
        messages = seen.link.receive()
        seen.heard = time.monotonic()
        for message in messages or []:
            self._hear(seen, message)
        if messages is None:
            self._ready.unregister(seen.link)
            del self._connected[descriptor]
            if seen.ended is None:
                self._gone(seen, "lost with its watcher")

    def _hear(self, seen: Seen, message: dict[str, Any]) -> None:
        if "beat" in message:
            seen.patience, seen.doing = message["beat"]["patience"], message["beat"]["doing"]
            seen.got_on = seen.heard if message["beat"]["got_on"] else seen.got_on
        elif "stacks" in message:
            seen.stacks = message["stacks"]
        elif "gone" in message:
            seen.doing = message["gone"]
            out_of_memory = "killed by the system, which ran out of memory"
            self._gone(seen, out_of_memory if message["memory"] else "killed, or crashed")
        elif "end" in message:
            seen.ended = int(message["end"])
            if seen.ended:
                self._end(seen, message["why"])
            for other in self._seen.values():  # less patience from here on
                other.got_on = time.monotonic()

    def _gone(self, seen: Seen, how: str) -> None:
        seen.ended = 1
        at = f"; it was at: {seen.doing}" * bool(seen.doing)
        self._causes.append((0, seen, 1, f"{seen.name} is gone: {how}{at}"))
        self._decide_soon()

    def _end(self, seen: Seen, why: str) -> None:
        # What a rank has said itself is not said again; a signal may be the launcher's, which sends
        # it to all when one is gone.
        code = PREEMPTED_CODE if seen.ended == PREEMPTED_CODE else 1
        said = f"{seen.name} ended: {why}" if why else ""
        self._causes.append((3 if code == PREEMPTED_CODE else 1 if why else 2, seen, code, said))
        self._decide_soon()

    def _decide_soon(self) -> None:
        if self._decide_at is None:
            self._decide_at = time.monotonic() + _HEAR_ALL

    def _decide(self) -> None:
        """End the run for the first of the deepest causes that were heard."""
        depth, _, code, why = min(self._causes, key=lambda cause: cause[0])
        self._end_all(code, why, _GRACE[code], lost=depth == 0)

    def _look(self, now: float) -> None:
        """End the run where a rank is silent, or none gets on."""
        running = [seen for seen in self._seen.values() if seen.ended is None]
        if self._decide_at is not None:
            if now >= self._decide_at or not running:
                self._decide()
            return
        if not running or len(self._seen) < self._world:
            return
        for seen in running:
            if now - seen.heard > _SILENT:
                self._gone(seen, f"nothing heard of its host for {_SILENT:.0f} s")
                return
        waited = now - max(seen.got_on for seen in running)
        patience = max(seen.patience for seen in running)
        if len(running) < self._world:  # the others are through
            patience = min(patience, self._patience)
        if 0 < patience < waited:
            self._report(running, waited)

    def _report(self, running: list[Seen], waited: float) -> None:
        """Ask for stacks, write them down and end the run."""
        for seen in running:
            seen.link.send(report=True)
        until = time.monotonic() + 2 * _ANSWER
        while time.monotonic() < until and any(seen.stacks is None for seen in running):
            for key, _ in self._ready.select(_TICK):
                if key.fd in self._connected:
                    self._read(key.fd)
            if self._causes:  # one of them ended meanwhile, and was the cause
                return
        head = [f"no rank got on for {waited:.0f} s, at: {running[0].doing}", *summary(running)]
        file = self._folder / f"hang-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.txt"
        with contextlib.suppress(OSError):  # then the line below is all there is
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("\n".join([*head, "", *stacks_of(running)]) + "\n", "utf-8")
        self._end_all(HANG_CODE, "; ".join(head) + f"; stacks of all ranks: {file}", 0.0)

    def _end_all(self, code: int, why: str, grace: float, *, lost: bool = False) -> None:
        self._over = True
        if why:
            tell(why)
        for seen in self._connected.values():
            seen.link.send(leave=code, why=why, grace=grace, lost=lost)


def summary(ranks: list[Seen]) -> list[str]:
    """Return who waits where, who is missing, and with which samples."""
    waiting, missing = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    for seen in ranks:
        told = seen.stacks or {}
        if where := told.get("waits"):
            waiting[where].append(seen.number)
        elif told.get("where"):
            missing[told["where"]].append(seen.number)
        else:
            stopped = told.get("state") in ("T", "t")
            missing["stopped" if stopped else "does not answer"].append(seen.number)
    lines = [f"waiting in {where}: rank {_spans(found)}" for where, found in waiting.items()]
    lines += [f"missing: rank {_spans(found)} ({where})" for where, found in missing.items()]
    absent = {number for found in missing.values() for number in found}
    for seen in ranks:
        samples = (seen.stacks or {}).get("samples") or []
        if samples and (seen.number in absent or not absent):
            lines.append(f"samples of rank {seen.number}: {', '.join(samples[:8])}")
    return lines[:12]


def stacks_of(ranks: list[Seen]) -> Iterator[str]:
    """Yield the stacks of all ranks, those that are the same once."""
    same = defaultdict[str, list[Seen]](list)
    for seen in ranks:
        told = seen.stacks or {}
        text = told.get("text") or f"no stacks; state of the process: {told.get('state', '?')}"
        same[text].append(seen)
    for text, found in same.items():
        yield f"==== {', '.join(seen.name for seen in found)}; at: {found[0].doing}"
        yield text
        yield ""


def _spans(numbers: Iterable[int]) -> str:
    """Return `0-2, 5` for 0, 1, 2, 5."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def tell(line: str) -> None:
    """Print one line for the run, at once and whole."""
    os.write(2, f"watchdog: {line}\n".encode())


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty where there are none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _work(pid: int) -> tuple[int, int]:
    """Return processor ticks of a process's children, and the bytes that it read and wrote."""
    ticks, moved = 0, 0
    if fields := _stat(pid):
        ticks = int(fields[13]) + int(fields[14])  # of those that have ended
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for child in children:
            if int(child) != os.getpid() and (fields := _stat(int(child))):
                ticks += sum(map(int, fields[11:15]))
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        moved = sum(int(line.split()[1]) for line in lines[:2])
    return ticks, moved


def _memory_kills() -> int:
    """Return how many processes of this control group were killed for want of memory."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        group = Path("/proc/self/cgroup").read_text().split("::", 1)[1].strip()
        text = Path(f"/sys/fs/cgroup{group}/memory.events").read_text()
        return int(dict(line.split() for line in text.splitlines()).get("oom_kill", 0))
    return 0


def main(settings: dict[str, Any]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # they are the rank's affair
    link = Lines(socket.socket(fileno=settings["link"]))
    rank = Rank(settings["pid"], settings["beat"], settings["stacks"])
    judging = None
    if settings["address"] is None:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        listener = _listen(settings["one_host"])
        port = listener.getsockname()[1]
        link.send(port=port)
        judging = threading.Thread(target=Judge(listener, settings, rank).run)
        judging.start()
    host, port = settings["address"] or ("127.0.0.1", port)
    try:
        connection = socket.create_connection((host, port), 60.0)
    except OSError as error:
        link.send(refused=str(error))
        return
    connection.settimeout(None)
    mine = Lines(connection)
    hello = {name: settings[name] for name in ("secret", "pid", "host")}
    mine.send(hello=settings["rank"], **hello)
    link.send(ready=True)
    Watcher(rank, link, mine, settings["pace"]).run()
    connection.close()
    if judging is not None:
        judging.join()


def _listen(one_host: bool) -> socket.socket:
    """Return a socket that listens: on this host alone, or to all."""
    if one_host:
        return socket.create_server(("127.0.0.1", 0), backlog=1024)
    if socket.has_dualstack_ipv6():
        v6 = socket.AF_INET6
        return socket.create_server(("", 0), family=v6, backlog=4096, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=4096)


if __name__ == "__main__":
    main({**json.loads(sys.argv[1]), "secret": os.environ[SECRET]})
