"""For loaders that expect a package named like the repository: the same module under that name."""

import importlib.util
import sys
from pathlib import Path

_variant = Path(__file__).parent.parent
_spec = importlib.util.spec_from_file_location(
    __name__, _variant / "__init__.py", submodule_search_locations=[str(_variant)]
)
_module = importlib.util.module_from_spec(_spec)
sys.modules[__name__] = _module
_spec.loader.exec_module(_module)
globals().update(vars(_module))
