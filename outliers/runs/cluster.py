"""The engine that runs cells as tasks of a Ray cluster, one that is running or one on this machine alone."""

import contextlib
import itertools
import logging
import math
import os
import signal
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from outliers.config.experiment import Experiment
from outliers.errors import EngineLost, MeasurementFailed, UserError, reason_of
from outliers.runs.engine import result_of, tried
from outliers.runs.forecast import PROCESS, FreeBytes, ModelRun, Need, forecast, room_of
from outliers.subjects.cell import Task
from outliers.subjects.model_cache import ModelCache
from outliers.terminal.interrupt import asked_to_stop, stop_if_asked
from outliers.terminal.printing import silence
from outliers.terminal.progress import Progress

TASKS_A_WORKER = 2  # at least, if texts can be cut, so that the workers end at nearly the same time
RETRIES = 3  # of a task after its worker or node is lost
SECONDS_TO_ANSWER = 5
SECONDS_A_LOOK = 10  # between looks at the machines of a cluster, which may grow
OBJECT_STORE = 200_000_000  # bytes, for a Ray on this machine alone: it holds token blocks and results
GPU_SPARE = 1.2  # factor of a model's need on several GPUs: whole layers are placed, and each GPU needs activations

# Ray's processes by name, each with the argument by which its node or session is recognized.
PROCESSES = {"raylet": "--raylet_socket_name={0}", "gcs_server": "--session-dir={1}"}

logger = logging.getLogger(__name__)


