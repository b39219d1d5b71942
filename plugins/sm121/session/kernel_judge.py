"""Judges the messages that the Linux kernels of a server's machines logged during a run."""

from collections.abc import Sequence
from dataclasses import dataclass

from sm121.core import architecture
from sm121.engines.attached_processes import AttachedProcesses
from sm121.evidence import cgroup, kernel_messages, silent_errors
from sm121.evidence.kernel_messages import KernelBefore, KernelMessages
from sm121.run import server_decisions
from sm121.run.run import Run

_NO_MEMORY_AT_START = (
    "the NVIDIA driver could not allocate memory during a start that succeeded: a GB10 logs "
    "NV_ERR_NO_MEMORY at healthy starts, too (vllm#56824)"
)


@dataclass
class KernelJudge:
    """The messages of the Linux kernels since a run began."""

    run: Run
    #: The launcher of a server on several machines. If None, it is the profile's launcher.
    launcher: str | None
    before: KernelBefore
    #: The remark that kernel messages cannot be read; None if they can.
    unread: str | None = None

    def judge(self) -> None:
        """Judge the kernel messages since the run began.

        After an error of the GPU or of memory no result can be trusted. In two cases there is only
        a remark:

        - a message about a GPU in a run on a CPU, which uses no GPU;
        - messages that cannot be read. This prevents a certificate.

        The messages at a crash are in the crash bundle.
        """
        if self.run.target.obstacle is not None:
            return
        faults = []
        kills = cgroup.kills(self.before.cgroup)
        if kills:
            faults.append(
                f"the memory of the control group ran out, and {kills} processes were killed"
            )
        self.judge_messages(self._kernel_here(), "", faults)
        unread = KernelMessages(unavailable="it is only read on this machine")
        for rank in range(1, self._unread_nodes()):
            self.judge_messages(unread, f" of node {rank}")

    def _kernel_here(self) -> KernelMessages:
        """Return the messages of this machine's kernel, if the server runs on this machine."""
        run = self.run
        attached = run.servers.attached
        if attached is not None and not AttachedProcesses(attached.endpoint.base_url).here:
            return KernelMessages(unavailable="the server runs on another machine")
        spans = run.servers.pool.start_spans if run.servers.pool is not None else ()
        return kernel_messages.since(self.before.at, spans)

    def _unread_nodes(self) -> int:
        """Return the number of nodes if only the messages of this machine are read; otherwise 0."""
        profile = self.run.target.profile
        if profile is None or profile.nodes is None:
            return 0
        launcher = self.launcher or profile.nodes.launcher
        if self.run.servers.attached is None and launcher == "nnodes":
            return 0  # each node reports its messages when the server stops
        return profile.nodes.count

    def judge_messages(self, kernel: KernelMessages, of: str, faults: Sequence[str] = ()) -> None:
        """Judge the messages of one kernel.

        Args:
            kernel: The messages.
            of: The words that name its node, such as " of node 1".
            faults: Further faults that are not messages.
        """
        run = self.run
        uses_gpu = run.target.arch != architecture.CPU
        faults = [*faults, *kernel.host_faults]
        if uses_gpu and kernel.unavailable is not None:
            why = f"not proven: the kernel{of} logged no error ({kernel.unavailable})"
            self.unread = why
            run.record.remark(why, at_once=False)
        if uses_gpu and kernel.no_memory_at_start:
            run.record.remark(_NO_MEMORY_AT_START, at_once=False)
        of_gpu = kernel.xids or kernel.no_memory
        if uses_gpu:
            faults += of_gpu
        elif of_gpu:
            first = of_gpu[0].strip()[:200]
            line = f"the kernel logged an error of a GPU, which this run does not use: {first}"
            run.record.remark(line, at_once=False)
        if faults and not run.record.file.crashes:
            server_decisions.decide_logged_errors(
                run.record, silent_errors.of_the_kernel(faults), f"messages of the kernel{of}"
            )
