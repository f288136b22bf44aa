"""Write fingerprints of the installed transformers into integration/kernels_ext_npu/matching/known_forwards.json.

What other releases have under a name stays. A pattern (patterns/) says which layer computes a new name, and the tests
compare that layer with what stands under it.

Example: ``python -m softnpu scripts/known_forwards.py llama:LlamaRMSNorm``; names are ``file:name``.
"""

from __future__ import annotations

import argparse
import json

from kernels_ext_npu.matching import known_forwards
from kernels_ext_npu.matching.fingerprint import fingerprint, names_hash


def main() -> None:
    """Add the fingerprints of the names that are given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", nargs="+", help="where transformers has a class or function: file:name")
    known: dict[str, list[str]] = json.loads(known_forwards.FILE.read_text())
    for name in parser.parse_args().name:
        what = known_forwards.find_named(name)
        tree = fingerprint(what)
        if tree is None:
            parser.error(f"the source of {name} cannot be read, or it is under a decorator that is not known")
        found = f"{names_hash(what)}-{tree}"
        other = known_forwards.known_name(what)
        if other not in (None, name):
            parser.error(f"{name} computes what {other} does, which stands for both")
        known.setdefault(name, [])
        known[name] += [found] if found not in known[name] else []
    lines = [f"  {json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known)]
    known_forwards.FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
