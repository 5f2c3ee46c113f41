"""Two processes of four devices work as one of eight: what they make, read, write and say, and how they fail."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

import vidax
from vidax import cli
from vidax.engine.engine import Engine
from vidax.errors import UserError
from vidax.nn import Spec, is_spec
from vidax.parallel.processes import check_flags
from vidax.parallel.rules import sharding

TOLERANCE = 5e-5  # of frames in [0, 1]; float32 sums in another order are 1.5e-5, of one device and of eight alike
SMALL = ["--size", "32x32", "--frames", "5", "--steps", "2", "--dtype", "float32", "--mesh", "data=2,seq=2,tensor=2"]
SECONDS = 300  # a machine may be busy

Ended = tuple[int, str, str]  # exit code, stdout, stderr


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """Compiled programs, of which two processes have one folder: only the first writes, and on a CPU only it reads."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def places(tmp_path) -> list[Path]:
    """A working folder for each process: they need not have the same files."""
    folders = [tmp_path / "host0", tmp_path / "host1"]
    for folder in folders:
        folder.mkdir()
    return folders


@pytest.fixture
def together(places, cache) -> Iterator:
    """Runs two Python processes, each with its own arguments, in `places`."""
    started: list[subprocess.Popen] = []

    def run(*words: list[str]) -> list[Ended]:
        started.clear()
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        environment |= {"VIDAX_CACHE_DIR": str(cache), "JAX_ENABLE_COMPILATION_CACHE": "1"}
        for process, place in zip(words, places, strict=True):
            pipe = subprocess.PIPE
            command = [sys.executable, *process]
            started.append(subprocess.Popen(command, cwd=place, env=environment, stdout=pipe, stderr=pipe, text=True))
        told = [process.communicate(timeout=SECONDS) for process in started]
        return [(process.returncode, *said) for process, said in zip(started, told, strict=True)]

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def generate(together):
    """Runs `vidax generate` in two processes; `more` are the arguments of each."""

    def run(*words: str, more=([], []), program=("-m", "vidax.cli")) -> list[Ended]:
        flags = ["--cpu-devices", "4", "--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2"]
        start = [*program, "generate", *words, *flags, "--process-id"]
        return together(*([*start, str(number), *own] for number, own in enumerate(more)))

    return run


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_two_processes_equal_one(generate, places, cache, tmp_path):
    """The folder of the output is there for process 0 alone."""
    (places[0] / "out").mkdir()
    words = ["a red circle moves right", *SMALL]
    first, other = generate(*words, "--output", "out/x.npy")
    assert first[0] == 0, first[2]
    assert first[1] == "out/x.npy\n" and "data=2,seq=2,tensor=2 (given)" in first[2] and "decode" in first[2]
    assert other == (0, "", "")
    assert files(places[0] / "out") == ["x.json", "x.npy"] and files(places[1]) == []
    assert any(name.endswith("-cache") for name in files(cache / "xla"))

    alone = tmp_path / "alone.npy"
    assert cli.main(["generate", *words, "--output", str(alone), "--quiet"]) == 0
    made, wanted = np.load(places[0] / "out" / "x.npy"), np.load(alone)
    assert wanted.std() > 0.02
    assert np.abs(made - wanted).max() < TOLERANCE


def test_two_processes_from_one_image(generate, places, tmp_path):
    """Which is there for process 0 alone."""
    # Large, and of noise that nothing compresses, in a corner that is hardly seen: more than a message may have.
    pixels = np.zeros((2048, 2048, 3), np.uint8)
    pixels[1088:1856, 640:1408] = 225, 40, 40
    pixels[:1024, :1024] = np.random.RandomState(0).randint(0, 40, (1024, 1024, 3))
    Image.fromarray(pixels).save(places[0] / "first.png")
    words = ["a red square moves up", "--model", "demo-i2v", "--steps", "2", "--frames", "5", "--dtype", "float32"]
    words += ["--mesh", "data=2,seq=2,tensor=2", "--image", "first.png"]
    first, other = generate(*words, "--output", "x.npy")
    assert first[0] == 0, first[2]
    assert other == (0, "", "")
    Image.fromarray(pixels).save(tmp_path / "first.png")
    words[-1] = str(tmp_path / "first.png")
    assert cli.main(["generate", *words[:-4], *words[-2:], "--output", str(tmp_path / "x.npy"), "--quiet"]) == 0
    made, wanted = np.load(places[0] / "x.npy"), np.load(tmp_path / "x.npy")
    assert wanted.std() > 0.02
    assert np.abs(made - wanted).max() < TOLERANCE


