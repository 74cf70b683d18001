"""Executes a notebook in a Jupyter kernel of its own.

Every run ends. No answer of the kernel is missed, and a kernel that fails ends the run
with one message."""

import ctypes
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from queue import Empty

from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.channels import AsyncZMQSocketChannel
from jupyter_client.kernelspec import NoSuchKernel
from jupyter_client.manager import AsyncKernelManager
from traitlets import Unicode
from zmq import ZMQError

from workbench.errors import CellError, InputError, one_line
from workbench.escape import path_template
from workbench.nbformat_import import import_nbformat
from workbench.progress import STAGE_FILE_VARIABLE, shows_bars, tick

POLL_S = 1.0
STAGE_POLL_S = 0.5  # seconds between two looks at the running stage
START_S = 60  # a kernel that does not answer within this time has failed
# a socket's path has 108 bytes on Linux and 104 on macOS, with the final null byte
MAX_SOCKET_PATH_BYTES = 103
SOCKET_NAME = "/kernel-ipc-5"  # jupyter_client's longest name in the folder of sockets
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
# without an estimate of the remaining time: cells differ too much in length
CELL_BAR = "{l_bar}{bar}| {n_fmt} of {total_fmt} cells, {elapsed}{postfix}"
# runs in a kernel, and leaves no name there
END_WITH_PARENT = '__import__("workbench.kernel").kernel.end_with_parent()'


class PolledChannel(AsyncZMQSocketChannel):
    """A channel whose reader looks at its socket about once a second.

    The file descriptor of a ZeroMQ socket signals a change once. If nbclient sends on a
    channel while a reader waits for it, jupyter_client, which sends without
    zmq.asyncio, may consume this signal. The reader would then wait for ever for a
    message that has arrived (jupyter_client #1059, nbclient #312).
    """

    async def get_msg(self, timeout: float | None = None) -> dict:
        if timeout is not None:
            return await super().get_msg(timeout)
        while True:
            try:
                return await super().get_msg(POLL_S)
            except Empty:
                pass


class PolledClient(AsyncKernelClient):
    """A client of a kernel whose channels are `PolledChannel`."""

    shell_channel_class = PolledChannel
    iopub_channel_class = PolledChannel
    stdin_channel_class = PolledChannel
    control_channel_class = PolledChannel


class KernelManager(AsyncKernelManager):
    """Starts a kernel. A process that the system cannot start is a RuntimeError, like a
    kernel that ends at once."""

    stage_file = Unicode(help="Where the kernel writes its running stage.").tag(
        config=True
    )

    async def start_kernel(self, *, extra_arguments: Sequence[str] = (), **options):
        arguments = list(extra_arguments)
        if self.stage_file:
            environment = options.get("env") or os.environ
            options["env"] = {**environment, STAGE_FILE_VARIABLE: self.stage_file}
        try:
            if any("ipykernel" in word for word in self.kernel_spec.argv):
                arguments.append(f"--IPKernelApp.exec_lines={END_WITH_PARENT}")
            await super().start_kernel(extra_arguments=arguments, **options)
        except OSError as problem:
            raise RuntimeError(f"no process was started: {problem}") from problem


def execute(
    source: Path,
    copy: Path,
    parameters: Mapping,
    *,
    progress: bool = True,
    folder: Path | None = None,
) -> None:
    """Executes a notebook, and writes it with its outputs.

    Args:
        source: the notebook.
        copy: the notebook with outputs, written after every cell.
        parameters: values for names that the cell tagged `parameters` sets.
        progress: whether a bar counts cells and names the running stage; in a command whose
            stderr is no terminal, plain lines do (see `PlainCells`).
        folder: the kernel's working folder; default: the notebook's.

    Raises:
        InputError: a cell raised it.
        CellError: a cell raised another error, or the kernel did not start, ended or
            gave no answer.
    """
    import_nbformat()  # before papermill imports it
    import papermill
    from papermill.exceptions import PapermillExecutionError
    from traitlets.config import Config

    config = Config(KernelManager={"client_factory": PolledClient, "transport": "ipc"})
    config.NotebookClient.kernel_manager_class = KernelManager
    try:
        # sockets are files, since TCP ports are open to all users of the machine
        with silent_logs(), tempfile.TemporaryDirectory(dir=socket_root()) as sockets:
            config.KernelManager.connection_file = f"{sockets}/kernel.json"
            config.KernelManager.stage_file = f"{sockets}/stage"
            papermill.execute_notebook(
                path_template(source),
                path_template(copy),
                dict(parameters),
                cwd=folder or source.parent,
                progress_bar=progress and shows_bars(),
                start_timeout=START_S,
                config=config,
                engine_name=_stage_engine(
                    Path(sockets, "stage"), source.stem, progress
                ),
            )
    except KeyboardInterrupt as problem:
        # most notebooks sweep, and a sweep measures no finished cell again
        text = "not finished; the same command measures only what its sweeps lack"
        problem.add_note(f"{source.stem}: {text}")
        raise
    except PapermillExecutionError as problem:
        refusal = InputError.from_message(problem.evalue)
        if problem.ename == "InputError" and refusal:
            raise refusal from None
        text = f"{source.stem}, cell [{problem.exec_count}]: {problem.ename}: "
        raise CellError(f"{text}{problem.evalue} (executed copy: {copy})") from None
    except (NoSuchKernel, RuntimeError, TimeoutError, ZMQError) as problem:
        reason = one_line(problem if str(problem) else type(problem).__name__)
        text = f"{source.stem}: the kernel failed: {reason} (executed copy: {copy})"
        raise CellError(text) from problem


