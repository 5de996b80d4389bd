"""The lock protocol's own tests, each call sent by a user who may just that.

The tests come from tests/locks; only ``lab`` is another one here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.locks.lab import Lab
from tests.locks.test_client_verbs import *  # noqa: F403 - its tests are run here again
from tests.locks.test_operator_verbs import *  # noqa: F403
from tests.locks.test_residency import *  # noqa: F403
from tests.locks.test_swap_verbs import *  # noqa: F403
from tests.security.conftest import Users
from tests.security.test_permissions import CALLS
from timeslice.locks.scripts import Call


class GuardedLab(Lab):
    """Plays every party with that party's own rights. Looking into keys and moving clocks is the administrator's."""

    def __init__(self, users: Users) -> None:
        super().__init__(users.server.url, users.prefix)
        self._users = {role: users.client(role) for role in CALLS}

    def send(self, call: Call[Any]) -> list[Any]:
        role = next(role for role, verbs in CALLS.items() if call.script.name in verbs)
        if call.script.name == "look":
            role = "viewer"
        verb = "EVAL_RO" if call.script.reads_only else "EVAL"
        reply: Any = self._users[role].execute_command(  # type: ignore[no-untyped-call]
            verb, call.script.source, len(call.keys), *call.keys, *call.args
        )
        return list(reply)


@pytest.fixture
def lab(users: Users) -> Iterator[Lab]:
    made = GuardedLab(users)
    yield made
    assert users.refusals() == []
    made.redis.close()
