"""What may import what: the package itself is light, nothing needs PyTorch, and imports point down."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
FILES = sorted(SOURCE.glob("vidax/**/*.py"))

# Lowest first. A module may import what is below it, and what begins with its own line's name.
# Families may import each other (Cosmos decodes with Wan's autoencoder), and the command line starts the server.
LAYERS = [
    ("vidax.errors", "vidax.__version__"),
    ("vidax.parallel",),
    ("vidax.ops",),
    ("vidax.nn",),
    ("vidax.sampling", "vidax.weights", "vidax.media"),
    ("vidax.models.towers",),
    ("vidax.models",),
    ("vidax.models.registry",),
    ("vidax.models.locate",),
    ("vidax.engine",),
    ("vidax.planner",),
    ("vidax.server",),
    ("vidax.terminal",),
    ("vidax.cli",),
    ("vidax.__main__",),
]
FOREIGN = {"torch", "torchvision", "transformers", "diffusers", "accelerate"}


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def imported(file: Path) -> Iterator[str]:
    """Everything that a file imports, at its head or inside a function, by its full name."""
    parents = file.relative_to(SOURCE).parent.parts
    for node in ast.walk(ast.parse(file.read_text(), file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = parents[: len(parents) - node.level + 1] if node.level else ()
            module = ".".join([*package, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def layer(name: str) -> tuple[int, str]:
    """(height, entry of LAYERS) that a name falls under, the longest where several do."""
    found = [
        (len(entry), height, entry)
        for height, entries in enumerate(LAYERS)
        for entry in entries
        if name == entry or name.startswith(f"{entry}.")
    ]
    assert found, f"{name} has no place in LAYERS"
    return max(found)[1:]


def faults(file: Path) -> Iterator[str]:
    height, entry = layer(module_name(file))
    for name in imported(file):
        if name == "vidax" or name.startswith("vidax."):
            other_height, other = layer(name)
            if other_height > height or (other_height == height and other != entry):
                yield f"{file.relative_to(SOURCE)} imports {name}"


def test_importing_the_package_does_not_import_jax():
    program = "import sys, vidax; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_nothing_imports_pytorch(file):
    assert not FOREIGN & {name.split(".")[0] for name in imported(file)}


# vidax/__init__.py imports public names lazily from anywhere.
@pytest.mark.parametrize("file", [file for file in FILES if module_name(file) != "vidax"], ids=module_name)
def test_imports_point_down(file):
    assert not list(faults(file))


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("ops/conv.py", "from vidax.nn import dot"),
        ("weights/load.py", "import vidax.sampling.noise"),
        ("nn.py", "def f():\n    from vidax import weights"),
        ("models/towers/t5.py", "from vidax.models.wan import dit"),
        ("models/wan/dit.py", "from .. import registry"),
        ("engine/plan.py", "from vidax import cli"),
        ("engine/engine.py", "from vidax.planner import chips"),
    ],
)
def test_the_rule_is_enforced(tmp_path, monkeypatch, file, line):
    path = tmp_path / "vidax" / file
    path.parent.mkdir(parents=True)
    path.write_text(line)
    monkeypatch.setattr("test_imports.SOURCE", tmp_path)
    assert len(list(faults(path))) == 1
