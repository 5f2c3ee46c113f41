"""Record what diffusers and transformers give for the cases of tests/test_goldens.py: `python tests/goldens/record.py`.

Needs the `parity` extra. tests/parity/test_wan.py checks that the recorded file is what this gives today.
"""

import sys
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import test_goldens as cases
import tiny
from parity import reference


def goldens() -> dict[str, np.ndarray]:
    ids, lengths = cases.token_ids()
    embeddings = reference.encode_text(reference.text_encoder(), ids, lengths)
    arrays = {"umt5": embeddings[np.arange(ids.shape[1]) < lengths[:, None]]}
    for name, case in cases.DIT_CASES.items():
        arrays[f"dit, {name}"] = reference.predict(reference.transformer(case.config), *case.inputs())
    vae = reference.vae()
    arrays["vae encode"] = reference.encode(vae, cases.frames())
    arrays["vae decode"] = reference.decode(vae, cases.latents())
    for name, (scheduler, run) in cases.RUNS.items():
        arrays[f"run, {name}"] = reference.generate(reference.pipeline(scheduler), **run)
    for name in arrays:  # what is cut at the ends of the range can hide an error
        clipped = {"vae decode": np.abs(arrays[name]) >= 1, "run": (arrays[name] <= 0) | (arrays[name] >= 1)}
        if (key := name.split(",")[0]) in clipped:
            assert clipped[key].mean() < 0.05, name
    return arrays


def vae22_goldens() -> dict[str, np.ndarray]:
    vae = reference.vae(tiny.VAE22_CONFIG)
    frames = reference.decode(vae, cases.vae22_latents())
    assert (np.abs(frames) >= 1).mean() < 0.05
    return {"encode": reference.encode(vae, cases.vae22_frames()), "decode": frames}


if __name__ == "__main__":
    np.savez_compressed(cases.VAE22_GOLDENS, **vae22_goldens())
    np.savez_compressed(cases.GOLDENS, **goldens())
