"""Compiled programs kept on disk, so that a second start does not compile again.

JAX does the work; this chooses the folder and the bounds. Only the command line turns it on: a program that imports
vidax has its own settings of JAX.
"""

import os
from pathlib import Path
from typing import Any

import filelock
import jax

from vidax.parallel import processes

MAX_BYTES = 4 * 2**30  # least recently used programs go first; one of a large model takes some 10 MB
MIN_COMPILE_SECONDS = 0.2  # JAX's 1 leaves out programs of which a start has several


def folder() -> Path:
    """$VIDAX_CACHE_DIR/xla, or vidax/xla in the user's cache folder."""
    if named := os.environ.get("VIDAX_CACHE_DIR"):
        return Path(named).expanduser() / "xla"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vidax" / "xla"


def use() -> str | None:
    """Turn the cache on for this process; a sentence says why if that cannot be.

    Of several processes JAX lets only the first write.

    Nothing is changed for users who have set JAX's own cache up, or turned it off (JAX_ENABLE_COMPILATION_CACHE=0).
    """
    if theirs() or not setting("jax_enable_compilation_cache"):
        return None
    if processes.count() > 1 and jax.default_backend() == "gpu":
        return None  # XLA tunes a program in all processes together: one that has it on disk would let the others wait
    path = folder()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)  # JAX runs what it finds there
        with lock(path):
            for file in halves(path):
                file.unlink(missing_ok=True)
    except (OSError, filelock.Timeout) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return f"{path}: no place for compiled programs ({reason}), so each start compiles; name one in VIDAX_CACHE_DIR"
    jax.config.update("jax_compilation_cache_dir", str(path))
    if setting("jax_compilation_cache_max_size") == -1:
        jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
    if setting("jax_persistent_cache_min_compile_time_secs") == 1:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
    return None


def theirs() -> str | None:
    """The folder that the user has told JAX to use, or the one that `use` has."""
    return setting("jax_compilation_cache_dir")


def setting(name: str) -> Any:
    return getattr(jax.config, name)


def lock(path: Path) -> filelock.FileLock:
    """The lock that JAX takes for each entry."""
    return filelock.FileLock(path / ".lockfile", timeout=10)


def halves(path: Path) -> list[Path]:
    """Programs without the time of their last use, and times without a program: what a killed process or a full disk
    leaves. JAX would neither read nor replace such a program, and stop removing old ones.
    """
    pairs = (("-cache", "-atime"), ("-atime", "-cache"))
    return [
        file
        for own, other in pairs
        for file in path.glob(f"*{own}")
        if not file.with_name(file.name.removesuffix(own) + other).exists()
    ]


def contents(path: Path) -> tuple[int, int]:
    """How many programs are kept, and the bytes of all files."""
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else []
    return sum(file.name.endswith("-cache") for file in files), sum(file.stat().st_size for file in files)


def clear(path: Path) -> None:
    """Remove everything but the lock, which another process may be waiting for."""
    if not path.is_dir():
        return
    with lock(path):
        for file in sorted(path.rglob("*"), reverse=True):  # what is in a folder before the folder
            if file.is_dir():
                file.rmdir()
            elif file.name != ".lockfile":
                file.unlink(missing_ok=True)
