"""Serve a folder until it is interrupted: `HF_ENDPOINT=<the printed URL>` makes it the Hub of a client."""

import argparse
import signal
from pathlib import Path

from . import LocalHub


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.localhub", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--root", type=Path, default=Path("localhub-data"), help="default: %(default)s")
    arguments = parser.parse_args()
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    with LocalHub(arguments.root, arguments.port) as hub:
        print(hub.url, flush=True)
        signal.sigwait(ends)


if __name__ == "__main__":
    main()
