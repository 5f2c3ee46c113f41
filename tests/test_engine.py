"""The engine's phases: the same result each time, memory given back, two programs for a decode of any length."""

import gc

import jax
import numpy as np
import pytest
import tiny

import vidax
from vidax.engine.engine import Silent
from vidax.models.wan import pipeline
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
    run = pipeline.prepare
    monkeypatch.setattr(pipeline, "prepare", lambda dit, text: batches.append(text.shape[0]) or run(dit, text))
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


def test_decode_compiles_two_programs_and_its_cache_does_not_grow(engine):
    decoder = load(*engine.model.decoder())
    sizes = []
    cache = None
    latents = tiny.normal(1, 6, 4, 6, 16)
    pipeline.decode_chunk.clear_cache()
    for i in range(latents.shape[1]):
        _, cache = pipeline.decode_chunk(decoder.decoder, latents[:, i : i + 1], cache, "uint8")
        sizes.append(sum(leaf.nbytes for leaf in jax.tree.leaves(cache)))
    assert len(set(sizes)) == 1
    assert pipeline.decode_chunk._cache_size() == 2


def test_steps_share_one_program(engine):
    pipeline.denoise_step.clear_cache()
    engine.generate("a red cat", **FIELDS)
    engine.generate("a red cat", **FIELDS | {"seed": 9})
    assert pipeline.denoise_step._cache_size() == 1
