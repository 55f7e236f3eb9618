"""Steps shared out among threads, each of which runs its operators on one core."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from .views import Step


def share(stage: Callable[[Step], None], steps: Iterable[Step], workers: int) -> None:
    """Run a stage on every step; with `workers` > 1 on that many threads, the longest steps first.

    Operators release the interpreter's lock while they compute. Threads live as long as the call, so that a process
    which forks has none to lose.
    """
    if workers == 1:
        for step in steps:
            stage(step)
        return
    queue = iter(sorted(steps, key=lambda step: -step.seqlens[0] * step.seqlens[1]))
    lock, started = threading.Lock(), threading.Barrier(workers + 1)
    inference, cores = torch.is_inference_mode_enabled(), torch.get_num_threads()

    def work(worker: int) -> None:
        torch.set_num_threads(1)
        started.wait()
        with torch.inference_mode(inference), torch.no_grad():
            while True:
                with lock:
                    step = next(queue, None)
                if step is None:
                    return
                stage(replace(step, worker=worker))

    with ThreadPoolExecutor(workers) as pool:
        done = [pool.submit(work, worker) for worker in range(workers)]
        started.wait()
        torch.set_num_threads(cores)  # a worker sets its own number, and the number new threads start from
        for future in done:
            future.result()
