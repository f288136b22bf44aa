"""A Hub on loopback: the HTTP interface of huggingface.co for kernel repositories, for tests.

`with LocalHub(folder) as hub:` serves it at `hub.url`; `python -m tests.localhub` does so for a while by hand.
"""

from .faults import Fault
from .server import LocalHub

__all__ = ["Fault", "LocalHub"]
