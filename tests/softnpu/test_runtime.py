"""How the software device starts: in processes of their own, because that is what is tested."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch_npu

from softnpu import runtime

ADD = "import softnpu, torch; assert (torch.ones(2, device='npu') + 1).sum().item() == 4; "


def test_import_after_torch_says_what_to_do(run_python) -> None:
    result = run_python("import torch, softnpu", check=False, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.returncode
    assert "import softnpu before torch" in result.stderr
    assert "python -m softnpu" in result.stderr


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"PATH": "{0}"}, "no C compiler ('cc').*apt-get install gcc"),
        ({"CC": "false"}, "could not build libascendcl.so"),
        ({"XDG_CACHE_HOME": "{0}/file"}, "{0}/file/softnpu and cannot write there.*XDG_CACHE_HOME"),
        ({"SOFTNPU_CANN": "newest"}, "SOFTNPU_CANN=newest: a version of CANN is written as 8.2.RC1 or"),
    ],
)
def test_what_keeps_it_from_being_built_is_named_with_a_remedy(run_python, tmp_path: Path, environment, said) -> None:
    (tmp_path / "file").write_text("not a folder")
    given = {name: value.format(tmp_path) for name, value in environment.items()}
    result = run_python("import softnpu", check=False, **{"XDG_CACHE_HOME": str(tmp_path)} | given)
    assert re.search(re.escape(said.format(tmp_path)).replace(r"\.\*", ".*"), result.stderr, re.DOTALL)
    assert not list(tmp_path.glob("softnpu/*"))


def test_several_processes_may_build_at_once_and_write_nothing_elsewhere(run_python, tmp_path: Path) -> None:
    """Without torch, which takes them longer than to build."""
    build = f"import runpy; runpy.run_path({runtime.__file__!r})['load']()"
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(run_python, build, XDG_CACHE_HOME=str(tmp_path)) for _ in range(4)]
        for run in runs:
            run.result()
    (home,) = (tmp_path / "softnpu").iterdir()  # no half-built folder is left
    assert {path.name for path in home.glob("*.so")} == {runtime.RUNTIME, *runtime.OTHERS}
    package, here = Path(runtime.__file__).parent, tmp_path / "here"
    here.mkdir()
    before = {path for path in package.rglob("*") if "__pycache__" not in path.parts}
    run_python(ADD, directory=here, XDG_CACHE_HOME=str(tmp_path))
    assert {path for path in package.rglob("*") if "__pycache__" not in path.parts} == before
    assert not list(here.iterdir())


@pytest.fixture
def libraries() -> dict[str, str]:
    """The environment of a machine with CANN, played by our libraries."""
    home = os.environ["ASCEND_HOME_PATH"]
    return {"ASCEND_HOME_PATH": home, "ASCEND_OPP_PATH": f"{home}/opp", "LD_LIBRARY_PATH": home}


def test_on_a_machine_with_a_device_nothing_changes(run_python, libraries: dict[str, str]) -> None:
    """The driver's node is in /dev and CANN's libraries, played by ours, are on the library path."""
    code = """
import os
listdir = os.listdir
os.listdir = lambda path=".": [*listdir(path), "davinci0", "davinci_manager"] if path == "/dev" else listdir(path)
before = dict(os.environ)
import softnpu, sys
assert not softnpu.is_software()
assert "torch" not in sys.modules and dict(os.environ) == before
import torch, torch_npu
assert torch.npu.is_available()
table = torch._C._dispatch_dump("aten::add.Tensor")
assert "softnpu" not in table, table
with softnpu.poisoned_memory():
    assert softnpu.counters() == {"stream_syncs": 0, "device_to_host_copies": 0}
"""
    run_python(code, **libraries)


def test_a_device_node_counts_only_with_a_number(monkeypatch) -> None:
    for nodes, expected in ((["null", "davinci_manager"], False), (["davinci7"], True), ([], False)):
        monkeypatch.setattr(os, "listdir", lambda path, nodes=nodes: nodes)
        assert runtime.real_device() is expected


def test_a_process_sees_the_devices_of_a_list_before_the_first_that_is_not_there(run_forked) -> None:
    """A server has eight, unless SOFTNPU_DEVICES says otherwise."""
    count = "import softnpu, torch; print(torch.npu.device_count(), torch.npu.is_available())"
    cases = {("4,6", "8"): "2 True", ("32", "8"): "0 False", ("0,1,8,3", "8"): "2 True", ("3,x", "8"): "1 True"}
    cases |= {("8", "16"): "1 True"}
    for (visible, there), said in cases.items():
        result = run_forked(count, ASCEND_RT_VISIBLE_DEVICES=visible, SOFTNPU_DEVICES=there)
        assert result.stdout.splitlines()[-1] == said


def test_expandable_segments_grow_and_give_memory_back(run_forked) -> None:
    code = """
import pytest, softnpu, torch
x = torch.arange(30 << 20, device="npu", dtype=torch.int32)  # 120 MB and the padding behind it: seven pieces of 20 MB
free = torch.npu.mem_get_info()[0]
assert (x[-1] + 1).item() == 30 << 20
del x
torch.npu.empty_cache()
assert torch.npu.mem_get_info()[0] == free + (140 << 20)
assert torch.ones(60 << 20, device="npu", dtype=torch.uint8).sum().item() == 60 << 20
with pytest.raises(torch.OutOfMemoryError):
    torch.empty(65 << 30, device="npu", dtype=torch.uint8)
