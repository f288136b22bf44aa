"""What is reached of `kernels` beside its public names, those of the installed release: moved or gone, it is said."""

import sys

import kernels
import pytest

import kernels_ext_npu
from kernels_ext_npu.distribution import kernels_internals
from kernels_ext_npu.distribution.kernels_internals import NAMES, REPLACE
from kernels_ext_npu.doctor import probes
from kernels_ext_npu.doctor.checks import libraries
from kernels_ext_npu.doctor.findings import Verdict
from kernels_ext_npu.doctor.observations import Outcome, run
from tests.integration.doctor import doctor_faults as faults
from tests.support import zoo


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch):
    """Takes a name out of all modules of `kernels`."""

    def take_out(name: str) -> object:
        last = name.rpartition(".")[2]
        found = kernels_internals.need(name)
        for module in [m for n, m in sys.modules.items() if n.partition(".")[0] == "kernels" and last in vars(m)]:
            monkeypatch.delattr(module, last)
        return found

    return take_out


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_gone_is_said_with_what_is_lost(without, monkeypatch, name: str) -> None:
    assert kernels_internals.gone() == []
    value = without(name)
    sentence = f"kernels {kernels.__version__} has no {name} any more: {NAMES[name]}"
    assert kernels_internals.gone() == [sentence]
    with pytest.raises(kernels_internals.GoneError) as raised:
        kernels_internals.need(name)
    assert str(raised.value).startswith(f"{sentence}. Take a release that was tested: pip install 'kernels")
    monkeypatch.setattr(kernels.layer, name.rpartition(".")[2], value, raising=False)  # moved
    assert kernels_internals.gone() == []
    assert kernels_internals.need(name) is value


def test_doctor_warns_where_a_name_of_kernels_is_gone(without) -> None:
    outcome = run(probes.imports, 60, names=["kernels"])  # in a process of its own
    assert outcome.facts["gone"] == []
    seen = faults.observed(imports=outcome)
    assert libraries.kernels(seen).verdict is Verdict.OK
    without(REPLACE)
    seen.imports = Outcome(facts={"gone": kernels_internals.gone()})
    finding = libraries.kernels(seen)
    assert finding.verdict is Verdict.WARNING
    assert NAMES[REPLACE] in finding.details[0]


@pytest.mark.parametrize("constant", ["TAKE", "TABLE"])
def test_models_get_their_kernels_without_internals_of_kernels(monkeypatch, constant: str) -> None:
    """`kernels` itself has them still, under names that are not found."""
    monkeypatch.setattr(kernels_internals, constant, "kernels.layer.other")
    with kernels.use_kernel_mapping({}):  # what is left behind is gone at its end
        kernels_ext_npu.register()
        model = zoo.build("llama").to("npu")
        model.set_use_kernels(True)
        candidates = [row for row in kernels_ext_npu.report(model) if row.is_candidate]
        kernels_ext_npu.restore(model)
        kernels_ext_npu.unregister()
    assert len(candidates) > 1
    assert all(row.swapped for row in candidates)


def test_register_refuses_a_release_of_kernels_without_replace_forward(without) -> None:
    without(REPLACE)
    with pytest.raises(kernels_ext_npu.UnsupportedEnvironmentError, match=r"_replace_forward any more: .* pip install"):
        kernels_ext_npu.register()


def test_a_function_is_replaced_wherever_kernels_has_it(monkeypatch) -> None:
    value = kernels_internals.need(REPLACE)
    monkeypatch.setattr(kernels.layer.layer, "_replace_forward", value)
    monkeypatch.setattr(kernels.layer.mode, "_replace_forward", value, raising=False)
    assert kernels_internals.callers(REPLACE) == [kernels.layer.layer, kernels.layer.mode]
    kernels_ext_npu.register()
    assert value is not kernels.layer.layer._replace_forward
    assert value is not kernels.layer.mode._replace_forward
    kernels_ext_npu.unregister()
    assert kernels.layer.layer._replace_forward is kernels.layer.mode._replace_forward is value
