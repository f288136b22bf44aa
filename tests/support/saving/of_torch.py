"""Ways to save and load of torch."""

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.package import PackageExporter, PackageImporter

from tests.support.saving.ways import Loading, add, add_of_state, into, way

FILE = "state.pt"


def saved(state: Any, folder: Path, **options: Any) -> None:
    torch.save(state, folder / FILE, **options)


def read(folder: Path, **options: Any) -> Any:
    return torch.load(folder / FILE, **{"map_location": "cpu"} | options)


add_of_state("torch_state_dict", saved, read)
# the format before archives, which writes storages as they are
add_of_state("torch_legacy", lambda *args: saved(*args, _use_new_zipfile_serialization=False), read)
# where it was saved from, and the model holds what was loaded
add(
    "torch_state_dict_onto_the_device",
    lambda model, folder: saved(model.state_dict(), folder),
    lambda fresh, folder: into(fresh, read(folder, map_location=fresh.device), assign=True),
)
add("torch_whole_model", saved, lambda fresh, folder: read(folder, weights_only=False, map_location=fresh.device))
# parameters themselves, not what a state dict detaches from them
add(
    "torch_parameters",
    lambda model, folder: saved(dict(model.named_parameters()), folder),
    lambda fresh, folder: into(fresh, read(folder), strict=False),
)
add(
    "pickled",
    lambda model, folder: (folder / FILE).write_bytes(pickle.dumps(model)),
    lambda fresh, folder: pickle.loads((folder / FILE).read_bytes()),
)


@way()
def deeply_copied(model: nn.Module, folder: Path) -> Loading:
    copied = copy.deepcopy(model)
    return lambda fresh: copied


@way()
def deeply_copied_state_dict(model: nn.Module, folder: Path) -> Loading:
    state = copy.deepcopy(model.state_dict())
    return lambda fresh: into(fresh, state)


def package(state: dict[str, Tensor], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # storages of a type
        with PackageExporter(folder / FILE) as exporter:
            exporter.extern("**")
            exporter.save_pickle("model", "state.pkl", state)


add_of_state(
    "packaged",
    package,
    lambda folder: PackageImporter(folder / FILE).load_pickle("model", "state.pkl", map_location="cpu"),
)


# ---- distributed checkpoints, which are read into what a fresh model holds -------------------------------------------
def in_place(fresh: nn.Module, folder: Path) -> None:
    dcp.load(fresh.state_dict(), checkpoint_id=folder, no_dist=True)


add("dcp_saved", lambda model, folder: dcp.save(model.state_dict(), checkpoint_id=folder, no_dist=True), in_place)
# another thread writes what was copied to the host first
add(
    "dcp_saved_meanwhile",
    lambda model, folder: dcp.async_save(model.state_dict(), checkpoint_id=folder, no_dist=True).result(),
    in_place,
)
add(
    "dcp_as_safetensors",
    lambda model, folder: dcp.save(
        model.state_dict(), storage_writer=dcp.HuggingFaceStorageWriter(str(folder)), no_dist=True
    ),
    lambda fresh, folder: dcp.load(
        fresh.state_dict(), storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True
    ),
)
ON_THE_HOST = StateDictOptions(full_state_dict=True, cpu_offload=True)
for name, options in {"dcp_model_state_dict": None, "dcp_model_state_dict_on_the_host": ON_THE_HOST}.items():
    add(
        name,
        lambda model, folder, options=options: saved(get_model_state_dict(model, options=options), folder),
        lambda fresh, folder, options=options: set_model_state_dict(fresh, read(folder), options=options),
    )


@way(kinds=("dense",))
def exported(model: nn.Module, folder: Path) -> Loading:
    """One MLP, whose weights the program holds; the others are there already."""
    mlp = model.model.layers[0].mlp
    others = {name: value for name, value in model.state_dict().items() if ".mlp." not in name}
    torch.export.save(
        torch.export.export(mlp, (torch.ones(1, 3, mlp.hidden_size, device=model.device),)), folder / "mlp.pt2"
    )

    def load(fresh: nn.Module) -> None:
        fresh.load_state_dict(others, strict=False)
        fresh.model.layers[0].mlp.load_state_dict(torch.export.load(folder / "mlp.pt2").state_dict)

    return load
