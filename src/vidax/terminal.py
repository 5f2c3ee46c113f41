"""What a run says: settings with their origins, jobs, warnings and progress on stderr, results on stdout."""

import contextlib
import io
import json
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vidax.engine.checkpoints import Account
from vidax.engine.progress import Progress, Silent
from vidax.engine.tasks import Task
from vidax.errors import UserError

FIXED = ("model", "device", "mesh", "residency", "text_residency", "dtype", "attention")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def warn(sentence: str) -> None:
    say(f"warning: {sentence}")


def keep_stdout() -> None:
    """Keep stdout to what Python prints: gloo, with which CPUs talk, writes its connections to descriptor 1."""
    sys.stdout.flush()
    sys.stdout = open(os.dup(1), "w", encoding=sys.stdout.encoding)  # noqa: SIM115  as long as the process
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def last_words(error: BaseException) -> int:
    """Why this one of several processes ends before the others. Returns the exit code."""
    if isinstance(error, KeyboardInterrupt):
        say("vidax: interrupted; the other processes end too")
        return 130
    cause = error.__cause__
    if isinstance(cause, UserError):
        say(f"vidax: {cause}")
    elif cause is not None:
        say("".join(traceback.format_exception(cause)).rstrip())
    say(f"vidax: {error}; this process ends, and the others with it")
    return 2 if isinstance(cause, UserError) else 1


def settings(tasks: Sequence[Task]) -> None:
    """Every setting and where it comes from, one a line; then the jobs, if there are several, with what differs."""
    first = tasks[0].metadata
    settings = dict.fromkeys(name for task in tasks for name in task.metadata["origins"])
    differing = [name for name in settings if any(t.metadata.get(name) != first.get(name) for t in tasks)]
    for name in FIXED:
        say(f"  {name.replace('_', ' '):16} {first[name]}")
    for name, origin in first["origins"].items():
        if first[name] is not None and name not in differing:
            say(f"  {name.replace('_', ' '):16} {shown(first[name])}  ({origin})")
    if len(tasks) > 1:
        for number, task in enumerate(tasks, 1):
            own = {name: task.metadata[name] for name in differing if name in task.metadata}
            about = [f"{name.replace('_', ' ')} {shown(value, 40)}" for name, value in own.items()]
            state = "skipped (done)" if task.writer is None else ", ".join(about)
            say(f"  {f'{number}/{len(tasks)}':>9}  {task.path}  {state}")
    elif tasks[0].writer is None:
        say(f"  {tasks[0].path}  skipped (done)")
    for sentence in dict.fromkeys(sentence for task in tasks for sentence in task.metadata["warnings"]):
        warn(sentence)


def shown(value: Any, limit: int = 60) -> str:
    text = str(value)
    return (text if len(text) <= limit else f"{text[: limit - 3]}...") or repr(text)


class Results:
    """What has become of each job. stdout has the written files, or the records; all else goes to stderr."""

    def __init__(self, *, many: bool, as_json: bool, quiet: bool):
        self.many, self.as_json, self.quiet = many, as_json, quiet
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # an undecodable byte of a name ends no run
        self.counts = {"written": 0, "skipped": 0, "failed": 0}

    def written(self, record: dict[str, Any], files: Sequence[Path]) -> None:
        self.count("written", record)
        if not self.as_json and not self.quiet:
            print(*files, sep="\n", flush=True)

    def skipped(self, task: Task) -> None:
        self.count("skipped", task.metadata | {"output": str(task.path)})

    def failed(self, task: Task, error: Exception) -> None:
        """What no user can put right comes with its traceback."""
        sentence = str(error) or type(error).__name__
        self.count("failed", task.metadata | {"output": str(task.path), "error": sentence})
        if not isinstance(error, UserError):
            say("".join(traceback.format_exception(error)).rstrip())
            sentence = f"{task.path} failed ({type(error).__name__})"
        say(f"vidax: {task.place}: {sentence}" if task.place else f"vidax: {sentence}")

    def count(self, status: str, record: dict[str, Any]) -> None:
        self.counts[status] += 1
        if self.as_json and self.many:
            print(json.dumps(record | {"status": status}, ensure_ascii=False, default=str), flush=True)
        elif self.as_json:
            print(json.dumps(record, indent=2, ensure_ascii=False))

    def close(self) -> int:
        """The exit code."""
        if self.many and not self.quiet:
            say("  " + ", ".join(f"{count} {status}" for status, count in self.counts.items()))
        return 1 if self.counts["failed"] else 0


def account_lines(account: Account) -> list[str]:
    """A component's tensors: what they are, which are left unread and why, and whose hash is known."""
    lines = [
        f"{account.component:13} {account.layout} layout, {account.tensors} tensors -> {account.parameters} "
        f"parameters, {account.values:,} values, {account.stored_bytes / 1e6:,.1f} MB: {account.path}"
    ]
    lines += [f"{'':13} not read: {name} ({reason})" for name, reason in account.skipped.items()]
    return lines + [
        f"{'':13} {'SHA-256 is right' if known else 'no SHA-256 is known'}: {file}"
        for file, known in account.verified.items()
    ]


@contextlib.contextmanager
def plain_warnings(quiet: bool) -> Iterator[None]:
    """What libraries warn of (JAX: a full disk under its cache) on one line, without their source code."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: None if quiet else warn(" ".join(str(message).split()))
        yield


class Interruptible(Silent):
    """Ctrl-C waits until something is done: a step, a parameter, some frames. A second one does not wait.

    At another moment Python may lose it (in a callback of the garbage collector) or JAX may crash (while it traces).
    """

    asked = False

    def ask(self, *_: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def advance(self, done: int) -> None:
        if self.asked:
            raise KeyboardInterrupt


@contextlib.contextmanager
def interrupting(reporter: Interruptible) -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield  # signals are the main thread's, and whoever ignores or handles Ctrl-C keeps doing so
        return
    signal.signal(signal.SIGINT, reporter.ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def progress(quiet: bool) -> Iterator[Progress]:
    """A line per phase: what is done, seconds per step, time left. Ctrl-C as `Interruptible` says."""
    if quiet:
        reporter = Interruptible()
        with interrupting(reporter):
            yield reporter
        return
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars
    from rich.text import Text

    class StepSeconds(ProgressColumn):
        def render(self, task) -> Text:
            if not task.description.startswith("denoise") or not task.completed:
                return Text("")
            speed = task.finished_speed or task.speed
            return Text(f"{task.completed:.0f}/{task.total:.0f}" + (f", {1 / speed:.2f} s/step" if speed else ""))

    class Reporter(Interruptible):
        def phase(self, name: str, total: int) -> None:
            self.name, self.task = name, bars.add_task(name, total=total)

        def job(self, number: int, count: int) -> None:
            if count > 1:
                bars.update(self.task, description=f"{self.name} {number}/{count}")

        def advance(self, done: int) -> None:
            bars.update(self.task, completed=done)
            super().advance(done)

        def ask(self, *words: Any) -> None:
            super().ask(*words)
            os.write(
                2, b"vidax: stopping after this step; Ctrl-C again does not wait for it\n"
            )  # print is not reentrant

        def warn(self, sentence: str) -> None:
            warn(sentence)

    columns = (
        TextColumn("  {task.description:20}"),
        BarColumn(24),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        StepSeconds(),
    )
    # Lines of results go above the bars where both are on one screen, and into the pipe where stdout is one.
    bars = Bars(*columns, console=Console(stderr=True), redirect_stdout=sys.stdout.isatty())
    reporter = Reporter()
    with interrupting(reporter), bars:
        yield reporter
