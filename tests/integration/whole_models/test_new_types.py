"""Every folder of models that transformers got since 5.22 has a tiny model in the zoo, or a reason here."""

from pathlib import Path

import pytest

from kernels_ext_npu.coverage.survey import all_folders
from tests.support import zoo

# the folders of transformers 5.22.2 with a modeling file
BEFORE = (Path(__file__).resolve().parents[2] / "data" / "folders_of_5_22.txt").read_text().split()
NOT_BUILT = {
    "jev": "has nothing that a kernel could serve",
    "wavtokenizer": "has nothing that a kernel could serve: its attention is called by no name",
}


def test_every_new_folder_is_in_the_zoo_or_says_why_it_is_not() -> None:
    new = {folder.name for folder in all_folders() if folder.files} - {*BEFORE}
    late = [name for name, architecture in zoo.ARCHITECTURES.items() if architecture.since != zoo.Architecture.since]
    built = {
        type(module).__module__.split(".")[2]
        for name in late
        for module in zoo.build(name).modules()
        if is_theirs(module)
    }
    assert new - built == new & NOT_BUILT.keys()


def is_theirs(module: object) -> bool:
    return type(module).__module__.startswith("transformers.models.")


def test_what_came_later_than_the_installed_transformers_is_named() -> None:
    if zoo.LATER:
        pytest.skip(f"not in this transformers: {', '.join(f'{name} ({since})' for name, since in zoo.LATER.items())}")
