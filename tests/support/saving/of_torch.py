"""Ways to save and load of torch."""

import copy
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import format_utils
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.package import PackageExporter, PackageImporter

from tests.support.saving.ways import Loading, into, then, way


@way("torch.save", "torch.load", "torch.nn.Module.state_dict", "torch.nn.Module.load_state_dict")
def torch_state_dict(model: nn.Module, folder: Path) -> Loading:
    torch.save(model.state_dict(), folder / "state.pt")
    return lambda fresh: into(fresh, torch.load(folder / "state.pt", map_location="cpu"))


@way("torch.save", "torch.load")
def torch_state_dict_onto_the_device(model: nn.Module, folder: Path) -> Loading:
    """Load where it was saved from, and let the model hold what was loaded."""
    torch.save(model.state_dict(), folder / "state.pt")
    return lambda fresh: into(fresh, torch.load(folder / "state.pt", map_location=fresh.device), assign=True)


@way("torch.save", "torch.load")
def torch_mapped(model: nn.Module, folder: Path) -> Loading:
    torch.save(model.state_dict(), folder / "state.pt")
    return lambda fresh: into(fresh, torch.load(folder / "state.pt", mmap=True, map_location="cpu"))


@way("torch.save", "torch.load")
def torch_legacy(model: nn.Module, folder: Path) -> Loading:
    """The format before archives, which writes storages as they are."""
    torch.save(model.state_dict(), folder / "state.pt", _use_new_zipfile_serialization=False)
    return lambda fresh: into(fresh, torch.load(folder / "state.pt", map_location="cpu"))


@way("torch.serialization.save", "torch.serialization.load")
def torch_serialized(model: nn.Module, folder: Path) -> Loading:
    """By the functions for which torch_npu puts its own into torch."""
    torch.serialization.save(model.state_dict(), folder / "state.pt")
    return lambda fresh: into(fresh, torch.serialization.load(folder / "state.pt", map_location="cpu"))


@way("torch.save", "torch.load")
def torch_whole_model(model: nn.Module, folder: Path) -> Loading:
    torch.save(model, folder / "model.pt")
    return lambda fresh: torch.load(folder / "model.pt", weights_only=False, map_location=fresh.device)


@way("torch.save", "torch.load")
def torch_parameters(model: nn.Module, folder: Path) -> Loading:
    """Parameters themselves, not what a state dict detaches from them."""
    torch.save(dict(model.named_parameters()), folder / "parameters.pt")
    return lambda fresh: into(fresh, torch.load(folder / "parameters.pt", map_location="cpu"), strict=False)


@way()
def pickled(model: nn.Module, folder: Path) -> Loading:
    (folder / "model.pickle").write_bytes(pickle.dumps(model))
    return lambda fresh: pickle.loads((folder / "model.pickle").read_bytes())


@way()
def deeply_copied(model: nn.Module, folder: Path) -> Loading:
    copied = copy.deepcopy(model)
    return lambda fresh: copied


@way()
def deeply_copied_state_dict(model: nn.Module, folder: Path) -> Loading:
    state = copy.deepcopy(model.state_dict())
    return lambda fresh: into(fresh, state)


