"""Trees of JAX arrays that leave the device and come back. Four devices of a CPU stand in for accelerators."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"  # read when the first array is made

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from tests.frameworks.test_torch import RIVAL, job
from timeslice.client.callbacks import Busy, Moved
from timeslice.errors import UsageError
from timeslice.integrations import jax_copy
from timeslice.integrations.jax import Cell, Pytrees, Trees, register_pytree
from timeslice.models import Residency
from timeslice.up import LocalStack, private_environment

EXAMPLE = Path(__file__).parents[2] / "examples" / "jax_ppo.py"
KIB = 1024

# A job with a sharded tree, and without one. Each line of input lets it go on.
JOB = """
import sys, timeslice
from tests.frameworks.test_jax import fresh, train, facts
from timeslice.integrations.jax import register_pytree

sys.stdin.readline()
with timeslice.hold("trainers", timeout=60):
    state = fresh()
    register_pytree("trainers", state)
    train(state, 1)
    before = str(facts(state.params["w"]))
print("registered", flush=True)
sys.stdin.readline()
try:
    state.params
except timeslice.UsageError as error:
    print(error, flush=True)
sys.stdin.readline()
with timeslice.hold("trainers", timeout=60) as lease:
    print(lease.grant.how, str(facts(state.params["w"])) == before, flush=True)
