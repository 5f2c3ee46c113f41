"""Where layers live changes nothing in what they compute, and what fits is worked out before it is loaded."""

import dataclasses
import functools
import gc
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from vidax import cli
from vidax.engine import engine as engine_module
from vidax.engine import residency as settling
from vidax.engine.engine import load
from vidax.engine.progress import Silent
from vidax.engine.work import Job
from vidax.errors import UserError
from vidax.models import model
from vidax.models.interface import Footprint, Inputs, Video
from vidax.models.programs import Places
from vidax.models.wan import dit
from vidax.models.wan.config import TEXT_TOKENS
from vidax.nn import map_specs, parameter_bytes
from vidax.weights import load as load_weights
from vidax.weights import memory
from vidax.weights import residency as residency_module
from vidax.weights.residency import RESIDENT, STREAMED, Residency, Ring, host_bytes, parse

loading = sys.modules["vidax.weights.load"]  # the package has a function of that name
PROMPT = "a red circle moves right"


@functools.cache
def frames(residency: str, mesh: str, dtype: str) -> np.ndarray:
    engine = load(dtype=dtype, mesh=mesh, residency=residency)
    return engine.generate(PROMPT, steps=3, frames=5).frames


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mesh", ["seq=1", "seq=4", "tensor=2", "data=2,seq=2,tensor=2"])
@pytest.mark.parametrize("residency", ["streamed", "mixed:1/2", "mixed:2/3"])
def test_same_bits(residency, mesh, dtype):
    assert np.array_equal(frames(residency, mesh, dtype), frames("resident", mesh, dtype))


def test_converted_weights_stream_too(tmp_path):
    """A file of ours holds all layers of a parameter in one tensor."""
    folder = tiny.write_folder(tmp_path / "model")
    converted = tmp_path / "converted"
    assert cli.main(["convert", str(folder), "--output", str(converted), "--dtype", "float32", "--quiet"]) == 0
    fields = {"steps": 2, "frames": 5, "size": (32, 32), "guidance_scale": 4.0}
    results = [
        load(path, dtype="float32", residency=way).generate(PROMPT, **fields).frames
        for path in (folder, converted)
        for way in ("resident", "streamed")
    ]
    assert all(np.array_equal(other, results[0]) for other in results[1:])


@pytest.fixture(scope="session")
def converted_demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted") / "demo"
    assert cli.main(["convert", "demo", "--output", str(folder), "--dtype", "float32", "--quiet"]) == 0
    return folder


@pytest.mark.parametrize("mesh", ["seq=1", "seq=2,tensor=2"])
@pytest.mark.parametrize("residency", ["streamed", "mixed:1/2", "mixed:5/6"])
def test_layers_from_disk(converted_demo, residency, mesh, monkeypatch):
    """The same bits; of the layers at most three are in host memory, one of which is on its way to the device."""
    alive, most = set(), 0
    read = residency_module.read_layer

    class Mark:
        """Lives as long as the layer that it was read with."""

    def counted(layer):
        nonlocal most
        found = read(layer)
        mark = Mark()
        weakref.finalize(found.mlp if hasattr(found, "mlp") else found.ffn, alive.discard, id(mark))
        alive.add(id(mark))
        most = max(most, len(alive))
        marks.append(mark)
        return found

    marks: list[Mark] = []
    monkeypatch.setattr(residency_module, "read_layer", counted)
    engine = load(converted_demo, dtype="float32", mesh=mesh, residency=residency, stream_from="disk")
    request = engine.request(PROMPT, steps=3, frames=5)
    assert engine.describe(request)["residency"] == f"{residency} from disk (given)"
    result = engine.generate(PROMPT, steps=3, frames=5)
    assert np.array_equal(result.frames, frames("resident", mesh, "float32"))
    assert len(marks) >= 3 * (6 - parse(residency).count(6)) and 1 <= most <= 3
    assert result.metadata["streaming"]["bytes_per_step_and_device"] > 0


def test_disk_needs_the_converted_form():
    with pytest.raises(UserError, match=r"read from disk at each step.*vidax convert MODEL --output DIR"):
        load(residency="streamed", stream_from="disk").generate(PROMPT, steps=2, frames=5)
    with pytest.raises(UserError, match="stream from 'tape': choose auto, memory or disk"):
        load(stream_from="tape")


def test_disk_where_host_memory_is_too_small(converted_demo, monkeypatch):
    monkeypatch.setattr(engine_module, "host_available", lambda: 1_000_000)
    engine = load(converted_demo, dtype="float32", residency="mixed:1/2")
    assert engine.describe(engine.request(PROMPT))["residency"] == "mixed:1/2 from disk (given)"
    with pytest.raises(UserError, match=r"3 of 6 layers in host memory take .*--stream-from disk"):
        load(converted_demo, dtype="float32", residency="mixed:1/2", stream_from="memory").generate(PROMPT)


