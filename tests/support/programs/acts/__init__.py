"""The acts, by family; importing this enters all of them in the registry."""

import importlib
import pkgutil

for _, name, _ in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(name)
