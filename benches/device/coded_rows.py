"""The rows of the measurement of erasure-coded pools: requests, systems, and the levels to reach.

Pure data and arithmetic: nothing here starts a process.
"""

from dataclasses import dataclass

from members_rows import Goal, medians, number

__all__ = ["Goal", "medians", "number"]

# Names of the systems in the table.
NONE = "no data stores"
DIRS = "4+2, directories"
NODES = "4+2, data nodes"
ONE = "1+1, one data node"
MINIO = "MinIO EC:2"
SYSTEMS = {
    NONE: "segments are objects, in a directory",
    DIRS: "4+2 over six directories",
    NODES: "4+2 over six data nodes",
    ONE: "whole segments on one data node, twice, on two drives",
    MINIO: "segments are objects, in MinIO with its own erasure code over six directories",
}
CODED = (DIRS, NODES)

# Volumes that every pool has.
WRITTEN = "written"
READ = "read"

DATA, PARITY = 4, 2
# Reads in a range that was found to be decoded.
DECODED_SHARE_MIN = 0.95


@dataclass(frozen=True)
class Row:
    """A row; `job` has those of fio's options that are its own."""

    key: str
    title: str
    # The part of the script that measures it.
    part: str
    systems: tuple
    job: dict


ROWS = (
    Row("write-qd1", "4 KiB random writes, QD1, the log has room", "writes", (NONE, *CODED),
        {"rw": "randwrite", "bs": "4k", "iodepth": 1}),
    Row("write-qd32", "4 KiB random writes, QD32, the log has room", "writes", (NONE, *CODED),
        {"rw": "randwrite", "bs": "4k", "iodepth": 32}),
    Row("destage", "destage of data that was written in sequence", "destage", (NONE, *CODED),
        {"rw": "write", "bs": "1M", "iodepth": 4, "refill_buffers": 1}),
    Row("read-8k-qd1", "8 KiB random reads, QD1, no caches", "reads", (NONE, ONE, *CODED),
        {"rw": "randread", "bs": "8k", "iodepth": 1}),
    Row("read-8k-qd32", "8 KiB random reads, QD32, no caches", "reads", (NONE, ONE, *CODED),
        {"rw": "randread", "bs": "8k", "iodepth": 32}),
    Row("gate", "4 KiB random reads, QD1, no caches", "gate", (*CODED, MINIO),
        {"rw": "randread", "bs": "4k", "iodepth": 1}),
    Row("degraded", "4 KiB random reads, QD1, of fragments on two data nodes", "degraded", (NODES,),
        {"rw": "randread", "bs": "4k", "iodepth": 1}),
    Row("paused", "4 KiB random reads, QD1, one data node of six paused", "paused", (NODES,),
        {"rw": "randread", "bs": "4k", "iodepth": 1}),
    Row("paused-drain", "drain with one data node paused", "paused_drain", (NODES,),
        {"rw": "write", "bs": "1M", "iodepth": 4, "refill_buffers": 1}),
    Row("sustained", "4 KiB random writes, QD32, over a small log", "sustained", (NONE, *CODED),
        {"rw": "randwrite", "bs": "4k", "iodepth": 32}),
    Row("rebuild", "rebuild of a lost data node of seven, beside clients", "rebuild", (NODES,),
        {"rw": "randread", "bs": "4k", "iodepth": 4}),
    Row("rebuild-dirs", "rebuild of a lost directory of seven, beside clients", "rebuild", (DIRS,),
        {"rw": "randread", "bs": "4k", "iodepth": 4}),
)
PARTS = tuple(dict.fromkeys(row.part for row in ROWS))
# Parts that have pools of their own.
OWN_POOLS = ("sustained", "rebuild")

# States of the data nodes, in the place of systems.
HEALTHY = "all healthy"
DEGRADED = "two killed"
PAUSED = "one paused"


@dataclass(frozen=True)
class UpperBound(Goal):
    """A goal whose figure is an upper bound of the one that counts: if it is missed, nothing is shown."""

    def verdict(self):
        return "met" if self.value <= self.bound else "not shown"


def ratio(part, whole):
    """Returns a quotient, and 0 without anything to divide by."""
    return part / whole if whole else 0.0


def goals_of_writes(row, systems):
    """Returns the goals of a row of writes: each coded pool beside the one without data stores."""
    found, none = [], systems.get(NONE)
    for name in CODED if none else ():
        if name not in systems:
            continue
        coded = systems[name]
        if row == "sustained":
            found.append(Goal(f"{row}: rate, {name}, x none", ratio(coded["value"], none["value"]), 0.85, True))
            continue
        for measure in ("p50", "p99"):
            share = ratio(none[f"{measure}_us"], coded[f"{measure}_us"])
            found.append(Goal(f"{row}: {measure} of none / {name}", share, 0.95, True))
    return found


