"""Cycles of attention kernels on every TPU generation, read from the compiled schedule: no TPU is needed.

    python benchmarks/attention_cycles.py                                      # everything: half an hour or more
    python benchmarks/attention_cycles.py --chips v6e --tokens 75600 --kernels splash
    python benchmarks/attention_cycles.py --chips v6e --tokens 75600 --kernels vidax --tiles 1024,2048,512
    python benchmarks/attention_cycles.py --json > cycles.json
    python benchmarks/attention_cycles.py --write                              # renews the package's tiles.json

Needs libtpu (extra: plan). Compiles each kernel for a chip of each generation and counts the bundles of its final
schedule (`llo_schedule.py` says how). A compilation takes two to ten seconds, large tiles up to minutes, each in a
process of its own. Tiles are compared at the first number of tokens, and the best few measured again at the others;
`--tiles` tries only those named.

cycles: for one head and one batch row, on one JAX device: a whole chip, except that a TPU7x chip is two devices. On v4
and v5p the two cores of a chip share the heads, so a head takes half of a core's cycles.
share of the bound: against the matrix units' peak for that head size. Scores contract over the head size K, so a W x W
matrix unit is filled to K / W where K < W. The weighted sum can fill it: transposed, K rows are streamed past weights
of W keys and W queries. Padding to whole tiles counts as loss. A share over 100 % is an error of the meter.

A rival's padded keys need a mask that is not in its schedule here, except for `flash_default_segments`, and its layouts
are taken as given: both favour it.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from llo_schedule import MatrixUnit, MeterError, schedule_cycles

from vidax.planner.chips import chips, devices, parse_topology

DATA_FILE = Path(__file__).parents[1] / "src/vidax/ops/attention/tiles.json"
TOKENS = ((32_760, 32_760), (75_600, 75_600), (118_800, 118_800), (75_600, 512))  # queries, keys
HEAD_SIZES = (128, 64)
HEADS = 4  # an even number for each of two cores
FINALISTS = 2  # tiles measured at every number of tokens
PATIENCE_SECONDS = 600  # the largest tiles can take minutes
DUMP = "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"  # 2 MB instead of 100

Tiles = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixUnits:
    """What the matrix units of one JAX device can do.

    flops_per_cycle: 2 W^2 for each W x W matrix unit and row per cycle. v4, v5e and v5p stream one row a cycle through
    four units a core (two cores on v4 and v5p), v6e and TPU7x two rows through two. With the published peaks this gives
    the known clocks: 275 TFLOP/s / 262,144 = 1.05 GHz on v4, 197 / 131,072 = 1.50 on v5e, 459 / 262,144 = 1.75 on v5p,
    918 / 524,288 = 1.75 on v6e. For TPU7x the clock is not published; 2307 TFLOP/s a chip
    (cloud.google.com/tpu/docs/tpu7x), so 1153 a device, is 2.20 GHz at v6e's rate, and the compiler's own estimate
    for a plain 8192^3 product, 422,000 operations a cycle, lies between half of that rate and all of it.

    unit: a plain matrix product's schedule spaces the multiplications of one unit by 16 and 8 cycles (bfloat16 and
    float32) on v4 and v5, by 8 and 4 on v6e: the rows of a register over the rows per cycle, as the peak demands.
    Loads of the stationary matrix follow each other by half of that on v4, by 4 and 2 cycles on v5 and v6e. TPU7x's
    schedule spaces neither, since the results wait in a buffer; v6e's figures are taken.
    """

    flops_per_cycle: int
    matrix_width: int
    unit: MatrixUnit
    scoped_vmem_kib: int | None = None  # None: the compiler's default, 16 MiB

    def bound(self, queries: int, keys: int, head_size: int) -> float:
        """Cycles that one head takes at the peak for its size."""
        filled = min(head_size / self.matrix_width, 1.0)
        return 2 * queries * keys * head_size * (1 / filled + 1) / self.flops_per_cycle


V5_UNIT = MatrixUnit(multiply={"bf16": 16, "f32": 8}, push={"bf16": 4, "f32": 2})
V6_UNIT = MatrixUnit(multiply={"bf16": 8, "f32": 4}, push={"bf16": 4, "f32": 2})
UNITS = {
    "v4": MatrixUnits(
        flops_per_cycle=262_144,
        matrix_width=128,
        unit=MatrixUnit(multiply={"bf16": 16, "f32": 8}, push={"bf16": 8, "f32": 4}),
    ),
    "v5e": MatrixUnits(
        flops_per_cycle=131_072,
        matrix_width=128,
        unit=V5_UNIT,
        scoped_vmem_kib=64 * 1024,
    ),
    "v5p": MatrixUnits(
        flops_per_cycle=262_144,
        matrix_width=128,
        unit=V5_UNIT,
        scoped_vmem_kib=48 * 1024,
    ),
    "v6e": MatrixUnits(
        flops_per_cycle=524_288,
        matrix_width=256,
        unit=V6_UNIT,
        scoped_vmem_kib=64 * 1024,
    ),
    "tpu7x": MatrixUnits(
        flops_per_cycle=524_288,
        matrix_width=256,
        unit=V6_UNIT,
        scoped_vmem_kib=48 * 1024,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement. tiles: the kernel's own meaning and order."""

    chip: str
    queries: int
    keys: int
    head_size: int
    kernel: str
    tiles: Tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """How to call a kernel, and the tiles to try.

    build: the function to compile and the (shape, dtype name) of its arguments, for HEADS heads.
    candidates: tiles that suit this many queries and keys.
    all_blocks_run: it reads from memory which blocks to skip, and with a full mask it skips none.
    scalar_read: the flag that it reads from memory.
    """

    build: Callable[[Case], tuple[Callable, list[tuple[int, ...]]]]
    candidates: Callable[[Case], list[Tiles]]
    fixed: bool = False  # its tiles are what it is: `--tiles` does not change them
    all_blocks_run: bool = False
    scalar_read: int | None = None


