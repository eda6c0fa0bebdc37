"""Flower's own processes on this machine: one SuperLink, some SuperNodes, a run of an app."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIG = '[superlink]\ndefault = "test"\n\n[superlink.test]\naddress = "{}"\ninsecure = true\n'


class Deployment:
    """What a test needs of the running processes."""

    def __init__(self, folder, environment, superlink, nodes):
        self.folder, self.environment = folder, environment
        self.superlink, self.nodes = superlink, nodes

    def submit(self, app):
        """`flwr run` of an app folder."""
        command = [_program("flwr"), "run", str(app), "test"]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def wait_for(self, file, seconds):
        """Wait until a file is there; on a time-out fail with the ends of all logs."""
        end = time.monotonic() + seconds
        while not file.is_file():
            gone = [p.args[0] for p in (self.superlink, *self.nodes) if p.poll() is not None]
            if time.monotonic() > end or self.superlink.poll() is not None:
                logs = [f"== {p.name}\n{p.read_text()[-3000:]}" for p in self.folder.glob("*.log")]
                raise AssertionError(f"no {file} in {seconds} s; ended: {gone}\n" + "\n".join(logs))
            time.sleep(0.5)


@contextmanager
def deployment(folder, nodes):
    """One SuperLink and so many SuperNodes on loopback, ended with everything that they started."""
    port, *node_ports = free_ports(1 + nodes)
    home = folder / "home"
    home.mkdir(parents=True)
    (home / "config.toml").write_text(CONFIG.format(f"127.0.0.1:{port}"))
    environment = {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),  # this checkout, wherever Flower's programs are installed
    }
    address = f"127.0.0.1:{port}"
    processes = []

    def start(name, *words):
        command = [_program(name), "--insecure", *words]
        log = (folder / f"{name}-{len(processes)}.log").open("w")
        processes.append(
            subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        )

    try:
        start("flower-superlink", "--port", str(port), "--disable-runtime-dependency-installation")
        _wait_for_port(port, processes[0])
        for number, node_port in enumerate(node_ports):
            words = ["--superlink", address, "--port", str(node_port)]
            start("flower-supernode", *words, "--node-config", f"partition-id={number}")
        yield Deployment(folder, environment, processes[0], processes[1:])
    finally:
        for process in processes:
            _end(process)


def free_ports(count):
    """Ports of the loopback interface that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _program(name):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    found = shutil.which(name, path=path)
    assert found is not None, f"{name} is not installed: it comes with flwr"
    return found


def _wait_for_port(port, process, seconds=90):
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError(f"{process.args[0]} does not listen on port {port}")


def _end(process):
    """End a process and all of its session, which this module made for it."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            return
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            continue
