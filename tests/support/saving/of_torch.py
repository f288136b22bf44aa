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
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.package import PackageExporter, PackageImporter

from tests.support.saving.ways import WAYS, Way, into, of_state

FILE = "state.pt"


def saved(state: Any, folder: Path, **options: Any) -> None:
    torch.save(state, folder / FILE, **options)


def read(folder: Path, **options: Any) -> Any:
    return torch.load(folder / FILE, **{"map_location": "cpu"} | options)


def package(state: dict[str, Tensor], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # storages of a type
        with PackageExporter(folder / FILE) as exporter:
            exporter.extern("**")
            exporter.save_pickle("model", "state.pkl", state)


copies: dict[Path, Any] = {}
WAYS |= {
    "torch_state_dict": of_state(saved, read),
    # the format before archives, which writes storages as they are
    "torch_legacy": of_state(lambda *args: saved(*args, _use_new_zipfile_serialization=False), read),
    # where it was saved from, and the model holds what was loaded
    "torch_state_dict_onto_the_device": Way(
        lambda model, folder: saved(model.state_dict(), folder),
        lambda fresh, folder: into(fresh, read(folder, map_location=fresh.device), assign=True),
    ),
    # functions for which torch_npu puts its own into torch
    "torch_serialized": of_state(
        lambda state, folder: torch.serialization.save(state, folder / FILE),
        lambda folder: torch.serialization.load(folder / FILE, map_location="cpu"),
    ),
    "torch_whole_model": Way(saved, lambda fresh, folder: read(folder, weights_only=False, map_location=fresh.device)),
    # parameters themselves, not what a state dict detaches from them
    "torch_parameters": Way(
        lambda model, folder: saved(dict(model.named_parameters()), folder),
        lambda fresh, folder: into(fresh, read(folder), strict=False),
    ),
    "pickled": Way(
        lambda model, folder: (folder / FILE).write_bytes(pickle.dumps(model)),
        lambda fresh, folder: pickle.loads((folder / FILE).read_bytes()),
    ),
    "deeply_copied": Way(
        lambda model, folder: copies.update({folder: copy.deepcopy(model)}), lambda fresh, folder: copies[folder]
    ),
    "deeply_copied_state_dict": Way(
        lambda model, folder: copies.update({folder: copy.deepcopy(model.state_dict())}),
        lambda fresh, folder: into(fresh, copies[folder]),
    ),
    "packaged": of_state(
        package,
        lambda folder: PackageImporter(folder / FILE).load_pickle("model", "state.pkl", map_location="cpu"),
    ),
}


# ---- distributed checkpoints, which are read into what a fresh model holds -------------------------------------------
def checkpoint(state: dict[str, Any], folder: Path) -> None:
    dcp.save(state, checkpoint_id=folder, no_dist=True)


def in_place(fresh: nn.Module, folder: Path) -> None:
    dcp.load(fresh.state_dict(), checkpoint_id=folder, no_dist=True)


def by_options(options: StateDictOptions | None) -> Way:
    return Way(
        lambda model, folder: saved(get_model_state_dict(model, options=options), folder),
        lambda fresh, folder: set_model_state_dict(fresh, read(folder), options=options),
    )


def with_an_optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    optimizer = torch.optim.SGD(model.parameters())
    return optimizer, dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))


def load_both(fresh: nn.Module, folder: Path) -> None:
    optimizer, state = with_an_optimizer(fresh)
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_state_dict(fresh, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def export(model: nn.Module, folder: Path) -> None:
    """One MLP, whose weights the program holds; the others are there already."""
    mlp = model.model.layers[0].mlp
    saved({name: value for name, value in model.state_dict().items() if ".mlp." not in name}, folder)
    program = torch.export.export(mlp, (torch.ones(1, 3, mlp.hidden_size, device=model.device),))
    torch.export.save(program, folder / "mlp.pt2")


def load_exported(fresh: nn.Module, folder: Path) -> None:
    fresh.load_state_dict(read(folder), strict=False)
    fresh.model.layers[0].mlp.load_state_dict(torch.export.load(folder / "mlp.pt2").state_dict)


WAYS |= {
    "dcp_saved": Way(lambda model, folder: checkpoint(model.state_dict(), folder), in_place),
    # another thread writes what was copied to the host first
    "dcp_saved_meanwhile": Way(
        lambda model, folder: dcp.async_save(model.state_dict(), checkpoint_id=folder, no_dist=True).result(),
        in_place,
    ),
    "dcp_as_safetensors": Way(
        lambda model, folder: dcp.save(
            model.state_dict(), storage_writer=dcp.HuggingFaceStorageWriter(str(folder)), no_dist=True
        ),
        lambda fresh, folder: dcp.load(
            fresh.state_dict(), storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True
        ),
    ),
    "dcp_model_state_dict": by_options(None),
    "dcp_model_state_dict_on_the_host": by_options(StateDictOptions(full_state_dict=True, cpu_offload=True)),
    "dcp_state_dicts": Way(lambda model, folder: checkpoint(with_an_optimizer(model)[1], folder), load_both),
    "exported": Way(export, load_exported, kinds=("dense",)),
}
