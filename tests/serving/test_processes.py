"""Processes below this one are found, waited for and ended."""

import subprocess
import sys
import time

from rayllm.serving.processes import descendants, end

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
child.wait()
"""


def test_children_of_children_are_found_and_ended():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        grandchild = int(parent.stdout.readline())
        family = [process for process in descendants() if process.pid in (parent.pid, grandchild)]
        assert len(family) == 2
        end(family, 0.0)
        assert parent.wait(5) != 0
    assert not {process.pid for process in descendants()} & {grandchild}


def test_those_that_end_by_themselves_are_not_killed():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.2)"]) as child:
        family = [process for process in descendants() if process.pid == child.pid]
        began = time.monotonic()
        end(family, 5.0)
        assert time.monotonic() - began < 4
        assert child.wait() == 0