class PlainCells:
    """Stands in for the bar of cells where no bar is shown: a plain line when a cell or a
    stage has begun, as `tick` prints it.

    Args:
        name: the notebook's.
        cells: of the notebook while papermill executes it, which marks those that ended.
    """

    def __init__(self, name: str, cells: Sequence):
        self.name, self.cells = name, cells
        self.last_line = ""

    @property
    def n(self) -> int:
        """The cells that have ended."""
        return sum(cell.metadata.papermill.status == "completed" for cell in self.cells)

    def set_postfix_str(self, text: str) -> None:
        """Prints the count of cells and `text`, if they are not those of the last line."""
        line = f"{self.name}: {self.n} of {len(self.cells)} cells"
        line += f", {text}" if text else ""
        if line != self.last_line and tick(line):
            self.last_line = line


def _stage_engine(file: Path, notebook: str, progress: bool) -> str:
    """The name of papermill's engine that executes a notebook and shows the stage in
    `file` beside the count of cells meanwhile, if `progress` asks for it."""
    from papermill.engines import NBClientEngine, papermill_engines

    class StageEngine(NBClientEngine):
        @classmethod
        def execute_managed_notebook(cls, nb_man, kernel_name, **options):
            bar = getattr(nb_man, "pbar", None)
            if bar:
                bar.bar_format = CELL_BAR
            elif progress:
                bar = PlainCells(notebook, nb_man.nb.cells)
            with shown_stages(bar, file) if bar else nullcontext():
                return super().execute_managed_notebook(nb_man, kernel_name, **options)

    name = "workbench"
    papermill_engines.register(name, StageEngine)
    return name


@contextmanager
def shown_stages(bar, file: Path) -> Iterator[None]:
    """Shows the stage that a kernel has written to `file` beside a bar of cells or
    `PlainCells`, until the cell of the stage has ended. A thread reads the file every
    `STAGE_POLL_S`, which also keeps the time of the bar going."""
    has_ended = threading.Event()

    def show() -> None:
        text, cell = "", bar.n  # the last stage, and the cell in which it began
        seen = None  # the status of the file at the last look
        while not has_ended.wait(STAGE_POLL_S):
            with suppress(OSError, ValueError):
                status = file.stat()
                if (status.st_mtime_ns, status.st_size) != seen:
                    seen = status.st_mtime_ns, status.st_size
                    text, cell = file.read_text(encoding="utf-8"), bar.n
            bar.set_postfix_str(text if bar.n == cell else "")

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


@contextmanager
def silent_logs() -> Iterator[None]:
    """Silences the libraries' logs within the block. They would repeat the failure of a
    kernel, which the error names, with a traceback."""
    loggers = [logging.getLogger(name) for name in ("traitlets", "papermill")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


def socket_root() -> str | None:
    """The folder in which a folder of sockets is made. None stands for the folder for
    temporary files; it is /tmp where paths below that folder are too long for a socket,
    as they are in the scratch folder of a cluster."""
    longest = f"{tempfile.gettempdir()}/tmp12345678{SOCKET_NAME}"
    return "/tmp" if len(os.fsencode(longest)) > MAX_SOCKET_PATH_BYTES else None


def end_with_parent() -> None:
    """In a kernel on Linux: asks the system to kill it when its parent ends, even if
    that was killed.

    ipykernel notices its parent's end only where process 1 adopts orphans. The kernel
    would stay below systemd's user session or a container's supervisor."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.environ.get("JPY_PARENT_PID")
    if parent and os.getppid() != int(parent):
        os._exit(1)  # the parent ended before the system was asked