class CompileError(Exception):
    """The compiler refuses the case, for want of memory most often."""


def padded(length: int, tile: int) -> int:
    return -(-length // tile) * tile


def fitting(tiles: list[Tiles], case: Case) -> list[Tiles]:
    """Tiles cut to the keys there are, in whole 128s, without repeats."""
    keys = padded(case.keys, 128)
    cut = [(query, min(key, keys), min(inner, keys)) for query, key, inner in tiles]
    return [t for t in dict.fromkeys(cut) if t[1] % t[2] == 0]


def build_flash(case: Case):
    """JAX's flash attention; tiles: queries, keys, keys at a time."""
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

    query, key, inner = case.tiles
    sizes = BlockSizes(block_q=query, block_k_major=key, block_k=inner, block_b=1)
    call = functools.partial(flash_attention, sm_scale=case.head_size**-0.5, block_sizes=sizes)
    lengths = padded(case.queries, query), padded(case.keys, key), padded(case.keys, key)
    return call, [(1, HEADS, length, case.head_size) for length in lengths]


def build_flash_segments(case: Case):
    """The same with segment ids that tell the padding from the rest, as its callers mask it."""
    from jax import numpy as jnp
    from jax.experimental.pallas.ops.tpu.flash_attention import SegmentIds

    call, shapes = build_flash(case)

    def masked(q, k, v):
        queries, keys = (
            jnp.broadcast_to(jnp.arange(x.shape[2]) < real, (x.shape[0], x.shape[2])).astype(jnp.int32)
            for x, real in ((q, case.queries), (k, case.keys))
        )
        return call(q, k, v, segment_ids=SegmentIds(queries, keys))

    return masked, shapes


FLASH_TILES = [(512, 512, 512), (1024, 1024, 512), (1024, 1024, 1024), (1024, 2048, 1024)]


def build_splash(case: Case):
    """JAX's splash attention with a full mask; tiles: queries, keys, keys at a time."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    query, key, inner = case.tiles
    queries, keys = padded(case.queries, query), padded(case.keys, key)
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.FullMask((queries, keys))] * HEADS)
    sizes = splash_attention_kernel.BlockSizes(block_q=query, block_kv=key, block_kv_compute=inner)
    call = splash_attention_kernel.make_splash_mha(mask=mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)
    return call, [(HEADS, length, case.head_size) for length in (queries, keys, keys)]


SPLASH_TILES = [
    (512, 512, 512),
    (1024, 1024, 1024),
    (1024, 2048, 1024),
    (2048, 2048, 512),
    (2048, 2048, 1024),
    (2048, 4096, 1024),
    (3024, 2048, 1024),
]


def build_vidax(case: Case):
    """This package's kernel; its tiles are described in `vidax.ops.attention.pallas_tpu_kernel`."""
    from vidax.ops.attention.pallas_tpu import pallas_tpu

    chip = chips()[case.chip].device_kind
    call = functools.partial(pallas_tpu, scale=case.head_size**-0.5, tiles=case.tiles, chip=chip)
    return call, [(1, length, HEADS, case.head_size) for length in (case.queries, case.keys, case.keys)]


VIDAX_TILES = [(1024, 2048, 256, 256, 256, 256), (1024, 2048, 512, 256, 2048, 128), (2048, 2048, 512, 256, 2048, 128)]

KERNELS = {
    # what BlockSizes.get_default gives
    "flash_default": Kernel(build=build_flash, candidates=lambda case: [(128, 128, 128)], fixed=True),
    "flash_default_segments": Kernel(build=build_flash_segments, candidates=lambda case: [(128, 128, 128)], fixed=True),
    "flash": Kernel(build=build_flash, candidates=functools.partial(fitting, FLASH_TILES)),
    "splash": Kernel(build=build_splash, candidates=functools.partial(fitting, SPLASH_TILES), all_blocks_run=True),
    # heads with a bound, and heads that need a running maximum
    "vidax": Kernel(build=build_vidax, candidates=lambda case: VIDAX_TILES, scalar_read=0),
    "vidax_running": Kernel(build=build_vidax, candidates=lambda case: VIDAX_TILES, scalar_read=1),
}


def compile_case(case: Case) -> list[str]:
    """Compiles for one device of the chip; the names of the Pallas kernels in the result, as the dump has them."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    units = UNITS[case.chip]
    topology = parse_topology(f"{case.chip}:{chips()[case.chip].smallest}")
    mesh = Mesh(np.array(devices(topology)[:1]), ("device",))
    call, shapes = KERNELS[case.kernel].build(case)
    everywhere = NamedSharding(mesh, PartitionSpec())
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=everywhere) for shape in shapes]
    specs = (PartitionSpec(),) * len(arguments)
    sharded = jax.shard_map(
        lambda *x: call(*x), mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False
    )  # a Pallas kernel is not partitioned by XLA, so the device is named
    options = {} if units.scoped_vmem_kib is None else {"xla_tpu_scoped_vmem_limit_kib": str(units.scoped_vmem_kib)}
    compiled = jax.jit(sharded).lower(*arguments).compile(compiler_options=options)
    calls = r"%?([\w.-]+) = [^\n]*custom-call\([^\n]*custom_call_target=\"tpu_custom_call\""
    return re.findall(calls, compiled.as_text())


def worker(case: Case, folder: Path) -> None:
    """Runs in a process of its own, whose libtpu dumps into `folder`; prints one line of JSON."""
    names = compile_case(case)
    if not names:
        raise MeterError("the compiled program has no Pallas kernel")
    kernel, units = KERNELS[case.kernel], UNITS[case.chip]
    total = 0
    for name in names:
        files = [f for f in folder.glob(f"*-{name}-*-final_bundles.txt") if "schedule-analysis" not in f.name]
        if len(files) != 1:
            raise MeterError(f"{len(files)} schedules were dumped for {name}")
        total += schedule_cycles(
            files[0].read_text(), units.unit, all_blocks_run=kernel.all_blocks_run, scalar_read=kernel.scalar_read
        )
    print(json.dumps({"cycles": total}))


def measure(case: Case) -> dict:
    """The row of a case; raises CompileError where it does not compile, MeterError where it is not understood."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # it compiles only, so it need not be alone
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} {DUMP}",
        }
        words = [sys.executable, __file__, "--worker", json.dumps(dataclasses.asdict(case)), folder]
        try:
            result = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise CompileError(f"not compiled after {PATIENCE_SECONDS} seconds") from None
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
        reason = (lines or result.stderr.splitlines() or ["the compiler died"])[-1][:300]
        raise (MeterError if reason.startswith("llo_schedule.") else CompileError)(reason)
    return row_of(case, json.loads(result.stdout.splitlines()[-1])["cycles"])


