"""The rows of the measurement of members: requests, states of the members, and the results to reach.

Pure data and arithmetic: nothing here starts a process.
"""

import statistics
from dataclasses import dataclass

# Names of the systems in the table. Those of the part "writes" have the injected time of a sync.
ONE = "one member"
WHOLE = "three members"
DEAD = "a third dead"
LATE = "a third answers late"
SLOW = "a third syncs late"
THIRDS = (DEAD, LATE, SLOW)
# Those of the part "alone", without it.
PLAIN = "no cluster"
SINGLE = "one member"
BEFORE = "before"

# Volumes that every pool has.
WRITTEN = "written"  # an answer says that the write was written
SYNCED = "synced"  # an answer says that it is on stable storage

SHARE_MIN = 0.97  # Chosen by hand: medians of two equal builds differ by so much.


@dataclass(frozen=True)
class Row:
    """A row of 4 KiB random writes; `job` has the rest of fio's options."""

    key: str
    title: str
    volume: str
    job: dict
    # Whether it is measured with a third dead or slow, too.
    has_thirds: bool = False


ROWS = (
    Row("written", "4 KiB written, QD1", WRITTEN, {"iodepth": 1}),
    Row("synced", "4 KiB synced before its answer, QD1", SYNCED, {"iodepth": 1}),
    Row("flushed", "4 KiB written, a flush after each, QD1", WRITTEN, {"iodepth": 1, "fsync": 1}),
    Row("written-qd32", "4 KiB written, QD32", WRITTEN, {"iodepth": 32}, True),
    Row("synced-qd32", "4 KiB synced before its answer, QD32", SYNCED, {"iodepth": 32}, True),
)
# Rows without the injected time, where the own cost of a cluster shows.
ALONE = ("written", "synced", "written-qd32")


@dataclass(frozen=True)
class Goal:
    """A goal: its figure against a bound; `None` if it was not measured."""

    title: str
    value: float
    bound: float
    at_least: bool = False

    def verdict(self):
        is_met = self.value >= self.bound if self.at_least else self.value <= self.bound
        if is_met:
            return "met"
        return f"MISSED by {abs(self.value / self.bound - 1):.0%}"

    def line(self):
        sign = ">=" if self.at_least else "<="
        return f"{self.verdict():<14} {self.title}: {self.value:.2f} ({sign} {self.bound:g})"


def medians(runs):
    """Returns the medians of `[{measure: number or None}]`, measure by measure."""
    names = {name for run in runs for name in run}
    values = {name: [run[name] for run in runs if run.get(name) is not None] for name in names}
    return {name: statistics.median(found) if found else None for name, found in values.items()}


def goals_of_writes(table, round_trip_us):
    """Returns the goals of `{row: {system: medians}}`."""
    found = []
    for row in ROWS:
        systems = table.get(row.key, {})
        one, whole = systems.get(ONE), systems.get(WHOLE)
        if one and whole and row.job["iodepth"] == 1:
            found.append(Goal(f"{row.key}: p50 with three, x (one + round trip)",
                              whole["p50_us"] / (one["p50_us"] + round_trip_us), 1.3))
        if one and whole:
            found.append(Goal(f"{row.key}: CPU of three, x one", whole["cpu_us"] / one["cpu_us"], 2.5))
        for third in THIRDS if whole else ():
            if third in systems:
                found.append(Goal(f"{row.key}: rate with {third}, x three members",
                                  systems[third]["value"] / whole["value"], 0.95, True))
            if third in systems and third != DEAD:
                found.append(Goal(f"{row.key}: p99 with {third}, x three members",
                                  systems[third]["p99_us"] / whole["p99_us"], 1.2))
    return found


def goals_of_alone(table):
    """Returns the goals of a pool with one member, against one without a cluster."""
    found = []
    for row, systems in table.items():
        for other in (PLAIN, BEFORE):
            if other in systems:
                share = systems[SINGLE]["value"] / systems[other]["value"]
                found.append(Goal(f"{row}: rate of one member, x {other}", share, SHARE_MIN, True))
    return found


def goals_of_catch_up(place, found):
    """Returns the goals of the medians of catch-ups with the logs at a place."""
    return [
        Goal(f"catch-up, logs {place}: bytes a second, x the device's",
             found["value"] / found["device_mib_s"], 0.5, True),
        Goal(f"catch-up, logs {place}: clients' p99, x before",
             found["p99_us"] / found["before_p99_us"], 1.5),
    ]


COLUMNS = (("system", "", 22), ("rate/s", "value", 10), ("p50 us", "p50_us", 10),
           ("p99 us", "p99_us", 10), ("mean us", "mean_us", 10), ("CPU us", "cpu_us", 9),
           ("+later", "cpu_later_us", 9), ("answer us", "answer_us", 10))


def number(value):
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"


def section(title, systems):
    """Returns a row of the table: a title, and a line for each system."""
    heading = " ".join(f"{name:>{width}}" if measure else f"{name:<{width}}"
                       for name, measure, width in COLUMNS)
    lines = ["", title, heading]
    for name, found in systems.items():
        cells = [f"{number(found.get(measure)):>{width}}" for _, measure, width in COLUMNS[1:]]
        lines.append(" ".join([f"{name:<{COLUMNS[0][2]}}", *cells]))
    return "\n".join(lines)


LEGEND = """
p50, p99  of a request, with the flush that follows it where each has one (p99 is then an upper bound)
CPU us    of the daemons of all nodes per request while the load ran; +later: until all is destaged
answer us mean time from a request of the owner to the answer of a member, behind the last write"""
