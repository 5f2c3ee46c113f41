"""The engine's phases: the same result each time, memory given back, two programs for a decode of any length."""

import ctypes
import dataclasses
import gc
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

import vidax
from vidax.engine.engine import Engine
from vidax.engine.progress import Silent
from vidax.engine.work import Job
from vidax.errors import UserError
from vidax.models import model
from vidax.models.registry import CARDS
from vidax.models.wan.pipeline import WanModel
from vidax.weights import load

FIELDS = {"size": (32, 48), "frames": 9, "steps": 3, "seed": 5}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return vidax.load(tiny.write_folder(tmp_path_factory.mktemp("tiny") / "wan"), dtype="float32")


def test_same_request_same_frames(engine):
    first, second = (engine.generate("a red cat", **FIELDS).frames for _ in range(2))
    assert first.dtype == np.float32 and first.shape == (9, 48, 32, 3)
    assert np.array_equal(first, second)


def test_seed_prompt_and_noise_matter(engine):
    base = engine.generate("a red cat", **FIELDS).frames
    for change in ({"seed": 6}, {"noise": "jax"}, {"solver": "euler"}, {"flow_shift": 1.0}, {"guidance_scale": 2.0}):
        assert not np.array_equal(base, engine.generate("a red cat", **FIELDS | change).frames), change
    assert not np.array_equal(base, engine.generate("a cat", **FIELDS).frames)


def test_guidance_one_runs_one_branch(engine, monkeypatch):
    batches = []
    run = model.prepare
    monkeypatch.setattr(model, "prepare", lambda dit, text, image: batches.append(len(text)) or run(dit, text, image))
    result = engine.generate("a red cat", **FIELDS, guidance_scale=1.0)
    engine.generate("a red cat", **FIELDS, guidance_scale=1.5)
    assert batches == [1, 2]
    assert result.metadata["negative_prompt"] is None


def test_uint8_is_the_rounded_float(engine):
    exact = engine.generate("a red cat", **FIELDS).frames
    rounded = engine.generate("a red cat", **FIELDS, frames_dtype="uint8").frames
    assert rounded.dtype == np.uint8
    assert np.abs(rounded / 255.0 - exact).max() <= 0.5 / 255 + 1e-6


def test_result_saves_as_array_and_as_video(engine, tmp_path):
    result = engine.generate("a red cat", **FIELDS)
    assert np.array_equal(np.load(result.save(tmp_path / "x.npy")), result.frames)
    assert result.save(tmp_path / "y.mp4").stat().st_size > 0
    assert (tmp_path / "y.json").exists()
    with pytest.raises(vidax.UserError, match=r"y.mp4 exists"):
        result.save(tmp_path / "y.mp4")


def test_each_phase_gives_its_weights_back(engine):
    """At the end of a phase only its result is alive: at most one part's weights at any time."""
    sizes: dict[str, int] = {}

    class Counting(Silent):
        def phase(self, name: str, total: int) -> None:
            gc.collect()
            sizes[name] = sum(array.nbytes for array in jax.live_arrays()) - before

    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    engine.generate("a red cat", **FIELDS, progress=Counting())
    text = 2 * 512 * 32 * 4
    assert sizes["load text encoder"] == 0
    assert sizes["load transformer"] <= text
    assert sizes["load decoder"] <= text + 3 * 6 * 4 * 16 * 4 + 4096  # text, latents and a solver's few scalars
    gc.collect()
    assert sum(array.nbytes for array in jax.live_arrays()) == before


def requests(engine, *changes: dict) -> list[vidax.Request]:
    return [engine.request(**{"prompt": "a red cat"} | FIELDS | change) for change in changes]