def test_a_fault_while_reading_is_the_jobs_own(converted_demo, monkeypatch):
    """It is raised for the job that waited for the layer; the next one starts anew."""
    engine = load(converted_demo, dtype="float32", mesh="seq=1", residency="streamed", stream_from="disk")
    jobs = [Job(request=engine.request(PROMPT, steps=3, frames=5)) for _ in range(2)]
    read, count = residency_module.read_layer, 0

    def fails_once(layer):
        nonlocal count
        count += isinstance(layer, dit.Block)
        if count == 9:  # of 6 layers the third, in the second step
            count += 1
            raise OSError("the disk is gone")
        return read(layer)

    monkeypatch.setattr(residency_module, "read_layer", fails_once)
    clips = engine.run(jobs)
    with pytest.raises(OSError, match="the disk is gone"):
        list(next(clips).frames)
    made = np.concatenate(list(next(clips).frames))
    assert np.array_equal(made, frames("resident", "seq=1", "float32"))


@pytest.mark.parametrize("source", ["memory", "disk"])
def test_interrupted_in_the_middle_of_a_step(converted_demo, source, monkeypatch):
    """It ends at once, leaves nothing on the devices, and the same engine makes the same video afterwards."""
    engine = load(converted_demo, dtype="float32", mesh="seq=1", residency="streamed", stream_from=source)
    gc.collect()
    before, calls = device_bytes(), 0
    through = model.through

    def interrupted(*inputs):
        nonlocal calls
        calls += 1
        if calls == 9:  # of 6 layers the third, in the second step
            raise KeyboardInterrupt
        return through(*inputs)

    with monkeypatch.context() as patch:
        patch.setattr(model, "through", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPT, steps=3, frames=5)
    gc.collect()
    assert device_bytes() <= before + 1e5
    result = engine.generate(PROMPT, steps=3, frames=5)
    assert np.array_equal(result.frames, frames("resident", "seq=1", "float32"))


def device_bytes() -> int:
    return sum(x.nbytes for x in jax.live_arrays())


class Edges(Silent):
    """Bytes of live arrays when a phase begins."""

    def __init__(self):
        self.bytes = {}

    def phase(self, name, total):
        gc.collect()
        self.bytes[name] = device_bytes()


@pytest.mark.parametrize("residency", ["resident", "mixed:1/2", "streamed"])
def test_memory_is_given_back_between_phases(residency):
    """Before a part is loaded, nothing of the parts before it is left; afterwards all of it is there, and no more."""
    engine, edges = load(dtype="float32", residency=residency), Edges()
    gc.collect()
    before = device_bytes()
    engine.generate(PROMPT, steps=2, frames=5, progress=edges)
    model = engine.model
    text = dataclasses.replace(model.text_encoder(jnp.float32).spec, token_embedding=None)
    weights = {
        "encode text": parameter_bytes(text),
        "denoise": parameter_bytes(model.transformers(jnp.float32)[0].spec),
        "decode": parameter_bytes(model.decoder().spec),
    }
    for name in ("load text encoder", "load transformer", "load decoder"):
        assert abs(edges.bytes[name] - before) < 2e5, name
    for name, nbytes in weights.items():
        assert edges.bytes[name] - before == pytest.approx(nbytes, rel=0.02), name


def test_spread():
    half = [Residency(1, 2).holds(i) for i in range(6)]
    assert half == [False, True] * 3
    assert Residency(2, 3).count(40) == 26 and Residency(23, 40).count(40) == 23
    assert RESIDENT.count(7) == 7 and STREAMED.count(7) == 0
    assert list(map(str, (RESIDENT, STREAMED, Residency(1, 2)))) == ["resident", "streamed", "mixed:1/2"]
    assert parse("auto") is None and parse("mixed:3/4") == Residency(3, 4)


@pytest.mark.parametrize("text", ["mixed:0/2", "mixed:2/2", "mixed:3/2", "mixed", "mixed:1", "half", ""])
def test_bad_residencies_are_sentences(text):
    with pytest.raises(UserError, match=f"residency {text!r}: .*mixed:1/2"):
        load(residency=text)


def layers(count: int, on_host: tuple[int, ...]) -> list[dict[str, jax.Array]]:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    values = [np.full((4, 4), i, np.float32) for i in range(count)]
    places = [device.with_memory_kind("pinned_host") if i in on_host else device for i in range(count)]
    return [{"weight": jax.device_put(v, p), "bias": jnp.ones(4)} for v, p in zip(values, places, strict=True)]