@way("torch.package.PackageExporter.save_pickle", "torch.package.PackageImporter.load_pickle")
def packaged(model: nn.Module, folder: Path) -> Loading:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # storages of a type
        with PackageExporter(folder / "state.package") as exporter:
            exporter.extern("**")
            exporter.save_pickle("model", "state.pkl", model.state_dict())

    def load(fresh: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importer = PackageImporter(folder / "state.package")
            return into(fresh, importer.load_pickle("model", "state.pkl", map_location="cpu"))

    return load


@way("torch.hub.load_state_dict_from_url")
def by_url(model: nn.Module, folder: Path) -> Loading:
    """What a web server would give."""
    torch.save(model.state_dict(), folder / "state.pt")
    url, cache = (folder / "state.pt").as_uri(), str(folder / "cache")
    return lambda fresh: into(fresh, torch.hub.load_state_dict_from_url(url, cache, "cpu", progress=False))


def in_place(**options: Any) -> Loading:
    """Load from a distributed checkpoint into what a fresh model holds."""
    return then(lambda fresh: dcp.load(fresh.state_dict(), no_dist=True, **options))


@way("torch.distributed.checkpoint.save", "torch.distributed.checkpoint.load")
def dcp_saved(model: nn.Module, folder: Path) -> Loading:
    dcp.save(model.state_dict(), checkpoint_id=folder, no_dist=True)
    return in_place(checkpoint_id=folder)


@way("torch.distributed.checkpoint.async_save")
def dcp_saved_meanwhile(model: nn.Module, folder: Path) -> Loading:
    """Another thread writes what was copied to the host first."""
    writing = dcp.async_save(model.state_dict(), checkpoint_id=folder, no_dist=True)
    writing.result()
    return in_place(checkpoint_id=folder)


@way("torch.distributed.checkpoint.save_state_dict", "torch.distributed.checkpoint.load_state_dict")
def dcp_by_former_names(model: nn.Module, folder: Path) -> Loading:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dcp.save_state_dict(model.state_dict(), dcp.FileSystemWriter(folder), no_dist=True)

    def load(fresh: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            dcp.load_state_dict(fresh.state_dict(), dcp.FileSystemReader(folder), no_dist=True)
        return fresh

    return load


@way()
def dcp_as_safetensors(model: nn.Module, folder: Path) -> Loading:
    writer = dcp.HuggingFaceStorageWriter(str(folder))
    dcp.save(model.state_dict(), storage_writer=writer, no_dist=True)
    return in_place(storage_reader=dcp.HuggingFaceStorageReader(str(folder)))


@way(
    "torch.distributed.checkpoint.state_dict.get_model_state_dict",
    "torch.distributed.checkpoint.state_dict.set_model_state_dict",
)
def dcp_model_state_dict(model: nn.Module, folder: Path) -> Loading:
    torch.save(get_model_state_dict(model), folder / "state.pt")
    return then(lambda fresh: set_model_state_dict(fresh, torch.load(folder / "state.pt", map_location="cpu")))


@way(
    "torch.distributed.checkpoint.state_dict.get_model_state_dict",
    "torch.distributed.checkpoint.state_dict.set_model_state_dict",
)
def dcp_model_state_dict_on_the_host(model: nn.Module, folder: Path) -> Loading:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    torch.save(get_model_state_dict(model, options=options), folder / "state.pt")
    return then(lambda fresh: set_model_state_dict(fresh, torch.load(folder / "state.pt"), options=options))


@way("torch.distributed.checkpoint.state_dict.get_state_dict", "torch.distributed.checkpoint.state_dict.set_state_dict")
def dcp_state_dicts(model: nn.Module, folder: Path) -> Loading:
    """With an optimizer beside it."""
    state = dict(zip(("model", "optimizer"), get_state_dict(model, torch.optim.SGD(model.parameters()))))
    dcp.save(state, checkpoint_id=folder, no_dist=True)

    def load(fresh: nn.Module) -> nn.Module:
        optimizer = torch.optim.SGD(fresh.parameters())
        read = dict(zip(("model", "optimizer"), get_state_dict(fresh, optimizer)))
        dcp.load(read, checkpoint_id=folder, no_dist=True)
        set_state_dict(fresh, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"])
        return fresh

    return load


@way(
    "torch.distributed.checkpoint.format_utils.dcp_to_torch_save",
    "torch.distributed.checkpoint.format_utils.torch_save_to_dcp",
)
def dcp_there_and_back(model: nn.Module, folder: Path) -> Loading:
    torch.save(model.state_dict(), folder / "first.pt")
    format_utils.torch_save_to_dcp(folder / "first.pt", folder / "dcp")
    format_utils.dcp_to_torch_save(folder / "dcp", folder / "second.pt")
    return lambda fresh: into(fresh, torch.load(folder / "second.pt", map_location="cpu"))


@way("torch.export.save", "torch.export.load", kinds=("dense",))
def exported(model: nn.Module, folder: Path) -> Loading:
    """One MLP, whose weights the program holds; the others are there already."""
    mlp = model.model.layers[0].mlp
    others = {name: value for name, value in model.state_dict().items() if ".mlp." not in name}
    program = torch.export.export(mlp, (torch.ones(1, 3, mlp.hidden_size, device=model.device),))
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    (folder / "mlp.pt2").write_bytes(buffer.getvalue())

    def load(fresh: nn.Module) -> nn.Module:
        fresh.load_state_dict(others, strict=False)
        fresh.model.layers[0].mlp.load_state_dict(torch.export.load(folder / "mlp.pt2").state_dict)
        return fresh

    return load
