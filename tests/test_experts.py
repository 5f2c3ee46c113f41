"""Two experts as one model: where they are, when they are read, and that nothing of it shows in the frames. And the
layers of image to video streamed: the same bits wherever they wait. No PyTorch.
"""

import gc
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

import vidax
from vidax.engine import loading
from vidax.engine.checkpoints import convert
from vidax.engine.progress import Silent
from vidax.models import model as models
from vidax.models.programs import denoise_step
from vidax.nn import parameter_bytes

SHAPE = {"size": (64, 32), "frames": 5, "steps": 4, "negative_prompt": tiny.NEGATIVE_PROMPT}
IMAGES = {"i2v 2.1": 1, "flf2v": 2, "t2v 2.2": 0, "i2v 2.2": 1, "5b": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a tiny model, written once."""
    made: dict[str, Path] = {}

    def write(name: str) -> Path:
        if name not in made:
            made[name] = tiny.write_folder(tmp_path_factory.mktemp("tiny") / "model", tiny.FOLDERS[name])
        return made[name]

    return write


def load(model: Path, **more) -> vidax.Engine:
    return vidax.load(model, **{"dtype": "float32", "devices": jax.devices()[:1], **more})


def request(engine: vidax.Engine, images: int = 0, **more):
    given = dict(zip(("image", "last_image"), (tiny.picture(64, 32, seed) for seed in range(images)), strict=False))
    return engine.request(tiny.PROMPT, **{**SHAPE, **given, **more})


def frames(engine: vidax.Engine, *requests) -> list[np.ndarray]:
    return [result.frames for result in engine.generate_many(requests)]


class Phases(Silent):
    """What is begun, in order."""

    def __init__(self):
        self.names: list[str] = []
        self.warnings: list[str] = []

    def phase(self, name: str, total: int) -> None:
        self.names.append(name)

    def warn(self, sentence: str) -> None:
        self.warnings.append(sentence)


@pytest.mark.parametrize(("name", "dtype"), [("i2v 2.1", "float32"), ("5b", "float32"), ("i2v 2.2", "bfloat16")])
def test_streamed_layers_make_the_same_bits(name, dtype, folder, tmp_path):
    """Resident, some or none of them, and from disk."""
    ready = convert(load(folder(name)).model, tmp_path / "ready", dtype=dtype)
    made = []
    for model, residency, source in (
        (folder(name), "streamed", "memory"),
        (folder(name), "mixed:1/2", "memory"),
        (ready, "streamed", "disk"),
        *([(folder(name), "resident", "memory")] if dtype == "bfloat16" else []),  # layer by layer too
    ):
        engine = load(model, dtype=dtype, residency=residency, stream_from=source)
        (result,) = engine.generate_many([request(engine, IMAGES[name])])
        assert result.metadata["residency"].startswith(residency)
        made.append(result.frames)
    for other in made[1:]:
        np.testing.assert_array_equal(other, made[0])
    whole = load(folder(name), dtype=dtype)
    np.testing.assert_allclose(*frames(whole, request(whole, IMAGES[name])), made[0], atol=2e-6)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("i2v 2.1", "data=2,seq=2,tensor=2"), ("i2v 2.2", "seq=2,tensor=2"), ("5b", "seq=2,tensor=2")],
)
def test_every_model_on_a_mesh(name, mesh, folder):
    """Measured: 1e-6. Heads, tokens and the two branches split, the image branch with them."""
    one = load(folder(name))
    several = load(folder(name), mesh=mesh, devices=jax.devices())
    (alone,), (shared,) = (
        frames(engine, request(engine, IMAGES[name], guidance_scale=4.0)) for engine in (one, several)
    )
    assert np.abs(alone - shared).max() < 1e-5


def test_the_second_expert_is_read_while_the_first_works(folder, monkeypatch):
    """Or, where the host has no room, when its turn has come; the frames are the same."""
    engine = load(folder("i2v 2.2"))
    begun = Phases()
    (ahead,) = (result.frames for result in engine.generate_many([request(engine, 1)], progress=begun))
    assert begun.names == [
        *("load text encoder", "encode text", "load encoder", "encode images"),
        *("load high-noise transformer", "denoise, high noise", "load low-noise transformer", "denoise, low noise"),
        *("load decoder", "decode"),
    ]
    assert not begun.warnings
    monkeypatch.setattr(loading, "host_available", lambda: 1)
    full = Phases()
    results = list(engine.generate_many([request(engine, 1)], progress=full))
    np.testing.assert_array_equal(results[0].frames, ahead)
    assert full.names == begun.names and len(full.warnings) == 1
    assert full.warnings[0].startswith("the low-noise transformer takes 0.000")
    assert full.warnings[0].endswith("it is read from its files when its turn comes, not before")
    assert full.warnings == results[0].metadata["warnings"]


@pytest.mark.parametrize("residency", ["resident", "mixed:1/2", "streamed"])
@pytest.mark.parametrize("mesh", ["seq=1", "seq=2,tensor=2"])
def test_an_expert_that_waits_in_host_memory(residency, mesh, folder, monkeypatch):
    """As on an accelerator, where the devices have no room for both: the same bits, and at the switch all is moved."""
    engine = load(folder("t2v 2.2"), mesh=mesh, devices=None, residency=residency)
    (alone,) = frames(engine, request(engine))
    one = parameter_bytes(engine.model.transformers("float32")[0].spec)
    held: dict[str, dict[str, int]] = {}

    class Watch(Phases):
        def advance(self, done: int) -> None:
            if self.names[-1].startswith("denoise"):
                end = time.monotonic() + 10
                while self.names[-1].endswith("high noise") and readers() and time.monotonic() < end:
                    time.sleep(0.01)  # the second expert is here
                gc.collect()
                found = held[self.names[-1]] = {"device": 0, "pinned_host": 0}
                for x in jax.live_arrays():
                    found[x.sharding.memory_kind] += x.nbytes

    gc.collect()
    before = sum(x.nbytes for x in jax.live_arrays())
    monkeypatch.setattr(loading, "on_cpu", lambda mesh: False)
    (result,) = engine.generate_many([request(engine)], progress=Watch())
    np.testing.assert_array_equal(result.frames, alone)
    high, low = held["denoise, high noise"], held["denoise, low noise"]
    assert high["device"] - before < 1.9 * one
    assert high["pinned_host"] - low["pinned_host"] == one, "all of the second, beside layers that are streamed"
    assert (low["pinned_host"] == 0) == (residency == "resident")
    assert abs(high["device"] - low["device"]) < 0.1 * one


def test_an_expert_of_another_layout_is_not_streamed_from_disk(folder, tmp_path):
    """Both have one residency."""
    ready = convert(load(folder("t2v 2.2")).model, tmp_path / "ready", dtype="float32")
    engine = load(ready, transformer_2=folder("t2v 2.2") / "transformer_2", residency="streamed", stream_from="disk")
    with pytest.raises(vidax.UserError, match="this checkpoint is not in the form for it"):
        engine.settle(request(engine))


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]


def none_reads() -> bool:
    """Whether no thread reads, after a while at most."""
    end = time.monotonic() + 10
    while any(thread.is_alive() for thread in readers()) and time.monotonic() < end:
        time.sleep(0.01)
    return not readers()


def test_what_goes_wrong_while_it_is_read_is_raised_at_the_switch(folder, monkeypatch):
    engine, weights = load(folder("t2v 2.2")), loading.Loader.weights

    def read(self, part, *arguments, **more):
        if threading.current_thread() is not threading.main_thread():
            raise OSError("the disk is gone")
        return weights(self, part, *arguments, **more)

    monkeypatch.setattr(loading.Loader, "weights", read)
    begun = Phases()
    with pytest.raises(OSError, match="the disk is gone"):
        list(engine.generate_many([request(engine)], progress=begun))
    assert begun.names[-2:] == ["denoise, high noise", "load low-noise transformer"]
    assert none_reads()


def test_a_run_that_ends_early_gives_up_reading(folder, monkeypatch):
    """An interruption in the first expert's steps: the thread that reads the second stops at the next parameter."""
    engine, go_on = load(folder("t2v 2.2")), loading.Ahead._go_on
    reading = threading.Event()

    def slow(self, done: int) -> None:
        reading.set()
        time.sleep(0.05)
        go_on(self, done)

    monkeypatch.setattr(loading.Ahead, "_go_on", slow)

    class Interrupt(Silent):
        def phase(self, name: str, total: int) -> None:
            self.name = name

        def advance(self, done: int) -> None:
            if self.name == "denoise, high noise":
                assert reading.wait(10)
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(engine.generate_many([request(engine)], progress=Interrupt()))
    assert none_reads()


def test_many_jobs_switch_once(folder):
    """Each with the first expert, then each with the second; a job's frames are those of the job alone, whatever others
    there are, also where all of its steps are of one expert.
    """
    engine = load(folder("t2v 2.2"))
    requests = [request(engine, seed=seed, boundary_ratio=ratio) for seed, ratio in enumerate((0.875, 0.0, 0.95, 1.0))]
    assert [[len(stage.steps) for stage in r.stages] for r in requests] == [[2, 2], [4, 0], [1, 3], [0, 4]]
    begun = Phases()
    together = [result.frames for result in engine.generate_many(requests, progress=begun)]
    assert [name for name in begun.names if "transformer" in name] == [
        "load high-noise transformer",
        "load low-noise transformer",
    ]
    for alone, shared in zip(requests, together, strict=True):
        np.testing.assert_array_equal(frames(engine, alone)[0], shared)


@pytest.mark.parametrize(("ratio", "expert"), [(0.0, "high-noise"), (1.0, "low-noise")])
def test_an_expert_without_steps_is_not_loaded(ratio, expert, folder):
    engine, begun = load(folder("t2v 2.2")), Phases()
    list(engine.generate_many([request(engine, boundary_ratio=ratio)], progress=begun))
    assert [name for name in begun.names if "transformer" in name] == [f"load {expert} transformer"]


def test_where_no_job_is_left_the_second_expert_is_not_loaded(folder, monkeypatch):
    engine, begun = load(folder("t2v 2.2")), Phases()

    def fail(*_, **__):
        raise MemoryError("too large")

    monkeypatch.setattr(models, "denoise_step", fail)
    with pytest.raises(MemoryError, match="too large"):
        list(engine.generate_many([request(engine)], progress=begun))
    assert "load low-noise transformer" not in begun.names


def test_one_expert_is_on_the_devices_at_a_time(folder, monkeypatch):
    """With nothing read ahead: what is alive in the steps of either is one transformer and little beside it."""
    monkeypatch.setattr(loading, "host_available", lambda: 1)
    engine = load(folder("t2v 2.2"))
    one = parameter_bytes(engine.model.transformers("float32")[0].spec)
    alive: dict[str, int] = {}

    class Watch(Phases):
        def advance(self, done: int) -> None:
            if self.names[-1].startswith("denoise"):
                gc.collect()
                alive[self.names[-1]] = sum(x.nbytes for x in jax.live_arrays())

    gc.collect()
    before = sum(x.nbytes for x in jax.live_arrays())
    list(engine.generate_many([request(engine)], progress=Watch()))
    assert set(alive) == {"denoise, high noise", "denoise, low noise"}
    assert all(one <= total - before < 1.9 * one for total in alive.values()), (alive, one)
    gc.collect()
    assert sum(x.nbytes for x in jax.live_arrays()) <= before


def test_both_experts_run_one_program(folder):
    engine = load(folder("i2v 2.2"))
    before = denoise_step._cache_size()
    frames(engine, request(engine, 1, frames=9))
    assert denoise_step._cache_size() - before == 1


def test_the_record_of_two_experts(folder):
    """The job's own seconds are those of both, and the streamed bytes those of a step of either."""
    engine = load(folder("t2v 2.2"), residency="streamed")
    (result,) = engine.generate_many([request(engine, guidance_scale=4.0, guidance_scale_2=1.0)])
    record = result.metadata
    assert (record["guidance_scale"], record["guidance_scale_2"], record["boundary_ratio"]) == (4.0, 1.0, 0.875)
    timings = record["timings_seconds"]
    phases = timings["denoise, high noise"] + timings["denoise, low noise"]
    assert 0 < timings["denoise"] <= phases + 0.1
    assert record["streaming"]["steps"] == 4 and record["streaming"]["bytes_per_step_and_device"] > 0
