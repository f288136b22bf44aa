"""The sections on LLaMA-Factory, ms-swift and verl, with these projects themselves.

Each is installed into an environment of its own, without what it requires of torch and transformers, which are those of
the tests. Their results are compared with their own without kernels.
"""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import checkpoints, environments, pages

pytestmark = [pytest.mark.long, pytest.mark.software]  # which counts what the recipes launch

PAGE = pages.read(pages.DOCS / "recipes.md")
ALL_SWAPPED = "9 of 9 norms, 2 of 2 gated MLPs, 2 of 2 rotary calls, 1 of 1 rotary tables"
# norms, gated MLPs and rotation are the framework's; what it has no kernel for is ours
NONE_SWAPPED = "0 of 9 norms, 0 of 2 gated MLPs, 0 of 2 rotary calls, 1 of 1 rotary tables"
REST_SWAPPED = "2 of 2 attention, 1 of 1 heads"
# ms-swift wraps the implementation where it splits sequences, and the kernel is inside
ALL_BUT_ATTENTION = "0 of 2 attention, 1 of 1 heads"
COUNTERS = """
import json, pathlib, softnpu
pathlib.Path("counters.json").write_text(json.dumps(softnpu.counters()))
"""


# a release of a project, and what it imports that the tests do not have
LLAMA_FACTORY = (
    "llamafactory==0.9.5",
    """antlr4-python3-runtime==4.9.3 av==18.1.0 docstring_parser==0.18.0 einops==0.8.2 fastapi==0.165.0 fire==0.7.1
    hf_transfer==0.1.9 modelscope==1.40.2 omegaconf==2.4.0 protobuf==7.36.2 sentencepiece==0.2.3 shtab==1.13.0
    sse-starlette==3.7.0 starlette==1.10.0 termcolor==3.3.0 tiktoken==0.14.0 torchaudio==2.11.0 torchdata==0.11.0
    trl==0.24.0 tyro==0.8.14 uvicorn==0.54.0""",
)
SWIFT = (
    "ms-swift==4.6.0",
    """addict==2.4.0 aiohappyeyeballs==2.7.1 aiohttp==3.14.5 aiosignal==1.4.0 attrdict==2.0.1 attrs==26.1.0
    binpacking==2.0.1 cpm-kernels==1.0.11 dacite==1.9.2 einops==0.8.2 fastapi==0.165.0 frozenlist==1.8.0
    json_repair==0.64.5 modelscope==1.40.2 modelscope-hub==0.5.1 multidict==7.2.1 nltk==3.10.4 openai==3.54.0
    oss2==2.19.1 propcache==0.5.4 rouge==1.0.1 sentencepiece==0.2.3 simplejson==4.3.0 starlette==1.10.0
    tensorboard==2.21.0 tiktoken==0.14.0 transformers-stream-generator==0.0.5 trl==0.29.1 uvicorn==0.54.0
    yarl==1.25.1 zstandard==0.25.0""",
)
VERL = (
    "verl==0.9.1",
    """antlr4-python3-runtime==4.9.3 attrs==26.1.0 cloudpickle==3.1.2 codetiming==1.4.0 hydra-core==1.3.8
    importlib_metadata==10.2.0 jsonschema==4.26.0 jsonschema-specifications==2025.9.1 msgpack==1.2.4 omegaconf==2.4.0
    orjson==3.13.0 protobuf==7.36.2 pylatexenc==2.11 pyvers==0.2.3 ray==2.60.0 referencing==0.37.0 rpds-py==2026.9.1
    tensorboard==2.21.0 tensordict==0.10.0 torchdata==0.11.0 trl==0.29.1 zipp==4.1.2""",
)


