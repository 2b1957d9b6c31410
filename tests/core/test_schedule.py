"""The denoising schedule: which steps cluster, smooth, and run unquantised."""

import dataclasses
import json
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vc_jax
from vc_jax import DenoisingSchedule


@pytest.mark.parametrize(
    ("steps", "refreshes"),
    [
        (40, (0, 4, 8)),
        (50, (0, 4, 8, 12)),
        (8, (0,)),
        (1, (0,)),
        (4, (0,)),
        (5, (0,)),
        (16, (0,)),
        (17, (0, 4)),
    ],
)
def test_values_are_clustered_every_fourth_step_of_the_first_quarter(steps, refreshes):
    schedule = DenoisingSchedule(steps)
    assert schedule.refresh_steps == refreshes
    found = jax.jit(jax.vmap(schedule.refreshes))(jnp.arange(steps))
    assert tuple(np.flatnonzero(found).tolist()) == refreshes


def test_the_window_is_the_first_quarter_rounded_up():
    for steps in range(1, 300):
        schedule = DenoisingSchedule(steps)
        assert schedule.smoothing_steps == -(-steps // 4)
    window = [bool(DenoisingSchedule(10).in_window(step)) for step in range(10)]
    assert window == [True] * 3 + [False] * 7


@pytest.mark.parametrize(("fraction", "length"), [(0.0, 0), (1.0, 40), (0.3, 12), (0.01, 1)])
def test_the_window_may_be_any_share_of_the_steps(fraction, length):
    schedule = DenoisingSchedule(40, smoothing_fraction=fraction, refresh_every=7)
    assert schedule.smoothing_steps == length == math.ceil(round(fraction * 40, 6))
    assert schedule.refresh_steps == tuple(range(0, length, 7))
    assert [bool(schedule.in_window(step)) for step in range(40)].count(True) == length


def test_the_first_and_last_steps_may_run_in_high_precision():
    schedule = DenoisingSchedule(10, high_precision_steps=(2, 3))
    found = jax.jit(jax.vmap(schedule.high_precision))(jnp.arange(10))
    assert np.flatnonzero(found).tolist() == [0, 1, 7, 8, 9]
    assert not any(bool(DenoisingSchedule(10).high_precision(step)) for step in range(10))


def test_a_schedule_is_frozen_and_hashable():
    schedule = DenoisingSchedule(40, 0.25, 4, (0, 0))
    assert schedule == DenoisingSchedule(40)
    assert hash(schedule) == hash(DenoisingSchedule(40))
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.num_steps = 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_steps", 0),
        ("num_steps", 2.5),
        ("num_steps", True),
        ("smoothing_fraction", -0.1),
        ("smoothing_fraction", 1.5),
        ("smoothing_fraction", math.nan),
        ("smoothing_fraction", "all"),
        ("refresh_every", 0),
        ("refresh_every", 1.0),
        ("high_precision_steps", 3),
        ("high_precision_steps", (1,)),
        ("high_precision_steps", (-1, 0)),
        ("high_precision_steps", (1.0, 0)),
    ],
)
def test_a_wrong_field_is_named(field, value):
    with pytest.raises(ValueError, match=field):
        vc_jax.DenoisingSchedule(**({"num_steps": 40} | {field: value}))


def test_numpy_numbers_are_numbers():
    schedule = DenoisingSchedule(
        np.int64(40), np.float32(0.25), np.int32(4), (np.int64(1), np.int64(2))
    )
    assert schedule == DenoisingSchedule(40, 0.25, 4, (1, 2))
    assert hash(schedule) == hash(DenoisingSchedule(40, 0.25, 4, (1, 2)))


def test_a_schedule_comes_back_from_json_and_from_a_pickle():
    schedule = DenoisingSchedule(40, high_precision_steps=(1, 2))
    read = DenoisingSchedule(**json.loads(json.dumps(dataclasses.asdict(schedule))))
    assert read == schedule == pickle.loads(pickle.dumps(schedule))
    assert hash(read) == hash(schedule)
