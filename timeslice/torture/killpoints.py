"""Kills this process with SIGKILL right before or right after it does a chosen thing for the N-th time.

A point is a write to Redis, a write of the agent's to its disk, or a step of a backend. Writes to Redis are found on
the wire, under every client and driver, so that none escapes: whatever is not known to be a read is one.
Patched from outside, like the mutants: the product knows nothing of it.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import wraps
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import redis.asyncio.connection
import redis.connection

from timeslice.agent import journal
from timeslice.agent.state import Ledger
from timeslice.backends.arena import ArenaBackend
from timeslice.errors import UsageError
from timeslice.locks import loader

IN_PASSING = "ack in passing"  # in the middle of a step
_OUTCOME = 7  # of an ack: after the command, its script, the number of keys, those, and four arguments
STEPS = ("prepare", "suspend", "restore", "release", "abort")
# What changes nothing, or only the connection; a consumer that reads gets the same again when it comes back.
_READS = frozenset({
    *("AUTH", "CLIENT", "CONFIG", "EVALSHA_RO", "EVAL_RO", "EXISTS", "HELLO", "HGET", "HGETALL", "HMGET", "INFO"),
    *("PING", "SELECT", "SMEMBERS", "TIME", "XINFO", "XLEN", "XPENDING", "XRANGE", "XREAD", "XREADGROUP", "XREVRANGE"),
    *("ZCARD", "ZCOUNT", "ZRANGE", "ZSCORE", "MULTI", "EXEC"),
})  # fmt: skip

_Note = Callable[..., None]
_Reached = Callable[[str, str], None]  # is told of a point, and ``before`` or ``after``


def arm(spec: str) -> None:
    """``ROLE:POINT:before|after:N`` kills this process there, for the N-th time that it comes there. The role is for
    the reader. With ``:FILE`` after it, times count once that file is there. ``trace:FILE`` kills nobody and writes
    each point that is passed into the file, a line each."""
    kind, _, rest = spec.partition(":")
    if kind == "trace":
        _watch(_tracer(Path(rest)))
        return
    point, _, rest = rest.partition(":")
    when, _, rest = rest.partition(":")
    number, _, gate = rest.partition(":")
    if when not in {"before", "after"} or not number.isdigit():
        raise UsageError(f"a kill point is ROLE:POINT:before|after:N[:FILE], not {spec!r}")
    _watch(_killer(point, when, int(number), Path(gate) if gate else None))


def traced(file: Path) -> set[str]:
    """The points that a process was seen to pass."""
    return set(file.read_text().splitlines()) if file.exists() else set()


def _killer(point: str, when: str, number: int, gate: Path | None) -> _Reached:
    left = number

    def reached(here: str, now: str) -> None:
        nonlocal left
        if (here, now) == (point, when) and (gate is None or gate.exists()):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return reached


def _tracer(file: Path) -> _Reached:
    seen: set[str] = set()

    def reached(here: str, _: str) -> None:
        if here not in seen:
            seen.add(here)
            with file.open("a") as out:
                out.write(f"{here}\n")

    return reached


def _watch(reached: _Reached) -> None:
    _watch_redis(reached)
    _watch_disk(reached)
    _watch_backend(reached)


def _watch_redis(reached: _Reached) -> None:
    names = _script_names()
    unanswered: dict[int, list[str]] = {}  # connection -> what each answer to come completes

    def sending(connection: Any, packed: Any) -> None:
        """What goes out in one piece is one point, which is answered when its last command is."""
        points = [_point(command, names) for command in _commands(packed)]
        whole = "+".join(dict.fromkeys(filter(None, points)))
        if whole:
            reached(whole, "before")
        unanswered.setdefault(id(connection), []).extend([*([""] * (len(points) - 1)), whole])

    def answered(connection: Any) -> None:
        waiting = unanswered.get(id(connection))
        point = waiting.pop(0) if waiting else ""
        if point:
            reached(point, "after")

    def refused(connection: Any, error: Exception) -> None:
        """An error is an answer, too; but a script that the server did not know comes again, with its text."""
        if isinstance(error, redis.exceptions.NoScriptError):
            unanswered[id(connection)].pop(0)
        else:
            answered(connection)

    def closed(connection: Any) -> None:
        unanswered.pop(id(connection), None)

    _wrap_sync(sending, answered, refused, closed)
    _wrap_async(sending, answered, refused, closed)


def _wrap_sync(sending: _Note, answered: _Note, refused: _Note, closed: _Note) -> None:
    kind: Any = redis.connection.AbstractConnection
    send, read, leave = kind.send_packed_command, kind.read_response, kind.disconnect

    def send_first(self: Any, command: Any, *args: Any, **options: Any) -> Any:
        sending(self, command)
        return send(self, command, *args, **options)

    def read_first(self: Any, *args: Any, **options: Any) -> Any:
        try:
            answer = read(self, *args, **options)
        except redis.exceptions.ResponseError as error:
            refused(self, error)
            raise
        answered(self)
        return answer

    def forget(self: Any, *args: Any, **options: Any) -> Any:
        closed(self)
        return leave(self, *args, **options)

    kind.send_packed_command, kind.read_response, kind.disconnect = send_first, read_first, forget


def _wrap_async(sending: _Note, answered: _Note, refused: _Note, closed: _Note) -> None:
    kind: Any = redis.asyncio.connection.AbstractConnection
    send, read, leave = kind.send_packed_command, kind.read_response, kind.disconnect

    async def send_first(self: Any, command: Any, *args: Any, **options: Any) -> Any:
        sending(self, command)
        return await send(self, command, *args, **options)

    async def read_first(self: Any, *args: Any, **options: Any) -> Any:
        try:
            answer = await read(self, *args, **options)
        except redis.exceptions.ResponseError as error:
            refused(self, error)
            raise
        answered(self)
        return answer

    async def forget(self: Any, *args: Any, **options: Any) -> Any:
        closed(self)
        return await leave(self, *args, **options)

    kind.send_packed_command, kind.read_response, kind.disconnect = send_first, read_first, forget


def _commands(packed: bytes | str | Iterable[bytes]) -> Iterator[list[bytes]]:
    """The commands that go out in one piece."""
    data = packed.encode() if isinstance(packed, str) else packed if isinstance(packed, bytes) else b"".join(packed)
    at = 0

    def line() -> bytes:
        nonlocal at
        end = data.index(b"\r\n", at)
        found, at = data[at:end], end + 2
        return found

    while at < len(data):
        words = []
        for _ in range(int(line()[1:])):
            size = int(line()[1:])
            words.append(data[at : at + size])
            at += size + 2
        yield words


def _point(command: list[bytes], names: dict[str, str]) -> str:
    """The name of a write: a script's, or the command with what its key is for. '' for what is no write."""
    verb = command[0].decode().upper()
    if verb in _READS:
        return ""
    if verb in {"EVALSHA", "EVAL"}:
        body = command[1]
        sha = body.decode() if verb == "EVALSHA" else hashlib.sha1(body, usedforsecurity=False).hexdigest()
        name = names.get(sha, "an unknown script")
        return IN_PASSING if name == "ack" and command[int(command[2]) + _OUTCOME] == b"" else name
    key = next((word for word in command[1:] if b":" in word), b"")
    return f"{verb.lower()} {key.decode().rpartition(':')[2]}".strip()