# ---- environments ---------------------------------------------------------------------------------------------------
@pytest.fixture
def install(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[[str, str], str]:
    """The interpreter of an environment with a framework."""

    def interpreter(framework: str, packages: str) -> str:
        name, everything = framework.partition("==")[0], (framework, *packages.split())
        return environments.interpreter(tmp_path_factory, worker_id, name, *everything, deps=False)

    return interpreter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoints.save(tmp_path / "Qwen/Qwen3-0.6B", "qwen3")
    checkpoints.write_data(tmp_path)
    return tmp_path


def losses(output: Path) -> list[float]:
    states = sorted(output.rglob("trainer_state.json"))
    return [entry["loss"] for entry in json.loads(states[-1].read_text())["log_history"] if "loss" in entry]


def assert_trained_with_kernels(folder: Path, log: str, rest: str = REST_SWAPPED) -> None:
    assert f"{ALL_SWAPPED}, {rest}" in " ".join(log.split())
    counters: dict[str, Any] = json.loads((folder / "counters.json").read_text())
    for operator in ("npu_rms_norm", "npu_swiglu", "npu_rotary_mul"):
        assert counters[operator] > 0
        assert counters[f"{operator}_backward"] > 0


# ---- LLaMA-Factory --------------------------------------------------------------------------------------------------
@pytest.fixture
def llama_factory(install, run_python, folder: Path) -> Callable[..., str]:
    python = install(*LLAMA_FACTORY)
    (folder / "sft.yaml").write_text(PAGE.code("LLaMA-Factory", "yaml"))

    def run(script: str, output: str, *options: str, check: bool = True) -> str:
        (folder / "train.py").write_text(script + COUNTERS)
        arguments = ["train.py", "sft.yaml", "max_steps=2", "bf16=false", f"output_dir={output}", *options]
        environment = {"DISABLE_VERSION_CHECK": "1", "HF_DATASETS_CACHE": str(folder / "datasets")}
        result = run_python(
            None, "-m", "softnpu", *arguments, python=python, directory=folder, check=check, **environment
        )
        return result.stdout + result.stderr

    return run


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_llama_factory_trains_through_the_kernels_as_without(llama_factory, folder: Path, kind) -> None:
    """float32, AdamW: 1e-5."""
    script = PAGE.code("LLaMA-Factory")
    log = llama_factory(script, "with", f"finetuning_type={kind}")
    assert_trained_with_kernels(folder, log)
    plain = "".join(line for line in script.splitlines(True) if "kernels_ext_npu" not in line)
    assert "kernels-ext-npu" not in llama_factory(plain, "without", f"finetuning_type={kind}")
    assert len(losses(folder / "with")) == 2
    assert losses(folder / "with") == pytest.approx(losses(folder / "without"), rel=1e-5)


def test_llama_factorys_own_kernels_stay_and_are_named(llama_factory) -> None:
    log = llama_factory(PAGE.code("LLaMA-Factory"), "both", "use_v1_kernels=true", check=False)
    assert f"{NONE_SWAPPED}, {REST_SWAPPED}" in " ".join(log.split())
    assert "(npu_rms_norm_forward)" in log


# ---- ms-swift -------------------------------------------------------------------------------------------------------
@pytest.fixture
def swift(install, run_python, folder: Path) -> Callable[..., str]:
    python = install(*SWIFT)
    (folder / "npu_kernels.py").write_text(PAGE.code("ms-swift") + "import atexit\n" + ATEXIT)
    (folder / "sft.py").write_text(ON_SEVERAL)

    def run(arguments: list[str], output: str, check: bool = True, devices: int = 1) -> str:
        further = "--max_steps 2 --logging_steps 1 --torch_dtype float32 --bf16 false --fp16 false --report_to none"
        offline = "--use_hf true --check_model false"
        arguments = [*arguments, *further.split(), *offline.split(), "--output_dir", output]
        program, environment = ["swift.cli.sft"], {"HF_DATASETS_CACHE": str(folder / "datasets")}
        if devices > 1:
            launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(devices)]
            program = [*launcher, "sft.py", "--sequence_parallel_size", str(devices)]
            environment |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "GLOO_SOCKET_IFNAME": "lo"}
        command = ["-m", "softnpu", "-m", *program, *arguments]
        result = run_python(None, *command, python=python, directory=folder, check=check, **environment)
        return result.stdout + result.stderr

    return run


ON_SEVERAL = """
import softnpu
import runpy

runpy.run_module("swift.cli.sft", run_name="__main__")
"""
ATEXIT = """
@atexit.register
def count():
""" + "".join(f"    {line}\n" for line in COUNTERS.strip().splitlines())


def command(heading: str) -> list[str]:
    return shlex.split(PAGE.code(heading, "sh").replace("\\\n", " "), comments=True)


def without(arguments: list[str], option: str) -> list[str]:
    place = arguments.index(option)
    return arguments[:place] + arguments[place + 2 :]


def test_ms_swift_trains_through_the_kernels_as_without(swift, folder: Path) -> None:
    """float32, AdamW: 1e-5."""
    swift_sft = command("ms-swift")
    assert swift_sft[:2] == ["swift", "sft"]
    arguments = swift_sft[2:]
    assert_trained_with_kernels(folder, swift(arguments, "with"))
    assert "kernels-ext-npu" not in swift(without(arguments, "--external_plugins"), "without")
    assert len(losses(folder / "with")) == 2
    assert losses(folder / "with") == pytest.approx(losses(folder / "without"), rel=1e-5)


