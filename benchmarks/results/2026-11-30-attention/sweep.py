"""The sweep behind `sweep.json` and the table behind `final.json`, with `vc_jax.benchmarks`.

python sweep.py OUTPUT_FOLDER
"""

import json
import pathlib
import sys

from vc_jax.benchmarks import attention
from vc_jax.benchmarks._peers import available_peers
from vc_jax.benchmarks._workloads import WORKLOADS
from vc_jax.pallas_kernels.hopper import Config

SWEEP = [
    ("fp8 c2k3v3", "fp8", True, Config(value_slots=3), "expcast"),
    ("fp8 c2k3v2", "fp8", True, Config(), "expcast"),
    ("fp8 c4k3v3", "fp8", True, Config(cluster=4, value_slots=3), "expcast"),
    ("fp8 c1k3v3", "fp8", True, Config(cluster=1, value_slots=3), "expcast"),
    ("fp8 nomeans", "fp8", False, Config(value_slots=3), "expcast"),
    ("int8 c2k3v3", "int8", True, Config(value_slots=3), "expcast"),
    ("int8 c4k3v3", "int8", True, Config(cluster=4, value_slots=3), "expcast"),
    ("int8 nomeans", "int8", False, Config(value_slots=3), "expcast"),
    ("fp8 exp", "fp8", True, Config(value_slots=3), "exp"),
]


def main(folder: pathlib.Path) -> None:
    """Run both and write JSON."""
    peers, _ = available_peers()
    baseline = {name: peers[name] for name in peers if name == attention.BASELINE}
    standard = list(attention.standard_variants(["fp8", "int8"]))
    runs = {
        "sweep": [("s75k-h8", SWEEP, baseline, 0.7)],
        "final": [
            ("s8k-h24", standard, baseline, 0.35),
            ("s32k-h16", standard, peers, 0.35),
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, entries in runs.items():
        rows = []
        for workload, variants, against, seconds in entries:
            found = attention.measure(
                WORKLOADS[workload], variants, seconds=seconds, rounds=2, peers=against
            )
            rows += found
            print(f"{workload}\n{attention.workload_table(found)}", flush=True)
        (folder / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
