"""What a command works with: the server it talks to and the names there. Nothing connects before it is needed."""

from __future__ import annotations

import difflib
import functools
import json
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import click

from timeslice.errors import InvalidNameError, ServerUnsuitableError, UnknownGroupError, UsageError, printable

if TYPE_CHECKING:  # they bring redis-py and pydantic, which `--help` does not need
    from collections.abc import Callable, Iterable

    from timeslice.locks.drivers import SyncDriver
    from timeslice.locks.keys import Keys
    from timeslice.locks.scripts import Call
    from timeslice.locks.view import GroupView

T = TypeVar("T")

PATIENCE_S = 1.0  # a person at a shell wants to know soon that nobody answers


class Session:
    """The server and prefix of one command line."""

    def __init__(self, url: str | None = None, prefix: str | None = None) -> None:
        self.given_url = url
        self._prefix = prefix
        self._driver: SyncDriver | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        if self._driver is not None:
            self._driver.close()

    @functools.cached_property
    def url(self) -> str:
        from timeslice.settings import find_url

        return find_url(self.given_url)

    @functools.cached_property
    def prefix(self) -> str:
        from timeslice.names import check_prefix
        from timeslice.settings import Settings

        return check_prefix(self._prefix) if self._prefix is not None else Settings().prefix

    @functools.cached_property
    def keys(self) -> Keys:
        from timeslice.locks.keys import Keys

        return Keys(self.prefix)

    @property
    def driver(self) -> SyncDriver:
        """Connected; RedisUnreachableError within about a second if nobody answers."""
        if self._driver is None:
            from timeslice.locks.drivers import SyncDriver

            driver = SyncDriver(self.url)

            def look() -> None:
                # A cluster's client is made by asking who has which slot: that may fail too. And not PING, which a
                # server that can't write to its disk refuses.
                driver.client.time()

            driver.retry(look, deadline_s=PATIENCE_S)
            self._driver = driver
        return self._driver

    def run(self, call: Call[T]) -> T:
        """Send a script call."""
        return self.driver.run(call)

    def ask(self, attempt: Callable[[], Any]) -> Any:
        """Send a plain read; its errors become ours."""
        return self.driver.retry(attempt)

    def if_allowed(self, attempt: Callable[[], T], what: str) -> T | None:
        """What a read gives; None, with a word about ``what``, where this user may not know."""
        from timeslice.locks.faults import is_denial

        try:
            return attempt()
        except ServerUnsuitableError as error:
            if not is_denial(error):
                raise
        click.echo(f"note: {what} not looked at: this user may not read that; a viewer may (timeslice acl)", err=True)
        return None

    def group_names(self) -> list[str]:
        """All groups. A name that is none, put there by something else, is left out with a word about it."""
        return self._names(self.keys.groups, "group")

    def node_names(self) -> list[str]:
        """All nodes."""
        return self._names(self.keys.nodes, "node")

    def emulated(self) -> set[str] | None:
        """Groups of which some node's agent says that its device is an emulated one; None if this user may not know."""
        return self.if_allowed(self._emulated, "which devices are emulated was")

    def _emulated(self) -> set[str]:
        from timeslice.locks.scripts import text

        client, found = self.driver.client, set[str]()
        for node in self.node_names():
            key = self.keys.node_state(node)
            told = self.ask(lambda: client.hget(key, "emulated"))  # noqa: B023 - called at once
            sizes = parse_json(text(told or ""))
            found |= set(sizes) if isinstance(sizes, dict) else set()
        return found

    def complaints(self) -> dict[str, list[tuple[str, str]]] | None:
        """What agents complain of, by group: node and sentence. None if this user may not know."""
        return self.if_allowed(self._complaints, "what agents complain of was")

    def _complaints(self) -> dict[str, list[tuple[str, str]]]:
        from timeslice.locks.scripts import text

        client, found = self.driver.client, dict[str, list[tuple[str, str]]]()
        for node in self.node_names():
            key = self.keys.node_state(node)
            stored = self.ask(lambda: client.hget(key, "complaints"))  # noqa: B023 - called at once
            told = parse_json(text(stored or ""))
            for group, lines in told.items() if isinstance(told, dict) else ():
                found.setdefault(group, []).extend(
                    (node, str(line)) for line in (lines if isinstance(lines, list) else ())
                )
        return found

    def _names(self, key: str, kind: str) -> list[str]:
        from timeslice.locks.scripts import text
        from timeslice.names import check_name

        client, names = self.driver.client, []
        for name in sorted(text(each) for each in self.ask(lambda: client.smembers(key))):
            try:
                names.append(check_name(kind, name))
            except InvalidNameError as error:
                click.echo(f"warning: {key} holds what is no name: {error}", err=True)
        return names

    def views(self, names: Iterable[str] | None = None) -> list[GroupView]:
        """The groups named, or all that can be read, each as one consistent picture."""
        if names is not None:
            return [self.driver.view(self.keys.group(name)) for name in names]
        found = []
        for name in self.group_names():
            try:
                found.append(self.driver.view(self.keys.group(name)))
            except (
                ServerUnsuitableError,
                UsageError,
            ) as error:  # no reason to hide the others
                click.echo(f"warning: group {name} can't be shown: {printable(str(error))}", err=True)
        return found

    def view(self, name: str) -> GroupView:
        """One group; UnknownGroupError with the nearest names if there is none."""
        view = self.driver.view(self.keys.group(name))
        if view.exists:
            return view
        known = self.group_names()
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(near)}? See" if near else "see"
        raise UnknownGroupError(f"no group {name}; {hint}: timeslice groups", group=name)


def parse_json(stored: str) -> Any:
    """What an agent stored as JSON; None for nothing, and what is no JSON as it is, so that somebody sees it."""
    try:
        return json.loads(stored) if stored else None
    except (ValueError, RecursionError):
        return stored


def operator() -> str:
    """Who gives the orders of this command line, for events and messages."""
    import getpass

    from timeslice.settings import default_node

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user id without a name
        import os

        user = str(os.getuid())
    return f"{user}@{default_node()}"