def goals_of_destage(systems):
    """Returns the goals of destage."""
    return [Goal(f"destage: bytes of fragments per byte of segments, {name}", systems[name]["sent_per_byte"], 1.52)
            for name in CODED if name in systems and systems[name]["sent_per_byte"]]


def goals_of_reads(row, systems):
    """Returns the goals of healthy reads."""
    found = []
    nodes, one = systems.get(NODES), systems.get(ONE)
    if nodes and one:
        found.append(Goal(f"{row}: rate of six data nodes, x one", ratio(nodes["value"], one["value"]), 0.95, True))
    # Two in flight may be answered by one request, and a connection sends a few of its own accord.
    found += [Goal(f"{row}: requests for fragments per read, {name}", systems[name]["requests"], 1.005)
              for name in CODED if name in systems]
    return found


def goals_of_gate(systems):
    """Returns the goals of the gate: spindle's own code beside that of the S3 server."""
    found, minio = [], systems.get(MINIO)
    for name in CODED if minio else ():
        coded = systems[name]
        found += [Goal(f"gate: CPU per read, {name}, x MinIO", ratio(coded["cpu_us"], minio["cpu_us"]), 0.2),
                  Goal(f"gate: p50, {name}, x MinIO", ratio(coded["p50_us"], minio["p50_us"]), 1 / 3)]
    return found


def goals_of_degraded(states):
    """Returns the goals of reads that are decoded."""
    healthy, degraded = states[HEALTHY], states[DEGRADED]
    more = degraded["cpu_us"] - healthy["cpu_us"]
    return [
        Goal("degraded: p50, x healthy", ratio(degraded["p50_us"], healthy["p50_us"]), 2.5),
        UpperBound(f"degraded: us of CPU more per read, of which decoding is a part ({DATA - 1} more requests, too)",
                   more, 20),
    ]


def goals_of_paused(states):
    """Returns the goals of reads while a data node does not answer."""
    healthy, paused = states[HEALTHY], states[PAUSED]
    return [
        Goal("paused: p99, x healthy", ratio(paused["p99_us"], healthy["p99_us"]), 2),
        Goal("paused: requests per read beyond those that decoding needs", paused["wasted"], 0.05),
    ]


def goals_of_rebuild(row, found):
    """Returns the goals of a rebuild."""
    return [Goal(f"{row}: MiB/s of fragments", found["value"], 300, True),
            Goal(f"{row}: clients' p99, x before", ratio(found["p99_us"], found["before_p99_us"]), 2)]


COLUMNS = (("system", "", 20), ("rate/s", "value", 9), ("p50 us", "p50_us", 8), ("p99 us", "p99_us", 9),
           ("mean us", "mean_us", 8), ("CPU us", "cpu_us", 8), ("daemon", "owner_cpu_us", 8),
           ("requests", "requests", 9), ("decoded", "decoded", 8), ("hedged", "hedged", 8))
DESTAGE_COLUMNS = (("system", "", 20), ("MiB/s", "value", 9), ("CPU s/GiB", "cpu_s_gib", 10),
                   ("daemon", "owner_cpu_s_gib", 8), ("sent/byte", "sent_per_byte", 10))
PRECISE = ("requests", "decoded", "hedged", "cpu_s_gib", "owner_cpu_s_gib", "sent_per_byte")


def section(title, systems, columns=COLUMNS):
    """Returns a row of the table: a title, and a line for each system."""
    lines = ["", title, " ".join(f"{name:>{width}}" if measure else f"{name:<{width}}"
                                 for name, measure, width in columns)]
    for name, found in systems.items():
        cells = []
        for _, measure, width in columns[1:]:
            value = found.get(measure)
            text = f"{value:.3f}" if value is not None and measure in PRECISE else number(value)
            cells.append(f"{text:>{width}}")
        lines.append(" ".join([f"{name:<{columns[0][2]}}", *cells]))
    return "\n".join(lines)


LEGEND = """
CPU us    of all processes of the system per request: daemon, data nodes, MinIO; daemon: of that one alone
requests  for fragments, per read; decoded: reads made from other fragments, per read; hedged: reads
          that were tried another way because an answer was late, per read
CPU s/GiB of all processes, per GiB of volumes that was destaged; sent/byte: bytes of fragments written
          per byte of segments"""
