"""Block devices of the guest's kernel that are compared, each behind the interface of a server.

Invariants:
- It runs in a guest kernel of its own (`tests/guest`), as root; devices of a machine are left alone.
- A device is there when its constructor returns, and gone when `close` does. It is closed before its
  server is stopped, because requests without a server wait for ever.
- What is stored lies in the directory of the `Life`, for all alike.
"""

import glob
import json
import os
import pathlib
import subprocess

from . import life, servers

RUBLK_VERSION = "0.2.15"
DEPTH = 64  # requests in flight on a device: spindle's default, and rublk's option
VOLUMES = ("u", "n", "m")  # for ublk, for nbd, and for nbd over several connections
FILL_BYTES = 1 << 20
LOG_SECONDS_MAX = 120  # Chosen by hand: a file a second, after earlier load has passed.


def cached_rublk():
    """Returns rublk of that version, built from crates.io once; `None` if that fails."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = pathlib.Path(os.environ.get("SPINDLE_TEST_CACHE") or f"{base}/spindle-tests")
    place = cache / f"rublk-{RUBLK_VERSION}"
    if not (place / "bin/rublk").exists():
        cache.mkdir(parents=True, exist_ok=True)
        part, log = f"{place}.part", f"{place}.log"
        print(f"building rublk {RUBLK_VERSION} (once, some minutes)", flush=True)
        command = ["nice", "-n", "15", "cargo", "install", "rublk", "--version", RUBLK_VERSION,
                   "--locked", "--root", part, "--target-dir", f"{part}/target"]
        with open(log, "wb") as sink:
            built = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
        if built.returncode:
            print(f"skipped: rublk: {life.tail(log, 3)}\n"
                  "It needs libclang: apt-get install libclang-dev", flush=True)
            return None
        subprocess.run(["rm", "-rf", f"{part}/target"], check=True)
        os.rename(part, place)  # so that an incomplete one is never found
    return place / "bin/rublk"


def run(*command):
    """Runs a command that must succeed, and returns its output."""
    done = subprocess.run([str(part) for part in command], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stdout[-1000:]}")
    return done.stdout


class Backing:
    """An ext4 for all systems, on a loop device with direct I/O over a file in memory.

    The file is in memory, so that the machine's disk, its other users and its page cache are not
    measured. As there is one CPU, each request to this file system takes CPU time from its server.
    """

    make = ("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0")

    def __init__(self, mountpoint, size_bytes):
        self.mountpoint, self.file = mountpoint, f"{mountpoint}.file"
        os.makedirs(mountpoint)
        with open(self.file, "wb") as file:
            file.truncate(size_bytes)
        self.device = run("losetup", "--direct-io=on", "--find", "--show", self.file).strip()
        run(*self.make, self.device)
        run("mount", "-o", "discard", self.device, mountpoint)

    def __enter__(self):
        return self.mountpoint

    def __exit__(self, *_):
        subprocess.run(["umount", self.mountpoint])
        subprocess.run(["losetup", "--detach", self.device])
        os.unlink(self.file)


class Device(servers.Server):
    """A device under test; `node` is the device or file that fio uses."""

    node = ""

    def fio_target(self, volume, is_depth_one=False):
        # One request at a time needs no ring; a system call is then the shortest way.
        engine = "psync" if is_depth_one else "io_uring"
        return {"ioengine": engine, "filename": self.node, "direct": 1}

    def destaged_bytes(self):
        """Returns the bytes destaged since the start; `None` if the system does not destage."""
        return None

    def close(self):
        """Removes the device."""


class RawFile(Device):
    """No server: a file of the backing file system itself."""

    def __init__(self, world, name, size_bytes):
        self.name = name
        self.node = make_file(world, name, size_bytes)


class Rublk(Device):
    """`rublk` as a null device or as a loop device over a file, depending on its name."""

    count = 0

    def __init__(self, world, name, binary, size_bytes):
        self.world, self.name, self.binary = world, name, binary
        Rublk.count += 1
        self.number = 20 + Rublk.count
        self.node = f"/dev/ublkb{self.number}"
        kind = name.split()[1]
        command = [binary, "add", kind, "-n", self.number, "-q", 1, "-d", DEPTH, "--foreground"]
        if kind == "loop":
            command += ["-f", make_file(world, name, size_bytes)]
        if name.endswith("buffered"):
            command += ["--buffered-io"]
        self.child = world.start(command, os.path.join(world.dir, f"{name}.log".replace(" ", "-")))
        self.pids = (self.child.pid,)
        life.until(lambda: os.path.exists(self.node), f"start {name}", child=self.child)

    def close(self):
        # It sometimes ends with 101 although the device is gone.
        subprocess.run([self.binary, "del", "-n", str(self.number)], stdin=subprocess.DEVNULL,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.world.stop(self.child)


class GuestSpindle(servers.Spindle):
    """A daemon that listens on its socket only."""

    def listener(self):
        return ["--nbd-unix", f"{self.dir}/nbd.sock"]

    def destaged_bytes(self):
        done = self.command("status", more=["-o", "json"], check=True)
        return json.loads(done.stdout)["destage"]["destaged_bytes"]

    def wait_for_log(self):
        """Waits until all files of the write log are made; an idle daemon makes one per second."""
        def is_made():
            return len(glob.glob(f"{self.dir}/log/ring-*.log")) == servers.LOG_FILE_COUNT
        life.until(is_made, "make the files of the log", LOG_SECONDS_MAX, child=self.child)


class SpindleDevice(Device):
    """One device of a daemon; its name ends with "ublk", "nbd", or "nbd x4"."""

    destages = True

    def __init__(self, spindle, name):
        self.spindle, self.name, self.pids = spindle, name, spindle.pids
        kind, _, count = name.partition(" ")[2].partition(" x")
        if kind == "ublk":
            self.volume = "u"
            self.node = attach_ublk(spindle, self.volume)
        else:
            self.volume = "m" if count else "n"
            self.node = attach_nbd(spindle, self.volume, int(count or 1))

    def settle(self):
        return self.spindle.settle()

    def destaged_bytes(self):
        return self.spindle.destaged_bytes()

    def close(self):
        self.spindle.command("detach", more=[self.volume], check=True)


def attach_ublk(spindle, volume):
    done = spindle.command("attach", more=[volume, "--depth", str(DEPTH), "-o", "json"], check=True)
    return json.loads(done.stdout)["device"]


def attach_nbd(spindle, volume, connection_count):
    """Makes a volume a device of the kernel's nbd driver and returns it."""
    more = [volume, "--nbd", "--connections", str(connection_count), "-o", "json"]
    return json.loads(spindle.command("attach", more=more, check=True).stdout)["device"]


def make_file(world, name, size_bytes):
    """Makes a file whose blocks are all written."""
    path = os.path.join(world.dir, f"{name}.file".replace(" ", "-"))
    zeroes = bytes(FILL_BYTES)
    with open(path, "wb", buffering=0) as file:
        for _ in range(size_bytes // FILL_BYTES):
            file.write(zeroes)
        os.fsync(file.fileno())
    return path
