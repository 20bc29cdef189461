"""The rows of the comparison: the client's requests, the systems, and the results to reach.

Pure data and arithmetic: nothing here starts a process.
"""

from dataclasses import dataclass, field

MIB = 1 << 20

# Names of the systems in the table.
SPINDLE = "spindle"  # local store, default memory cache
SPINDLE_NVME = "spindle nvme"  # memory cache 0: reads come from the NVMe cache
SPINDLE_SMALL = "spindle small-log"
SPINDLE_S3 = "spindle s3"
SPINDLE_S3_SMALL = "spindle s3 small-log"
NBDKIT = "nbdkit file"
QEMU = "qemu-nbd"
NULL = "nbdkit null"
RAW = "raw direct"

OTHERS = (NBDKIT, QEMU, NULL, RAW)
WRITERS = (SPINDLE, SPINDLE_S3) + OTHERS
READERS = (SPINDLE, SPINDLE_NVME, SPINDLE_S3) + OTHERS
STEADY = (SPINDLE_SMALL, SPINDLE_S3_SMALL, NBDKIT, QEMU)

# Volumes that every system offers.
WARM = "warm"  # filled once, only read
HOT = "hot"  # filled once, then overwritten
FRESH = "fresh"  # never written before a run; a flush waits for spindle's store
BIG = "big"  # larger than the amount that the kernel keeps unwritten


@dataclass(frozen=True)
class Row:
    """A row; `job` is fio's, `amount` is its end: time, laps (of a small log), fresh or big."""

    key: str
    title: str
    unit: str
    volume: str
    systems: tuple
    job: dict = field(default_factory=dict)
    amount: str = "time"
    final_flush: bool = False
    run_count: int = 0  # at most this many; 0: the number on the command line
    kind: str = "plain"


ROWS = (
    Row("read-qd1", "8 KiB random read, QD1, warm", "IOPS", WARM, READERS,
        {"rw": "randread", "bs": "8k", "iodepth": 1}),
    Row("read-qd32", "8 KiB random read, QD32, warm", "IOPS", WARM, READERS,
        {"rw": "randread", "bs": "8k", "iodepth": 32}),
    Row("seq-read", "1 MiB sequential read, QD4, warm", "MiB/s", WARM, READERS,
        {"rw": "read", "bs": "1M", "iodepth": 4}),
    Row("write-qd1-sync", "4 KiB random write, QD1, flush after each", "IOPS", HOT, WRITERS,
        {"rw": "randwrite", "bs": "4k", "iodepth": 1, "fsync": 1}),
    Row("write-qd32", "4 KiB random write, QD32, burst", "IOPS", HOT, WRITERS,
        {"rw": "randwrite", "bs": "4k", "iodepth": 32}),
    Row("write-qd32-flush", "4 KiB random write, QD32, flush every 32", "IOPS", HOT, WRITERS,
        {"rw": "randwrite", "bs": "4k", "iodepth": 32, "fsync": 32}),
    Row("write-steady", "4 KiB random write, QD32, 10 laps of the log, final flush", "IOPS", HOT,
        STEADY, {"rw": "randwrite", "bs": "4k", "iodepth": 32}, "laps", final_flush=True),
    Row("write-dirty", "4 KiB random write, QD32, more than the kernel keeps dirty, final flush",
        "IOPS", BIG, (SPINDLE, NBDKIT, QEMU),
        {"rw": "randwrite", "bs": "4k", "iodepth": 32, "norandommap": 0}, "big",
        final_flush=True, run_count=1),
    Row("seq-write", "1 MiB sequential write, QD4, fresh space, final flush and destage", "MiB/s",
        FRESH, (SPINDLE, SPINDLE_S3, NBDKIT, QEMU),
        {"rw": "write", "bs": "1M", "iodepth": 4}, "fresh", final_flush=True),
    Row("mixed", "8 KiB random 70 % read 30 % write, QD32", "IOPS", HOT, WRITERS,
        {"rw": "randrw", "rwmixread": 70, "bs": "8k", "iodepth": 32}),
    Row("burst", "8 KiB random write at a fixed rate, and bursts of 50 times that", "IOPS", HOT,
        (SPINDLE, SPINDLE_S3, NBDKIT, QEMU),
        {"rw": "randwrite", "bs": "8k", "iodepth": 32}, run_count=2, kind="burst"),
    Row("scan", "8 KiB random write, QD1, flush after each; alone, then beside a scan", "IOPS", HOT,
        (SPINDLE, SPINDLE_NVME, SPINDLE_S3, NBDKIT, QEMU, NULL),
        {"rw": "randwrite", "bs": "8k", "iodepth": 1, "fsync": 1}, kind="scan"),
)

LAP_COUNT = 10
BURST_FACTOR = 50
DIRTY_FACTOR = 1.25  # of the kernel's limit


@dataclass(frozen=True)
class Goal:
    """A goal: `value(get)` against a bound; `get(row, system, measure)` is a median or `None`."""

    title: str
    bound: float
    at_least: bool
    value: object


def ratio(row, system, other, measure="value", other_row=None):
    def of(get):
        upper = get(row, system, measure)
        lower = get(other_row or row, other, measure)
        return upper / lower if upper is not None and lower else None

    return of


def plain(row, system, measure):
    return lambda get: get(row, system, measure)


GOALS = (
    Goal("random write QD32, flush every 32, x nbdkit file", 1.5, True,
         ratio("write-qd32-flush", SPINDLE, NBDKIT)),
    Goal("random write QD32, x nbdkit file", 1.0, True, ratio("write-qd32", SPINDLE, NBDKIT)),
    Goal("synced 4 KiB write QD1, x nbdkit file", 1.5, True,
         ratio("write-qd1-sync", SPINDLE, NBDKIT)),
    Goal("synced 4 KiB write QD1, x raw direct", 0.6, True, ratio("write-qd1-sync", SPINDLE, RAW)),
    Goal("8 KiB read QD32 from memory, x nbdkit file", 1.0, True,
         ratio("read-qd32", SPINDLE, NBDKIT)),
    Goal("8 KiB read QD32 from NVMe cache, x nbdkit file", 0.5, True,
         ratio("read-qd32", SPINDLE_NVME, NBDKIT)),
    Goal("1 MiB sequential read from NVMe cache, x raw direct", 0.7, True,
         ratio("seq-read", SPINDLE_NVME, RAW)),
    Goal("sequential write, destage included, x nbdkit file", 0.7, True,
         ratio("seq-write", SPINDLE, NBDKIT)),
    Goal("server CPU us per 4 KiB write", 20, False, plain("write-qd32", SPINDLE, "cpu_us")),
    Goal("server CPU us per 4 KiB write, destage included", 40, False,
         plain("write-qd32", SPINDLE, "cpu_all_us")),
    Goal("mean latency in a burst, x base", 2.0, False,
         ratio("burst: in burst", SPINDLE, SPINDLE, "mean_us", "burst: base")),
    Goal("p99 of synced writes beside a scan, x alone", 1.5, False,
         ratio("scan: beside", SPINDLE, SPINDLE, "p99_us", "scan: alone")),
)
# Above this share of the client's own ceiling, CPU per operation decides, not the rate.
CEILING_SHARE = 0.8
