"""`vc-jax bench sharded` on simulated devices: that it runs, and that its checks can fail."""

import dataclasses
import sys
from typing import Any

import jax

from vc_jax.benchmarks import _sharded_calls as calls
from vc_jax.benchmarks._video_models import VideoModel
from vc_jax.benchmarks._workloads import Workload
from vc_jax.models import wan

from . import devices

WAN = VideoModel(
    "small",
    "small",
    wan.Wan,
    dataclasses.replace(
        wan.T2V_A14B, num_layers=2, num_heads=2, head_dim=32, ffn_dim=64, text_dim=16
    ),
    "small",
    (1, 16, 2, 8, 8),
    {"text": (1, 7, 16)},
)


def log(text: str) -> None:
    print(text, file=sys.stderr)


def check_calls():
    """23 tokens become 22; three heads go by a ring only; rows of one device come first."""
    rows = calls.measure_calls(Workload("small", 23, 3, 32), ["bf16"], [2], 0.01, log)
    assert [row["method"] for row in rows] == [None, "ulysses", "ring"]
    assert "needs key heads" in rows[1]["refused"]
    assert rows[2]["right"]
    assert rows[2]["tokens"] == 22
    assert rows[2]["sent_bytes"] == 2 * 11 * 3 * 32 * 2


def check_a_wrong_result_is_seen():
    right = calls.vc_jax.sharding.sharded_attention

    def wrong(*tensors: jax.Array, **options: Any) -> Any:
        return jax.tree.map(lambda x: 1.1 * x, right(*tensors, **options))

    calls.vc_jax.sharding.sharded_attention = wrong
    try:
        rows = calls.measure_calls(Workload("small", 22, 2, 32), ["bf16"], [2], 0.01, log)
    finally:
        calls.vc_jax.sharding.sharded_attention = right
    assert [row["right"] for row in rows[1:]] == [False, False]


def check_link():
    found = calls.measure_link(2, 0.1, 0.01)
    assert sorted(found) == ["all-to-all", "collective-permute"]
    assert min(found.values()) > 0


def check_steps():
    rows = calls.measure_steps(WAN, ["bf16"], [2], 0.01, log)
    assert [row["devices"] for row in rows] == [1, 2]
    assert all(row["right"] for row in rows)
    assert 0 < rows[1]["relative_l2"] < 0.02


if __name__ == "__main__":
    assert jax.device_count() >= 2
    devices.run(sys.modules["__main__"])
