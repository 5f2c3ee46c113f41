"""Compiled programs on disk: a second start reads them, their number is bounded, and no fault of the disk is fatal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from vidax import cli
from vidax.engine import compilation_cache


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny.write_folder(tmp_path_factory.mktemp("tiny") / "wan")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("VIDAX_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "xla"


def start(folder: Path, output: Path, **environment: str) -> str:
    """A process of its own, with JAX's cache as it is by default; returns its stderr."""
    words = ["--model", str(folder), "--size", "16x16", "--frames", "5", "--steps", "1", "--output", str(output)]
    done = subprocess.run(
        [sys.executable, "-m", "vidax.cli", "generate", "a red cat", *words],
        env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def programs(cache: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in cache.glob("*-cache")}


def test_a_second_start_compiles_nothing_new(folder, cache, tmp_path, capsys):
    all_of_them = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # else those near the bound come and go
    start(folder, tmp_path / "a.npy", **all_of_them)
    first = programs(cache)
    assert {name.split("-")[0] for name in first} >= {"jit_encode_through", "jit_through", "jit_decode_chunk"}
    assert cache.stat().st_mode & 0o777 == 0o700
    half = next(iter(first))
    (cache / half).write_bytes(b"")  # as a process that was killed while writing leaves it
    (cache / half.replace("-cache", "-atime")).unlink()
    told = start(folder, tmp_path / "b.npy", **all_of_them)
    second = programs(cache)
    assert second.keys() == first.keys() and {name for name in first if first[name] != second[name]} == {half}
    assert "arning" not in told
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()

    count, total = compilation_cache.contents(cache)
    assert count == len(first) and total > 10_000
    assert cli.main(["cache"]) == 0
    assert capsys.readouterr().out == f"{cache}: {count} programs, {total} bytes of at most {4 * 2**30}\n"
    (cache / "xla_gpu_per_fusion_autotune_cache_dir").mkdir()  # XLA's own, on GPUs
    (cache / "xla_gpu_per_fusion_autotune_cache_dir" / "x").write_text("x")
    assert cli.main(["plan", "demo", "--here", "--frames", "5", "--quiet"]) == 0 and capsys.readouterr().out
    assert cli.main(["cache", "--clear"]) == 0
    removed = f"{cache}: removed {count} programs, {total + 1} bytes\n{cache.with_name('plans')}: removed 1 plans\n"
    assert capsys.readouterr().out == removed and not list(cache.with_name("plans").iterdir())
    assert [path.name for path in cache.iterdir()] == [".lockfile"]


def test_the_least_recently_used_go(folder, cache, tmp_path):
    start(folder, tmp_path / "a.npy", JAX_COMPILATION_CACHE_MAX_SIZE="150000")
    count, total = compilation_cache.contents(cache)
    assert count >= 1 and total <= 150_000 + 8 * count


def test_a_folder_that_cannot_be_written_costs_a_warning(folder, tmp_path):
    (tmp_path / "file").touch()
    told = start(folder, tmp_path / "a.npy", VIDAX_CACHE_DIR=str(tmp_path / "file"))
    sentence = (
        f"warning: {tmp_path}/file/xla: no place for compiled programs (Not a directory), so each start compiles; "
    )
    assert told.count(sentence + "name one in VIDAX_CACHE_DIR\n") == 1


def test_a_full_disk_costs_a_line(folder, tmp_path, small_disk):
    told = start(folder, tmp_path / "a.npy", VIDAX_CACHE_DIR=str(small_disk))
    lines = [line for line in told.splitlines() if "No space left" in line]
    assert lines and all(line.startswith("warning: Error writing persistent compilation cache") for line in lines)
    assert "warnings.warn" not in told


def test_the_folder(monkeypatch):
    monkeypatch.delenv("VIDAX_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(compilation_cache.folder()) == "/x/vidax/xla"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert str(compilation_cache.folder()) == "/home/me/.cache/vidax/xla"
    monkeypatch.setenv("VIDAX_CACHE_DIR", "~/here")
    assert str(compilation_cache.folder()) == "/home/me/here/xla"


def test_a_cache_that_is_not_there_is_empty(cache, capsys):
    assert cli.main(["cache"]) == 0 and cli.main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out.startswith(f"{cache}: 0 programs, 0 bytes of at most")
    assert not cache.exists()


def test_a_cache_of_the_users_own_is_left_alone(cache, tmp_path):
    program = (
        "import sys; from vidax import cli; from vidax.engine.compilation_cache import setting, use; use();"
        "print(setting('jax_compilation_cache_max_size')); sys.exit(cli.main(['cache', '--clear']))"
    )
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "1", "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "-1\n")
    assert done.stderr == (
        f"vidax: {tmp_path} comes from JAX_COMPILATION_CACHE_DIR: vidax uses it, but leaves it to you\n"
    )
    assert not cache.exists()
