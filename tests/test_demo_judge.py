"""The judge of the demo model is right about clips whose content we know, and the benchmark's wordings are new."""

import itertools

import demo_accuracy
import demo_data
import numpy as np
import pytest
from scipy import ndimage

KINDS = list(itertools.product(demo_data.COLORS, demo_data.SHAPES, demo_data.MOTIONS))
TRAINING = {c for kind in KINDS for c in demo_data.captions(*kind)}
HELD_OUT = {c for kind in KINDS for c in demo_data.held_out_captions(*kind)}


def clips(seed=0, n=75):
    scenes = demo_data.sample_scenes(np.random.default_rng(seed), n)
    return [scenes.names(i) for i in range(n)], demo_data.draw(scenes)


def noisy(frames, rng):
    return np.clip(frames + rng.normal(0, 10, frames.shape), 0, 255).astype(np.uint8)


def blurred(frames, rng):
    return ndimage.gaussian_filter(frames, (0, 1.0, 1.0, 0))


@pytest.mark.parametrize("damage", [lambda x, rng: x, noisy, blurred], ids=["clean", "noisy", "blurred"])
def test_right_about_drawn_clips(damage):
    rng = np.random.default_rng(1)
    names, frames = clips()
    assert len(set(names)) == 75
    assert [demo_accuracy.judge(damage(x, rng)) for x in frames] == names


def test_right_about_shapes_anywhere():
    scenes = demo_data.sample_scenes(np.random.default_rng(4), 75, anywhere=True)
    frames = demo_data.draw(scenes)
    assert [demo_accuracy.judge(x) for x in frames] == [scenes.names(i) for i in range(75)]
    border = np.concatenate([frames[:, :, [0, -1]], frames[:, :, :, [0, -1]].swapaxes(2, 3)], 2)
    assert (border == demo_data.BACKGROUND).all()  # no shape is cut


def test_first_frames_leave_the_motion_open():
    cases = demo_accuracy.first_frames(50)
    assert {prompt for prompt, _, _ in cases} <= HELD_OUT
    for (_, moving, frame), (_, resting, same) in zip(cases[::2], cases[1::2], strict=True):
        assert np.array_equal(frame, same)
        assert moving[:2] == resting[:2]
        assert moving[2] != resting[2] == "stays"
        assert demo_accuracy.judge(np.stack([frame] * 17)) == resting


def test_time_reversed_is_the_opposite_motion():
    opposite = {"right": "left", "left": "right", "up": "down", "down": "up", "stays": "stays"}
    names, frames = clips(2)
    for (color, shape, motion), x in zip(names, frames, strict=True):
        assert demo_accuracy.judge(x[::-1]) == (color, shape, opposite[motion])


def test_turned_clips_are_not_what_they_were():
    names, frames = clips(3)
    for (_, shape, motion), x in zip(names, frames, strict=True):
        _, turned_shape, turned_motion = demo_accuracy.judge(np.rot90(x, axes=(1, 2)))
        assert (turned_shape == shape) == (shape != "triangle")
        assert (turned_motion == motion) == (motion == "stays")


def test_nothing_to_see_is_nothing():
    rng = np.random.default_rng(0)
    empty = np.full((17, 64, 64, 3), 20, np.uint8)
    assert demo_accuracy.judge(empty) == (None, None, None)
    assert demo_accuracy.judge(rng.integers(0, 255, empty.shape).astype(np.uint8)) == (None, None, None)
    _, frames = clips()
    vanishing = frames[0].copy()
    vanishing[8:] = 20
    assert demo_accuracy.judge(vanishing) == (None, None, None)


def test_a_jump_is_no_motion():
    names, frames = clips()
    i = next(i for i, (_, _, motion) in enumerate(names) if motion == "right")
    assert demo_accuracy.judge(frames[i][[0] * 8 + [16] * 9])[2] is None


def test_held_out_wordings_are_new_and_their_words_are_known():
    assert not TRAINING & HELD_OUT
    words = {w for c in TRAINING for w in c.replace(",", " ,").split()}
    assert {w for c in HELD_OUT for w in c.replace(",", " ,").split()} <= words
    assert {"a red circle moves right", "red circle moving to the right"} <= TRAINING


def test_every_caption_says_one_thing():
    said = [c for kind in KINDS for c in {*demo_data.captions(*kind), *demo_data.held_out_captions(*kind)}]
    assert len(said) == len(set(said))


def test_tokenizer_knows_every_word_and_spells_the_rest():
    tokenizer = demo_data.build_tokenizer()
    for caption in TRAINING | HELD_OUT:
        ids = tokenizer.encode(caption).ids
        assert ids[-1] == 1 and 2 not in ids
        assert tokenizer.decode(ids) == caption
    assert tokenizer.encode("A RED circle").ids == tokenizer.encode("a red circle").ids
    assert 2 not in tokenizer.encode("zebra, 3 quick!").ids
    assert tokenizer.encode("").ids[-1] == 1
