"""Eight virtual CPU devices for every test, no network, and nothing kept in the user's cache.

The variables count only if they are set before JAX and huggingface_hub are imported.
"""

import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_CACHE"] = tempfile.mkdtemp(prefix="vidax-no-models-")

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()


@pytest.fixture(autouse=True, scope="module")
def few_programs() -> Iterator[None]:
    """Programs of one file of tests only: each takes some of the memory mappings that Linux gives a process, 65,530,
    and beyond those XLA crashes.
    """
    yield
    if jax := sys.modules.get("jax"):
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A folder with 160 KB of space."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk takes root, on Linux")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)