# A user's own program: it notes the frames, and every slice of a parameter that is read.
PROGRAM = """
import json, sys
import jax
import numpy as np
address, process = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(address, 2, process)
import vidax
import importlib
load = importlib.import_module("vidax.weights.load")
read, slices = load.read_slice, []
def noting(spec, tensors, ranges):
    slices.append([spec.shape, [(part.start, part.stop) for part in ranges]])
    return read(spec, tensors, ranges)
load.read_slice = noting
engine = vidax.load("demo", dtype="float32", mesh="seq=4,tensor=2")
try:
    engine.generate("a red circle", size=(32, 32), frames=1, steps=1, seed=-1)
except vidax.UserError as error:
    print(error)
result = engine.generate("a red circle", size=(32, 32), frames=1, steps=1)
np.save("frames.npy", result.frames)
open("slices.json", "w").write(json.dumps(slices))
"""


def specs(engine: Engine) -> list[Spec]:
    parts = engine.model.text_encoder("float32"), *engine.model.transformers("float32"), engine.model.decoder()
    return [spec for part in parts for spec in jax.tree.leaves(part.spec, is_leaf=is_spec)]


def slices_of(engine: Engine, process: int) -> list:
    """Every part of every parameter that the devices of one process are to hold, once each; an embedding table stays in
    its file.
    """
    mine = set(engine.mesh.devices.flat[4 * process : 4 * process + 4])
    found = []
    for spec in (spec for spec in specs(engine) if not spec.looked_up):
        places = sharding(engine.mesh, spec.axes, spec.shape).devices_indices_map(spec.shape)
        ranges = [
            [list(part.indices(size)[:2]) for part, size in zip(index, spec.shape, strict=True)]
            for device, index in places.items()
            if device in mine
        ]
        found += [[list(spec.shape), one] for number, one in enumerate(ranges) if one not in ranges[:number]]
    return found


def values(slices: list) -> int:
    return sum(math.prod(stop - start for start, stop in ranges) for _, ranges in slices)


def test_a_program_of_ones_own(together, places):
    """Each process gets all frames, and reads what its devices hold and no more. Jobs that differ are refused."""
    address = f"127.0.0.1:{free_port()}"
    for code, printed, told in together(*(["-c", PROGRAM, address, str(process)] for process in range(2))):
        assert code == 0, printed + told
        assert "process 1 has seed " in printed and "start all with the same settings" in printed
    engine = vidax.load("demo", dtype="float32", mesh="seq=4,tensor=2", devices=jax.devices())
    wanted = engine.generate("a red circle", size=(32, 32), frames=1, steps=1).frames
    made = [np.load(place / "frames.npy") for place in places]
    assert np.array_equal(*made)
    assert np.abs(made[0] - wanted).max() < TOLERANCE
    for process, place in enumerate(places):
        slices = json.loads((place / "slices.json").read_text())
        expected = slices_of(engine, process)
        assert sorted(slices) == sorted(expected)
        assert values(expected) < 2 / 3 * sum(spec.size for spec in specs(engine))


