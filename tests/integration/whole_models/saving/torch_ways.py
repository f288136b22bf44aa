"""Ways to save and load of torch."""

import copy
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from tests.integration.whole_models.saving.ways import Way, from_state_dict, into

FILE = "state.pt"


def saved(state: Any, folder: Path, **options: Any) -> None:
    torch.save(state, folder / FILE, **options)


def read(folder: Path, **options: Any) -> Any:
    return torch.load(folder / FILE, **{"map_location": "cpu"} | options)


copies: dict[Path, Any] = {}
WAYS: dict[str, Way] = {
    "torch_state_dict": from_state_dict(saved, read)._replace(kinds=("dense", "experts", "adapted")),
    # the format before archives, which writes storages as they are
    "torch_legacy": from_state_dict(lambda *args: saved(*args, _use_new_zipfile_serialization=False), read),
    # where it was saved from, and the model holds what was loaded
    "torch_state_dict_onto_the_device": Way(
        lambda model, folder: saved(model.state_dict(), folder),
        lambda fresh, folder: into(fresh, read(folder, map_location=fresh.device), assign=True),
    ),
    "torch_whole_model": Way(saved, lambda fresh, folder: read(folder, weights_only=False, map_location=fresh.device)),
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
}


# ---- distributed checkpoints, which are read into what a fresh model holds -------------------------------------------
def by_options(options: StateDictOptions | None) -> Way:
    return Way(
        lambda model, folder: saved(get_model_state_dict(model, options=options), folder),
        lambda fresh, folder: set_model_state_dict(fresh, read(folder), options=options),
    )


WAYS |= {
    "dcp_saved": Way(
        lambda model, folder: dcp.save(model.state_dict(), checkpoint_id=folder, no_dist=True),
        lambda fresh, folder: dcp.load(fresh.state_dict(), checkpoint_id=folder, no_dist=True),
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
}
