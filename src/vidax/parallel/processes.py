"""Several processes that work as one, each with some of the devices: how they start, and how they stay in step.

Every process runs the same programs on the same jobs. A collective waits until all take part, so what one of them
cannot do must be known to all before the next one: they tell each other through the key-value store that comes with
`jax.distributed`, which needs no device. Who has started it, the command line or the user's program, does not matter.
"""

import contextlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import jax

from vidax.errors import UserError

START_SECONDS = 300  # until all processes are there; the hosts of a slice start one after the other
HEARTBEAT_SECONDS = 30  # without a sign of life from a process, all are ended (JAX: 100)
SHUTDOWN_SECONDS = 15  # at the end, for a process that is still at work (JAX: 300)

# How long a fault here waits to hear of the others. Where there are collectives they may be waiting in one for ever.
IN_COLLECTIVES_SECONDS = 60.0
ALONE_SECONDS = 24 * 3600.0

ENCODING = "utf-8", "surrogatepass"  # an undecodable byte of a path is a lone surrogate

_turns = itertools.count()  # `exchange` is called equally often by all


class OutOfStep(BaseException):
    """This process cannot go on with the others. Like KeyboardInterrupt, it is not one job's error."""


def check_flags(detect: bool, coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Raises UserError unless the flags say nothing, `--distributed` alone, or all that it would find out."""
    given = {"--coordinator": coordinator, "--num-processes": processes, "--process-id": process}
    missing = [flag for flag, value in given.items() if value is None]
    named = [flag for flag in given if flag not in missing]
    if detect and named:
        raise UserError(f"--distributed finds everything out by itself; leave out {' and '.join(named)}, or it")
    if not named:
        return
    if missing:
        raise UserError(
            f"{' and '.join(named)} without {' and '.join(missing)}: the three go together; "
            "--distributed alone finds them out on a TPU slice and under Slurm"
        )
    assert coordinator is not None and processes is not None and process is not None
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        raise UserError(
            f"--coordinator {coordinator!r}: write HOST:PORT, as in 10.0.0.1:8476; the host is that of process 0, "
            "the port one that is free there"
        )
    if processes < 1:
        raise UserError(f"--num-processes {processes}: give 1 or more, the same for every process")
    if not 0 <= process < processes:
        raise UserError(
            f"--process-id {process}: {processes} processes have the numbers 0 to {processes - 1}; give each its own"
        )


def start(coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> None:
    """Become one of several processes, before JAX has looked for devices; without arguments all is detected.

    Where not all of them come in time, JAX would abort with a stack trace: a sentence is printed instead, exit code 2.
    """
    others = "other processes" if coordinator is None else f"other processes, {processes} in all, at {coordinator}"

    def give_up() -> None:
        print(
            f"vidax: waited {START_SECONDS} seconds for the {others}; start all of them at about the same time, "
            "where their hosts can reach the coordinator's port",
            file=sys.stderr,
        )
        leave(2)

    jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM, which is to end us
    timer = threading.Timer(START_SECONDS, give_up)
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            initialization_timeout=START_SECONDS + 60,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (ValueError, RuntimeError, OSError) as error:
        if coordinator is None:
            raise UserError(
                f"--distributed: no TPU slice, Slurm or Open MPI job is found here ({error}); "
                "give --coordinator HOST:PORT, --num-processes N and --process-id I"
            ) from error
        raise UserError(f"--coordinator {coordinator}: {error}; is the port free there?") from error
    finally:
        timer.cancel()


def count() -> int:
    """How many processes there are. Looks for devices only where there may be several."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def first() -> bool:
    """Whether this is process 0, which alone writes and prints."""
    return jax.process_index() == 0


def leave(code: int) -> NoReturn:
    """End this process at once. Python's own end would wait for the others, which may be waiting for this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


PIECE = 1 << 20  # characters that are said at a time: gRPC takes 4 MB


def exchange(message: str, seconds: float = ALONE_SECONDS) -> list[str]:
    """What every process says, in their order; all have to say something. Raises OutOfStep after so many seconds."""
    if count() == 1:
        return [message]
    from jax._src.distributed import global_state  # no public name gives the client that jax.distributed has made

    client, turn, until = global_state.client, next(_turns), time.monotonic() + seconds
    assert client is not None

    def hear(process: int) -> str:
        while True:
            try:
                # A second at a time: Ctrl-C is not seen in between.
                return client.blocking_key_value_get_bytes(f"vidax/{turn}/{process}", 1000).decode(*ENCODING)
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error) or time.monotonic() > until:
                    raise OutOfStep(f"process {process} does not answer") from error

    client.key_value_set_bytes(f"vidax/{turn}/{jax.process_index()}", message.encode(*ENCODING))
    return [hear(process) for process in range(count())]


def from_first(message: str) -> str:
    """What process 0 says, however long it is."""
    if count() == 1:
        return message
    pieces = [message[start : start + PIECE] for start in range(0, len(message), PIECE)]
    parts = int(exchange(str(len(pieces)) if first() else "")[0])
    return "".join(exchange(pieces[i] if first() else "")[0] for i in range(parts))


def settle(error: Exception | None, seconds: float = ALONE_SECONDS) -> None:
    """Raise this process's error, or else that of another one: where one fails, all do.

    Raises OutOfStep where this process has failed and not all of the others say in time that they are as far.
    """
    kind = "" if error is None or isinstance(error, UserError) else f"{type(error).__name__}: "
    told = "" if error is None else f"{kind}{error}"
    try:
        heard = exchange(told, ALONE_SECONDS if error is None else seconds)
    except OutOfStep as lost:
        raise (lost if error is None else lost.with_traceback(None)) from error
    if error is not None:
        raise error
    for process, words in enumerate(heard):
        if words:
            raise UserError(f"process {process}: {words}")


@contextlib.contextmanager
def in_step(several: bool, seconds: float = ALONE_SECONDS) -> Iterator[None]:
    """What goes wrong inside on one process goes wrong on all, as `settle` says."""
    error = None
    try:
        yield
    except Exception as caught:
        if not several:
            raise
        error = caught
    if several:
        settle(error, seconds)


def require_same(values: Mapping[str, Any], remedy: str) -> None:
    """Raises UserError, on every process, unless all give the same values."""
    first, *others = (json.loads(words) for words in exchange(json.dumps(values, default=str)))
    for process, theirs in enumerate(others, 1):
        for name in [*first, *theirs]:
            here, there = first.get(name), theirs.get(name)
            if here != there:
                raise UserError(f"process {process} has {name} {there!r} where process 0 has {here!r}; {remedy}")
