"""The mathematics of a demo job."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from timeslice.demo.grpo import TOKENS, Array, Rollouts, Sampler, Trainer, Work, advantages, encode
from timeslice.demo.verifier import score

SMALL = Work(modulus=4, width=256, prompts=32, samples=8, minibatches=2, rate=1e-2)
TINY = Work(modulus=3, width=12, prompts=4, samples=3, minibatches=2, replayed=2, dtype="float64")


def loaded(work: Work) -> tuple[Sampler, Trainer]:
    sampler, trainer = Sampler(work, np.zeros), Trainer(work, np.zeros)
    sampler.load()
    trainer.load()
    return sampler, trainer


def scored(work: Work, rollouts: Rollouts) -> Array:
    return np.array(score(work.modulus, rollouts.prompts.tolist(), rollouts.tokens.tolist()), float)


def learn(work: Work, steps: int) -> tuple[list[float], Array]:
    sampler, trainer = loaded(work)
    rewards = []
    for step in range(steps):
        rollouts = sampler.generate(step)
        found = scored(work, rollouts)
        rewards.append(float(found.mean()))
        sampler.trained[:] = trainer.train(rollouts, found)
    return rewards, trainer.trained


def test_the_gradient_is_that_of_the_loss() -> None:
    """Finite differences of the clipped objective agree with the gradient for every parameter, clip binding or not."""
    sampler, trainer = loaded(TINY)
    random = np.random.default_rng(3)
    trainer.trained[:] += 0.3 * random.standard_normal(trainer.trained.shape)  # away from where the ratio is 1
    part = sampler.generate(0).part(0, TINY.batch // 2)
    gains = random.standard_normal(part.tokens.shape)
    assert clipped_share(trainer, part, gains) not in {0.0, 1.0}
    trainer.loss(part, gains)
    analytic = trainer.gradient.copy()
    numeric = np.empty_like(analytic)
    for index in range(len(numeric)):
        before = trainer.trained[index]
        sides = []
        for shift in (1e-6, -1e-6):
            trainer.trained[index] = before + shift
            sides.append(trainer.loss(part, gains))
        trainer.trained[index] = before
        numeric[index] = (sides[0] - sides[1]) / 2e-6
    assert np.abs(analytic).max() > 1e-3
    np.testing.assert_allclose(numeric, analytic, atol=1e-7)


def clipped_share(trainer: Trainer, part: Rollouts, gains: Array) -> float:
    """Share of the tokens at which the clip binds: there, doubling the gain changes no gradient."""
    bound = 0
    for row, token in itertools.product(range(len(gains)), range(TOKENS)):
        alone = np.zeros_like(gains)
        alone[row, token] = gains[row, token]
        trainer.loss(part, alone)
        bound += not trainer.gradient.any()
    return bound / gains.size


def test_the_reward_rises() -> None:
    """The policy learns: it starts at chance and is far above it after some steps."""
    rewards, _ = learn(SMALL, 40)
    assert np.mean(rewards[:3]) == pytest.approx(1 / SMALL.modulus, abs=0.1)
    assert np.mean(rewards[-3:]) > 0.6


def test_the_same_seed_gives_the_same_bits() -> None:
    """Two runs agree in every bit of rewards and parameters; another seed gives others."""
    first, second = learn(SMALL, 3), learn(SMALL, 3)
    assert first[0] == second[0]
    assert first[1].tobytes() == second[1].tobytes()
    other = Work(**{**vars(SMALL), "seed": 1})
    assert learn(other, 3)[1].tobytes() != first[1].tobytes()


def test_token_by_token_or_all_at_once_the_policy_is_the_same() -> None:
    """The log-probabilities noted while drawing are those that training computes: the ratio starts at 1."""
    sampler, trainer = loaded(SMALL)
    random = np.random.default_rng(0)
    sampler.trained[:] += 0.3 * random.standard_normal(sampler.trained.shape).astype(np.float32)
    trainer.trained[:] = sampler.trained
    rollouts = sampler.generate(0)
    assert rollouts.logps.std() > 0.1
    # With a ratio of 1 everywhere the loss of all-one gains is exactly -1.
    assert trainer.loss(rollouts.part(0, 64), np.ones((64, TOKENS))) == pytest.approx(-1, abs=1e-4)


def test_answers_are_drawn_with_the_probabilities_of_the_policy() -> None:
    """A bias towards a token is seen in the share of answers that have it."""
    sampler, _ = loaded(SMALL)
    sampler.trained[-SMALL.modulus :] = np.log([0.1, 0.2, 0.3, 0.4])
    tokens = np.concatenate([sampler.generate(step).tokens.reshape(-1) for step in range(20)])
    np.testing.assert_allclose(np.bincount(tokens) / tokens.size, [0.1, 0.2, 0.3, 0.4], atol=0.02)


def test_advantages_compare_within_a_group_only() -> None:
    """A group that is right throughout teaches as little as one that is wrong throughout."""
    work = Work(modulus=4, prompts=3, samples=2)
    rewards = np.array([[1, 1, 1], [1, 1, 1], [0, 0, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0]], float)
    gains = advantages(work, rewards)
    assert not gains[:4].any()
    np.testing.assert_allclose(gains[4:, 0], [1, -1], rtol=1e-3)
    assert not gains[4:, 1:].any()


def test_the_batch_before_is_trained_on_again() -> None:
    """The replayed rollouts matter: with other ones in the buffer, the next update is another."""
    results = []
    for change in (0, 1):
        sampler, trainer = loaded(SMALL)
        for step in range(2):
            rollouts = sampler.generate(step)
            trained = trainer.train(rollouts, scored(SMALL, rollouts))
            sampler.trained[:] = trained
            trainer.replay.tokens[:] = (trainer.replay.tokens + change) % SMALL.modulus
        results.append(trained.tobytes())
    assert results[0] != results[1]


def test_the_input_names_pair_position_and_token_before() -> None:
    """Each row has four ones, each in the range of its own."""
    row = encode(TINY, np.array([[2, 1]]), 1, np.array([0]))[0]
    assert np.flatnonzero(row).tolist() == [2, 3 + 1, 6 + 1, 9 + 0]
    assert np.flatnonzero(encode(TINY, np.array([[0, 0]]), 0, None)[0]).tolist() == [0, 3, 6, 9 + 3]


def test_only_right_answers_are_rewarded() -> None:
    """a+b, a-b and a*b modulo m, token by token."""
    assert score(5, [[3, 4], [3, 4]], [[2, 4, 2], [0, 4, 3]]) == [[1, 1, 1], [0, 1, 0]]
