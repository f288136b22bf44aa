"""Run the notebook of the examples: its outputs are those of the code as it is now."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

_ROOT = Path(__file__).resolve().parents[2]
PATH = "examples/quick_start.ipynb"


def run() -> bytes:
    """Return the notebook with its outputs, in a process of its own, in an empty folder and without the Hub.

    Raises:
        CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(_ROOT / PATH, as_version=4)
    # what the software device set in this process is not what a user starts with
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ASCEND_")}
    with tempfile.TemporaryDirectory() as folder:
        paths = os.pathsep.join([str(_ROOT), str(_ROOT / "integration")])
        quiet = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        environment = inherited | quiet | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "IPYTHONDIR": folder}
        sockets = Config(KernelManager={"transport": "ipc", "ip": f"{folder}/kernel"})
        place = {"metadata": {"path": folder}}
        # the same however long a cell takes
        sockets.NotebookClient = Config(record_timing=False, coalesce_streams=True)
        NotebookClient(notebook, resources=place, config=sockets).execute(env=environment)
    notebook.metadata.language_info = {"name": "python"}  # without the version of this Python
    for cell in notebook.cells:
        if cell.cell_type == "code":  # what libraries warn of names folders of this machine
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return nbformat.writes(notebook).encode() + b"\n"