"""


def sharded(value: Any, *axes: str | tuple[str, ...] | None) -> Any:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*axes)))


def trees_of(holder: Pytrees) -> Trees:
    return Trees(vars(holder)["_cells"])


def one(tree: Any) -> tuple[Cell, Trees]:
    cell = Cell.of(tree)
    return cell, Trees({"": cell})


def facts(leaf: Any) -> Any:
    """All that can be told of an array, its bits on every device included."""
    if not isinstance(leaf, jax.Array):
        return leaf
    key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    plain = jax.random.key_data(leaf) if key else leaf
    bits = [(shard.device, shard.index, np.asarray(shard.data).tobytes()) for shard in plain.addressable_shards]
    return leaf.dtype, leaf.shape, leaf.sharding, leaf.committed, plain.weak_type, bits


def every_kind() -> dict[str, Any]:
    raw = np.arange(64, dtype=np.uint32) * 2654435761  # odd NaNs among them
    numbers = jnp.arange(16.0).reshape(4, 4)
    return {
        "sharded": sharded(numbers, "x", "y"),
        "by rows": sharded(numbers + 1, ("x", "y")),
        "replicated": sharded(numbers + 2),
        "half": sharded(numbers + 3, None, "y"),
        "there": jax.device_put(numbers, jax.devices()[2]),
        "anywhere": numbers + 4,
        "odd": jnp.asarray(raw.view(np.float32)),
        "bfloat16": jnp.asarray(raw.view(jnp.bfloat16)),
        "float8": sharded(raw.view(jnp.float8_e4m3fn).reshape(4, -1), "x"),
        "int4": jnp.arange(8).astype(jnp.int4),
        "flags": numbers > 3,
        "complex": numbers * 1j,
        "empty": jnp.zeros((0, 3)),
        "key": jax.random.key(7),
        "keys": sharded(jax.random.split(jax.random.key(8), 4), "x"),
        "old key": jax.random.PRNGKey(9),
        "weak": jnp.asarray(1.5),
        "weak row": jnp.where(jnp.arange(3) > 1, 1.0, jnp.nan),
        "weak there": jax.device_put(jnp.asarray(3), jax.devices()[1]),
        "weak shards": sharded(jnp.full(4, 2.5), "x"),
        "no array": (np.ones(3), 5, "text", None),
    }


def test_every_kind_of_array_comes_back_as_it_was() -> None:
    """Bits, dtype, shape, sharding, commitment and weak type, of keys too; what is no array stays the same object."""
    tree = every_kind()
    before = jax.tree.map(facts, tree)
    cell, trees = one(tree)
    trees.suspend("offload", ())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
    trees.restore(())
    back = cell.get()
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert [str(facts) for facts in jax.tree.leaves(jax.tree.map(facts, back))] == [
        str(facts) for facts in jax.tree.leaves(before)
    ]
    assert jax.tree.leaves(back["no array"])[0] is tree["no array"][0]
    assert jnp.array_equal(jax.random.normal(back["key"]), jax.random.normal(jax.random.key(7)))


def test_bytes_are_those_of_the_shards() -> None:
    """Replicas are counted where they lie; to the host each content goes once."""
    _, trees = one({"replicated": sharded(jnp.zeros(KIB)), "sharded": sharded(jnp.zeros(KIB), "x")})
    # The second lies in two halves on two devices each.
    assert trees.probe() == (Residency.RESIDENT, (4 + 2) * 4 * KIB, 0, {})
    assert trees.suspend("offload", ()) == Moved(bytes=2 * 4 * KIB)
    assert trees.probe() == (Residency.SUSPENDED, 0, 2 * 4 * KIB, {})
    assert trees.suspend("offload", ()) == Moved()
    assert trees.restore(()) == 2 * 4 * KIB
    assert trees.restore(()) == 0
    assert trees.probe() == (Residency.RESIDENT, (4 + 2) * 4 * KIB, 2 * 4 * KIB, {})


def test_nothing_there_is_absent() -> None:
    """F01: a job that registered before it made anything."""
    assert one(None)[1].probe() == (Residency.ABSENT, 0, 0, {})


def _loss(params: Any, batch: Any) -> Any:
    return jnp.mean((batch @ params["w"] + params["b"]) ** 2)


def _step(params: Any, momentum: Any, batch: Any) -> Any:
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, jax.grad(_loss)(params, batch))
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum


step = jax.jit(_step, donate_argnums=(0, 1))


def fresh() -> Pytrees:
    params = {"w": sharded(jnp.arange(32.0).reshape(8, 4) / 9, "x", "y"), "b": sharded(jnp.ones(4), "y")}
    return Pytrees("g", params=params, momentum=jax.tree.map(jnp.zeros_like, params))


def train(state: Pytrees, steps: int) -> None:
    for number in range(steps):
        batch = jax.random.normal(jax.random.key(number), (16, 8))
        state.params, state.momentum = step(state.params, state.momentum, batch)


def test_a_training_run_does_not_notice() -> None:
    """Suspended and restored in the middle, with donated buffers, it ends at the same bits as one left alone."""
    state, other = fresh(), fresh()
    trees = trees_of(state)
    for each in (state, other):
        train(each, 2)
    for _ in range(2):
        trees.suspend("offload", ())
        trees.restore(())
        for each in (state, other):
            train(each, 2)
    assert str(jax.tree.map(facts, state.params)) == str(jax.tree.map(facts, other.params))


def test_what_did_not_change_is_not_copied_again() -> None:
    """Frozen weights are copied once; what a step replaced is copied each time, and its old copy is let go at once."""
    state = Pytrees("g", base=jnp.ones(KIB), adapter=jnp.ones(KIB // 4))
    trees = trees_of(state)
    assert trees.suspend("offload", ()) == Moved(bytes=5 * KIB)
    trees.restore(())
    assert trees.probe()[2] == 5 * KIB
    state.adapter = state.adapter + 1
    assert trees.probe()[2] == 4 * KIB
    assert trees.suspend("offload", ()) == Moved(bytes=KIB, saved=4 * KIB)
    trees.restore(())
    assert float(state.adapter[0]) == 2.0
    assert trees.suspend("offload", ()) == Moved(saved=5 * KIB)


def test_a_copy_of_a_donated_array_is_not_taken_for_good() -> None:
    """Somebody keeps the shell of an array whose memory was given to a computation: its copy is let go."""
    cell, trees = one(jnp.ones(KIB))
    trees.suspend("offload", ())
    trees.restore(())
    shell = cell.get()
    cell.assign(jax.jit(lambda x: x + 1, donate_argnums=0)(shell))
    assert shell.is_deleted()
    assert trees.probe()[1:3] == (4 * KIB, 0)
    assert trees._copies._good == {}
    assert trees.suspend("offload", ()) == Moved(bytes=4 * KIB)


def test_a_tree_in_the_middle_of_a_step_is_busy() -> None:
    """G19: its arrays were donated and the new ones are not there yet. Nothing has happened, and it may be asked
    again."""
    cell, trees = one({"a": jnp.ones(4), "b": jnp.ones(4)})
    donated = cell.get()["b"]
    result = jax.jit(lambda x: x + 1, donate_argnums=0)(donated)
    with pytest.raises(Busy, match="donated"):
        trees.suspend("offload", ())
    assert trees.probe()[:2] == (Residency.RESIDENT, 16)
    cell.assign({"a": cell.get()["a"], "b": result})
    assert trees.suspend("offload", ()) == Moved(bytes=32)


def test_use_while_it_is_out_says_so() -> None:
    """G20: reading and assigning, until it is back; others' references find JAX's own error."""
    state = Pytrees("g", params=jnp.ones(4))
    trees, kept = trees_of(state), state.params
    trees.suspend("offload", ())
    for use in (lambda: state.params, lambda: setattr(state, "params", 1)):
        with pytest.raises(UsageError, match=r"group g: params is in host memory.*hold\('g'\)"):
            use()
    with pytest.raises(RuntimeError, match="deleted"):
        kept + 1
    trees.restore(())
    state.params = state.params + 1
    assert float(state.params.sum()) == 8.0
    with pytest.raises(AttributeError, match=r"no tree 'opt'.*params"):
        state.opt  # noqa: B018


def test_parts_leave_by_name() -> None:
    """Tags are names; what stays is usable, and an array that is in both stays and is one array again."""
    shared = jnp.ones(KIB)
    state = Pytrees("g", policy={"w": shared}, reference=[shared, jnp.zeros(KIB)])
    trees = trees_of(state)
    assert trees.tags == ("policy", "reference")
    assert trees.probe() == (Residency.RESIDENT, 8 * KIB, 0, {"policy": 4 * KIB, "reference": 8 * KIB})
    trees.suspend("offload", ("reference",))
    assert trees.probe() == (Residency.SUSPENDED, 4 * KIB, 8 * KIB, {"policy": 4 * KIB, "reference": 0})
    assert float(state.policy["w"].sum()) == KIB
    assert trees.suspend("offload", ()) == Moved(saved=4 * KIB)
    assert trees.restore(()) == 8 * KIB
    assert state.policy["w"] is state.reference[0]


def test_a_shared_array_may_stay() -> None:
    """The part that comes back finds it where it is."""
    shared = jnp.ones(KIB)
    state = Pytrees("g", policy=shared, reference=[shared])
    trees = trees_of(state)
    trees.suspend("offload", ("reference",))
    assert trees.restore(()) == 0
    assert state.reference[0] is state.policy is shared


def test_a_restore_that_fails_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is full in the middle: it has nothing of this job again, and the copies are whole."""
    cell, trees = one([jnp.full(4, 1.0), jnp.full(4, 2.0)])
    trees.suspend("offload", ())
    made: list[Any] = []
    restored = jax_copy.Copy.restored

    def full(copy: Any) -> Any:
        if made:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        made.append(restored(copy))
        return made[0]

    with monkeypatch.context() as patch:
        patch.setattr(jax_copy.Copy, "restored", full)
        with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
            trees.restore(())
    assert made[0].is_deleted()
    assert trees.probe() == (Residency.SUSPENDED, 0, 32, {})
    trees.restore(())
    assert [float(each.sum()) for each in cell.get()] == [4.0, 8.0]


