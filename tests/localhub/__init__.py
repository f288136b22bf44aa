"""Play a Hub on loopback for tests: the HTTP interface of huggingface.co for kernel repositories.

`with LocalHub() as hub:` serves it at `hub.url`.
"""

from tests.localhub.server import LocalHub

__all__ = ["LocalHub"]
