"""Create stored runs that contain only the fields that a test needs."""

from sm121.run.stored_run import StoredMetric, StoredRun
from sm121.run.verdict_file import EngineReport, VerdictFile


def stored_run(name: str, *metrics: StoredMetric, started: str = "", **context) -> StoredRun:
    engine = EngineReport(name="", managed=False, model="")
    file = VerdictFile(arch=None, profile="", started=started, engine=engine)
    return StoredRun(name, file, {metric.name: metric for metric in metrics}, context)
