"""DDP-wrapped modules, DTensors and collective operations inside transforms, in two processes of a gloo group."""

import os
import subprocess
import sys

import pytest
import torch.distributed

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")

NAMES = [
    "collectives",
    "refused_collectives",
    "ddp_functional",
    "ddp_forward",
    "ddp_backward",
    "sharded_lanes",
    "sharded_inside",
    "per_lane_gradient",
    "gradient",
    "forward_mode",
    "jacobians",
    "captured",
    "captured_first",
    "of_captured",
    "of_lanes",
    "tensor_parallel",
    "captured_write",
    "drawn",
]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    store = tmp_path_factory.mktemp("gloo") / "store"
    command = [sys.executable, "-W", "ignore", "-m", "tests.distributed_worker"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([*command, str(rank), str(store)], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return dict(line.split(": ", 1) for line in outputs[0].splitlines() if ": " in line)


@pytest.mark.parametrize("name", NAMES)
def test_two_processes(verdicts, name):
    assert verdicts[name] == "right"