@pytest.mark.parametrize("on_host", [(0, 1, 2, 3, 4), (1, 3), (4,), ()])
def test_ring_order_and_copies(on_host):
    """Each streamed layer comes once a step, two at most are on the device, and the last step has one copy ahead."""
    ring = Ring(layers(5, on_host))
    copies, seen = [], []
    copy = ring._copy
    ring._copy = lambda i: copies.append(i) or copy(i)  # type: ignore[method-assign]

    def block(layer, state):
        assert layer["weight"].sharding.memory_kind == "device"
        seen.append(int(layer["weight"][0, 0]))
        assert len([x for x in (ring._coming, ring._arriving) if x is not None]) <= 2
        return state + layer["weight"].sum(), state

    state = jnp.float32(0)
    for _ in range(3):
        state = ring.run(block, state)
    assert seen == [0, 1, 2, 3, 4] * 3 and float(state) == 3 * 16 * 10
    expected = list(on_host) * 3
    assert copies == expected + list(on_host[:1])
    assert ring.bytes_moved == len(copies) * 64
    ring.close()
    assert ring._coming is None


def test_small_parameters_stay():
    engine = load(dtype="float32", mesh="seq=2", residency="streamed")
    ring = loaded(engine, STREAMED).blocks
    (layer, *_) = ring.layers
    assert layer.self_attn.q.weight.sharding.memory_kind == "pinned_host"
    assert layer.self_attn.q.bias.sharding.memory_kind == layer.modulation.sharding.memory_kind == "device"
    assert 0.9 < host_bytes(layer) / sum(x.nbytes / 2 for x in jax.tree.leaves(layer)) < 1


def loaded(engine, residency: Residency):
    (part,) = engine.model.transformers(jnp.float32)
    return engine.loader.load("transformer", part, [], {}, Silent(), residency)


NEEDS = Footprint(fixed=1000, stream=10, layer=100, layers=10)


def test_as_many_layers_as_fit():
    assert NEEDS.total(RESIDENT) == 2000 and NEEDS.total(STREAMED) == 1200
    assert settling.fill(NEEDS, 2000) == RESIDENT
    assert settling.fill(NEEDS, 1999) == Residency(7, 10) and NEEDS.total(Residency(7, 10)) <= 1999
    assert settling.fill(NEEDS, 1200).count(10) == 0


def compiled_footprint(engine) -> Footprint:
    shape = Video(64, 64, 5, branches=2), jnp.dtype("float32"), engine.mesh
    return engine.model.footprint(*shape, engine.model.lower_layer(*shape).compile())


def test_memory_limit_decides():
    """The demo takes some MB: what a limit leaves on the device is what its own footprint says."""
    engine = load(dtype="float32")
    request = engine.request(PROMPT, frames=5)
    needs = compiled_footprint(engine)
    for resident in (0, 3, 6):
        limit = needs.total(Residency(resident, 6)) if resident < 6 else needs.total(RESIDENT)
        limited = load(dtype="float32", memory_limit=(limit + 1) / 1e9)
        assert limited.settle(request).count(6) == resident
        record = limited.describe(request)
        assert record["residency"].endswith(" (auto)")


def test_too_little_memory_is_a_sentence():
    engine = load(dtype="float32", memory_limit=0.001)
    with pytest.raises(
        UserError, match=r"streamed layers it takes .* GB of each device, and the memory limit is 0.001"
    ):
        engine.generate(PROMPT, steps=2, frames=5)
    needs = compiled_footprint(engine)
    between = load(dtype="float32", residency="resident", memory_limit=needs.total(STREAMED) / 1e9 + 1e-5)
    with pytest.raises(UserError, match=r"with resident layers it takes .* let --residency auto choose"):
        between.generate(PROMPT, steps=2, frames=5)


def test_too_little_host_memory_is_a_sentence(monkeypatch):
    monkeypatch.setattr(engine_module, "host_available", lambda: 1_000_000)
    engine = load(dtype="float32", residency="streamed")
    with pytest.raises(UserError, match=r"6 of 6 layers in host memory take .* GB, and 0.001 GB are available"):
        engine.generate(PROMPT, steps=2, frames=5)


@pytest.mark.parametrize("limit", [0, -3, float("nan")])
def test_a_limit_is_a_number_of_gigabytes(limit):
    with pytest.raises(UserError, match="give the GB of each device that may be used"):
        load(memory_limit=limit)


