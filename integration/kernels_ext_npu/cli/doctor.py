"""``kernels-ext-npu doctor``: what is wrong on this machine, and what to do."""

from __future__ import annotations

from typing import Annotated

import typer

from kernels_ext_npu.cli.terminal import AsJson, console, print_json


def doctor(
    source: Annotated[
        str, typer.Option(help="Where the kernels are to come from, as register() takes it: bundled, hub, or a clone.")
    ] = "bundled",
    as_json: AsJson = False,
) -> None:
    """Check this machine, and explain what is wrong and what to do.

    Looks at Python, torch, torch_npu, CANN, devices, transformers, kernels, the kernels' files and variants, the Hub
    and its cache, and runs a tiny model with kernels. What may crash or hang does so in a process of its own: it ends
    within four minutes, whatever hangs. Tokens and passwords are not printed.

    Ends with 0 if the machine is healthy, with 1 if there is a problem. Warnings leave it healthy, as does a Hub that
    cannot be reached, unless --source hub asks for it. Where nothing points to a card, the software device is healthy;
    where there is a driver, a device node, a card on the bus or CANN, and no device can be used, it is not.
    """
    from rich.console import Console

    from kernels_ext_npu.doctor import display
    from kernels_ext_npu.doctor.examination import examine
    from kernels_ext_npu.machine.privacy import hide

    with Console(stderr=True).status("examining this machine"):
        report = hide(examine(source))
    display.show(console(stderr=as_json, least=60), report)
    if as_json:
        print_json(report)
    raise typer.Exit(0 if report["healthy"] else 1)