def test_many_requests_give_what_each_gives_alone(engine):
    changes = {"seed": 1}, {"prompt": "the beach", "guidance_scale": 1.0}, {"size": (32, 32), "frames": 5, "steps": 2}
    many = list(engine.generate_many(requests(engine, *changes)))
    for change, result in zip(changes, many, strict=True):
        alone = engine.generate(**{"prompt": "a red cat"} | FIELDS | change)
        assert np.array_equal(result.frames, alone.frames), change
        differing = {key for key in alone.metadata if alone.metadata[key] != result.metadata[key]}
        assert differing <= {"timings_seconds"} and result.metadata.keys() == alone.metadata.keys()
        assert result.metadata["timings_seconds"].keys() == alone.metadata["timings_seconds"].keys()


def test_weights_are_loaded_once_and_a_text_is_encoded_once(engine, monkeypatch):
    encoded = []
    run = model.encode
    monkeypatch.setattr(model, "encode", lambda *inputs: encoded.append(inputs[2].shape[:2]) or run(*inputs))
    phases = []

    class Listening(Silent):
        def phase(self, name: str, total: int) -> None:
            phases.append((name, total))

        def job(self, number: int, count: int) -> None:
            phases.append((number, count))

    changes = {"seed": 1}, {"seed": 2}, {"prompt": "the beach"}
    list(engine.generate_many(requests(engine, *changes), progress=Listening()))
    loads = [name for name, _ in phases if str(name).startswith("load")]
    assert loads == ["load text encoder", "load transformer", "load decoder"]
    assert encoded == [(1, 512)] * 3  # two prompts and the empty negative one
    jobs = [(1, 3), (2, 3), (3, 3)]
    assert [p for p in phases if p not in jobs and not p[0].startswith("load")] == [
        *(("encode text", 3), ("denoise", 9), ("decode", 27))
    ]
    assert phases.count(jobs[0]) == phases.count(jobs[2]) == 2


