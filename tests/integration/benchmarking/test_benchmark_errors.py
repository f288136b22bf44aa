"""What `kernels-ext-npu benchmark` says where it cannot measure."""

from pathlib import Path

import pytest

from tests.integration.benchmarking.benchmark_runs import SMALL, TOKENS, refusal, run, write_config


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "Qwen3-8"], "--model Qwen3-8: did you mean Qwen3-8B? there are Gemma-3-12B, Gemma-3-1B"),
        (["--model", "/nowhere/config.json"], "is neither a folder nor a file"),
        (["--kernel", "RMSnrom"], "--kernel RMSnrom: did you mean RMSNorm? there are RMSNorm, SwiGLU"),
        (["--dtype", "float32"], "--dtype float32: there are bf16, fp16"),
        (["--report", "/nowhere/a.json"], "a.json cannot be written: No such file or directory: there is no folder"),
        (["--tokens", "1"], "16"),
    ],
)
def test_what_was_asked_for_wrongly_is_explained(arguments, said) -> None:
    assert said in refusal(*arguments)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "config.json"),
        ('{"model_type": "qwen99"}', "qwen99"),
        ('{"model_type": "vit"}', "no model for text can be built of its config"),
    ],
)
def test_a_config_that_cannot_be_used_is_explained(tmp_path: Path, content, said) -> None:
    (tmp_path / "config.json").write_text(content)
    assert said in refusal("--model", tmp_path, "--dtype", "bf16")


def test_a_kernel_that_a_model_has_no_use_for_is_named(tmp_path: Path) -> None:
    said = refusal("--model", write_config(tmp_path, "llama"), *SMALL, "--kernel", "FusedMoE")
    assert "none of the models has a call of FusedMoE" in said


def test_sizes_that_do_not_fit_each_other_are_explained(tmp_path: Path) -> None:
    path = write_config(tmp_path, "falcon_h1")  # mamba_d_ssm is the product of what is divided and of what is not
    said = refusal("--model", path, "--kernel", "layer", "--dtype", "bf16", "--tokens", TOKENS, "--shrink", 2)
    assert "kernels-ext-npu: raised RuntimeError" in said
    assert "try another one, or 1" in said


def test_a_file_that_is_there_is_kept_until_there_is_a_new_one(monkeypatch, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    assert run("--report", path, "--kernel", "nothing").exit_code == 2
    monkeypatch.setattr("torch_npu.npu.is_available", lambda: False)
    assert run("--report", path).exit_code == run("--report", tmp_path / "new.json").exit_code == 2
    assert path.read_text() == "old"
    assert not (tmp_path / "new.json").exists()


def test_a_missing_device_and_a_missing_dtype_are_explained(monkeypatch) -> None:
    monkeypatch.setattr("torch_npu.npu.is_bf16_supported", lambda: False)
    assert "has no bfloat16; use --dtype fp16" in refusal("--dtype", "bf16")
    monkeypatch.setattr("torch_npu.npu.is_available", lambda: False)
    assert "torch_npu finds no device that it may use: look at `npu-smi info`" in refusal()


def test_a_missing_torch_npu_is_explained(run_python) -> None:
    code = "import sys; sys.modules['torch_npu'] = None; from kernels_ext_npu.cli import app; app()"
    result = run_python(code, "benchmark", check=False, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.returncode == 2
    assert "torch_npu" in result.stderr
    assert "Traceback" not in result.stderr
