"""A program that follows the writer of an export and hashes what it reads back.

A thread that hashes waits for Python's lock after each block, and the writer waits for the thread;
a process of its own waits for bytes only. Lines on stdin, for one file after the other:

    file PATH           the next file, which is being written
    to OFFSET           it is written up to there
    part OFFSET         the header, or a tensor, ends there
    end                 the whole file was written

For each `end` the file is brought to the disk, and a line on stdout says, in JSON, its size, its
sha256, and the XXH3-128 of the XXH3-128 of its parts; or the errno of what the disk refused.
"""

import hashlib
import json
import os
import sys

import xxhash

_BLOCK = 2**20  # bytes read at a time: the processor's cache has them while they are hashed twice


def main() -> None:
    """Serve the lines of stdin until it ends."""
    buffer = memoryview(bytearray(_BLOCK))
    for line in sys.stdin:
        word, _, value = line.rstrip("\n").partition(" ")
        if word == "file":
            descriptor, at = os.open(json.loads(value), os.O_RDONLY), 0
            sha256, part, parts = hashlib.sha256(), xxhash.xxh3_128(), xxhash.xxh3_128()
        elif word == "end":
            os.fsync(descriptor)
            os.close(descriptor)
            found = {"size": at, "sha256": sha256.hexdigest(), "digests": parts.hexdigest()}
            print(json.dumps(found), flush=True)
        else:
            while at < int(value):
                count = os.preadv(descriptor, [buffer[: int(value) - at]], at)
                if count == 0:
                    raise EOFError(f"byte {at} of {int(value)} is not there")
                sha256.update(buffer[:count])
                part.update(buffer[:count])
                at += count
            if word == "part":
                parts.update(part.digest())
                part.reset()


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        print(json.dumps({"errno": error.errno}))
