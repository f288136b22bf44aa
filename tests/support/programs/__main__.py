"""Run many programs, each with a seed of its own, and go on after one that fails.

``python -m softnpu -m tests.support.programs 1 1000 --acts 20`` runs the seeds 1 to 1000. A line says how far it is
after every few; a failure is a line with its seed, and the shortest acts that still fail, an entry of `FOUND`.
"""

import argparse
import gc
import tempfile
import time
from pathlib import Path
from random import Random

import tests.conftest  # noqa: F401  no network, one thread
from tests.support.programs.program import Program
from tests.support.programs.variants import VARIANTS

Acts = list[tuple[str, int]]
EVERY = 10


def main() -> None:
    """Run the programs of some seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int, help="the first seed")
    parser.add_argument("last", type=int, help="the last one")
    parser.add_argument("--acts", type=int, default=20, help="of each program")
    asked = parser.parse_args()
    gc.collect()
    gc.freeze()  # what is imported stays
    failed = acts = 0
    for seed in range(asked.first, asked.last + 1):
        choice = Random(seed)
        variant, kernels = choice.choice(sorted(VARIANTS)), choice.random() < 0.75
        done, error = run(variant, kernels, asked.acts, choice)
        acts += len(done)
        if error is not None:
            failed += 1
            print(f"FAILED seed {seed}: {error!r:.300}", flush=True)
            print(f"    ({variant!r}, {shortest(variant, kernels, done)}) with kernels at first: {kernels}", flush=True)
        if seed == asked.last or (seed - asked.first) % EVERY == EVERY - 1:
            so_far = f"seeds {asked.first} to {seed}: {seed - asked.first + 1} programs, {acts} acts, {failed} failed"
            print(f"{time.strftime('%H:%M:%S')} {so_far}, {time.process_time():.0f} s CPU", flush=True)


def run(variant: str, kernels: bool, acts: int, choice: Random) -> tuple[Acts, Exception | None]:
    """Run a program of random acts; return them, and what was wrong after the last one."""
    done: Acts = []
    with tempfile.TemporaryDirectory() as folder:
        program = Program(variant, Path(folder), kernels)
        try:
            while len(done) < acts and not program.is_over:
                done.append((choice.choice(program.possible()), choice.randrange(2**16)))
                program.do(*done[-1])
        except Exception as error:
            return done, error
        finally:
            program.close()
    return done, None


def shortest(variant: str, kernels: bool, acts: Acts) -> Acts:
    """Leave out acts, one after the other, while the last one still goes wrong."""
    for index in reversed(range(len(acts) - 1)):
        fewer = acts[:index] + acts[index + 1 :]
        if fails(variant, kernels, fewer):
            acts = fewer
    return acts


def fails(variant: str, kernels: bool, acts: Acts) -> bool:
    """Tell whether a program goes wrong at its last act."""
    with tempfile.TemporaryDirectory() as folder:
        program = Program(variant, Path(folder), kernels)
        try:
            for name, seed in acts:
                if program.is_over or name not in program.possible():
                    return False
                program.do(name, seed)
        except Exception:
            return len(program.done) >= len(acts) - 1
        finally:
            program.close()
    return False


if __name__ == "__main__":
    main()
