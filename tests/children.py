"""Child processes for the tests that kill them.

A server that has imported what they need, and has run none of it, forks them: training starts a second thread, and the
fork of a process with threads can wait for ever for a lock that one of them held.
"""

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.process import BaseProcess

_SERVER = multiprocessing.get_context("forkserver")
# torch imports the second with the first optimiser step, in two seconds
_SERVER.set_forkserver_preload(["benchmarks.paper.images", "torch._dynamo", "tests.training.cases"])


def start(function: Callable[..., None], *args: object) -> BaseProcess:
    child = _SERVER.Process(target=function, args=args)
    child.start()
    return child


def finish(child: BaseProcess) -> None:
    child.join()
    assert child.exitcode == 0, child.exitcode


def kill(child: BaseProcess) -> None:
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL, child.exitcode