def _script_names() -> dict[str, str]:
    folder = resources.files("timeslice.locks") / "lua"
    found = [place.name for place in folder.iterdir()]
    found += [f"alone/{place.name}" for place in (folder / "alone").iterdir()]
    scripts = [loader.load(name.removesuffix(".lua")) for name in found if name.endswith(".lua")]
    return {script.sha: script.name for script in scripts}


def _watch_disk(reached: _Reached) -> None:
    write = journal.write_whole

    def write_whole(path: Path, data: bytes, **options: Any) -> None:
        point = f"disk {_noted(path, data, **options) or path.stem}"
        reached(point, "before")
        write(path, data, **options)
        reached(point, "after")

    import_module("timeslice.agent.service")  # and with it all that writes
    for name, module in list(sys.modules.items()):
        if name.startswith("timeslice.agent.") and vars(module).get("write_whole") is write:
            vars(module)["write_whole"] = write_whole


def _noted(path: Path, data: bytes, *, durable: bool = True) -> str:
    """What a journal gets noted of an order: that it is begun, or how it ended; '' for anything else."""
    if path.stem != "journal":
        return ""
    old = Ledger.model_validate_json(path.read_bytes()) if path.exists() else Ledger()
    new = Ledger.model_validate_json(data)
    if not new.records or (new.records, new.undo) == (old.records, old.undo):
        return ""
    if new.records[-1].answer is None:
        return "" if new.records[-1].step == "rollback" else "intent"  # an undo goes ahead without a note
    return "" if durable else "result"  # only a fence that rises is durable: what else is on its way with it came late


def _watch_backend(reached: _Reached) -> None:
    for name in STEPS:
        setattr(ArenaBackend, name, _step(name, getattr(ArenaBackend, name), reached))


def _step(name: str, step: Callable[..., Awaitable[Any]], reached: _Reached) -> Callable[..., Awaitable[Any]]:
    @wraps(step)
    async def watched(*args: Any, **options: Any) -> Any:
        reached(name, "before")
        outcome = await step(*args, **options)
        reached(name, "after")
        return outcome

    return watched