def test_without_host_memory_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy fails in the middle: all arrays are where they were."""
    cell, trees = one([jnp.ones(4), jnp.ones(4)])
    calls: list[Any] = []

    def scarce(value: Any) -> Any:
        calls.append(value)
        if len(calls) == 2:
            raise MemoryError
        return get(value)

    get = jax.device_get
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_get", scarce)
        with pytest.raises(MemoryError):
            trees.suspend("offload", ())
    assert trees.probe() == (Residency.RESIDENT, 32, 0, {})
    assert float(cell.get()[1].sum()) == 4.0


def test_wide_numbers_come_back_wide() -> None:
    """64 bits are a setting of the thread that made them; the thread that restores has not got it."""
    with jax.enable_x64(True):
        complex_ones = {"complex": jnp.arange(3) / 3j, "weak": jnp.asarray(1 / 3j)}
        cell, trees = one({"plain": jnp.arange(3.0) / 3, "sharded": sharded(jnp.arange(4), "x"), **complex_ones})
        before = str(jax.tree.map(facts, cell.get()))
    trees.suspend("offload", ())
    thread = threading.Thread(target=trees.restore, args=((),))
    thread.start()
    thread.join()
    assert [cell.get()[name].dtype for name in ("plain", "complex", "weak")] == [np.float64, *[np.complex128] * 2]
    assert str(jax.tree.map(facts, cell.get())) == before


def test_an_array_does_not_lie_on_its_copy() -> None:
    """On a CPU JAX shares memory with numpy where it can; what writes to the array would spoil the copy."""
    cell, trees = one(sharded(jnp.ones(KIB)))
    trees.suspend("offload", ())
    (copy,) = cell.copies()
    (content,) = copy._shards.values()
    trees.restore(())
    places = {shard.data.unsafe_buffer_pointer() for shard in cell.get().addressable_shards}
    assert content.ctypes.data not in places
    assert places


def test_a_device_may_be_guarded_against_transfers() -> None:
    """What moves is asked for explicitly, as jax.transfer_guard wants it."""
    cell, trees = one([sharded(jnp.ones(4), "x"), jnp.ones(4)])
    with jax.transfer_guard("disallow"):
        trees.suspend("offload", ())
        trees.restore(())
    assert cell.get()[0].sharding.spec == PartitionSpec("x")
    assert isinstance(cell.get()[1].sharding, SingleDeviceSharding)


@pytest.fixture
def stack() -> Iterator[LocalStack]:
    """Server, coordinator and agent with an emulated device, beside which the arrays of a CPU lie."""
    with (
        tempfile.TemporaryDirectory(prefix="tj-") as name,
        private_environment(Path(name)),
        LocalStack({"trainers": 1 << 20}) as local,
    ):
        yield local


def test_an_agent_moves_it_for_a_rival(stack: LocalStack) -> None:
    """Registered, a tree leaves when another job gets the group, and is back in the next hold as it was."""
    with job("a", JOB, stack.url) as a:
        assert a() == "registered"
        with job("b", RIVAL, stack.url) as b:
            assert b() == "inside"
            assert "params is in host memory" in a()
        assert a() == "restored True"


def test_a_function_needs_its_counterpart() -> None:
    """Said at registration."""
    with pytest.raises(UsageError, match="give both"):
        register_pytree("g", lambda: None)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_jobs_learn_together_what_they_learn_alone(tmp_path: Path) -> None:
    """G32: the shipped example, with evaluation and saving inside of holds: rewards and weights are those of the
    solo runs to the bit, and no two jobs compute at the same time."""
    report = tmp_path / "jax.json"
    command = [sys.executable, str(EXAMPLE), "--steps", "4", "--verifier", "0.2", "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert (found["results_equal"], found["overlaps"], found["jobs"]) == (True, 0, 2)
    assert found["swaps"] >= 4
    assert found["bytes_moved"] > 10 << 20
    assert {len(run["evals"]) for run in found["runs"].values()} == {1}
    assert len({run["weights"] for run in found["runs"].values()}) == 2
