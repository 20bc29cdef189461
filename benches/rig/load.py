"""Runs fio against a server and returns its measures.

Invariants:
- A final flush, where a row asks for one, is inside the time; on a volume of spindle whose
  durability is "store" so is the destage of everything.
- Latencies are those of whole requests, submission included. Where each write is followed by a
  flush, the two are added: the median is then close, the 99th percentile an upper bound.
- Buffers compress to about half, so that a server that compresses neither cheats nor suffers.
"""

import json
import os
import signal
import statistics
import time

from . import nbd
from .life import kill_group

COMPRESS_PERCENT = 50  # Chosen by hand: PostgreSQL pages compress to a quarter, media not at all.
BESIDE_SECONDS_MAX = 300  # Chosen by hand: far longer than a load takes, even on a busy machine.


class Seen:
    """One fio run. Times are in microseconds, rates per second."""

    def __init__(self, job, seconds_added=0.0):
        read, write, sync = job["read"], job["write"], job["sync"]
        self.io_count = read["total_ios"] + write["total_ios"]
        self.io_bytes = read["io_bytes"] + write["io_bytes"]
        self.write_count = write["total_ios"]
        self.write_bytes = write["io_bytes"]
        self.sync_count = sync["total_ios"]
        self.seconds = max(read["runtime"], write["runtime"]) / 1000 + seconds_added
        self.iops = self.io_count / self.seconds if self.seconds else 0.0
        self.mib_s = self.io_bytes / self.seconds / 2**20 if self.seconds else 0.0
        main = write if write["total_ios"] >= read["total_ios"] else read
        flushed_each = self.sync_count and self.sync_count >= 0.9 * self.write_count
        kinds = [main["lat_ns"]] + ([sync["lat_ns"]] if flushed_each else [])
        self.p50_us = sum(percentile_us(kind, "50.000000") for kind in kinds)
        self.p99_us = sum(percentile_us(kind, "99.000000") for kind in kinds)
        self.mean_us = sum(kind["mean"] for kind in kinds) / 1000
        every = [read["lat_ns"], write["lat_ns"], sync["lat_ns"]]
        self.worst_us = max(kind.get("max", 0) for kind in every) / 1000


def percentile_us(kind, which):
    return kind.get("percentile", {}).get(which, 0) / 1000


def arguments(target, job):
    """Builds fio's command line for one job; `job` and `target` use fio's own option names."""
    fixed = {
        "name": "row",
        "output-format": "json",
        "clat_percentiles": 0,
        "lat_percentiles": 1,
        "norandommap": 1,
        "randrepeat": 0,
        "buffer_compress_percentage": COMPRESS_PERCENT,
        "buffer_compress_chunk": 4096,
    }
    options = {**fixed, **target, **job}
    # --thread: a job in a process of its own would outlive fio, and fill the disk with complaints.
    return ["fio", "--thread"] + [f"--{name}={value}" for name, value in options.items()]


class Running:
    """fio at work; `finish` waits for it. See `Life.start` for `yields`."""

    def __init__(self, world, core, target, job, label, yields=False):
        self.out = os.path.join(world.dir, f"fio-{label}-{time.monotonic_ns()}")
        command = arguments(target, job) + [f"--output={self.out}.json"]
        self.world = world
        self.child = world.start(command, f"{self.out}.log", core, yields=yields)

    def finish(self, seconds_max):
        try:
            self.child.wait(seconds_max)
        finally:
            if self.child.poll() is None:
                kill_group(self.child)
            self.world.children.remove(self.child)
        with open(f"{self.out}.json") as report:
            text = report.read()
        if self.child.returncode != 0:
            with open(f"{self.out}.log") as log:
                text += log.read()
            raise RuntimeError(f"fio ended with {self.child.returncode}: {text[-1000:]}")
        job = json.loads(text[text.index("{"):])["jobs"][0]
        os.unlink(f"{self.out}.json")
        os.unlink(f"{self.out}.log")
        if job["error"]:
            raise RuntimeError(f"fio reports error {job['error']}")
        return job


class Beside:
    """Clients that read or write at a fixed rate until `finish`, which returns `[(time, us)]`."""

    def __init__(self, world, core, target, job):
        self.log = os.path.join(world.dir, f"beside-{time.monotonic_ns()}")
        # The option's name is about the log: it has the reads, too.
        job = {**job, "time_based": 1, "runtime": BESIDE_SECONDS_MAX, "write_lat_log": self.log,
               "log_unix_epoch": 1, "per_job_logs": 0}
        self.world = world
        self.fio = Running(world, core, target, job, "beside")
        time.sleep(1)  # fio needs a moment to connect and to begin

    def finish(self):
        os.kill(self.fio.child.pid, signal.SIGINT)
        self.fio.child.wait(BESIDE_SECONDS_MAX)
        self.world.children.remove(self.fio.child)
        with open(f"{self.log}_lat.log") as log:
            fields = [line.split(",") for line in log]
        return [(int(found[0]) / 1000, int(found[1]) / 1000) for found in fields]


def percentiles(latencies, begun, ended):
    """Returns median and 99th percentile of the requests that ended in a time."""
    chosen = sorted(us for at, us in latencies if begun <= at <= ended)
    if not chosen:
        return 0.0, 0.0
    return chosen[len(chosen) // 2], chosen[min(len(chosen) - 1, len(chosen) * 99 // 100)]


def run(world, core, server, volume, job, final_flush=False, seconds_max=3600):
    """Runs one job on one volume of one server."""
    target = server.fio_target(volume, job["iodepth"] == 1)
    if "filename" in target:
        job = dict(job, end_fsync=int(final_flush))
        if "fsync" in job:
            job["fdatasync"] = job.pop("fsync")
    report = Running(world, core, target, job, "row").finish(seconds_max)
    added = 0.0
    if final_flush and "uri" in target:
        started = time.monotonic()
        nbd.flush(target["uri"])
        added = time.monotonic() - started
    return Seen(report, added)


def fill(world, core, server, volume, size_bytes):
    """Writes a volume once, in sequence, and waits until its data is in its final place."""
    job = {"rw": "write", "bs": "1M", "iodepth": 4, "size": size_bytes, "refill_buffers": 1}
    run(world, core, server, volume, job, final_flush=True)
    server.settle()


def median(values):
    values = [value for value in values if value is not None]
    return statistics.median(values) if values else None
