"""Install bundles while one step after the other fails, for processes of their own."""

import os
import shutil
import sys
from pathlib import Path

from kernels_ext_npu.distribution import bundles
from kernels_ext_npu.distribution.bundle_archive import KernelRepository


def repository(name: str, text: bytes) -> KernelRepository:
    return KernelRepository(name, 1, {"build/a.py": text, "b.py": text})


OLD = [repository("A", b"old"), repository("B", b"old")]
NEW = [repository("A", b"new"), repository("B", b"new")]


class Steps:
    """Count what is done to files below a folder, and let one step fail in one of three ways."""

    def __init__(self, folder: Path, how: str) -> None:
        self.folder, self.how = str(folder), how
        self.left: int | None = None
        self.cleaning = False
        sys.addaudithook(self.step)

    def step(self, event: str, arguments: tuple) -> None:
        if self.left is None:
            return
        self.cleaning |= event == "shutil.rmtree"
        if event not in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            return
        if self.folder not in str(arguments[0]):
            return
        if self.left:
            self.left -= 1
            return
        self.left = None
        if self.how == "a kill":
            os._exit(9)
        raise OSError("no space left") if self.how == "an error" else KeyboardInterrupt

    def install(self, step: int, cache: Path) -> tuple[bool, bool]:
        """Tell whether there was such a step, and whether it was one before everything is in its place."""
        self.left, self.cleaning = step, False
        if self.how == "a kill":
            child = os.fork()
            if child == 0:
                bundles.put_into_cache(NEW, cache)
                os._exit(0)
            self.left = None
            return os.waitpid(child, 0)[1] != 0, False
        try:
            bundles.put_into_cache(NEW, cache)
            ended = False
        except (OSError, KeyboardInterrupt):
            ended = not self.cleaning
        failed, self.left = self.left is None, None
        return failed, ended


def states(cache: Path) -> list[str]:
    """Tell of each repository: none, old or new. What a version means is there, whole."""
    found = []
    for old, new in zip(OLD, NEW):
        home = cache / f"kernels--kernels-ext-npu--{new.name}"
        if not (home / "refs" / "v1").exists():
            found.append("none")
            continue
        repositories = {old.commit: old, new.commit: new}
        repository = repositories[(home / "refs" / "v1").read_text()]
        snapshot = home / "snapshots" / repository.commit
        files = {str(path.relative_to(snapshot)): path for path in snapshot.rglob("*") if path.is_file()}
        assert {path: file.read_bytes() for path, file in files.items()} == repository.files
        found.append("old" if repository is old else "new")
    return found


def main(how: str, before: str, folder: Path) -> None:
    """Let the first step fail, then the second and so on, until there is none that could; print how many there were."""
    os.fsync = lambda file: None  # hundreds of times, and no step of its own
    steps, step, failed = Steps(folder, how), 0, True
    while failed:
        cache = folder / str(step)
        if before == "old":
            bundles.put_into_cache(OLD, cache)
        failed, ended = steps.install(step, cache)
        found = states(cache)
        if how == "a kill":
            assert set(found) <= {before, "new"}, (step, found)
        elif ended:
            assert found == [before, before], (step, found)
            assert not list(cache.glob("*/.bundle-*")), step
        else:  # a folder was there already, or what was left to do was to clean up
            assert found == ["new", "new"], (step, found)
        if how == "a kill":  # what it left does not stand in the way of the next
            bundles.put_into_cache(NEW, cache)
            assert states(cache) == ["new", "new"]
        shutil.rmtree(cache, ignore_errors=True)
        step += 1
    print(step - 1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
