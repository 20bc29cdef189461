"""Owns the child processes and temporary directories that a dying run would leave behind.

Invariants:
- Every process is started in a session of its own and is killed when its `Life` ends, also after
  Ctrl-C, SIGTERM or an exception; the kernel kills it should this process be killed with -9.
- Only processes that were started here are ever signalled.
- The temporary directory is removed last, when nothing writes to it any more.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

PR_SET_PDEATHSIG = 1  # Source: linux/prctl.h
STOP_SECONDS_MAX = 60  # Chosen by hand: an orderly stop writes out at most one window.

_libc = ctypes.CDLL(None, use_errno=True)


class Missing(Exception):
    """The machine lacks something; the message says how to get it."""


def programs(**packages):
    """Fails when a program is missing. Keywords: program name (`-` as `_`) = Debian package."""
    absent = {p: d for p, d in packages.items() if not shutil.which(p.replace("_", "-"))}
    if absent:
        names = ", ".join(p.replace("_", "-") for p in absent)
        wanted = " ".join(sorted(set(absent.values())))
        raise Missing(f"not installed: {names}. On Debian: apt-get install {wanted}")


def cores():
    """Returns one core for the servers and one for the client; the same if there is only one."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[0], allowed[-1]


def ends_with_us():
    """For `preexec_fn`: asks the child to end when this process has died."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def kill_group(child):
    """Kills a child and its descendants, through its process group, which exists until it is reaped."""
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()


class Life:
    """Owner of everything that ends with the `with` block."""

    def __init__(self, parent_dir, keep=False):
        os.makedirs(parent_dir, exist_ok=True)
        self.dir = tempfile.mkdtemp(prefix="spindle-bench.", dir=parent_dir)
        self.keep = keep
        self.children = []

    def __enter__(self):
        signal.signal(signal.SIGINT, _interrupt)  # even if the shell had it ignored
        signal.signal(signal.SIGTERM, _interrupt)
        signal.signal(signal.SIGHUP, _interrupt)
        return self

    def __exit__(self, *_):
        # A second Ctrl-C must not interrupt the clean-up.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for child in reversed(self.children):
            if child.poll() is None:
                kill_group(child)
        if self.keep:
            print(f"kept: {self.dir}", file=sys.stderr)
        else:
            shutil.rmtree(self.dir, ignore_errors=True)

    def start(self, command, log, core=None, env=None, stdout=None, yields=False):
        """Starts a process, pinned to `core`; its stderr (and stdout, unless given) goes to `log`.

        One that `yields` runs only while its core has nothing else to do.
        """

        def in_child():
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if core is not None:
                os.sched_setaffinity(0, {core})
            if yields:
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

        with open(log, "ab") as sink:
            child = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=stdout or sink,
                stderr=sink,
                env=dict(os.environ, **(env or {})),
                # One session: where several daemons share a core, the kernel would weigh the nice values of
                # their threads within each session only.
                process_group=0,
                preexec_fn=in_child,
            )
        child.log = log
        self.children.append(child)
        return child

    def run(self, command, log, core=None, seconds_max=None):
        """Runs a process to its end. Raises with the tail of its output when it fails."""
        child = self.start(command, log, core)
        try:
            child.wait(seconds_max)
        finally:
            if child.poll() is None:
                kill_group(child)
            self.children.remove(child)
        if child.returncode != 0:
            name = os.path.basename(str(command[0]))
            raise RuntimeError(f"{name} ended with {child.returncode}: {tail(log)}")

    def stop(self, child, seconds_max=STOP_SECONDS_MAX):
        """Asks a process to end with SIGTERM and returns its exit status."""
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(seconds_max)
            except subprocess.TimeoutExpired:
                kill_group(child)
        if child in self.children:
            self.children.remove(child)
        return child.returncode


def _interrupt(*_):
    raise KeyboardInterrupt


def tail(path, line_count=12):
    """Returns the last lines of a log, for messages."""
    try:
        with open(path, errors="replace") as log:
            return "\n".join(log.read().splitlines()[-line_count:])
    except OSError as error:
        return str(error)


def until(condition, what, seconds_max=30, pause=0.02, child=None):
    """Waits until `condition()` is true and returns its result."""
    deadline = time.monotonic() + seconds_max
    while True:
        found = condition()
        if found:
            return found
        if child is not None and child.poll() is not None:
            raise RuntimeError(f"{what}: the process ended with {child.returncode}: {tail(child.log)}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not within {seconds_max} s")
        time.sleep(pause)