def test_ms_swift_splits_sequences_between_devices(swift, folder: Path) -> None:
    """And has the losses of one device without kernels. float32, AdamW: 1e-5."""
    arguments = [*command("ms-swift")[2:], "--lora_dropout", "0"]
    assert_trained_with_kernels(folder, swift(arguments, "split", devices=2), ALL_BUT_ATTENTION)
    swift(without(arguments, "--external_plugins"), "whole")
    assert len(losses(folder / "split")) == 2
    assert losses(folder / "split") == pytest.approx(losses(folder / "whole"), rel=1e-5)


def test_ms_swifts_own_kernels_stay_and_are_named(swift) -> None:
    log = swift(without(command("ms-swift")[2:], "--enable_npu_model_patch"), "both", check=False)
    assert f"{NONE_SWAPPED}, {REST_SWAPPED}" in " ".join(log.split())
    assert "NpuRMSNorm" in log
    assert "swift.model.npu_patch" in log


# ---- verl -----------------------------------------------------------------------------------------------------------
ENGINE = """
import json, os, sys
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
import torch
torch.distributed.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=0, world_size=1)
import softnpu
from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig
from verl.workers.config.model import HFModelConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

fused, *libraries = sys.argv[1:]
model = HFModelConfig(
    path="Qwen/Qwen3-0.6B",
    external_lib=libraries[0] if libraries else None,
    use_fused_kernels=fused == "fused",
    fused_kernel_options={"impl_backend": "torch"},
    use_remove_padding=False,
    override_config={"attn_implementation": "sdpa"},
)
engine = FSDPEngineConfig(use_torch_compile=False, model_dtype="fp32")
engine = FSDPEngineWithLMHead(model, engine, FSDPOptimizerConfig(lr=1e-3), CheckpointConfig())
module = engine._build_module().to("npu")  # FSDP itself needs HCCL
ids = torch.arange(8, 24, device="npu")[None]
if fused == "fused":
    found = module(input_ids=ids, temperature=0.7, return_dict=True)
    loss = -(found.log_probs + 0.1 * found.entropy).mean()
else:
    loss = module(input_ids=ids, labels=ids).loss
loss.backward()
norm = torch.stack([p.grad.norm() for p in module.parameters()]).norm()
print(json.dumps([loss.item(), norm.item()]))
"""


@pytest.fixture
def verl(install, run_python, folder: Path) -> Callable[..., tuple[list[float], str]]:
    python = install(*VERL)
    (folder / "verl_kernels.py").write_text(PAGE.code("verl", before="the workers find it"))
    (folder / "engine.py").write_text(ENGINE + COUNTERS)

    def run(*libraries: str, fused: str = "logits") -> tuple[list[float], str]:
        (folder / "store").unlink(missing_ok=True)
        arguments = "engine.py", fused, *libraries
        result = run_python(None, "-m", "softnpu", *arguments, python=python, directory=folder)
        return json.loads(result.stdout.splitlines()[-1]), result.stdout + result.stderr

    return run


def test_verl_builds_models_that_run_through_the_kernels(verl, folder: Path) -> None:
    """As it does with its own, to float32 sums in another order through two layers and back: 1e-5."""
    (option,) = [word for word in command("verl") if word.startswith("actor_rollout_ref.model.external_lib=")]
    found, log = verl(option.partition("=")[2])
    assert_trained_with_kernels(folder, log)
    expected, log = verl()
    assert "kernels-ext-npu" not in log
    assert found == pytest.approx(expected, rel=1e-5)


def test_verls_log_probabilities_and_entropies_come_from_the_kernel(verl, folder: Path) -> None:
    """As from its own ``FusedLinearForPPO``, loss and norm of all gradients: 1e-5."""
    expected, _ = verl(fused="fused")
    script = PAGE.code("verl", before="the workers find it") + PAGE.code("verl", before="Further lines")
    called = "cross_entropy.linear_log_probs_and_entropy("
    assert script.count(called) == 1
    (folder / "verl_kernels.py").write_text(script.replace(called, f"print('from the kernel') or {called}"))
    found, log = verl("verl_kernels", fused="fused")
    assert "from the kernel" in log
    assert found == pytest.approx(expected, rel=1e-5)


def test_verls_own_kernels_stay_and_are_named(verl, folder: Path) -> None:
    script = PAGE.code("verl", before="the workers find it")
    kept = "".join(line for line in script.splitlines(True) if "NPU_PATCHES" not in line)
    (folder / "verl_kernels.py").write_text(kept)
    _, log = verl("verl_kernels")
    assert f"{NONE_SWAPPED}, {REST_SWAPPED}" in " ".join(log.split())
    assert "library replaced its" in log
    assert "npu_patch.rms_norm" in log  # the names are longer than a column of the report