assert (torch.ones(30, device="npu") + 1).sum().item() == 60
"""
    run_forked(code, PYTORCH_NPU_ALLOC_CONF="expandable_segments:True")


def test_a_device_has_a_context_of_its_own_once_it_is_used(run_forked) -> None:
    """What torch_npu asks the runtime when it is to behave as CUDA does."""
    code = """
import softnpu, torch, torch_npu
torch_npu.npu.use_compatible_impl(True)
assert (torch.ones(2, device="npu") + 1).sum().item() == 4
assert torch.ones(2).pin_memory().npu(non_blocking=True).sum().item() == 2
"""
    run_forked(code)


def test_a_device_that_is_not_there_is_refused_with_the_variable_that_sets_how_many(run_forked) -> None:
    code = """
import pytest, softnpu, torch
said = "There is no device 2: the software devices are 0 to 1. Set the environment variable SOFTNPU_DEVICES to how many"
for call in (lambda: torch.npu.set_device(2), lambda: torch.ones(2, device="npu:2")):
    with pytest.raises(RuntimeError) as error:
        call()
    assert said + " you want, at most 64" in " ".join(str(error.value).split())
assert torch.npu.current_device() == 0
"""
    run_forked(code, SOFTNPU_DEVICES="2")


def test_a_script_runs_as_a_module(run_python, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\nimport beside\n"
        "print(__name__, sys.argv[1:], sys.path[0], torch.ones(3, device='npu').sum().item())\n"
    )
    (tmp_path / "beside.py").write_text("")
    result = run_python(None, "-m", "softnpu", str(script), "a", "--b")
    assert result.stdout.split("\n")[-2] == f"__main__ ['a', '--b'] {tmp_path} 3.0"


def test_a_module_runs_as_a_module(run_forked, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        "import sys, torch; print(__name__, sys.argv, torch.ones(3, device='npu').sum())"
    )
    result = run_forked(None, "-m", "softnpu", "-m", "module", "a", directory=tmp_path)
    assert result.stdout == f"__main__ ['{tmp_path}/module.py', 'a'] tensor(3., device='npu:0')\n"


@pytest.mark.parametrize("arguments", [[], ["-m"], ["--help"], ["missing.py"]])
def test_wrong_calls_print_the_usage(run_forked, arguments: list[str]) -> None:
    result = run_forked(None, "-m", "softnpu", *arguments, check=False)
    assert result.returncode
    assert "usage: python -m softnpu" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("end", "said"), [("raise ValueError('why')", "ValueError: why\n"), ("sys.exit('why')", "why\n")]
)
def test_the_last_line_is_that_of_the_program(run_forked, end: str, said: str) -> None:
    result = run_forked(f"import sys, softnpu, torch; torch.ones(2, device='npu'); {end}", check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.endswith(said)
    assert ("Traceback" in result.stderr) == (said != result.stderr)


def test_the_pytest_plugin_provides_the_device(run_forked, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import torch\n\n"
        "def test_it(npu_counters, poisoned_memory):\n"
        "    assert torch.empty(2, device='npu').isnan().all()\n"
        "    torch.ones(2, device='npu') * 2\n"
        "    assert npu_counters()['mul'] == 1\n"
    )
    result = run_forked(None, "-m", "pytest", "-p", "softnpu.pytest_plugin", str(tmp_path), "-c", os.devnull)
    assert "1 passed" in result.stdout
    assert "npu: software device" in result.stdout


def test_memory_of_the_host_can_be_registered() -> None:
    runtime, mapped, pinned = torch_npu.npu.npurt(), 0x2, 0x10000000
    page = torch.empty(3 * 4096, dtype=torch.uint8)
    start = page.data_ptr() + -page.data_ptr() % 4096
    assert int(runtime.npuHostRegister(start, 4096, mapped)) == 0
    assert int(runtime.npuHostRegister(start + 8, 64, mapped)) != 0  # the device maps whole pages
    assert int(runtime.npuHostRegister(start + 8, 64, pinned)) == 0
    assert int(runtime.npuHostRegister(start, 0, mapped)) != 0
    assert [int(runtime.npuHostUnregister(start + n)) == 0 for n in (0, 8, 8)] == [True, True, False]


def test_the_device_reaches_swapped_memory() -> None:
    x = torch_npu.empty_with_swapped_memory([4], dtype=torch.float32, device="npu")
    assert (x.fill_(3) + 1).tolist() == [4.0] * 4


def test_an_import_loads_torch_and_torch_npu_and_nothing_else(run_python, libraries: dict[str, str]) -> None:
    """Beside modules of its own; whatever else it loaded would slow down every program that it is imported in."""
    modules = "; import sys; print(*sys.modules)"
    theirs = run_python("import torch, torch_npu" + modules, **libraries).stdout.splitlines()[-1].split()
    ours = run_python("import softnpu" + modules).stdout.splitlines()[-1].split()
    assert "torch_npu" in ours
    assert {name.partition(".")[0] for name in set(ours) - set(theirs)} == {"softnpu"}
