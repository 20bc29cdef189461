"""Pools whose write log is on several nodes, which are processes of this machine.

Invariants:
- Each node is a `spindle serve` with a directory, a key file and addresses of its own, made with the
  commands that docs/cluster.md names. The nodes of a cluster share a store, which is a directory.
- The first node owns the pool. `Cluster.check` fails if another one has taken it over: a figure of
  such a run would mean nothing.
- Delays come from seeded bugs of the build, which are named in the environment of a process.
"""

import json
import os
import shutil
import subprocess

from . import life, servers

CATCH_UP_SECONDS_MAX = 120  # Chosen by hand: many times as long as a log on a slow disk takes.
KEY = "spindle.key"
SWITCH = "SPINDLE_SEEDED_BUGS"


def sync_late(ms):
    """Names the switch that makes each sync of a node's log take longer; no switch for 0."""
    return [f"log-sync-late={ms}"] if ms else []


def answers_late(ms):
    """Names the switch that makes the answers of a node's member late."""
    return [f"member-answers-late={ms}"]


def has_switches(binary):
    """Returns whether the binary has seeded bugs."""
    with open(binary, "rb") as program:
        return SWITCH.encode() in program.read()


def node_command(binary, dir, *arguments):
    """Runs `spindle node …` on the directory of a node, and returns its reply."""
    command = [binary, "node", *arguments, "--dir", dir, "-o", "json"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True,
                          stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"node {arguments[0]} of {dir}: {done.stderr.strip()}")
    return json.loads(done.stdout)


class Node(servers.Spindle):
    """A daemon with the pool's volumes, not yet started. Its name ends with that of the node."""

    def __init__(self, world, name, binary, core, volumes, store, settings, durability=None, bugs=()):
        self.short = name.split()[-1]
        super().__init__(world, name, binary, core, volumes, store, {SWITCH: ",".join(bugs)},
                         settings, durability, is_started=False)

    def switch(self, bugs):
        """Sets the switches of the processes from the next start on."""
        self.env[SWITCH] = ",".join(bugs)

    def kill(self):
        """Kills the daemon, if it runs."""
        if self.pids:
            life.kill_group(self.child)
            self.world.children.remove(self.child)
        self.pids = ()

    def node(self, *arguments):
        return node_command(self.binary, self.dir, *arguments)

    def found(self):
        """Founds a cluster in the directory of a pool that does not run."""
        address = f"127.0.0.1:{servers.free_port()}"
        self.node("init", "--address", address, "--name", self.short)

    def join(self, other):
        """Joins the cluster of a node that runs."""
        token = other.ask("node", "token")["token"]
        shutil.copy(os.path.join(other.dir, KEY), os.path.join(self.dir, KEY))
        address = f"127.0.0.1:{servers.free_port()}"
        self.node("join", token, "--address", address, "--name", self.short)


class Cluster(servers.Server):
    """Nodes that hold the log of one pool. It is a server whose requests go to the owner."""

    destages = True

    def __init__(self, owner):
        self.name = owner.name.rpartition(" ")[0] or owner.name
        self.nodes = [owner]
        self.paths = []
        owner.found()
        owner.start()

    @property
    def owner(self):
        return self.nodes[0]

    @property
    def pids(self):
        return tuple(pid for node in self.nodes for pid in node.pids)

    def admit(self, node):
        """Lets a node join the cluster, and starts it. It is no member yet."""
        node.join(self.owner)
        node.start()
        self.nodes.append(node)

    def add(self, node):
        """Makes a node a member, which returns once it has the whole log."""
        added = self.owner.ask("pool", "add_member", node=node.short, force=True)
        self.paths += added["paths"]
        return added

    def remove(self, node):
        """Kills a node, removes it from the members, and deletes its directory."""
        node.kill()
        self.nodes.remove(node)
        self.owner.ask("pool", "remove_member", node=node.short)
        shutil.rmtree(node.dir)

    def members(self):
        """Returns the members as the owner knows them, by name, and the bytes of all."""
        info = self.owner.ask("pool", "members")
        return {member["node"]: member for member in info["members"]}, info["traffic"]

    def catch_up(self):
        """Waits until each member that runs has everything that was acknowledged."""
        running = {node.short for node in self.nodes if node.pids}

        def is_up():
            members, _ = self.members()
            return all(members[name]["is_connected"] and not members[name]["behind"]
                       for name in running)

        life.until(is_up, f"bring the members of {self.name} up", CATCH_UP_SECONDS_MAX)

    def check(self):
        """Fails if the first node does not own the pool."""
        members, _ = self.members()
        owner = next(member["node"] for member in members.values() if member["is_owner"])
        if owner != self.owner.short:
            raise RuntimeError(f"{self.name}: node {owner} has taken the pool over; the machine is too busy")

    def round_trip_us(self):
        """Returns the time of a small request from the owner to a member, the least that was seen."""
        from_owner = [path["round_trip_us"] for path in self.paths if path["from"] == self.owner.short]
        return min(from_owner)

    def uri(self, volume):
        return self.owner.uri(volume)

    def settle(self):
        return self.owner.settle()

    def stop(self):
        """Ends all nodes at once; nothing of the pool is needed any more."""
        for node in self.nodes:
            node.kill()
