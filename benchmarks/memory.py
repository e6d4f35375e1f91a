"""The anonymous memory of this process, its peak, and the page cache of the machine."""

import os
import threading
from pathlib import Path


def anonymous() -> int:
    """Return the anonymous resident memory of this process in bytes (mapped files are not
    counted).
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status: this benchmark needs Linux")


def fill_page_cache(file: Path) -> bool:
    """Leave no memory free: writes then take pages from the cache, as on a machine that trains.

    Pages that are free go back to the host of a virtual machine, seconds after they were freed, and
    come again at up to 2.4 s a GB: whoever writes for longer would get more of those.

    Returns whether the kernel first dropped the cache and compacted memory, as it does for root.
    Else each round leaves it in smaller pieces than the one before: after eighty exports of 4 GB
    the same export took 5.1 for 1.8 processor seconds of the kernel.
    """
    orders = [Path("/proc/sys/vm", name) for name in ("drop_caches", "compact_memory")]
    compacted = all(os.access(order, os.W_OK) for order in orders)
    if compacted:
        os.sync()
        for order in orders:
            order.write_text("1")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with open(file, "a+b") as f:
        f.truncate(memory)  # a hole: it takes no room on the disk
        f.seek(0)
        while f.read(2**24):
            pass
    return compacted


def cache_libraries() -> None:
    """Read what is mapped into this process, the libraries of its imports, into the page cache,
    which dropped them: else 50 MB of them are read by and by, 8 MB a fault, while it is timed.
    """
    mapped = (line.split(None, 5)[5:] for line in Path("/proc/self/maps").read_text().splitlines())
    for name in sorted({Path(*names) for names in mapped if names}):
        if name.is_file():
            with open(name, "rb") as f:
                while f.read(2**24):
                    pass


class Peak:
    """Samples the anonymous memory every 2 ms while entered."""

    def __enter__(self) -> "Peak":
        self.highest, self._stop = anonymous(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.highest = max(self.highest, anonymous())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.highest = max(self.highest, anonymous())
