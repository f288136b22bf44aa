"""What a forward does beside computing, or reads of objects in its file, stays: such a module keeps its forward."""

import builtins
import copy
import sys
import threading

import pytest
import torch
from torch import nn

import kernels_ext_npu
from tests.integration.recognition.blocks import Block, launched, said
from tests.integration.recognition.spellings.other_peoples_norms import WIDTH, MetaNorm

CALLS: list[int] = []
FLAGS = {"doubled": False}
TABLE = torch.ones(WIDTH)
COUNT = 0


class Prints(MetaNorm):
    def forward(self, x):
        print("a norm")
        return super().forward(x)


class Opens(MetaNorm):
    def forward(self, x):
        with open("/dev/null") as file:
            file.read()
        return super().forward(x)


class Counts(MetaNorm):
    def forward(self, x):
        global COUNT
        COUNT += 1
        return super().forward(x)


class Appends(MetaNorm):
    def forward(self, x):
        note(x)
        return super().forward(x)


def note(x):
    CALLS.append(x.shape[0])


class LooksUp(MetaNorm):
    def forward(self, x):
        y = super().forward(x)
        return 2 * y if FLAGS["doubled"] else y


class Multiplies(MetaNorm):
    def forward(self, x):
        return super().forward(x) * TABLE.to(x.device)


class Seeds(MetaNorm):
    def forward(self, x):
        torch.manual_seed(0)
        return super().forward(x)


class SaysWhenAsked(MetaNorm):
    """Prints under a setting that it does not have: that is watched."""

    verbose = False

    def forward(self, x):
        if self.verbose:
            print("a norm")
        return super().forward(x)


class NamesLikeGlobals(MetaNorm):
    """Reads members that have the names of objects in its file."""

    def __init__(self) -> None:
        super().__init__()
        self.COUNT, self.FLAGS = 1.0, 1.0

    def forward(self, x):
        return super().forward(x) * self.COUNT * self.FLAGS


@pytest.mark.parametrize("cls", [Prints, Opens, Counts, Appends, LooksUp, Multiplies, Seeds], ids=lambda c: c.__name__)
def test_a_norm_that_does_more_keeps_its_forward_which_does_it_at_no_swap(registered, capsys, cls) -> None:
    CALLS.clear()
    before = COUNT, builtins.print, builtins.open
    plain = Block(cls())
    model = kernels_ext_npu.kernelize(copy.deepcopy(plain).to("npu"))
    assert not any(swapped for _, swapped in said(model))
    assert (COUNT, builtins.print, builtins.open) == before
    assert not CALLS
    assert capsys.readouterr().out == ""
    x = torch.randn(2, WIDTH)
    torch.testing.assert_close(model(x.npu()).cpu(), plain(x), rtol=1e-5, atol=1e-6)  # of float32 in another order
    assert launched(lambda: model(x.npu())) == 0


class EndsTheProcess(MetaNorm):
    def forward(self, x):
        if x.dim() != 3:
            sys.exit("three dimensions")
        return super().forward(x)


class Leaves(MetaNorm):
    def forward(self, x):
        raise SystemExit(1)


@pytest.mark.parametrize(("cls", "is_served"), [(EndsTheProcess, True), (Leaves, False)])
def test_what_ends_the_process_where_it_is_tried_ends_no_kernelize(registered, cls, is_served: bool) -> None:
    model = kernels_ext_npu.kernelize(Block(cls()).to("npu"))
    assert (("RMSNorm", True) in said(model)) is is_served


@pytest.mark.parametrize("cls", [SaysWhenAsked, NamesLikeGlobals])
def test_what_it_might_do_with_other_settings_stands_not_against_it(registered, capsys, cls: type[nn.Module]) -> None:
    model = kernels_ext_npu.kernelize(Block(cls()).to("npu"))
    assert said(model) == [("RMSNorm", True)]
    if cls is SaysWhenAsked:
        model.part.verbose = True
        model(torch.randn(2, WIDTH, device="npu"))
        assert "a norm" in capsys.readouterr().out


def test_others_may_print_while_a_forward_is_tried(registered, capsys) -> None:
    """What is refused is refused to the thread that runs it."""
    ended = threading.Event()

    class Waits(MetaNorm):
        def forward(self, x):
            if not ended.is_set():
                threading.Thread(target=lambda: (print("from elsewhere"), ended.set())).start()
                ended.wait(10)
            return super().forward(x)

    before = builtins.print
    kernels_ext_npu.kernelize(Block(Waits()).to("npu"))
    assert builtins.print is before
    assert "from elsewhere" in capsys.readouterr().out


class Importing:
    """Stands for a library that is imported when it is asked for something."""

    def __getattr__(self, name):
        raise ImportError(name)


LIBRARY = Importing()


class AsksALibrary(MetaNorm):
    def forward(self, x):
        return LIBRARY.norm(x) if x.is_cuda else super().forward(x)


def test_a_library_that_cannot_be_imported_is_not_asked(registered) -> None:
    model = kernels_ext_npu.kernelize(Block(AsksALibrary()).to("npu"))
    assert not any(swapped for _, swapped in said(model))
