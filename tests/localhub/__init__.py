"""Play a Hub on loopback for tests: the HTTP interface of huggingface.co for kernel repositories.

`with LocalHub(folder) as hub:` serves it at `hub.url`; `python -m tests.localhub` does so for a while by hand.
"""

from .faults import Fault
from .server import LocalHub

__all__ = ["Fault", "LocalHub"]