# `vidax generate` on a disk that is full when it comes to the second chunk of the first video.
FULL = """
import errno, sys
from vidax import cli
from vidax.media.output import NpyWriter
put, chunks = NpyWriter._put, []
def full(self, chunk):
    chunks.append(len(chunk))
    if len(chunks) == 2:
        raise OSError(errno.ENOSPC, "No space left on device")
    put(self, chunk)
NpyWriter._put = full
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_failing_write_leaves_the_others_in_step(generate, places):
    """The file of jobs, too, is there for process 0 alone."""
    lines = [{"prompt": "a red circle", "output": name} for name in ("a.npy", "b.npy")]
    (places[0] / "jobs.txt").write_text("\n".join(map(json.dumps, lines)))
    words = ["--prompts", "jobs.txt", *SMALL, "--seed", "-1"]
    first, other = generate(*words, program=["-c", FULL])
    assert (first[0], other) == (1, (1, "", "")), first[2]
    assert first[1] == "b.npy\n" and "jobs.txt, line 1: a.npy: no space left in ." in first[2]
    assert "1 written, 0 skipped, 1 failed" in first[2]
    assert files(places[0]) == ["b.json", "b.npy", "jobs.txt"] and files(places[1]) == []


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (([], []), "vidax: x.npy exists; choose another name"),
        ((["--overwrite"], ["--model", "nowhere"]), "vidax: process 1: 'nowhere' is neither a model's name nor"),
        (
            (["--overwrite"], ["--dtype", "bfloat16"]),
            "vidax: process 1 has dtype 'bfloat16' where process 0 has 'float32'",
        ),
        (
            (["--overwrite"], ["--mesh", "seq=2"]),
            "vidax: process 1: mesh data=1,seq=2,tensor=1 has 2 of 8 devices, which",
        ),
    ],
    ids=["output", "model", "settings", "mesh"],
)
def test_what_one_process_cannot_do_none_does(generate, places, more, sentence):
    (places[0] / "x.npy").touch()
    first, other = generate("a red circle", *SMALL, "--output", "x.npy", "--quiet", more=more)
    assert (first[:2], other) == ((2, ""), (2, "", "")), first[2]
    assert first[2].startswith(sentence) and first[2].count("\n") == 1
    assert files(places[0]) == ["x.npy"] and files(places[1]) == []


@pytest.mark.parametrize("dying", [0, 1])
def test_the_others_end_with_a_process_that_is_killed(together, dying):
    """They would wait for ever in a collective. JAX ends them with a stack trace of its own."""
    program = """
import os, signal, sys
from vidax.parallel import processes
processes.HEARTBEAT_SECONDS = 5
address, process, dying = sys.argv[1], *map(int, sys.argv[2:])
processes.start(address, 2, process)
processes.exchange("")
if process == dying:
    os.kill(os.getpid(), signal.SIGKILL)
processes.exchange("")
"""
    address = f"127.0.0.1:{free_port()}"
    ended = together(*(["-c", program, address, str(process), str(dying)] for process in range(2)))
    assert ended[dying][0] == -signal.SIGKILL
    assert ended[1 - dying][0] == -signal.SIGABRT and "another task died" in ended[1 - dying][2]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((True, "a:1", None, None), "--distributed finds everything out by itself; leave out --coordinator, or it"),
        ((True, None, 2, 1), "leave out --num-processes and --process-id, or it"),
        ((False, "a:1", None, None), "--coordinator without --num-processes and --process-id: the three go together"),
        ((False, None, 2, 0), "--num-processes and --process-id without --coordinator: the three go together"),
        ((False, "host", 2, 0), "--coordinator 'host': write HOST:PORT, as in 10.0.0.1:8476"),
        ((False, "host:port", 2, 0), "--coordinator 'host:port': write HOST:PORT"),
        ((False, "host:0", 2, 0), "--coordinator 'host:0': write HOST:PORT"),
        ((False, "host:1", 0, 0), "--num-processes 0: give 1 or more"),
        ((False, "host:1", 2, 2), "--process-id 2: 2 processes have the numbers 0 to 1; give each its own"),
        ((False, "host:1", 2, -1), "--process-id -1: 2 processes have the numbers 0 to 1"),
    ],
)
def test_refuses_flags(flags, sentence):
    with pytest.raises(UserError) as caught:
        check_flags(*flags)
    assert sentence in str(caught.value)


def test_refuses_numbers_that_are_none(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["generate", "a", "--coordinator", "host:1", "--num-processes", "two", "--process-id", "0"])
    assert caught.value.code == 2
    assert "argument --num-processes: invalid int value: 'two'" in capsys.readouterr().err


def test_processes_that_do_not_come(together):
    program = """
import sys
from vidax.parallel import processes
processes.START_SECONDS = 3
processes.start(sys.argv[1], 3, int(sys.argv[2]))
"""
    address = f"127.0.0.1:{free_port()}"
    for code, printed, told in together(*(["-c", program, address, str(process)] for process in range(2))):
        assert (code, printed) == (2, "")
        assert f"vidax: waited 3 seconds for the other processes, 3 in all, at {address}; start all of them" in told


def test_detection_that_finds_nothing(together):
    words = ["-m", "vidax.cli", "generate", "a", "--distributed"]
    for code, printed, told in together(words, words):
        assert (code, printed) == (2, "")
        assert told.startswith("vidax: --distributed: no TPU slice, Slurm or Open MPI job is found here (")