def test_a_container_bounds_the_host(tmp_path, monkeypatch):
    """Version 2 of control groups, and the older; files that the kernel may drop count as free."""
    free = memory.host_available()
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 1\nactive_file 20\ninactive_file 300\n")
    monkeypatch.setattr(memory, "_cgroup", lambda: tmp_path)
    assert memory.host_available() == 100_320
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.host_available() == pytest.approx(free, rel=0.5)
    old = tmp_path / "old"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("5000")
    (old / "memory.usage_in_bytes").write_text("1000")
    monkeypatch.setattr(memory, "_cgroup", lambda: old)
    assert memory.host_available() == 4000


def test_the_record_says_what_was_moved():
    engine = load(dtype="float32", residency="mixed:1/2")
    record = engine.generate(PROMPT, steps=4, frames=5).metadata
    ring = loaded(engine, Residency(1, 2)).blocks
    per_step = sum(map(host_bytes, ring.layers))
    assert per_step <= record["streaming"]["bytes_per_step_and_device"] <= per_step * 1.25  # one copy ahead in 4 steps
    assert 0 <= record["streaming"]["share_of_denoising"] <= 1
    assert "streaming" not in load().generate(PROMPT, steps=2, frames=5).metadata


def test_footprint_is_what_the_device_holds():
    """Weights by shard shapes equal those that are loaded."""
    engine = load(dtype="float32", mesh="seq=2,tensor=2", residency="streamed")
    needs = engine.model.footprint(Video(64, 64, 5, branches=2), jnp.dtype("float32"), engine.mesh)
    transformer = loaded(engine, STREAMED)
    layer = transformer.blocks.layers[0]
    first = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(layer))
    assert needs.layer == first
    ends = dataclasses.replace(transformer, blocks=None)
    assert needs.fixed > sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(ends))


def test_without_pinned_memory_it_goes_on(monkeypatch):
    """And says so, on the way and in the record; the frames are the same."""
    make = loading.make

    def refuse(spec, place, read):
        if place.memory_kind == "pinned_host":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no pinned memory\nat some place")
        return make(spec, place, read)

    monkeypatch.setattr(loading, "make", refuse)
    result = load(dtype="float32", mesh="seq=1", residency="streamed").generate(PROMPT, steps=3, frames=5)
    sentences = [warning for warning in result.metadata["warnings"] if "pinned" in warning]
    for part, sentence in zip(("text encoder", "transformer"), sentences, strict=True):
        assert sentence.startswith(
            f"no pinned host memory for the layers of the {part} (RESOURCE_EXHAUSTED: no pinned memory), so"
        )
    assert np.array_equal(result.frames, frames("resident", "seq=1", "float32"))
    assert result.metadata["streaming"]["bytes_per_step_and_device"] > 0


def test_much_waiting_is_a_warning(monkeypatch):
    monkeypatch.setattr(engine_module, "WAITING", -1)
    record = load(dtype="float32", residency="mixed:1/2").generate(PROMPT, steps=2, frames=5).metadata
    assert any("of denoising was waiting for layers from host memory (mixed:1/2)" in w for w in record["warnings"])


@functools.cache
def latents(way: str, mesh: str, dtype: str) -> np.ndarray:
    """What two steps make of noise: one program over a stack on the device or in host memory, or a ring of layers."""
    engine = load(dtype=dtype, mesh=mesh)
    (part,) = engine.model.transformers(jnp.dtype(dtype))
    if way == "ring":
        network = engine.loader.load("transformer", part, [], {}, Silent(), STREAMED)
    else:
        network = load_weights(*part, sharding=Places(engine.mesh).parameter)
    if way == "graph":
        network = jax.device_put(network, map_specs(Places(engine.mesh).streamed, part.spec))
        kinds = {x.sharding.memory_kind for x in (network.blocks.self_attn.q.weight, network.blocks.ffn.fc2.weight)}
        assert kinds == {"pinned_host"}
        small = network.blocks.self_attn.q.bias, network.head.head.weight
        assert {x.sharding.memory_kind for x in small} == {"device"}
    config = part.spec.config
    request = engine.request(PROMPT, steps=2, frames=5)
    numbers = np.random.default_rng(0)
    noise = numbers.standard_normal(engine.model.latent_shape(64, 64, 5), np.float32)[None]
    text = numbers.standard_normal((2, TEXT_TOKENS, config.text_dim), np.float32)
    with jax.set_mesh(engine.mesh):
        table, inputs = request.sampler.table(), Inputs(text)
        scales = np.full(2, 4, np.float32)
        return np.array(engine.model.denoise(network, table, range(2), noise, inputs, scales, lambda _: None).sample)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mesh", ["seq=1", "seq=4", "tensor=2"])
@pytest.mark.parametrize("way", ["graph", "ring"])
def test_one_program_and_one_for_each_layer_give_the_same_bits(way, mesh, dtype):
    assert np.array_equal(latents(way, mesh, dtype), latents("stack", mesh, dtype))