def row_of(case: Case, core_cycles: int) -> dict:
    """Cycles of one head, and their share of the bound. Cores that share a device run at the same time."""
    cycles = core_cycles / HEADS
    share = UNITS[case.chip].bound(case.queries, case.keys, case.head_size) / cycles
    if share > 1:
        raise MeterError(f"{describe(case)}: {share:.1%} of the bound cannot be; the meter is wrong")
    return {
        "chip": chips()[case.chip].device_kind,
        "tokens": case.queries,
        "keys": case.keys,
        "head_size": case.head_size,
        "kernel": case.kernel,
        "tiles": list(case.tiles),
        "cycles": round(cycles),
        "share_of_bound": round(share, 4),
    }


def describe(case: Case) -> str:
    tiles = "x".join(map(str, case.tiles))
    return f"{case.kernel} {tiles} on {case.chip}, {case.queries} x {case.keys}, head size {case.head_size}"


def measured(cases: list[Case], note: Callable[[str], None], failures: list[str]) -> list[dict]:
    """Rows of the cases that compile, best first. Schedules that are not understood go to `failures`."""
    rows = []
    for case in cases:
        try:
            rows.append(measure(case))
            note(f"{describe(case)}: {rows[-1]['cycles']:,} cycles, {rows[-1]['share_of_bound']:.1%}")
        except CompileError as error:
            note(f"{describe(case)}: {error}")
        except MeterError as error:
            failures.append(f"{describe(case)}: {error}")
            note(failures[-1])
    return sorted(rows, key=lambda row: row["cycles"])


