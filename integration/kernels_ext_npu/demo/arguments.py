"""What the scripts in examples/ are given: a model and data that the command line names, or tiny ones of their own.

What is missing is said in a sentence, before torch is imported. A script of yours needs none of this: it has names.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.metadata
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

from kernels_ext_npu.machine import description

_TINY_TOKENS = 128


@dataclass(frozen=True)
class Arguments:
    """A path or id of a model, and where a script asked for them the path of its data and a number of tokens."""

    model: str
    data: str = ""
    tokens: int = 0


def read(model: str, tiny: str, data: str = "", tokens: int = 0, needs: str = "", cards: int = 1) -> Arguments:
    """Return what the command line names, or end with a sentence on what is missing.

    Args:
        model: the id that is taken where none is named.
        tiny: the model of ``model_configs`` that ``--tiny`` takes, with random weights.
        data: the file that is taken where none is named, one of ``tiny_checkpoints.DATA``; empty if none is needed.
        tokens: how many are taken where no number is named; 0 if there is none to choose.
        needs: the packages that the script imports besides what this one requires, by their names in the index.
        cards: how many processes a script needs that torchrun has to start; 1 for any other.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.set_defaults(data="", tokens=0)
    parser.add_argument("model", nargs="?", default=model, help=f"a folder, or an id on the Hub; by default {model}")
    if data:
        parser.add_argument("data", nargs="?", default=data, help=f"lines of JSON; by default {data}")
    if tokens:
        shown = f"how many; by default {tokens}, and {_TINY_TOKENS} with --tiny"
        parser.add_argument("--tokens", type=int, help=shown)
    parser.add_argument("--tiny", action="store_true", help="a small model with random weights, and data of its own")
    given = parser.parse_args()
    for package in needs.split():
        _require_package(package)
    require_npu()
    if cards > 1:
        _require_torchrun(cards)
    if given.tiny:
        folder = _checkpoint(tiny, data)
        return Arguments(str(folder), data and str(folder / data), given.tokens or _TINY_TOKENS)
    if data and not os.path.exists(given.data):
        _end(f"there is no {given.data}: write one as the first lines of the script say, or take --tiny")
    _require_model(given.model)
    return Arguments(given.model, given.data, given.tokens or tokens)


def require_npu() -> None:
    """End with a sentence where there is neither a card nor the software device."""
    if "softnpu" not in sys.modules and not description.signs(Path("/"))["nodes"]:
        _end(f"there is no NPU here: `python -m softnpu {' '.join(sys.argv)}` runs it on the software device")


def _require_package(package: str) -> None:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        _end(f"{package} is not installed: pip install {package}")


def _require_torchrun(cards: int) -> None:
    if "LOCAL_RANK" in os.environ:
        return
    launch = f"torchrun --nproc-per-node {cards}"
    if "softnpu" in sys.modules:  # torchrun's own process is without it
        launch = f"TORCH_DEVICE_BACKEND_AUTOLOAD=0 {launch} -m softnpu"
    _end(f"torchrun has to start it, as in `{launch} {' '.join(sys.argv)}`")


def _require_model(model: str) -> None:
    """Ask for the configuration: a Hub that answers for it has the weights, too."""
    if os.path.isdir(model):
        if not os.path.exists(os.path.join(model, "config.json")):
            _end(f"{model} is no model: it has no config.json")
        return
    try:
        if isinstance(try_to_load_from_cache(model, "config.json"), str):
            return
        get_hf_file_metadata(hf_hub_url(model, "config.json"), timeout=10)
    except errors.HFValidationError:
        _end(f"there is no folder {model}: name another one, or the id of a model, or take --tiny")
    except errors.GatedRepoError:
        _end(f"{model} asks you to accept its terms on its page on the Hub, and to log in with `hf auth login`")
    except (errors.RepositoryNotFoundError, errors.EntryNotFoundError):
        _end(f"there is no folder {model}, and no such model on the Hub for you: name another one, or take --tiny")
    except Exception as error:  # a network error, of which there are many classes
        reason = re.split(r"\.\s|\.?$", str(error), maxsplit=1)[0]
        _end(f"there is no folder {model}, and the Hub is out of reach ({reason}): name a folder, or take --tiny")


def _checkpoint(name: str, data: str) -> Path:
    """Write a tiny checkpoint, and data, into a folder that is gone when the script has ended."""
    from transformers.utils import logging  # and torch with it

    from kernels_ext_npu.demo import tiny_checkpoints

    logging.disable_progress_bar()
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    tiny_checkpoints.save(name, folder)
    if data:
        tiny_checkpoints.write_data(data, folder)
    return folder


def _end(sentence: str) -> NoReturn:
    raise SystemExit(f"{Path(sys.argv[0]).name}: {sentence}")
