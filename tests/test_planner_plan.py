"""Plans: what they say, how they know it, and that what is asked for amiss is refused in sentences."""

import dataclasses
import gc
import json

import jax
import jax.numpy as jnp
import pytest
import tiny

import vidax
from vidax import cli
from vidax.engine.progress import Silent
from vidax.engine.request import resolve
from vidax.errors import UserError
from vidax.models.interface import Video
from vidax.models.locate import describe
from vidax.models.wan.dit import step_flops
from vidax.ops.flops import flops
from vidax.parallel.mesh import MeshShape
from vidax.planner import chips, command, phases, plan, show, store
from vidax.planner.phases import Phase
from vidax.weights.residency import RESIDENT, STREAMED, Residency

KEYS = ("model", "topology", "mesh", "residency", "fits", "peak_device_gb", "limit_gb", "step_seconds", "total_seconds")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VIDAX_CACHE_DIR", str(tmp_path / "cache"))


def planned(capsys, *words: str) -> tuple[int, list[dict]]:
    code = cli.main(["plan", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_live_bytes_at_phase_edges(capsys):
    """What a phase begins with is what the plan says, within 10 %; the demo, float32 and bfloat16."""

    class Edges(Silent):
        def __init__(self):
            gc.collect()
            self.before, self.bytes = sum(x.nbytes for x in jax.live_arrays()), {}

        def phase(self, name, total):
            gc.collect()
            self.bytes[name] = sum(x.nbytes for x in jax.live_arrays()) - self.before

    for dtype in ("float32", "bfloat16"):
        code, (made,) = planned(capsys, "demo", "--here", "--dtype", dtype, "--frames", "5")
        assert code == 0
        edges = Edges()
        vidax.load(dtype=dtype).generate("a red circle", steps=2, frames=5, progress=edges)
        for phase in made["phases"]:
            assert edges.bytes[phase["name"]] == pytest.approx(1e9 * phase["weights_gb"], rel=0.1), (dtype, phase)
            assert phase["device_gb"] > phase["weights_gb"]


def test_json_and_text(capsys):
    code, (made,) = planned(capsys, "demo", "--here", "--steps", "3", "--mesh", "seq=1")
    assert code == 0 and all(key in made for key in KEYS)
    assert [phase["name"] for phase in made["phases"]] == ["encode text", "denoise", "decode"]
    assert made["phases"][1]["runs"] == 3 and made["phases"][2]["runs"] == 5
    assert made["mesh_origin"] == "given" and made["residency_origin"] == "auto" and made["step_seconds"] is None
    assert cli.main(["plan", "demo", "--here", "--steps", "3", "--mesh", "seq=1"]) == 0
    told = capsys.readouterr()
    assert "nothing says how much there is" in told.out and "compiling" not in told.err, "it was made before"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    return {name: tiny.write_folder(path / name, folder) for name, folder in tiny.FOLDERS.items()}


TEXT_TO_VIDEO = ["encode text", "denoise", "decode"]
SEEN = ["encode text", "look at images", "encode images", "denoise", "decode"]
FRAMED = [name for name in SEEN if name != "look at images"]


@pytest.mark.parametrize(
    ("name", "words", "images", "phases", "chunks"),
    [
        ("i2v 2.1", [], 1, SEEN, 3),
        ("flf2v", [], 2, SEEN, 3),
        ("t2v 2.2", [], 0, TEXT_TO_VIDEO, 0),
        ("i2v 2.2", [], 1, FRAMED, 3),
        ("i2v 2.2", ["--images", "2"], 2, FRAMED, 3),
        ("5b", [], 0, TEXT_TO_VIDEO, 0),
        ("5b", ["--images", "1"], 1, FRAMED, 1),  # which is the first frame of the video, and all that is encoded
    ],
)
def test_a_model_from_images_or_with_two_experts(name, words, images, phases, chunks, folders, capsys, monkeypatch):
    """No image is at hand. The coders are not compiled here: their programs are those of `WanArchitecture.lower_*`."""
    monkeypatch.setattr(plan, "has_libtpu", lambda: False)
    words = [str(folders[name]), "--topology", "v4-8", "--size", "64x64", "--frames", "9", "--steps", "4", *words]
    _, (made,) = planned(capsys, *words)
    assert made["images"] == images and [phase["name"] for phase in made["phases"]] == phases
    by_name = {phase["name"]: phase for phase in made["phases"]}
    assert by_name["denoise"]["runs"] == 4
    assert by_name.get("encode images", {"runs": 0})["runs"] == chunks
    experts = 2 if "2.2" in name else 1
    waiting = by_name["denoise"]["host_gb"]
    assert waiting == pytest.approx((experts - 1) * 4 * by_name["denoise"]["weights_gb"], rel=0.01)
    assert any("the other expert waits in host memory: " in sentence for sentence in made["advice"]) == (experts == 2)
    assert ("guidance_scale_2" in made) == (experts == 2)
    told = show.text(made)
    assert ("from 2 images" in told) == (images == 2) and ("guidance 5 and 5" in told) == (experts == 2)


@pytest.mark.parametrize(
    ("name", "frames", "share", "fit"),
    [("cogvideox-5b", 49, 0.9, 41), ("cogvideox1.5-5b", 81, 0.9, 65), ("wan2.1-t2v-14b", 81, 0.9, 69)],
)
def test_frames_that_would_fit(name, frames, share, fit):
    """Of 13, 22 and 21 latent frames, as many as the share leaves, and a number of frames that the model takes."""
    card, model = describe(name)
    request = resolve(card, model, "any", frames=frames)
    assert plan.frames_within(model, request, share) == fit
    assert plan.frames_within(model, request, 0.0) == 1


def test_an_expert_without_steps_is_not_there(folders):
    card, model = describe(folders["t2v 2.2"])
    place = target("v4-8", MeshShape(seq=4))
    for ratio, there in ((0.875, True), (0.0, False)):
        request = resolve(card, model, "any", size=(64, 64), frames=9, steps=4, boundary_ratio=ratio)
        assert (phases.denoise(model, request, None, jnp.bfloat16, place).waiting_bytes > 0) == there


def test_an_encoder_that_is_not_in_the_table_is_taken_from_the_decoder(folders, monkeypatch):
    card, model = describe(folders["i2v 2.2"])
    request = resolve(card, model, "any", size=(64, 64), frames=9, image=tiny.picture(64, 64))
    place, specs = target("v4-8", MeshShape(seq=4)), model.specs(jnp.float32)
    row = {"pixels": 64 * 64, "chip": "v4", "devices": 4, "weights_bytes": 50, "device_bytes": 450, "unknown": []}
    row |= {"seconds": {"matrix units": 2.0}, "network": phases.digest(specs["decoder"])}
    monkeypatch.setattr(phases, "table", lambda: {"rows": [row]})
    found = phases.encode_images(model, request, place, full=False)
    assert found.how == "modelled" and found.device_bytes - found.weights_bytes == 400 and found.runs == 3
    assert found.total_seconds is not None and 0 < found.total_seconds / 3 < 2
    monkeypatch.setattr(phases, "table", lambda: {"rows": [row, row | {"network": phases.digest(specs["encoder"])}]})
    assert phases.encode_images(model, request, place, full=False).how == "table"


@pytest.mark.parametrize("name", ["i2v 2.1", "5b"])
def test_programs_of_images(name, folders):
    """What the plan lowers takes and gives what the phases do: a chunk of frames, and the pictures of a tower."""
    _, model = describe(folders[name])
    mesh, first = plan.here().mesh(MeshShape()), name == "5b"
    latents, cache = model.lower_encode(Video(64, 64, 9, 2, 1), mesh).out_info
    assert latents.shape == ((1, 1, 4, 4, 48) if first else (1, 1, 8, 8, 16))
    assert jax.tree.leaves(cache)
    if not first:
        assert model.lower_look(2, jnp.float32, mesh).out_info.shape == (1, 2 * model.image.tokens, 32)


def test_a_plan_is_made_once(capsys, monkeypatch):
    made = planned(capsys, "demo", "--here", "--frames", "5")
    monkeypatch.setattr(command, "make_plan", lambda *_, **__: pytest.fail("made again"))
    assert planned(capsys, "demo", "--here", "--frames", "5") == made
    monkeypatch.setattr(store, "code", lambda: "other code")
    with pytest.raises(pytest.fail.Exception):
        cli.main(["plan", "demo", "--here", "--frames", "5"])


def test_a_plan_that_cannot_be_kept_is_given_and_says_so(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VIDAX_CACHE_DIR", str(tmp_path / "file"))
    assert cli.main(["plan", "demo", "--here", "--frames", "5"]) == 0
    told = capsys.readouterr()
    assert "nothing says how much there is" in told.out and "warning: the plan is not kept: " in told.err


def test_what_does_not_fit_says_what_would(capsys):
    """Of the demo, at four times its size, on a device of 12 MB."""
    code, (made,) = planned(
        capsys, "demo", "--here", "--memory-limit", "0.012", "--dtype", "float32", "--size", "128x128"
    )
    assert code == 1 and made["fits"] is False
    (advice,) = made["advice"]
    assert "too much; " in advice and ("devices would hold it" in advice or "frames would fit" in advice)
    assert "does not fit" in show.text(made)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--topology", "v4-9"], "topology 'v4-9': the usual slices are v4-8"),
        (["--topology", "v7-8"], "is no TPU known here"),
        ([], "give a slice to plan for, as in --topology v5e-8, or --here"),
        (["--here", "--size", "65x64"], "multiples of"),
        (["--here", "--frames", "6"], "this model takes 4k+1"),
        (["--here", "--mesh", "seq=64"], "has 64 devices, and there"),
        (["--topology", "v4-8", "--mesh", "data=2", "--guidance-scale", "1"], "in 1 branch; give the other"),
        (["--here", "--images", "1"], "1 images: demo takes none; leave it out"),
        (["--here", "--residency", "half"], "residency 'half': choose resident"),
        (["--here", "--memory-limit", "-1"], "give the GB of each device"),
        (["--here", "--price-per-chip-hour", "-1"], "price -1.0: give what a chip costs an hour"),
        (["--here", "--dtype", "int8"], "dtype 'int8': choose bfloat16 or float32"),
        (["--here", "--plot", "plan.jpg"], "a plan is drawn as a PNG"),
    ],
)
def test_refusals(words, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "has_libtpu", lambda: False)
    assert cli.main(["plan", "demo", *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.glob("*.*"))


def test_plot(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert cli.main(["plan", "demo", "--here", "--frames", "5", "--plot", str(path), "--quiet"]) == 0
    assert path.read_bytes().startswith(b"\x89PNG") and capsys.readouterr().err == ""
    assert cli.main(["plan", "demo", "--here", "--frames", "5", "--plot", str(path)]) == 2
    assert "exists; choose another name" in capsys.readouterr().err


def test_without_libtpu_it_is_an_estimate_that_says_so(capsys, monkeypatch):
    monkeypatch.setattr(plan, "has_libtpu", lambda: False)
    code, (made,) = planned(capsys, "wan2.1-t2v-14b", "--topology", "v4-8")
    assert code == 0 and made["fits"] and made["mesh"] == "data=1,seq=4,tensor=1"
    text, step, frames = made["phases"]
    assert step["known_as"] == text["known_as"] == "modelled" and frames["known_as"] in ("table", "modelled")
    peak = 275e12 * 4 * phases.SHARE_OF_PEAK
    assert made["step_seconds"] == pytest.approx(
        (2 * step_flops(describe("wan2.1-t2v-14b")[1].dit, 75_600)) / peak, 0.02
    )
    code, (made,) = planned(capsys, "wan2.1-t2v-14b", "--topology", "v5e-1", "--residency", "resident")
    assert code == 1 and "leave out --residency, or say streamed" in made["advice"][0]
    code, (made,) = planned(capsys, "wan2.1-t2v-14b", "--topology", "v5e-1")
    assert made["phases"][1]["residency"] == "streamed" and made["phases"][1]["host_gb"] > 20


def test_flops():
    """Of a model against its formula, and of what the formula does not have, by hand."""
    card, model = describe("wan2.1-t2v-1.3b")
    step = model.flops(Video(832, 480, 81, 2), jnp.bfloat16)["step"]
    assert sum(step.values()) == pytest.approx(2 * step_flops(card.dit, 32_760), rel=0.01)

    def function(x, kernel, weight):
        y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        y, _ = jax.lax.scan(lambda y, _: (y @ weight, None), y.astype(jnp.bfloat16), None, length=7)
        return jax.lax.platform_dependent(y, cpu=lambda y: y @ weight, default=lambda y: y @ weight @ weight)

    shapes = (1, 6, 8, 3), (3, 3, 3, 16), (16, 16)
    described = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    described[2] = jax.ShapeDtypeStruct(shapes[2], jnp.bfloat16)
    pixels = 4 * 6
    expected = {"float32": 2 * 27 * 16 * pixels, "bfloat16": 2 * 16 * 16 * pixels * (7 + 2)}
    assert flops(function, *described) == expected


def target(name: str, shape: MeshShape) -> phases.Target:
    topology = chips.parse_topology(name)
    site = plan.Site(name=name, devices=None, count=topology.devices, topology=topology, limit_bytes=10**12)
    return phases.Target(mesh=site.mesh(shape), topology=topology, budget=10**12, compiles=False)


def test_a_decoder_of_another_size_is_scaled(monkeypatch):
    row = {"network": "n", "pixels": 1000, "chip": "v4", "devices": 4, "weights_bytes": 50, "device_bytes": 450}
    row |= {"seconds": {"matrix units": 2.0}, "unknown": []}
    monkeypatch.setattr(phases, "table", lambda: {"rows": [row]})
    same = phases.known("n", 1000, 50, target("v4-8", MeshShape(seq=4)))
    assert same is not None and (same.device_bytes, same.seconds, same.how) == (450, {"matrix units": 2.0}, "table")
    half = phases.known("n", 500, 50, target("v4-8", MeshShape(seq=4)))
    assert half is not None and (half.device_bytes, half.how) == (250, "modelled")
    assert half.seconds == {"matrix units": 1.0}
    other = phases.known("n", 1000, 50, target("v5e-8", MeshShape(seq=8)))
    assert other is not None and other.device_bytes == 250 and other.seconds is not None
    assert other.seconds["matrix units"] == pytest.approx(275 / 197)
    assert phases.known("m", 1000, 50, target("v4-8", MeshShape(seq=4))) is None


def test_what_copies_show():
    """10 GB of streamed layers over 15 GB/s, beside a step that is shorter, and one that is longer."""
    place = target("v5e-1", MeshShape())
    needs = phases.Footprint(fixed=0, stream=0, layer=10**9, layers=20)
    link = chips.chips()["v5e"].host_link_bytes_per_second
    assert phases.exposed(0.5, needs, 10, place) == pytest.approx(10**10 / link - 0.5)
    assert phases.exposed(5.0, needs, 10, place) == 0


def test_promising_meshes_are_those_that_a_model_allows():
    card, model = describe("wan2.1-t2v-14b")
    request = resolve(card, model, "any")
    topology = chips.parse_topology("v5e-8")
    site = plan.Site(name="v5e-8", devices=None, count=8, topology=topology, limit_bytes=16 * 2**30)
    found = plan.promising(model, request, site, "bfloat16", MeshShape(seq=8))
    assert MeshShape(seq=8) not in found and len(found) == len(set(found))
    assert all(shape.devices == 8 and 40 % shape.tensor == 0 and shape.data <= 2 for shape in found)
    assert found[0] == MeshShape(data=2, seq=4) and found[-1].tensor == 8


def phase(name: str, residency: Residency, device: int, weights: int) -> Phase:
    return Phase(
        name=name, residency=residency, device_bytes=device, weights_bytes=weights, host_bytes=0, runs=1,
        seconds={"matrix units": 3.0, "links": 1.0}, compile_seconds=None, how="modelled",
    )  # fmt: skip


def test_the_way_out_is_that_of_the_largest_phase():
    card, model = describe("wan2.1-t2v-14b")
    request = resolve(card, model, "any")
    place = dataclasses.replace(target("v5e-1", MeshShape()), budget=1000)

    def advice(*found: Phase) -> str:
        made = plan.Plan(
            model="m", request=request, dtype="bfloat16", topology="v5e-1", chips=1, mesh=MeshShape(),
            mesh_origin="auto", residency_origin="auto", phases=found, limit_bytes=1030,
        )  # fmt: skip
        assert made.fits is False and made.total_seconds == 4.0 * len(found) and made.step_seconds == 4.0
        return plan.way_out(made, model, place)

    fine = phase("denoise", RESIDENT, 500, 100)
    assert "3 devices would hold it, or a size of at most 40%" in advice(fine, phase("decode", RESIDENT, 2350, 100))
    assert "leave out --residency" in advice(phase("denoise", RESIDENT, 2000, 100))
    assert "41 frames would fit, by their share, or 2 devices in seq" in advice(phase("denoise", STREAMED, 1800, 100))


def test_a_job_that_cannot_be_decoded_is_refused_unless_forced(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(plan, "slice_of", lambda device, count: chips.parse_topology("v5e-1"))
    row = {"network": "n", "pixels": 64 * 64, "chip": "v5e", "devices": 1, "weights_bytes": 10, "device_bytes": 10**9}
    row |= {"seconds": {"memory": 1.0}, "unknown": []}
    monkeypatch.setattr(phases, "table", lambda: {"rows": [row]})
    monkeypatch.setattr(phases, "digest", lambda specs: "n")
    words = ["generate", "a red circle", "--frames", "5", "--steps", "2", "--memory-limit", "0.5", "--quiet"]
    words += ["--output", str(tmp_path / "x.npy")]
    assert cli.main(words) == 2
    told = capsys.readouterr().err
    assert "64x64: decoding takes 1 GB of each device by the plan, and the memory limit is 0.5 GB" in told
    assert "--force" in told and not (tmp_path / "x.npy").exists()
    assert cli.main([*words, "--force"]) == 0 and (tmp_path / "x.npy").exists()


def test_force_tries_what_does_not_fit():
    with pytest.raises(UserError, match="the memory limit is"):
        vidax.load(dtype="float32", memory_limit=0.001).generate("a red circle", steps=1, frames=5)
    made = vidax.load(dtype="float32", memory_limit=0.001, force=True).generate("a red circle", steps=1, frames=5)
    assert made.metadata["residency"] == "streamed (auto)"
