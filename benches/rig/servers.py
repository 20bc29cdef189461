"""The servers that are compared, behind one small interface.

Invariants:
- Every server offers the same volumes by name: `uri(volume)`; `raw` offers a plain file instead.
- A server is ready when its constructor returns, and its files are in one directory of its own.
- Ports are free ones of 127.0.0.1; nothing is shared between two runs of a script.
"""

import glob
import http.client
import json
import os
import pathlib
import shutil
import socket
import subprocess
import time

from . import life, nbd

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
BUCKET = "spindle-bench"
MIB = 1 << 20
READY_SECONDS_MAX = 60  # Chosen by hand: opening a pool with a full default log takes 5 s at most.
MEMORY_BYTES = 1 << 30  # the default budget; a larger memory cache comes on top
LOG_FILE_COUNT = 8
ANSWER_SECONDS_MAX = 600  # Chosen by hand: a drain, or a copy, of a large pool.


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def spindle_binary(given=None):
    """Returns the binary to measure: the named one, or the release build of this repository."""
    path = pathlib.Path(given) if given else REPOSITORY / "target/release/spindle"
    if not os.access(path, os.X_OK):
        raise life.Missing(f"{path} is not there. Build it: cargo build --release")
    return path


def cached_minio():
    """Returns the MinIO that tests and examples build into the user's cache, if it exists."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = os.environ.get("SPINDLE_TEST_CACHE") or f"{base}/spindle-tests"
    for path in [*sorted(glob.glob(f"{cache}/minio-*/minio")), shutil.which("minio")]:
        if path and os.access(path, os.X_OK):
            return path
    return None


class Server:
    """A server; `name` is its name in the table, `pids` are the processes whose CPU time counts."""

    name = ""
    pids = ()
    # Whether acknowledged data may still have to move.
    destages = False

    def uri(self, volume):
        """Returns the URI of the volume."""
        raise NotImplementedError

    def settle(self):
        """Waits until acknowledged data is in its final place; returns the seconds that this took."""
        return 0.0

    def fio_target(self, volume, is_depth_one=False):
        """Returns fio's options to reach the volume."""
        return {"ioengine": "nbd", "uri": self.uri(volume)}