def best_rows(
    chip: str, head_size: int, kernel: str, tokens: list[tuple[int, int]], tiles: list[Tiles], note, failures: list[str]
) -> list[dict]:
    """The best row for each number of tokens, or every row where tiles are named."""
    rows: list[dict] = []
    tiles = [] if KERNELS[kernel].fixed else tiles
    finalists: dict[bool, list[Tiles]] = {}  # by whether it attends to itself
    for queries, keys in tokens:
        case = Case(chip=chip, queries=queries, keys=keys, head_size=head_size, kernel=kernel, tiles=())
        candidates = tiles or finalists.get(queries == keys) or KERNELS[kernel].candidates(case)
        found = measured([dataclasses.replace(case, tiles=t) for t in candidates], note, failures)
        finalists.setdefault(queries == keys, [tuple(row["tiles"]) for row in found[:FINALISTS]])
        rows += found if tiles else found[:1]
    return rows


def print_table(rows: list[dict]) -> None:
    """One line for each row, with its speed as a multiple of each other's."""
    keys = ("chip", "tokens", "keys", "head_size")
    for place, group in itertools.groupby(
        sorted(rows, key=lambda row: [row[k] for k in keys]), key=lambda row: [row[k] for k in keys]
    ):
        chip, tokens, key_count, head_size = place
        print(f"\n{chip}, {tokens:,} x {key_count:,} tokens, head size {head_size}")
        members = sorted(group, key=lambda row: row["cycles"])
        for row in members:
            tiles = "x".join(map(str, row["tiles"]))
            ratios = [f"{o['cycles'] / row['cycles']:.2f} of {o['kernel']}'s speed" for o in members if o is not row]
            head = f"  {row['kernel']:14} {tiles:16} {row['cycles']:>14,} cycles {row['share_of_bound']:6.1%}"
            print(f"{head}  {', '.join(ratios)}")


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}


def write(rows: list[dict], path: Path = DATA_FILE) -> None:
    """Puts the best of these rows into the data file; rows that other versions measured are dropped."""
    key = ("chip", "head_size", "tokens", "keys", "kernel")
    old = json.loads(path.read_text()) if path.exists() else {"versions": versions(), "rows": []}
    kept = old["rows"] if old["versions"] == versions() else []
    best = {tuple(row[k] for k in key): row for row in kept}
    renewed = {tuple(row[k] for k in key): row for row in sorted(rows, key=lambda row: -row["cycles"])}
    merged = best | renewed
    lines = ",\n".join(
        "  " + json.dumps({k: merged[place][k] for k in (*key, "tiles", "cycles", "share_of_bound")})
        for place in sorted(merged)
    )
    path.write_text(f'{{"versions": {json.dumps(versions())},\n "rows": [\n{lines}\n]}}\n')


def token_counts(word: str) -> tuple[int, int]:
    """ "75600" attends to itself; "75600x512" to 512 keys."""
    queries, _, keys = word.partition("x")
    return int(queries), int(keys or queries)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--chips", nargs="+", choices=UNITS, default=list(UNITS))
    parser.add_argument("--tokens", nargs="+", type=token_counts, default=list(TOKENS), help="75600, or 75600x512")
    parser.add_argument("--head-sizes", nargs="+", type=int, default=list(HEAD_SIZES))
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--tiles", nargs="+", help="1024,2048,512: measure these and print them all")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"renew {DATA_FILE.name}")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        fields = json.loads(arguments.worker[0])
        worker(Case(**fields | {"tiles": tuple(fields["tiles"])}), Path(arguments.worker[1]))
        return
    tiles = [tuple(map(int, word.split(","))) for word in arguments.tiles or []]
    note = functools.partial(print, file=sys.stderr, flush=True)
    rows: list[dict] = []
    failures: list[str] = []
    for chip, head_size, kernel in itertools.product(arguments.chips, arguments.head_sizes, arguments.kernels):
        rows += best_rows(chip, head_size, kernel, arguments.tokens, tiles, note, failures)
        if arguments.write:
            write(rows)
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        print_table(rows)
    if failures:
        sys.exit("The meter failed:\n" + "\n".join(failures))


if __name__ == "__main__":
    main()
