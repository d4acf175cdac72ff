"""The threads of the compiled decoder, by themselves."""

import os
import subprocess
from pathlib import Path

import pytest

from engine.embedded.models.native.build import SOURCE, find_compiler

APART = """
#include "team.h"

void stay_on(int core) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  sched_setaffinity(0, sizeof one, &one);
}

// Argument: a core that this process may use. Both threads are on it; then the second one may leave.
int main(int, char** arguments) {
  const int core = atoi(arguments[1]);
  cpu_set_t all, after;
  sched_getaffinity(0, sizeof all, &all);
  Cores cores(2);
  std::thread([&] { stay_on(core), cores.keep_apart(0, 2); }).join();
  std::thread([&] {
    stay_on(core), sched_setaffinity(0, sizeof all, &all);
    if (sched_getcpu() != core) return;  // the system has moved it already
    cores.keep_apart(1, 2);
    sched_getaffinity(0, sizeof after, &after);
    printf("%d %d", sched_getcpu() != core, (int)CPU_EQUAL(&all, &after));
  }).join();
}
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core only")
def test_a_thread_leaves_the_core_of_another_and_may_go_anywhere(tmp_path: Path) -> None:
    source, program = tmp_path / "apart.cpp", tmp_path / "apart"
    source.write_text("#include <cstdio>\n#include <cstdlib>\n" + APART)
    command = [find_compiler(), "-std=gnu++20", "-pthread", f"-I{SOURCE.parent}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    for core in sorted(os.sched_getaffinity(0))[:2]:
        done = subprocess.run([str(program), str(core)], capture_output=True, text=True, check=True)
        assert done.stdout in ("1 1", "")
