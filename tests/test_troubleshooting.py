"""The page on errors: every message in it is one that somebody gives, and doctor names headings that are there."""

import functools
import inspect
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.activations import GELUActivation

from kernels_ext_npu.doctor import findings
from kernels_ext_npu.swaps.linear import lora

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
SITE = Path(sysconfig.get_path("purelib"))
LOADERS = [*Path("/lib64").glob("ld-linux-*.so*"), *Path("/lib").glob("ld-linux-*.so*")]

DOCTOR = ROOT / "integration/kernels_ext_npu/doctor"

# who an entry says it is from -> where its messages are written
SOURCES = {
    "kernels-ext-npu": [(ROOT, ("integration/**/*.py", "*/torch-ext/**/*.py"))],
    "doctor": [(DOCTOR, ("**/*.py",))],
    "softnpu": [(ROOT, ("softnpu/**/*.py", "softnpu/*.c"))],
    "kernels": [(SITE, ("kernels/**/*.py",))],
    "packaging": [(SITE, ("packaging/*.py",))],
    "h11": [(SITE, ("h11/*.py",))],
    "httpx2": [(SITE, ("httpx2/*.py",))],
    "torch": [(SITE, ("torch/__init__.py",))],
    "torch_npu": [(SITE, ("torch_npu/__init__.py", "torch_npu/_init/**/*.py"))],
    "torch_npu's library": [(SITE, ("torch_npu/lib/libtorch_npu.so",))],
    "transformers": [
        (SITE / "transformers", ("integrations/*.py", "modeling_utils.py", "masking_utils.py", "trainer.py"))
    ],
    "the loader": [(path.parent, (path.name,)) for path in LOADERS],
}
ENTRIES = re.findall(r"^### (.+)\n(From .+)$", PAGE, re.MULTILINE)


def message(heading: str) -> str:
    return heading.strip().strip("`").strip() if not heading.startswith("``") else heading.strip("`").lstrip(" ")


HEADINGS = [message(heading) for heading, _ in ENTRIES]
CHANNELS_LAST = next(heading for heading in HEADINGS if "MemoryFormat" in heading)
VIEW = next(heading for heading in HEADINGS if "view size" in heading)


@functools.cache
def written(source: str) -> str:
    """What a source holds, with the parts of a message that stands in several literals put together."""
    paths = [path for folder, patterns in SOURCES[source] for pattern in patterns for path in folder.glob(pattern)]
    # doctor quotes the messages of others
    return "\n".join(joined(path) for path in paths if source == "doctor" or DOCTOR not in path.parents)


def joined(path: Path) -> str:
    """What a file holds, literals that follow each other as one; a library has none."""
    if path.suffix == ".so":
        return path.read_bytes().decode("latin-1")
    text = path.read_bytes().decode(errors="replace")
    return re.sub(r"""["']\s*\n\s*[rf]*["']""", "", text).replace('\\"', '"')


def sources(origin: str) -> list[str]:
    names = sorted(SOURCES, key=len, reverse=True)
    return re.findall("|".join(names), origin)


def parts(text: str) -> Iterator[str]:
    """Between what differs from case to case; a name and what is said of it may come from two places."""
    for part in re.split("…|: ", text):
        if len(part.strip(" `'")) > 2:
            yield part.strip()


@pytest.mark.parametrize(("heading", "origin"), ENTRIES, ids=HEADINGS)
def test_every_message_is_given_by_whom_the_page_says(heading: str, origin: str) -> None:
    names = sources(origin)
    assert names, origin
    for part in parts(message(heading)):
        assert any(part in written(name) for name in names), (part, names)


def test_every_entry_says_whose_message_it_is() -> None:
    assert len(ENTRIES) == PAGE.count("\n### ")
    assert len(set(HEADINGS)) == len(HEADINGS)


def test_reasons_of_packing_are_those_of_the_kernel() -> None:
    table = PAGE[PAGE.index("| reason |") :].split("\n\n")[0]
    quoted = re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)
    source = "".join((ROOT / "SwiGLU/torch-ext/swiglu" / name).read_text() for name in ("packing.py", "memory.py"))
    source += inspect.getsource(lora.why_apart)
    given = [re.sub(r"\{.*?\}", "…", text) for text in re.findall(r'return (?:\[\], )?f?"([^"]+)"', source)]
    assert {re.sub("….*", "…", text) for text in given} == set(quoted)


def test_doctor_refers_to_headings_that_are_there() -> None:
    named = {known.see for known in findings.KNOWN} | {case.get("see") for case in findings.REMEDIES.values()}
    assert len(named) > 15
    assert named - {None} <= set(HEADINGS)


def test_doctor_has_a_remedy_for_each_case_and_a_case_for_each_remedy() -> None:
    written = "".join(path.read_text() for path in DOCTOR.rglob("*.py"))
    built = {"autoload, software device", "publisher not trusted", "publisher not told"}  # put together in the code
    assert not [case for case in findings.REMEDIES.keys() - built if f'"{case}"' not in written]
    assert set(re.findall(r'remedy\(\s*"([^"]+)"', written)) <= findings.REMEDIES.keys()


@pytest.mark.software
def test_what_switching_autoload_off_helps_is_as_the_page_says(run_python) -> None:
    """On a machine without CANN: torch alone, and not transformers, for which softnpu has to be there.

    With that doctor's tests import transformers, and kernelize, where it is off.
    """
    code = "import torch; torch.ones(1); print('of torch'); from transformers import LlamaForCausalLM"
    result = run_python(code, check=False, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.stdout == "of torch\n"
    assert "libhccl.so" in result.stderr


def test_the_hook_against_gelu_of_channels_last_helps() -> None:
    """Without it torch_npu raises: the entry can go once it does not."""
    (code,) = re.findall(r"```python\n(def contiguous.*?)```", PAGE, re.DOTALL)
    model = nn.Sequential(nn.GELU(), GELUActivation())
    x = torch.randn(2, 4, 4, 8).permute(0, 3, 1, 2)
    with pytest.raises(RuntimeError, match=re.escape(CHANNELS_LAST)):
        model(x.npu())
    exec(code, {"model": model})
    torch.testing.assert_close(model(x.npu()).cpu(), model(x))


def test_a_reshape_behind_a_product_is_compiled_to_a_view_that_fails() -> None:
    """Where torch_npu's result does not lie as its meta kernel says: the entry can go once it does."""

    def reshaped(x: torch.Tensor) -> torch.Tensor:
        return (x.transpose(1, 2) * 2).transpose(1, 2).reshape(2, 12)

    torch.compiler.reset()
    x = torch.randn(2, 3, 4)
    assert torch.equal(torch.compile(reshaped, backend="eager")(x.npu()).cpu(), reshaped(x))
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match=re.escape(VIEW)):
        torch.compile(reshaped, backend="aot_eager")(x.npu())
