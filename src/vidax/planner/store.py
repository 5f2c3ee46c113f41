"""Plans kept on disk by what they were made of: the settings, the devices, this package's code and the compilers."""

import functools
import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any

from vidax.engine import compilation_cache
from vidax.errors import UserError
from vidax.media.files import write_json
from vidax.planner.plan import versions


def folder() -> Path:
    """Beside the compiled programs."""
    return compilation_cache.folder().with_name("plans")


def clear() -> int:
    """Remove all plans; how many there were."""
    files = list(folder().glob("*.json"))
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)


def file_of(settings: dict[str, Any]) -> Path:
    """Where the plan of these settings is, or would be."""
    content = json.dumps([settings, versions(), code()], sort_keys=True, default=str)
    return folder() / f"{hashlib.sha256(content.encode()).hexdigest()[:24]}.json"


@functools.cache
def code() -> str:
    """A digest of this package's modules and tables."""
    digest = hashlib.sha256()
    root = Path(str(resources.files("vidax")))
    for file in sorted((*root.rglob("*.py"), *root.rglob("*.json"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def recall(settings: dict[str, Any]) -> dict[str, Any] | None:
    """The plan that was kept. One that cannot be read is made again."""
    try:
        return json.loads(file_of(settings).read_text())
    except (OSError, ValueError):
        return None


def keep(settings: dict[str, Any], plan: dict[str, Any]) -> str | None:
    """Keep a plan; a sentence says why if that cannot be. It is then made again the next time."""
    path = file_of(settings)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, plan, overwrite=True)
    except (OSError, UserError) as error:
        return f"the plan is not kept: {error}"
    return None
