"""Reads the kernel's counters for a process and for a disk. Pure reading, no state.

Invariants:
- CPU time covers every thread of a process, those that have ended included.
- What a process wrote is not read from /proc/PID/io: it counts whole folios of the page cache, up to
  1 MiB for a write of 4 KiB.
- Device counters are those of the whole machine: they mean something only while nothing else
  writes, which the caller says beside the figures.
"""

import os
import time

TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")
SECTOR_BYTES = 512  # Source: Documentation/block/stat.rst, whatever the device's block size is


def cpu_seconds(pids):
    """Returns user and system time of processes since they started. Source: proc_pid_stat(5)."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as stat:
            # The name may contain spaces and parentheses; the fields follow the last parenthesis.
            fields = stat.read().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total * TICK_SECONDS


def cpu_seconds_exact(pids):
    """Like `cpu_seconds`, but from the processes' clocks instead of ticks."""
    # Source: clock_getcpuclockid(3): the complement of the process id, and CPUCLOCK_SCHED, 2.
    return sum(time.clock_gettime(((~pid) << 3) | 2) for pid in pids)


def busy_seconds():
    """Returns the machine's busy CPU time since it started. Source: proc_stat(5)."""
    with open("/proc/stat") as stat:
        fields = [int(field) for field in stat.readline().split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) * TICK_SECONDS


class Activity:
    """Page faults and context switches of a process so far, by thread."""

    def __init__(self, pid):
        self.threads = {}
        for thread in os.listdir(f"/proc/{pid}/task"):
            try:
                with open(f"/proc/{pid}/task/{thread}/stat") as stat:
                    head, _, tail = stat.read().rpartition(")")
                with open(f"/proc/{pid}/task/{thread}/status") as status:
                    counts = [int(line.split()[1]) for line in status if "ctxt_switches" in line]
            except FileNotFoundError:
                continue  # it has ended
            fields = tail.split()
            faults = int(fields[7]) + int(fields[9])
            cpu_seconds = (int(fields[11]) + int(fields[12])) * TICK_SECONDS
            self.threads[thread] = (head.partition("(")[2], cpu_seconds, faults, *counts)
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        # Includes threads that have ended.
        self.fault_count = int(fields[7]) + int(fields[9])

    def switches_until(self, later):
        """Returns the context switches of the threads that still exist in `later`."""
        none = (None, 0, 0, 0, 0)
        pairs = [(self.threads.get(thread, none), after) for thread, after in later.threads.items()]
        return sum(sum(after[3:]) - sum(before[3:]) for before, after in pairs)

    def until(self, later, io_count):
        """Returns a line for each thread that was active until `later`, per request."""
        lines = []
        for thread, (name, *after) in later.threads.items():
            before = self.threads.get(thread, (name, 0, 0, 0, 0))[1:]
            cpu, faults, gave, lost = (b - a for a, b in zip(before, after))
            if cpu or gave:
                lines.append(f"  {name:<16} CPU {cpu * 1e6 / io_count:7.1f} us  faults "
                             f"{faults / io_count:5.2f}  switches {gave / io_count:5.2f} "
                             f"(and {lost / io_count:5.2f} forced)")
        return lines


def disk_of(path):
    """Returns the whole disk below a directory, as named in /sys/block; `None` if there is none."""
    device = os.stat(path).st_dev
    link = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    if not os.path.exists(link):
        return None
    found = os.path.realpath(link)
    if os.path.exists(f"{found}/partition"):
        found = os.path.dirname(found)
    return os.path.basename(found)


def disk_writes(disk):
    """Returns writes completed and bytes written by a disk since boot, flushes not counted."""
    if disk is None:
        return None
    with open(f"/sys/block/{disk}/stat") as stat:
        fields = stat.read().split()
    return int(fields[4]), int(fields[6]) * SECTOR_BYTES


class Footprint:
    """The resources of a process at one moment."""

    def __init__(self, pid):
        with open(f"/proc/{pid}/status") as status:
            lines = dict(line.split(":", 1) for line in status)
        self.resident_bytes = int(lines["VmRSS"].split()[0]) * 1024
        self.thread_count = int(lines["Threads"])
        self.descriptor_count = len(os.listdir(f"/proc/{pid}/fd"))
        with open(f"/proc/{pid}/maps") as maps:
            self.mapping_count = sum(1 for _ in maps)


def machine():
    """Returns the facts about the machine that a reader needs to judge the figures."""
    cpu = ""
    with open("/proc/cpuinfo") as info:
        cpu = next((l.split(":")[1].strip() for l in info if l.startswith("model name")), "")
    with open("/proc/meminfo") as info:
        memory_kib = int(next(info).split()[1])
    return {
        "kernel": os.uname().release,
        "cpu": cpu,
        "core_count": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_kib * 1024,
        "load_average": os.getloadavg(),
    }


def dirty_limit_bytes():
    """Returns roughly how much unwritten file data the kernel keeps before it makes writers wait."""
    with open("/proc/sys/vm/dirty_bytes") as limit:
        fixed = int(limit.read())
    if fixed:
        return fixed
    with open("/proc/sys/vm/dirty_ratio") as ratio:
        percent = int(ratio.read())
    with open("/proc/meminfo") as info:
        available_kib = next(int(l.split()[1]) for l in info if l.startswith("MemAvailable"))
    return available_kib * 1024 * percent // 100


def runnable_others():
    """Returns the share of the machine's CPU time that is busy now, from 0 to 1, over 0.3 s."""
    def busy_and_all():
        with open("/proc/stat") as stat:
            fields = [int(field) for field in stat.readline().split()[1:9]]
        return sum(fields) - fields[3] - fields[4], sum(fields)

    busy, everything = busy_and_all()
    time.sleep(0.3)
    busy_after, everything_after = busy_and_all()
    return (busy_after - busy) / max(1, everything_after - everything)