class Spindle(Server):
    """`spindle serve` on a directory of its own, configured by a file.

    `volumes` are sizes by name; `durability` names that of a volume which is not "flush". With
    "store" a flush waits until the object store has everything; with "write" each write is synced.
    """

    destages = True

    def __init__(self, world, name, binary, core, volumes, store=None, env=None, settings=None,
                 durability=None, is_started=True):
        self.world, self.name, self.binary, self.core, self.store = world, name, binary, core, store
        self.dir = os.path.join(world.dir, name.replace(" ", "-"))
        self.log = f"{self.dir}.log"
        self.env = {"SPINDLE_LOG": "warn", **(env or {})}
        os.makedirs(self.dir)
        tables = [{"name": volume, "size": str(size_bytes),
                   "durability": (durability or {}).get(volume, "flush")}
                  for volume, size_bytes in volumes.items()]
        self.config = f"{self.dir}.toml"
        with open(self.config, "w") as config:
            config.write(toml({**(settings or {}), "volumes": tables}))
        if is_started:
            self.start()

    def listener(self):
        """Returns the options of `serve` with its addresses."""
        return ["--nbd", "127.0.0.1:0"]

    def start(self):
        command = [self.binary, "serve", "--dir", self.dir, "-c", self.config, *self.listener()]
        if self.store:
            command += ["--store", self.store]
        self.child, lines = start_until_ready(self.world, self.name, command, self.dir, self.core, self.env)
        self.uris = {uri.rpartition("/")[2]: uri for uri in lines if uri.startswith("nbd://")}
        self.pids = (self.child.pid,)

    def uri(self, volume):
        return self.uris[volume]

    def settle(self):
        started = time.monotonic()
        self.command("drain", check=True)
        return time.monotonic() - started

    def command(self, name, check=False, more=()):
        """Runs a command of the binary on this pool."""
        command = [str(self.binary), name, *more, "--dir", self.dir]
        if self.store and name == "fsck":
            command += ["--store", self.store]
        return subprocess.run(command, env={**os.environ, **self.env}, check=check,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def ask(self, noun, action, **fields):
        """Sends a request to the admin socket, without a process, and returns the reply."""
        return ask(self.dir, noun, action, **fields)

    def fsck(self):
        """Runs `spindle fsck` on the stopped pool; returns exit status and output."""
        done = self.command("fsck")
        return done.returncode, done.stdout.strip()

    def stop(self):
        return self.world.stop(self.child)


def start_until_ready(world, name, command, dir, core=None, env=None):
    """Starts a daemon on its directory; returns its process, and the lines that it printed until ready."""
    said = f"{dir}.stdout"
    with open(said, "wb") as stdout:
        child = world.start(command, f"{dir}.log", core, env, stdout)

    def ready():
        with open(said) as file:
            lines = file.read().splitlines()
        return lines if "ready" in lines else None

    return child, life.until(ready, f"start {name}", READY_SECONDS_MAX, child=child)


def ask(dir, noun, action, **fields):
    """Sends a request to the admin socket of the daemon on a directory, and returns the reply."""
    with socket.socket(socket.AF_UNIX) as admin:
        admin.settimeout(ANSWER_SECONDS_MAX)
        admin.connect(os.path.join(dir, "admin.sock"))
        request = {noun: {"action": action, **fields}}
        admin.sendall(json.dumps({"version": 1, "request": request}).encode() + b"\n")
        said = b""
        while not said.endswith(b"\n"):
            part = admin.recv(1 << 20)
            if not part:
                break
            said += part
    answer = json.loads(said)
    if "ok" not in answer:
        raise RuntimeError(f"{noun} {action}: {answer}")
    return answer["ok"]


def settings(memory_cache_bytes=None, log_bytes=None, log_io=None):
    """Settings of spindle.toml that a measurement changes; `None` leaves the default."""
    chosen = {}
    if memory_cache_bytes is not None:
        chosen["memory"] = str(MEMORY_BYTES + memory_cache_bytes)
        chosen["memory_cache"] = {"size": str(memory_cache_bytes)}
    if log_bytes is not None:
        chosen["log"] = {"size": str(log_bytes), "file_size": str(log_bytes // LOG_FILE_COUNT)}
    if log_io is not None:
        chosen.setdefault("log", {})["io"] = log_io
    return chosen


def toml(settings):
    """`{"log": {"size": "1G"}, "volumes": [{…}]}` as TOML; strings, numbers, booleans, and lists of them."""

    def pairs(values):
        return [f"{key} = {json.dumps(value)}" for key, value in values.items()]

    lines = pairs({k: v for k, v in settings.items() if not isinstance(v, (dict, list))})
    for section, values in settings.items():
        if isinstance(values, dict):
            lines += [f"[{section}]", *pairs(values)]
        elif isinstance(values, list):
            for item in values:
                lines += [f"[[{section}]]", *pairs(item)]
    return "\n".join(lines) + "\n"


class NbdkitFile(Server):
    """`nbdkit file` on a directory of files, through the page cache."""

    def __init__(self, world, name, core, files):
        self.name, self.files = name, files
        self.port = free_port()
        command = ["nbdkit", "-f", "-i", "127.0.0.1", "-p", self.port, "file", f"dir={files.dir}"]
        child = world.start(command, os.path.join(world.dir, "nbdkit-file.log"), core)
        self.pids = (child.pid,)
        wait_for(self, files.any_volume(), child)

    def uri(self, volume):
        return f"nbd://127.0.0.1:{self.port}/{volume}"


class NbdkitNull(Server):
    """`nbdkit null`, which does nothing and so shows the limit of the client."""

    def __init__(self, world, core, size_bytes):
        self.name = "nbdkit null"
        self.port = free_port()
        command = ["nbdkit", "-f", "-i", "127.0.0.1", "-p", self.port, "null", size_bytes]
        child = world.start(command, os.path.join(world.dir, "nbdkit-null.log"), core)
        self.pids = (child.pid,)
        wait_for(self, "", child)

    def uri(self, _volume):
        return f"nbd://127.0.0.1:{self.port}/"


class QemuNbd(Server):
    """`qemu-nbd`, one process per volume."""

    def __init__(self, world, core, files, cache):
        self.name = "qemu-nbd"
        self.ports, pids = {}, []
        for volume, path in files.paths.items():
            port = self.ports[volume] = free_port()
            command = ["qemu-nbd", "-t", "-e", "8", "-f", "raw", f"--cache={cache}", "-b",
                       "127.0.0.1", "-p", port, "-x", volume, path]
            child = world.start(command, os.path.join(world.dir, f"qemu-nbd-{volume}.log"), core)
            pids.append(child.pid)
            wait_for(self, volume, child)
        self.pids = tuple(pids)

    def uri(self, volume):
        return f"nbd://127.0.0.1:{self.ports[volume]}/{volume}"


class Raw(Server):
    """No server: the same requests with O_DIRECT on a file."""

    def __init__(self, files):
        self.name = "raw direct"
        self.files = files

    def fio_target(self, volume, is_depth_one=False):
        # One request at a time needs no ring; a system call is then the shortest way.
        engine = "psync" if is_depth_one else "io_uring"
        return {"ioengine": engine, "filename": self.files.paths[volume], "direct": 1}


class Files:
    """One sparse file per volume."""

    def __init__(self, dir, volumes):
        self.dir = dir
        os.makedirs(dir)
        self.paths = {volume: os.path.join(dir, volume) for volume in volumes}
        for volume, size_bytes in volumes.items():
            with open(self.paths[volume], "wb") as file:
                file.truncate(size_bytes)

    def any_volume(self):
        return next(iter(self.paths))


class Minio:
    """An S3 server on local disk. `env` is the environment that its clients need.

    With `drive_count`, it has so many directories under its own erasure code, two of them for parity.
    """

    def __init__(self, world, binary, drive_count=1, core=None):
        self.dir = os.path.join(world.dir, "minio")
        self.port = port = free_port()
        user, password = "spindle", os.urandom(16).hex()
        env = {"MINIO_ROOT_USER": user, "MINIO_ROOT_PASSWORD": password, "MINIO_UPDATE": "off"}
        where, drives = self.dir, [self.dir]
        if drive_count > 1:
            where = f"{self.dir}/drive{{1...{drive_count}}}"
            drives = [f"{self.dir}/drive{number}" for number in range(1, drive_count + 1)]
            env["MINIO_STORAGE_CLASS_STANDARD"] = "EC:2"
        for drive in drives:
            os.makedirs(drive)
        if drive_count > 1 and os.stat(self.dir).st_dev == os.stat("/").st_dev:
            env["MINIO_CI_CD"] = "on"  # it takes no drives on the disk of the root otherwise
        command = [binary, "server", "--quiet", "--address", f"127.0.0.1:{port}",
                   "--console-address", f"127.0.0.1:{free_port()}", where]
        self.world = world
        self.child = world.start(command, os.path.join(world.dir, "minio.log"), core, env)
        self.pids = (self.child.pid,)
        self.url = f"s3://{BUCKET}/pool"
        self.env = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": user,
            "AWS_SECRET_ACCESS_KEY": password,
            "AWS_REGION": "us-east-1",
        }
        life.until(self.is_ready, "start MinIO", READY_SECONDS_MAX, child=self.child)
        # A directory in the root of each drive is a bucket.
        for drive in drives:
            os.makedirs(os.path.join(drive, BUCKET))

    def is_ready(self):
        """Returns whether it has formatted enough drives to take objects."""
        asked = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        try:
            asked.request("GET", "/minio/health/cluster")
            return asked.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            asked.close()

    def kill(self):
        life.kill_group(self.child)
        self.world.children.remove(self.child)
        self.pids = ()


def wait_for(server, volume, child):
    def ready():
        try:
            return nbd.size_bytes(server.uri(volume)) > 0
        except OSError:
            return False

    life.until(ready, f"start {server.name}", READY_SECONDS_MAX, child=child)
