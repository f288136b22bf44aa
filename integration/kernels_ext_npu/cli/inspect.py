"""``kernels-ext-npu inspect``: what the kernels do for a model, without its weights and without an NPU."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Annotated

import typer

from kernels_ext_npu.cli.terminal import (
    AsJson,
    TrustRemoteCode,
    check_picture,
    console,
    print_json,
    progress,
    take_device,
)
from kernels_ext_npu.environment import RefusedError

_DTYPES = ("bfloat16", "float16", "float32")


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            help="A checkpoint folder, a config.json, a model id in the local cache, a model type such as qwen3_moe, "
            "or a model that benchmark knows, such as Qwen3-8B."
        ),
    ],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens a row.")] = 4096,
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    dtype: Annotated[str, typer.Option(help=f"Of the weights: {', '.join(_DTYPES)}.")] = _DTYPES[0],
    chip: Annotated[str, typer.Option(help="The chip of the estimate: 910b2, 910b3, 910b4 or 910c.")] = "910b3",
    compare: Annotated[bool, typer.Option("--compare", help="Count each kernel alone, too.")] = False,
    tp: Annotated[int, typer.Option(min=1, help="Ranks that share each weight, as transformers' tp_size.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Ranks that share the experts, as ep_size.")] = 1,
    fsdp: Annotated[
        int | None,
        typer.Option(
            min=1, help="Ranks, or groups of --tp, with inputs of their own, as fsdp_size; as many as --ep needs."
        ),
    ] = None,
    cp: Annotated[
        int,
        typer.Option(
            min=1, help="Ranks of --fsdp that share each row of --tokens, as cp_size; as many shard weights by default."
        ),
    ] = 1,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Compute layers again in the backward, as transformers does.")
    ] = False,
    lora: Annotated[
        int,
        typer.Option(min=0, help="The rank of adapters of all linear layers but the head, which alone are trained."),
    ] = 0,
    nf4: Annotated[
        bool, typer.Option("--nf4", help="Keep the weights under these adapters in four bits, as bitsandbytes does.")
    ] = False,
    update: Annotated[
        bool, typer.Option("--update", help="Count a whole step by phases, too, with gradient clipping and AdamW.")
    ] = False,
    decode: Annotated[
        bool,
        typer.Option(
            "--decode", help="Count steps of decoding behind --tokens tokens, in place of a forward and a step."
        ),
    ] = False,
    cann: Annotated[
        str, typer.Option(help="Count what the kernels launch on this release of CANN, such as 8.2, whatever is here.")
    ] = "",
    plot: Annotated[
        Path | None, typer.Option(help="Draw launches and bytes by operator into this file, such as inspect.png.")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Show what the kernels would do for a model, without its weights and without an NPU.

    Which modules they serve, and why not the others; launches, bytes, host waits and peak memory of a forward and of a
    training step, before and after; with --decode of one more token, with a cache that grows and with a static one, and
    how many graphs that is. The model is built at its real size on tensors without memory. With --tp, --ep or --fsdp it
    is sharded by transformers as for so many ranks, with --cp rows are split, and one rank is counted, with its
    collectives. Ends with 2 where that cannot be.
    """
    if dtype not in _DTYPES:
        raise RefusedError(f"--dtype {dtype}: expected is one of {', '.join(_DTYPES)}")
    if cann and not re.match(r"\d\.\d(\.|$)", cann):
        raise RefusedError(f"--cann {cann}: a version of CANN is written as 8.2 or 8.2.RC1")
    take_device(needed=True)
    import torch

    if cann:
        torch.version.cann = cann  # type: ignore[attr-defined]  # what kernels read when they are loaded, below

    from kernels_ext_npu.inspection import inspecting, printing
    from kernels_ext_npu.inspection.mesh import Mesh, check
    from kernels_ext_npu.inspection.subject import find
    from kernels_ext_npu.measuring.roofline import SOCS

    if chip not in SOCS:
        raise RefusedError(f"--chip {chip}: expected is one of {', '.join(SOCS)}")
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # what it says is remarked
    if decode and (checkpointing or update or plot is not None or cp > 1):
        raise RefusedError("--decode: a step of decoding has no backward, no update, no split rows, and is not drawn")
    if nf4 and not lora:
        raise RefusedError("--nf4: weights in four bits are not trained; give adapters with --lora, too")
    with progress() as shown:
        check_picture(plot)
        mesh = Mesh(tp, ep, max(cp, ep // tp) if fsdp is None else fsdp, cp)
        check(mesh)
        task = shown.add_task("", total=None)
        subject = find(model, trust_remote_code)
        if cann:
            subject.remarks.append(f"kernels: as they are on CANN {cann}")
        inspection = inspecting.inspect(
            subject,
            SOCS[chip],
            getattr(torch, dtype),
            batch,
            tokens,
            compare,
            lambda what: shown.update(task, description=what),
            mesh,
            checkpointing,
            lora,
            nf4,
            update,
            decode,
        )
    if plot is not None:
        from kernels_ext_npu.inspection import picture

        picture.plot(inspection, plot)
    if as_json:
        print_json(printing.as_json(inspection))
        return
    printing.show(inspection, console(least=60))
    if plot is not None:
        typer.echo(f"drawn: {plot}")
