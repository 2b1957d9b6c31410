"""Two processes of one device each, joined by `jax.distributed` over loopback."""

import socket
import subprocess
import sys

from . import devices


def test_eager_calls_and_a_model_in_two_processes(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "tests.sharding.two_processes", port]
    running = [
        subprocess.Popen(
            [*command, str(place), str(tmp_path)],
            env=devices.environment(1),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for place in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(outputs)[-6000:]
