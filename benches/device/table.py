"""Turns measured runs into medians, the table, and the list of goals. Pure."""

import statistics

from rows import CEILING_SHARE, GOALS, NBDKIT, NULL, RAW

COLUMNS = (
    # heading, width, measure or function name
    ("system", 20), ("rate", 10), ("", 6), ("p50 us", 9), ("p99 us", 10), ("mean us", 9),
    ("CPU us", 8), ("+later", 8), ("dev w/w", 8), ("dev B/B", 8), ("x nbdkit", 9), ("x raw", 7), ("% null", 7),
)
HEADING = " ".join(f"{title:>{width}}" if at else f"{title:<{width}}"
                   for at, (title, width) in enumerate(COLUMNS))


def medians(runs):
    """Returns the medians of `[{measure: number or None}]`, measure by measure."""
    result = {}
    for measure in {name for run in runs for name in run}:
        values = [run[measure] for run in runs if run.get(measure) is not None]
        result[measure] = statistics.median(values) if values else None
    return result


def number(value, digits=1):
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}f}"


def line(system, unit, found, row):
    """Returns one line of the table. `row` is `{system: medians}` of the whole row."""

    def share(other, factor=1):
        base = row.get(other, {}).get("value")
        if not base or other == system:
            return None
        return factor * found["value"] / base

    cells = (
        number(found["value"]), unit, number(found.get("p50_us")), number(found.get("p99_us")),
        number(found.get("mean_us")), number(found.get("cpu_us")),
        number(found.get("cpu_later_us")), number(found.get("device_writes"), 2),
        number(found.get("device_bytes"), 2),
        number(share(NBDKIT), 2), number(share(RAW), 2), number(share(NULL, 100), 0),
    )
    text = f"{system:<{COLUMNS[0][1]}}"
    for cell, (_, width) in zip(cells, COLUMNS[1:]):
        text += f" {cell:>{width}}"
    return text


def section(title, unit, row):
    """Returns one row of the comparison: a title and a line per system."""
    lines = ["", title, HEADING]
    lines += [line(system, unit, found, row) for system, found in row.items()]
    return "\n".join(lines)


LEGEND = """
rate     requests or MiB a second, median of the runs; destage and final flush inside where the title says so
p50, p99 of a request, with the flush that follows it where each has one (p99 is then an upper bound)
CPU us   server CPU per request while the load ran, all threads; +later: after it, until everything is destaged
dev w/w  writes of the disk, the whole machine's, per acknowledged write, until all is destaged and synced
dev B/B  the same in bytes
% null   of what the client reaches against a server that does nothing; above 80, CPU per request decides"""


def goals(table):
    """Returns `[(title, value, bound, verdict)]` for everything that was measured."""

    def get(row, system, measure):
        return table.get(row, {}).get(system, {}).get(measure)

    result = []
    for goal in GOALS:
        value = goal.value(get)
        if value is None:
            continue
        is_met = value >= goal.bound if goal.at_least else value <= goal.bound
        sign = ">=" if goal.at_least else "<="
        result.append((goal.title, value, f"{sign} {goal.bound:g}", "reached" if is_met else "MISSED"))
    return result


def decided_by_cpu(table):
    """Returns the rows that the client limits: `[(row, system, CPU us, CPU us of nbdkit file)]`."""
    result = []
    for row, systems in table.items():
        ceiling = systems.get(NULL, {}).get("value")
        base = systems.get(NBDKIT, {}).get("cpu_us")
        for system, found in systems.items():
            is_ours = system.startswith("spindle")
            if is_ours and ceiling and found["value"] > CEILING_SHARE * ceiling:
                result.append((row, system, found.get("cpu_us"), base))
    return result


def closing(table):
    """Returns the goals, and the rows where CPU decides, as text."""
    lines = [LEGEND, ""]
    for title, value, bound, verdict in goals(table):
        lines.append(f"{verdict:<8} {title}: {value:.2f} ({bound})")
    for row, system, ours, base in decided_by_cpu(table):
        lines.append(f"CPU decides in {row}: {system} {number(ours)} us, nbdkit file {number(base)} us")
    return "\n".join(lines)
