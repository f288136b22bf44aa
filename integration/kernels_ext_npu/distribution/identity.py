"""The id of a variant, and the bytes of its ``metadata.json``: both follow from what the variant holds.

The digest in ``metadata.json`` covers every other file of a variant; the id covers ``metadata.json`` itself, so that a
change of any byte shows. It also becomes the name of the loaded module, where two equal ones would share submodules.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any


def identity(metadata: dict[str, Any], variant: str) -> str:
    """Return the id that belongs to the metadata of a variant; one that is there already does not count."""
    rest = {key: value for key, value in metadata.items() if key != "id"}
    content = hashlib.sha256(json.dumps([variant, rest], sort_keys=True).encode()).hexdigest()
    name = str(metadata.get("name", "")).replace("-", "_")
    return f"_{name}_v{metadata.get('version')}_{variant.replace('-', '_')}_{content[:12]}"


def render(metadata: dict[str, Any]) -> bytes:
    """Return metadata as the bytes of ``metadata.json``: it is written down in this one way."""
    return (json.dumps(metadata, indent=2) + "\n").encode()