def test_no_jobs_load_nothing(engine):
    assert list(engine.run([])) == [] and list(engine.generate_many([])) == []


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def anonymous_bytes() -> int:
    """What the process holds, without what its allocator keeps for later, which moves by some tens of MB."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc
        trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_ten_jobs_take_the_memory_of_one_and_the_tenth_is_the_first(engine):
    """A job's frames are 5 MB: were they to stay, it would be 15 MB more at the sixth than at the third.

    Measured over 30 jobs: no growth after the fourth; the allocator's slack moves by up to 25 MB, mostly downwards.
    """
    fields = FIELDS | {"frames": 257, "steps": 1}
    changes = [fields | {"seed": seed} for seed in (0, 1, 2, 3, 4, 5, 6, 7, 8, 0)]
    before = live_bytes()
    device, host, first = [], [], None
    for result in engine.generate_many(requests(engine, *changes)):
        device.append(live_bytes())
        host.append(anonymous_bytes())
        if first is None:
            first = result.frames
        last = result.frames
        del result
    assert np.array_equal(first, last) and first is not last
    assert max(device[1:]) <= device[0]
    assert min(host[5:]) <= max(host[:3]) + 12e6, [f"{size / 1e6:.1f}" for size in host]
    assert live_bytes() == before


@pytest.mark.parametrize("failing", ["denoise", "decode"])
def test_a_job_that_fails_leaves_the_others_and_no_weights(engine, monkeypatch, failing):
    run = getattr(WanModel, failing)
    calls = []

    def flaky(self, weights, *inputs):
        calls.append(None)
        if len(calls) == 2:
            jax.jit(lambda leaf: leaf + 1)(jax.tree.leaves(weights)[0])
            raise RuntimeError("out of memory")
        return run(self, weights, *inputs)

    changes = {"seed": 1}, {"seed": 2}, {"seed": 3}
    alone = [engine.generate("a red cat", **FIELDS | change).frames for change in changes]
    before = live_bytes()
    monkeypatch.setattr(WanModel, failing, flaky)
    frames, errors = {}, []
    for number, clip in enumerate(engine.run([Job(request=request) for request in requests(engine, *changes)])):
        try:
            frames[number] = np.concatenate(list(clip.frames))
        except RuntimeError as error:
            errors.append((number, str(error)))
    assert errors == [(1, "out of memory")] and frames.keys() == {0, 2}
    assert np.array_equal(frames[0], alone[0]) and np.array_equal(frames[2], alone[2])
    assert live_bytes() == before


def test_a_kept_error_does_not_keep_weights(engine, monkeypatch):
    def broken(self, weights, *_):
        raise RuntimeError("out of memory")

    before = live_bytes()
    monkeypatch.setattr(WanModel, "denoise", broken)
    clips = engine.run([Job(request=engine.request("a red cat", **FIELDS))])
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        next(next(clips).frames)
    assert list(clips) == []
    assert "broken" in [entry.name for entry in caught.traceback]
    assert live_bytes() == before


def test_a_clip_that_is_not_wanted_is_left(engine):
    """Half taken or not taken at all: the next one is whole."""
    clips = engine.run([Job(request=request) for request in requests(engine, {}, {}, {"seed": 8})])
    next(next(clips).frames)
    next(clips)
    assert sum(map(len, next(clips).frames)) == FIELDS["frames"]
    assert list(clips) == []


def test_prompts_that_are_cut_and_settings_beyond_training_are_recorded(engine):
    card = dataclasses.replace(engine.card, name="x", trained_sizes=((64, 64), (32, 32)), trained_frames=(1, 81))
    told = []

    class Listening(Silent):
        def warn(self, sentence: str) -> None:
            told.append(sentence)

    trained = Engine(card, engine.model, dtype="float32")
    result = trained.generate("a red cat " * 200, **FIELDS, progress=Listening())
    start = "a red cat a red cat a red cat a red cat ..."
    cut = f"the prompt {start!r} is longer than 512 tokens; what comes after them is left out"
    assert told == [cut]
    assert result.metadata["warnings"] == [
        "size 32x48: x was trained for 64x64, 32x32; other sizes may look worse",
        "9 frames: x was trained for 1 and 81; other lengths may look worse",
        cut,
    ]
    assert trained.describe(trained.request("a cat", size=(64, 64), frames=81))["warnings"] == []


def test_disputed_defaults_name_their_source(engine):
    card = CARDS["wan2.1-t2v-1.3b"]
    origins = Engine(card, engine.model).request("a cat").origins
    assert origins["guidance_scale"].startswith("card wan2.1-t2v-1.3b: README.md of Wan2.1; its generate.py and")
    assert origins["flow_shift"].startswith("scheduler_config.json; 8 in card wan2.1-t2v-1.3b: README.md of Wan2.1")
    assert origins["steps"] == "card wan2.1-t2v-1.3b"


def test_a_scheduler_for_other_noise_levels_is_refused(engine):
    scheduler = {"_class_name": "CogVideoXDPMScheduler", "prediction_type": "v_prediction"}
    scheduler |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    other = Engine(engine.card, dataclasses.replace(engine.model, scheduler=scheduler))
    with pytest.raises(UserError, match=r"scheduler_config.json: CogVideoXDPMScheduler is not for .*, whose network"):
        other.request("a cat")


def test_decode_compiles_two_programs_and_its_cache_does_not_grow(engine):
    decoder = load(*engine.model.decoder())
    sizes = []
    cache = None
    latents = tiny.normal(1, 6, 4, 6, 16)
    model.decode_chunk.clear_cache()
    for i in range(latents.shape[1]):
        _, cache = model.decode_chunk(decoder.decoder, latents[:, i : i + 1], cache, "uint8")
        sizes.append(sum(leaf.nbytes for leaf in jax.tree.leaves(cache)))
    assert len(set(sizes)) == 1
    assert model.decode_chunk._cache_size() == 2


def test_steps_share_one_program(engine):
    model.denoise_step.clear_cache()
    engine.generate("a red cat", **FIELDS)
    engine.generate("a red cat", **FIELDS | {"seed": 9})
    assert model.denoise_step._cache_size() == 1
