"""The rows of the comparison in a guest, its table and its verdict. Pure."""

from dataclasses import dataclass, replace

from rows import Goal, ratio
from table import number

# Names of the systems in the table.
UBLK = "spindle ublk"
NBD = "spindle nbd"  # the kernel's nbd driver, one connection
NBD_MANY = "spindle nbd x4"
OTHER = "other"  # a second binary of spindle
OTHER_UBLK = f"{OTHER} ublk"
LOOP = "rublk loop"  # O_DIRECT on its file
LOOP_BUFFERED = "rublk loop buffered"
NULL = "rublk null"
RAW = "raw direct"  # no server: O_DIRECT on a file

FULL = "log full, destage running"

SYSTEMS = (UBLK, OTHER_UBLK, NBD, NBD_MANY, LOOP, LOOP_BUFFERED, NULL, RAW)


@dataclass(frozen=True)
class Row:
    """A row; `job` is fio's. A job that is not timed reads or writes the device once."""

    key: str
    title: str
    unit: str
    job: dict
    is_timed: bool = True

    def from_empty(self):
        """Returns the same row for a log that is empty at the beginning."""
        return replace(self, title=self.title.replace(FULL, "log empty at the beginning"))

    @property
    def is_write(self):
        return "write" in self.job["rw"]


def _random(kind, kib, depth):
    is_write = kind == "write"
    state = FULL if is_write else "warm"
    return Row(f"{kind}-{kib}k-qd{depth}", f"{kib} KiB random {kind}, QD{depth}, {state}", "IOPS",
               {"rw": f"rand{kind}", "bs": f"{kib}k", "iodepth": depth})


ROWS = (
    *(_random("read", kib, depth) for kib in (4, 8) for depth in (1, 32)),
    Row("read-1m-qd4", "1 MiB sequential read, QD4, warm", "MiB/s",
        {"rw": "read", "bs": "1M", "iodepth": 4}),
    *(_random("write", kib, depth) for kib in (4, 8) for depth in (1, 32)),
    Row("write-1m-qd4", f"1 MiB sequential write, QD4, {FULL}", "MiB/s",
        {"rw": "write", "bs": "1M", "iodepth": 4}, is_timed=False),
)

GOALS = (
    Goal("4 KiB random write QD32, unflushed, x rublk loop", 0.8, True,
         ratio("write-4k-qd32", UBLK, LOOP)),
    Goal("4 KiB random write QD1, unflushed, x rublk loop", 0.8, True,
         ratio("write-4k-qd1", UBLK, LOOP)),
)

# Figures that are printed beside the goals, without a level to reach.
FIGURES = tuple(
    (f"{row.title}: {UBLK} x {other}", ratio(row.key, UBLK, other))
    for row in ROWS for other in (NBD, NBD_MANY, OTHER_UBLK)
)

COLUMNS = (
    ("system", 20), ("rate", 9), ("", 6), ("p50 us", 9), ("p99 us", 9), ("CPU us", 8),
    ("guest us", 9), ("calls", 7), ("faults", 7), ("switches", 9), ("x loop", 7), ("x nbd", 7),
)
HEADING = " ".join(f"{title:>{width}}" if at else f"{title:<{width}}"
                   for at, (title, width) in enumerate(COLUMNS))

LEGEND = """
rate      requests or MiB a second, median of the runs; nothing is flushed
CPU us    of the server's process per request, all threads; guest us: of the whole guest, fio and kernel included
calls     system calls of the server per request, by strace in a short run of its own, where it is slower
faults    page faults of the server per request; switches: of its threads, voluntary and not
"""


def line(system, unit, found, row):
    def share(other):
        base = row.get(other, {}).get("value")
        return found["value"] / base if base and other != system else None

    cells = (
        number(found["value"]), unit, number(found["p50_us"]), number(found["p99_us"]),
        number(found.get("cpu_us")), number(found["guest_cpu_us"]), number(found.get("calls")),
        number(found.get("faults"), 2), number(found.get("switches"), 2), number(share(LOOP), 2),
        number(share(NBD), 2),
    )
    text = f"{system:<{COLUMNS[0][1]}}"
    for cell, (_, width) in zip(cells, COLUMNS[1:]):
        text += f" {cell:>{width}}"
    return text


def section(row, medians):
    """Returns one row of the comparison: a title and a line per system."""
    lines = ["", row.title, HEADING]
    lines += [line(system, row.unit, found, medians) for system, found in medians.items()]
    for system, found in medians.items():
        if row.is_write and found.get("destaged_bytes") is not None:
            written, destaged = found["written_bytes"] / 2**20, found["destaged_bytes"] / 2**20
            lines.append(f"  {system} wrote {written:.0f} MiB and destaged {destaged:.0f} MiB a run")
    return "\n".join(lines)


def _getter(medians):
    return lambda row, system, measure: medians.get(row, {}).get(system, {}).get(measure)


def goals(medians):
    """Returns `[(title, value, bound, verdict)]` for everything that was measured."""
    found = [(goal, goal.value(_getter(medians))) for goal in GOALS]
    return [(goal.title, value, f">= {goal.bound:g}", "reached" if value >= goal.bound else "MISSED")
            for goal, value in found if value is not None]


def closing(medians):
    lines = [LEGEND]
    for title, value, bound, verdict in goals(medians):
        lines.append(f"{verdict:<8} {title}: {value:.2f} ({bound})")
    for title, value in FIGURES:
        found = value(_getter(medians))
        if found is not None:
            lines.append(f"{'':<8} {title}: {found:.2f}")
    return "\n".join(lines)