class Cluster:
    """An engine that runs tasks as Ray tasks, each with the cores, GPUs and memory that it needs.

    A task whose worker is lost runs again elsewhere.

    Raises:
        UserError: Ray is not installed or cannot be reached, or no machine of it can hold a task.
    """

    def __init__(self, experiment: Experiment, bar: Progress):
        self.device, self.bar = experiment.device, bar
        self.forecasts: dict[str, Need] = {}  # by model
        self.room = FreeBytes()  # of a worker
        # A part of a text reads all layers of a streamed model.
        self.tasks_a_worker = 1 if experiment.stream else TASKS_A_WORKER
        self.warned: set[str] = set()  # warnings of workers, each shown once
        self.name = uuid.uuid4().hex  # of this run: workers outlive it, but drop what they loaded for it
        self.needed: list[psutil.Process] = []  # processes of Ray on this machine that the run depends on
        self.nodes: list[dict[str, float]] = []  # resources of each machine
        self.nodes_read = -math.inf  # time of their last reading

    def __enter__(self) -> "Cluster":
        try:
            import ray
        except ImportError:
            raise UserError("engine 'ray' needs Ray; pip install 'outliers[cluster]'") from None
        self.ray = ray
        self.connected = ray.is_initialized()  # a caller who connected also disconnects
        self.alone = False
        if not self.connected:
            with _in_silence():
                self._connect()
        # Ray prints reports of its own processes in spite of log_to_driver; only this switch of its debugger stops it.
        ray._private.worker._worker_logs_enabled = False
        self.needed = list(self._needed())
        self.remote = ray.remote(_measure)
        return self

    def __exit__(self, *_error) -> None:
        if not self.connected or self._lost():
            self.ray.shutdown()

    def _needed(self) -> Iterator[psutil.Process]:
        """Yield the processes of Ray on this machine that every run depends on."""
        node_id = self.ray.get_runtime_context().get_node_id()
        for socket_name in (Path(node["RayletSocketName"]) for node in self.ray.nodes() if node["NodeID"] == node_id):
            marks = {name: mark.format(socket_name, socket_name.parents[1]) for name, mark in PROCESSES.items()}
            for process in psutil.process_iter(["name", "cmdline"]):
                if marks.get(process.info["name"]) in (process.info["cmdline"] or ()):
                    yield process

    def _lost(self) -> EngineLost | None:
        """Return an error if a process that Ray needs has ended.

        Ray would end this process silently as soon as it asks for machines, or stores or reads a large object.
        """
        for process in self.needed:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    continue
            return EngineLost(f"{EngineLost.BEGINNING} on this machine (its process '{process.info['name']}' is gone)")
        return None

    def _connect(self) -> None:
        options = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            _check_answers(os.environ.get("RAY_ADDRESS", ""))
            self.ray.init(address="auto", **options)
        except (OSError, ValueError) as error:
            if os.environ.get("RAY_ADDRESS"):
                raise UserError(
                    f"no Ray cluster accepts a connection at RAY_ADDRESS={os.environ['RAY_ADDRESS']} ({error}); "
                    "start it, unset RAY_ADDRESS for one of this machine alone, or set RAY_AUTH_MODE=token if it asks "
                    "for its token"
                ) from None
            handler = signal.getsignal(signal.SIGTERM)
            self.ray.init(include_dashboard=False, object_store_memory=OBJECT_STORE, **options)
            if signal.getsignal(signal.SIGTERM) is not handler:  # Ray's ends the process in the middle of a row
                signal.signal(signal.SIGTERM, handler)
            self.alone = True

    def forecast(self, model_runs: list[ModelRun]) -> dict[str, str]:
        """Return the models that do not fit on the machine of a worker, each with the reason."""
        ((_, self.room),) = self.run([Task("what is free", _free_bytes, model_runs[0], ())])
        if isinstance(self.room, EngineLost):
            raise EngineLost(f"{self.room}; run the same command again")
        if isinstance(self.room, MeasurementFailed):
            raise UserError(f"no worker of the cluster answers: {self.room}")
        needs, refused = forecast(model_runs, self.room)
        needs.sort(key=lambda needed: needed.memory)
        self.forecasts = {needed.model: needed for needed in needs}  # the largest need of each model comes last
        return refused

    def groups(self, subjects: list) -> list[list]:
        """Return all subjects as one group: they are measured together."""
        return [subjects]

    def parts(self, blocks: int, tasks: int) -> list[slice]:
        """Cut a text into parts so that all workers get some.

        Args:
            blocks: number of blocks of the text.
            tasks: number of tasks that would run if no text were cut.
        """
        workers = sum(int(node["CPU" if self.device == "cpu" else "GPU"]) for node in self._nodes())
        count = min(blocks, max(1, math.ceil(self.tasks_a_worker * workers / max(1, tasks))))
        ends = [blocks * number // count for number in range(count + 1)]
        return [slice(start, end) for start, end in itertools.pairwise(ends)]

    def run(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Any]]:
        """Yield each task with its result or its failure, as the tasks finish.

        After Ctrl-C the tasks that are running still finish.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        tasks = list(tasks)
        lacks = {name: self._shortage(task) for name, task in {task.subject.name: task for task in tasks}.items()}
        waiting, running = deque(task for task in tasks if not lacks[task.subject.name]), {}
        yield from ((task, MeasurementFailed(lack)) for task in tasks if (lack := lacks[task.subject.name]))
        self.bar.set_workers(min(len(waiting), self._slots(waiting[0])) if waiting else 1)
        try:
            while (waiting or running) and not asked_to_stop() and not self._lost():
                if waiting and len(running) < self._queue_size(waiting[0]):
                    task = waiting.popleft()
                    running[self._submit(task)] = task
                else:
                    yield from self._finished(running)
            if not self._lost():
                self._leave_out_queued(running)
            while running and not self._lost():  # after Ctrl-C
                yield from self._finished(running)
            stop_if_asked()
            if lost := self._lost():
                yield from ((task, lost) for task in (*running.values(), *waiting))
        finally:
            if not self._lost():
                self._cancel(running)

    def _finished(self, running: dict) -> Iterator[tuple[Task, Any]]:
        """Yield the running tasks that finish within a second, with their results, and remove them from `running`."""
        ready, _ = self.ray.wait(list(running), timeout=1)
        for reference in () if self._lost() else ready:
            task = running.pop(reference)
            try:
                result, warnings = self.ray.get(reference)
            except self.ray.exceptions.RayTaskError:  # an error of a program
                raise
            except self.ray.exceptions.RayError as error:
                result, warnings = MeasurementFailed(f"{type(error).__name__}: {reason_of(error, 300)}"), []
            for warning in warnings:
                if warning not in self.warned:
                    logger.warning(warning)
            self.warned |= set(warnings)
            self.bar.enter(task.name, task.steps)
            self.bar.update(task.steps.count)
            yield task, result

    def _submit(self, task: Task):
        needs = self._needs(task)
        options = {"num_cpus": needs["CPU"], "num_gpus": needs["GPU"], "memory": needs["memory"]}
        threads = int(needs["CPU"])
        arguments = self.name, os.getcwd(), threads, task.function, task.subject, task.arguments
        return self.remote.options(**options, max_retries=RETRIES, name=task.name).remote(*arguments)

    def _needs(self, task: Task) -> dict[str, float]:
        """Return the resources that a task needs, by Ray's names."""
        needed = self.forecasts.get(task.subject.name)
        if self.device != "cpu":
            gpus = self._gpus(needed) if self.device == "auto" else 1
            return {"CPU": 1, "GPU": gpus, "memory": needed.host if needed else PROCESS}
        memory = needed.memory if needed else PROCESS
        # Where memory bounds how many tasks run at once, each has its share of the cores.
        shares = [node["CPU"] * memory / node["memory"] for node in self._nodes() if node["memory"] >= memory]
        cores = min(shares, default=1)
        return {"CPU": max(1, math.floor(cores)), "GPU": 0, "memory": memory}

    def _gpus(self, needed: Need | None) -> int:
        """Return the number of GPUs for a model: as many as it needs, or all of a machine if the need is unknown."""
        most = max((int(node["GPU"]) for node in self._nodes()), default=0)
        share = GPU_SPARE * needed.memory / self.room.gpus if needed and self.room.gpus else 1
        return max(1, min(most, math.ceil(share * most)))

    def _nodes(self) -> list[dict[str, float]]:
        names = ("CPU", "GPU", "memory")
        if time.monotonic() > self.nodes_read + SECONDS_A_LOOK and not self._lost():
            alive = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
            self.nodes_read, self.nodes = (
                time.monotonic(),
                [{name: node.get(name, 0) for name in names} for node in alive],
            )
        return self.nodes

    def _slots(self, task: Task) -> int:
        """Return how many tasks like this one can run at once."""
        needs = self._needs(task)
        return sum(min(int(node[name] // needs[name]) for name in needs if needs[name]) for node in self._nodes())

    def _queue_size(self, task: Task) -> int:
        """Return the number of tasks to submit at once: more than can run, so that an autoscaling cluster grows."""
        return max(2, 2 * self._slots(task))

    def _shortage(self, task: Task) -> str:
        """Return why no machine can hold a task, or an empty text.

        If the cluster existed before the run, only warn: machines may join it.
        """
        if self._slots(task):
            return ""
        needs = ", ".join(_amount(name, value) for name, value in self._needs(task).items() if value)
        have = "; ".join(", ".join(_amount(*entry) for entry in node.items()) for node in self._nodes())
        if self.alone:
            return f"'{task.name}' needs {needs}; this machine has {have}"
        logger.warning("waiting for a machine with %s for '%s'; the cluster has %s", needs, task.name, have)
        return ""

    def _leave_out_queued(self, running: dict) -> None:
        """Cancel all tasks but the first ones, which are running; the others are queued."""
        slots = max((self._slots(task) for task in running.values()), default=0)
        for reference in list(running)[max(1, slots) :]:
            self._cancel([reference])
            del running[reference]

    def _cancel(self, references: Iterable) -> None:
        for reference in references:
            with contextlib.suppress(self.ray.exceptions.RayError):
                self.ray.cancel(reference, force=True)


@contextlib.contextmanager
def _in_silence() -> Iterator[None]:
    """Keep standard error of this process, and of Ray's own processes, silent while Ray starts.

    Its messages are in its log files. If RAY_BACKEND_LOG_LEVEL is set, nothing is silenced.
    """
    if "RAY_BACKEND_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["RAY_BACKEND_LOG_LEVEL"] = "fatal"  # a lost process is reported in one line instead
    try:
        with silence():
            yield
    finally:
        del os.environ["RAY_BACKEND_LOG_LEVEL"]


def _check_answers(address: str) -> None:
    """Raise OSError or ValueError if nothing listens at an address, for Ray would try it for minutes.

    Names and addresses of another protocol are left to Ray.
    """
    if address not in ("", "auto", "local") and "://" not in address:
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), SECONDS_TO_ANSWER).close()


_model_cache: tuple[str, ModelCache] | None = None  # the cache of a worker, kept between tasks, with the id of the run


class _Warnings(logging.Handler):
    """A log handler that collects the warnings of a worker, to show them where the run was started."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _measure(
    run: str, folder: str, threads: int, function: Callable, subject, arguments: tuple
) -> tuple[Any, list[str]]:
    """Run a task in a worker, and return its result and its warnings.

    Args:
        run: id of the run; what the worker has loaded for another run is dropped.
        folder: working directory of the driver, to which paths are relative.
        threads: cores that Ray reserved for the task.
        function, subject, arguments: of the `Task`.
    """
    global _model_cache
    if Path(folder).is_dir():
        os.chdir(folder)
    torch.set_num_threads(threads)
    if _model_cache is None or _model_cache[0] != run:
        _model_cache = None
        _model_cache = run, ModelCache(Progress(0))
    handler, root = _Warnings(), logging.getLogger("outliers")
    root.addHandler(handler)
    try:
        return tried(result_of, _model_cache[1], function, subject, arguments), handler.messages
    finally:
        root.removeHandler(handler)


def _free_bytes(_model_cache: ModelCache, model_run: ModelRun) -> FreeBytes:
    """Return the free bytes of the worker on which it runs as a task."""
    return room_of(model_run.device)


def _amount(resource: str, value: float) -> str:
    return f"{value / 1e9:.1f} GB of memory" if resource == "memory" else f"{value:g} {resource}s"
