"""The anonymous memory of this process, and its peak."""

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
