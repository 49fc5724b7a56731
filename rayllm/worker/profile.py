"""Profiles of a worker's steps by torch's profiler, begun and ended on request. Traces are for Perfetto or TensorBoard.

A profiler sees the thread that starts it: all methods belong to the worker's thread.
"""

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule, tensorboard_trace_handler

from rayllm.config.engine import ProfilerSettings
from rayllm.errors import ConfigError

log = logging.getLogger(__name__)
T = TypeVar("T")


class Profile:
    """At most one profile at a time."""

    def __init__(self, settings: ProfilerSettings) -> None:
        """Make the folder.

        Raises:
            ConfigError: it cannot be made.
        """
        try:
            os.makedirs(settings.folder, exist_ok=True)
        except OSError as error:
            option = "--profiler-config.torch_profiler_dir"
            raise ConfigError(option, f"{settings.folder}: {error.strerror}", "name another folder") from None
        self._settings = settings
        self._profiler: profile | None = None
        self._steps = 0
        """Since the start, those included that the profiler is to let pass."""
        self._failure: OSError | None = None
        """Why the last trace could not be written."""

    def start(self) -> None:
        """Begin. Does nothing where a profile is under way."""
        if self._profiler is None:
            self._profiler, self._steps, self._failure = self._make(), 0, None
            if not self._settings.delay_iterations:
                self._profiler.start()
            log.info("profiling begins")

    def stop(self) -> None:
        """End and write the trace. Does nothing where no profile is under way, or none of its steps came.

        Raises:
            OSError: the trace, or one that a limit of iterations ended before, could not be written.
        """
        self._end()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def step(self, tokens: int, run: Callable[[], T]) -> T:
        """Run a step, recorded if a profile is under way."""
        if self._profiler is None:
            return run()
        with self._recording(tokens):
            result = run()
        self._advance(self._profiler)
        return result

    def _recording(self, tokens: int) -> AbstractContextManager[object]:
        waiting = self._steps < self._settings.delay_iterations
        return nullcontext() if waiting else record_function(f"step of {tokens} tokens")

    def _advance(self, profiler: profile) -> None:
        settings = self._settings
        self._steps += 1
        if self._steps == settings.delay_iterations:
            profiler.start()
        elif self._steps > settings.delay_iterations:
            profiler.step()
        if settings.max_iterations and self._steps == settings.delay_iterations + settings.max_iterations:
            self._end()

    def _end(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None and self._steps >= self._settings.delay_iterations:
            profiler.stop()

    def _write(self, profiler: profile) -> None:
        """Called by the profiler, in the middle of steps too, which a full disk must not end."""
        try:
            tensorboard_trace_handler(self._settings.folder, use_gzip=self._settings.gzip)(profiler)
            log.info("a profile is written to %s", self._settings.folder)
        except OSError as error:
            log.exception("a profile cannot be written to %s", self._settings.folder)
            self._failure = error

    def _make(self) -> profile:
        settings = self._settings
        parts = None
        if settings.wait_iterations or settings.warmup_iterations:
            parts = schedule(
                wait=settings.wait_iterations,
                warmup=settings.warmup_iterations,
                active=settings.active_iterations,
                repeat=1,
            )
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        return profile(
            activities=activities,
            schedule=parts,
            on_trace_ready=self._write,
            record_shapes=settings.shapes,
            profile_memory=settings.memory,
            with_stack=settings.stack,
            with_flops=settings.flops,
        )
