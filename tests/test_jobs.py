"""Many jobs in one run: the file that asks for them, the names of what they write, and what a fault leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import av
import numpy as np
import pytest
import tiny

from vidax import cli
from vidax.engine.jobs import Wish, multiply, read_jobs
from vidax.errors import UserError
from vidax.models.wan.pipeline import WanModel

SMALL = ["--size", "32x32", "--frames", "5", "--steps", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny.write_folder(tmp_path_factory.mktemp("tiny") / "wan")


@pytest.fixture
def out(tmp_path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture
def generate(folder, out, tmp_path, capsys):
    """Runs jobs, given as lines; returns the exit code, stdout and stderr."""

    def run(lines: list[str | dict] | None, *words: str, output: Path = out) -> tuple[int, str, str]:
        if lines is not None:
            file = tmp_path / "jobs.txt"
            file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
            words = ("--prompts", str(file), *words)
        code = cli.main(["generate", "--model", str(folder), *SMALL, "--output", str(output), *words])
        return code, *capsys.readouterr()

    return run


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- the file


def test_a_line_is_a_prompt_or_a_json_object():
    text = """\ufeff# comment

      a red cat, 5 # of them
    {"prompt": "a dog", "size": "832*480", "frames": 17, "guidance_scale": 3, "seed": 7, "fps": null}
    [cinematic] a bird
    {"prompt": "x", "size": [64, 32], "negative_prompt": "", "output": "x.mp4", "solver": "euler"}
    """.removeprefix("\ufeff")
    assert read_jobs(text, "jobs") == [
        Wish("jobs, line 3", {"prompt": "a red cat, 5 # of them"}),
        Wish(
            "jobs, line 4",
            {"prompt": "a dog", "size": (832, 480), "frames": 17, "guidance_scale": 3, "seed": 7, "fps": None},
        ),
        Wish("jobs, line 5", {"prompt": "[cinematic] a bird"}),
        Wish(
            "jobs, line 6",
            {"prompt": "x", "size": (64, 32), "negative_prompt": "", "output": "x.mp4", "solver": "euler"},
        ),
    ]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"prompt": "a", "step": 3}', "jobs, line 2: unknown field 'step'; did you mean 'steps'? there are prompt, "),
        ('{"prompt": "a", "num_inference_steps": 3}', "unknown field 'num_inference_steps'; did you mean 'steps'?"),
        ('{"prompt": "a", "height": 3}', "unknown field 'height'; did you mean 'size'?"),
        ('{"prompt": "a", "zzz": 3}', "unknown field 'zzz'; there are prompt, negative_prompt, size"),
        ('{"prompt": "a"', "jobs, line 2: not readable JSON (Expecting ',' delimiter: line 1 column 15 (char 14))"),
        ('{"prompt": "a"} x', "jobs, line 2: not readable JSON (Extra data"),
        ('{"steps": 3}', "jobs, line 2: the prompt is missing; every job has one"),
        ('{"prompt": null}', "the prompt is missing"),
        ('{"prompt": 3}', "prompt is 3; write it in quotes"),
        ('{"prompt": "a", "frames": "17"}', 'frames is "17"; it is a whole number, without quotes'),
        ('{"prompt": "a", "vae_tiling": 1}', "vae_tiling is 1; it is true or false, without quotes"),
        ('{"prompt": "a", "frames": 17.0}', "frames is 17.0; it is a whole number"),
        ('{"prompt": "a", "seed": true}', "seed is true; it is a whole number"),
        ('{"prompt": "a", "flow_shift": [3]}', "flow_shift is [3]; it is a number"),
        ('{"prompt": "a", "size": 64}', 'size is 64; write "832x480" or [832, 480], width first'),
        ('{"prompt": "a", "size": [64, "32"]}', 'size is [64, "32"]; write "832x480"'),
        ('{"prompt": "a", "size": "64"}', "'64' is not a size; write width x height"),
        ('{"prompt": "a", "seed": 1, "seed": 2}', "seed is given twice; leave one out"),
        ("[", "a list; write one JSON object a line"),
        ('[{"prompt": "a"}]', "a list; write one JSON object a line"),
    ],
)
def test_refuses_a_line(line, sentence):
    with pytest.raises(UserError) as caught:
        read_jobs(f"a cat\n{line}\n", "jobs")
    assert sentence in str(caught.value)
    assert str(caught.value).count("\n") == 0


def test_every_wrong_line_is_named():
    with pytest.raises(UserError) as caught:
        read_jobs('{"steps": 3}\na cat\n' + '{"promt": "x"}\n' * 12, "jobs")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("jobs, line 1: the prompt is missing")
    assert lines[1].startswith("jobs, line 3: unknown field 'promt'; did you mean 'prompt'?")
    assert len(lines) == 11 and lines[-1] == "and 3 more"


@pytest.mark.parametrize("text", ["", "\n \n", "# nothing\n"])
def test_refuses_an_empty_file(text):
    with pytest.raises(UserError, match="jobs: holds no prompt; write one a line, or a JSON object a line"):
        read_jobs(text, "jobs")


def test_prompts_times_seeds_times_videos():
    def made(wishes: list[dict], seeds: list[int], videos: int) -> list[tuple]:
        many = multiply([Wish("", fields) for fields in wishes], {"steps": 9, "seed": None}, seeds, videos)
        return [(wish.fields["prompt"], wish.fields["steps"], wish.fields["seed"]) for wish in many]

    a, b = {"prompt": "a"}, {"prompt": "b", "seed": 7, "steps": 3}
    assert made([a, b], [], 1) == [("a", 9, None), ("b", 3, 7)]
    assert made([a, b], [1, 2], 1) == [("a", 9, 1), ("a", 9, 2), ("b", 3, 7)]
    assert made([a, b], [], 2) == [("a", 9, 42), ("a", 9, 43), ("b", 3, 7), ("b", 3, 8)]
    assert [seed for *_, seed in made([a], [1, 2, 10], 2)] == [1, 2, 3, 10, 11]
    assert [seed for *_, seed in made([a], [-1], 3)] == [-1, -1, -1]


# ---- a run


def test_jobs_write_files_and_a_second_run_makes_what_is_missing(generate, out, monkeypatch):
    lines = ["a red cat", {"prompt": "A red cat!", "steps": 2}, {"prompt": "the beach", "frames": 1, "output": "b.npy"}]
    code, printed, told = generate([*lines, {"prompt": "the beach", "seed": 9, "frames": 1}], "--seed", "1")
    names = ["a-red-cat-1.mp4", "a-red-cat-1-0002.mp4", "b.npy", "the-beach-9.png"]
    assert code == 0 and printed.split() == [str(out / name) for name in names], told
    assert files(out) == sorted([*names, *(Path(name).stem + ".json" for name in names)])
    assert "a-red-cat-1-0002.mp4  frames 5, steps 2, seed 1" in told
    assert "denoise 4/4" in told and "decode 4/4" in told and "4 written, 0 skipped, 0 failed" in told
    record = json.loads((out / "a-red-cat-1-0002.json").read_text())
    assert (record["prompt"], record["steps"], record["seed"]) == ("A red cat!", 2, 1)
    with av.open(str(out / names[0])) as video:
        tags = json.loads(video.metadata["comment"])
        assert video.metadata["title"] == tags["prompt"] == "a red cat"
        assert tags["seed"] == 1 and tags["model"] == "wan" and tags["vidax"] == record["versions"]["vidax"]

    kept = {name: (out / name).stat().st_mtime_ns for name in files(out)}
    (out / names[1]).unlink()
    (out / "a-red-cat-1-0002.json").unlink()
    (out / "b.json").write_text(json.dumps(json.loads((out / "b.json").read_text()) | {"versions": {"vidax": "0.0"}}))
    kept["b.json"] = (out / "b.json").stat().st_mtime_ns
    code, printed, told = generate(None, "--prompts", str(out.parent / "jobs.txt"), "--seed", "1")
    assert code == 0 and printed.split() == [str(out / names[1])], told
    assert told.count("skipped (done)") == 3 and "1 written, 3 skipped, 0 failed" in told
    now = {name: (out / name).stat().st_mtime_ns for name in files(out)}
    assert now.keys() == kept.keys() and {name for name in now if now[name] != kept[name]} == {
        "a-red-cat-1-0002.mp4",
        "a-red-cat-1-0002.json",
    }

    def loaded(*_):
        raise AssertionError("nothing is left to do")

    monkeypatch.setattr("vidax.engine.loading.load_weights", loaded)
    code, printed, told = generate(None, "--prompts", str(out.parent / "jobs.txt"), "--seed", "1", "--json")
    assert code == 0
    records = [json.loads(line) for line in printed.splitlines()]
    assert [(record["status"], record["output"]) for record in records] == [
        ("skipped", str(out / name)) for name in names
    ]
    elsewhere = ("--mesh", "seq=2", "--residency", "streamed")
    code, printed, told = generate(None, "--prompts", str(out.parent / "jobs.txt"), "--seed", "1", *elsewhere)
    assert code == 0 and told.count("skipped (done)") == 4, told


@pytest.mark.parametrize("change", [["--steps", "2"], ["--negative-prompt", "blurred"], ["--prompts"]])
def test_other_settings_take_the_next_name(generate, out, change):
    assert generate(["a red cat"], "--quiet")[0] == 0
    lines, words = (["A red: cat"], []) if change == ["--prompts"] else (["a red cat"], change)
    code, printed, _ = generate(lines, *words, "--json")
    assert code == 0 and json.loads(printed)["status"] == "written"
    assert [name for name in files(out) if name.endswith("mp4")] == ["a-red-cat-42-0002.mp4", "a-red-cat-42.mp4"]


def test_overwriting_makes_all_again(generate, out):
    assert generate(["a red cat"], "--quiet")[0] == 0
    before = (out / "a-red-cat-42.mp4").read_bytes()
    assert generate(["a red cat"], "--steps", "2", "--overwrite", "--quiet") == (0, "", "")
    assert (out / "a-red-cat-42.mp4").read_bytes() != before
    assert files(out) == ["a-red-cat-42.json", "a-red-cat-42.mp4"]


def test_odd_prompts_and_warnings(generate, out):
    """A lone surrogate is legal in JSON and in no file; what is cut or left out is said once."""
    long = ("a red cat " * 200).strip()
    code, printed, told = generate([{"prompt": "\ud800 cat"}, long, {"prompt": long, "seed": 7}], "--json")
    assert code == 0, told
    first, *others = [json.loads(line) for line in printed.splitlines()]
    assert first["prompt"] == "\ud800 cat" and first["warnings"] == []
    warning = "the prompt 'a red cat a red cat a red cat a red cat ...' is longer than 512 tokens"
    assert [len(record["warnings"]) for record in others] == [1, 1]
    assert [line for line in told.splitlines() if warning in line] == [
        f"warning: {warning}; what comes after them is left out"
    ]
    assert (
        others[0]["warnings"] == others[1]["warnings"] == json.loads(next(out.glob("a-*.json")).read_text())["warnings"]
    )


def test_several_seeds_of_one_prompt(generate, out):
    code, printed, _ = generate(None, "a red cat", "--num-videos", "2", "--seed", "3,7", "--frames", "1")
    assert code == 0
    assert [Path(name).name for name in printed.split()] == [f"a-red-cat-{seed}.png" for seed in (3, 4, 7, 8)]


def test_prompts_from_stdin(generate, out):
    command = [sys.executable, "-m", "vidax.cli", "generate", "--prompts", "-", *SMALL, "--output", str(out)]
    done = subprocess.run([*command, "--model", str(out)], input=b"a\n{", capture_output=True, check=False)
    assert done.returncode == 2
    assert done.stderr.decode().startswith("vidax: stdin, line 2: not readable JSON")


@pytest.mark.parametrize(
    ("lines", "words", "sentence"),
    [
        (["a", {"prompt": "b", "frames": 4}], [], "jobs.txt, line 2: 4 frames: this model takes 4k+1; use 1 or 5"),
        (["a", {"prompt": "b", "size": "33x32"}], [], "jobs.txt, line 2: size 33x32: width and height are multiples"),
        (["a", {"prompt": "b", "solver": "ddim"}], [], "jobs.txt, line 2: solver 'ddim': choose unipc or euler"),
        ([{"prompt": " "}], [], "jobs.txt, line 1: the prompt is empty"),
        ([{"prompt": "b", "output": "b.gif"}], [], "jobs.txt, line 1: "),
        ([{"prompt": "b", "output": "no/b.mp4"}], [], "there is no folder"),
        ([{"prompt": "b", "output": "no/"}], [], "no: there is no such folder; create it first"),
        ([{"prompt": "a", "output": "a.mp4"}, {"prompt": "b", "output": "a.npy"}], [], "is already that of "),
        ([{"prompt": "a", "output": "a.mp4"}], ["--seed", "1,2"], "a.mp4 is already that of another seed; leave it"),
        (["a"], ["--num-videos", "0"], "0 videos: at least 1"),
        (["a"], ["a prompt"], "give either a prompt, in quotes, or a file of them with --prompts"),
        (None, [], "give either a prompt, in quotes, or a file of them with --prompts"),
        (None, ["--prompts", "/no/such/file"], "/no/such/file: cannot be read (No such file or directory)"),
        (None, ["--prompts", sys.executable], "is not UTF-8 text"),
        (None, ["a", "--width", "64"], "give either --size or --width and --height"),
    ],
)
def test_a_run_is_refused_before_weights_are_loaded(generate, out, lines, words, sentence, monkeypatch):
    monkeypatch.setattr("vidax.engine.loading.load_weights", None)
    code, printed, told = generate(lines, *words)
    assert (code, printed) == (2, "") and sentence in told
    assert files(out) == []


def test_one_file_for_many_is_refused(generate, out):
    code, _, told = generate(["a", "b"], output=out / "x.mp4")
    assert code == 2 and "x.mp4: one file for 2 videos; give a folder, and create it first" in told
    code, _, told = generate(["a"], output=Path("/proc"))
    assert code == 2 and "jobs.txt, line 1: /proc/a-42.mp4: the folder /proc cannot be written to" in told


def test_a_failed_job_does_not_stop_the_others(generate, out, monkeypatch):
    run = WanModel.denoise

    def flaky(self, transformer, table, *inputs):
        if table.steps == 2:
            raise RuntimeError("out of memory")
        return run(self, transformer, table, *inputs)

    monkeypatch.setattr(WanModel, "denoise", flaky)
    code, printed, told = generate(["a", {"prompt": "b", "steps": 2}, "c"], "--json")
    assert code == 1
    records = [json.loads(line) for line in printed.splitlines()]
    assert [record["status"] for record in records] == ["written", "failed", "written"]
    assert records[1]["error"] == "out of memory"
    assert f"jobs.txt, line 2: {out / 'b-42.mp4'} failed (RuntimeError)" in told and "Traceback" in told
    assert "2 written, 0 skipped, 1 failed" in told
    assert files(out) == ["a-42.json", "a-42.mp4", "c-42.json", "c-42.mp4"]


def test_a_full_disk_stops_the_job_that_does_not_fit(generate, small_disk):
    lengths = {"a": 5, "b": 13, "c": 5}
    lines = [{"prompt": "a", "output": f"{name}.npy", "frames": frames} for name, frames in lengths.items()]
    code, printed, told = generate(lines, "--seed", "3", output=small_disk)
    assert code == 1 and printed.split() == [str(small_disk / name) for name in ("a.npy", "c.npy")]
    file = small_disk / "b.npy"
    assert f"jobs.txt, line 2: {file}: no space left in {small_disk}; free some, or write to another" in told
    assert "Traceback" not in told
    assert files(small_disk) == ["a.json", "a.npy", "c.json", "c.npy"]
    assert np.array_equal(np.load(small_disk / "a.npy"), np.load(small_disk / "c.npy"))
    code, printed, told = generate([lines[1]], output=small_disk)
    assert code == 1 and printed == ""


def test_ctrl_c_while_writing_leaves_what_is_finished(folder, out, tmp_path):
    """The second job's file is open when the signal comes."""
    jobs = tmp_path / "jobs.txt"
    jobs.write_text('a red cat\n{"prompt": "the beach", "frames": 8001, "size": "16x16"}\n')
    command = ["-m", "vidax.cli", "generate", "--prompts", str(jobs), "--model", str(folder), *SMALL]
    process = subprocess.Popen(
        [sys.executable, *command, "--output", str(out)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    deadline = time.time() + 300
    while time.time() < deadline and process.poll() is None:
        if (out / "a-red-cat-42.json").exists() and any(name.startswith(".vidax-") for name in files(out)):
            break
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    printed, told = process.communicate(timeout=300)
    assert process.returncode == 130, told
    assert printed.split() == [str(out / "a-red-cat-42.mp4")] and "Traceback" not in told
    assert "vidax: interrupted; 1 of 2 videos are written, the same command makes the others" in told
    assert files(out) == ["a-red-cat-42.json", "a-red-cat-42.mp4"]
