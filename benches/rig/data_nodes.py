"""Pools whose segments are on data stores: directories, drives of data nodes, or a bucket.

Invariants:
- A data node is a `spindle dnode` with a directory, an address and drives of its own, made with the
  commands that docs/operations.md names. The first one founds the cluster.
- The processes of a pool are the daemon that serves it, its data nodes, and the S3 server behind it:
  `Pool.pids` has all that run, `Pool.owner.pids` the daemon alone.
- Caches are off, so that every read goes to the data stores.
"""

import contextlib
import os
import shutil
import signal
import time

from . import counters, life, nbd, servers
from .cluster import node_command

BACK_SECONDS_MAX = 120  # Chosen by hand: a store is asked again after 30 s at most.
# Reads that must all be answered by the store that has the fragment, before it counts as back.
BACK_READS = 200
BLOCK_BYTES = 4096


class DataNode:
    """A data node, which runs."""

    def __init__(self, world, pool_name, number, binary, core, drive_count=1, issuer=None):
        self.world, self.binary, self.core = world, binary, core
        self.name = f"d{number}"
        self.dir = os.path.join(world.dir, f"{pool_name}-{self.name}".replace(" ", "-"))
        self.drives = [f"{self.dir}-nvme{drive}" for drive in range(drive_count)]
        for place in (self.dir, *self.drives):
            os.makedirs(place)
        place = ["--address", f"127.0.0.1:{servers.free_port()}", "--name", self.name]
        if issuer is None:
            node_command(binary, self.dir, "init", *place)
        else:
            node_command(binary, self.dir, "join", issuer.token(), "--without-key", *place)
        self.start()

    @property
    def urls(self):
        return [f"spindle://{self.name}/{os.path.basename(drive)}" for drive in self.drives]

    def token(self):
        return servers.ask(self.dir, "node", "token")["token"]

    def start(self):
        drives = [part for drive in self.drives for part in ("--drive", drive)]
        command = [self.binary, "dnode", "--dir", self.dir, *drives]
        self.child, _ = servers.start_until_ready(self.world, self.name, command, self.dir, self.core,
                                                  {"SPINDLE_LOG": "error"})
        self.pids = (self.child.pid,)

    def kill(self):
        """Kills the process, if it runs."""
        if self.pids:
            life.kill_group(self.child)
            self.world.children.remove(self.child)
        self.pids = ()

    def lose(self):
        """Kills the process, and deletes its drives."""
        self.kill()
        for drive in self.drives:
            shutil.rmtree(drive)

    @contextlib.contextmanager
    def paused(self):
        """Stops the process from running until the end of the block."""
        os.kill(self.child.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.child.pid, signal.SIGCONT)


class Pool(servers.Server):
    """A pool over data nodes, directories (`data_dirs`), or the S3 server that is its store."""

    destages = True

    def __init__(self, world, name, binary, core, volumes, settings, scheme=None, data_dirs=(), nodes=(),
                 minio=None, lost_after=None):
        self.name, self.nodes, self.minio = name, list(nodes), minio
        stores = [{"url": url, "domain": url} for node in self.nodes for url in node.urls]
        for place in data_dirs:
            os.makedirs(place)
            stores.append({"url": place})
        self.data_dirs = list(data_dirs)
        if scheme:
            data = {"scheme": scheme, **({"lost_after": lost_after} if lost_after else {})}
            settings = {**settings, "data": data, "data.stores": stores}
        self.owner = servers.Spindle(world, name, binary, core, volumes, minio.url if minio else None,
                                     minio.env if minio else None, settings, is_started=False)
        if self.nodes:
            place = ["--address", f"127.0.0.1:{servers.free_port()}", "--name", "owner"]
            node_command(binary, self.owner.dir, "join", self.nodes[0].token(), *place)
        self.owner.start()

    @property
    def pids(self):
        of_nodes = [pid for node in self.nodes for pid in node.pids]
        return (*self.owner.pids, *of_nodes, *(self.minio.pids if self.minio else ()))

    def uri(self, volume):
        return self.owner.uri(volume)

    def settle(self):
        return self.owner.settle()

    def status(self):
        return self.owner.ask("pool", "status")

    def stores(self):
        """Returns the state and the counters of the data stores; zeroes for a pool without them."""
        none = {"read_count": 0, "degraded_read_count": 0, "hedged_read_count": 0, "written_bytes": 0,
                "stores": []}
        return self.status().get("data_stores") or none

    def decoded_count(self):
        return self.stores()["degraded_read_count"]

    def lose_one(self):
        """Loses the last of the data nodes, or of the directories, with all that it has."""
        if self.nodes:
            self.nodes[-1].lose()
        else:
            shutil.rmtree(self.data_dirs[-1])

    def wait_until_well(self, volume, size_bytes):
        """Waits until every store answers, and is asked first for what it has."""

        def is_well():
            if any("failure" in store for store in self.stores()["stores"]):
                return False
            before = self.decoded_count()
            self.read_some(volume, size_bytes)
            return self.decoded_count() == before

        life.until(is_well, f"bring the data stores of {self.name} back", BACK_SECONDS_MAX, 0.2)

    def read_some(self, volume, size_bytes):
        """Reads blocks all over a volume."""
        client = nbd.Client(self.uri(volume))
        for number in range(BACK_READS):
            client.read(size_bytes // BLOCK_BYTES * number // BACK_READS * BLOCK_BYTES, BLOCK_BYTES)
        client.close()

    def decoded_range(self, volume, size_bytes, step_bytes):
        """Returns offset and length of the longest range that must be decoded now; `None` if there is none."""
        client = nbd.Client(self.uri(volume))
        longest, begun, before = (0, 0), None, self.decoded_count()
        for at in range(0, size_bytes, step_bytes):
            client.read(at, BLOCK_BYTES)
            after = self.decoded_count()
            if after == before:
                begun = None
            else:
                begun = at if begun is None else begun
                longest = max(longest, (at - begun, -begun))
            before = after
        client.close()
        length, begun = longest
        return (-begun, length) if length else None

    def kill(self):
        """Kills all processes of the pool and deletes its files, which are of no use to another one."""
        owner = self.owner
        if owner.pids:
            life.kill_group(owner.child)
            owner.world.children.remove(owner.child)
            owner.pids = ()
        for node in self.nodes:
            node.kill()
        places = [owner.dir, *self.data_dirs]
        for node in self.nodes:
            places += [node.dir, *node.drives]
        if self.minio:
            self.minio.kill()
            places.append(self.minio.dir)
        for place in places:
            shutil.rmtree(place, ignore_errors=True)


def rest(pids, seconds_max=60, share=0.05):
    """Waits until processes do nothing but look; returns whether they do.

    They have written data in the background that a measurement before them left.
    """
    deadline = time.monotonic() + seconds_max
    while time.monotonic() < deadline:
        begun, before = time.monotonic(), counters.cpu_seconds_exact(pids)
        time.sleep(0.25)
        spent = counters.cpu_seconds_exact(pids) - before
        if spent < share * (time.monotonic() - begun):
            return True
    return False
