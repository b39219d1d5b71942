"""The program that counts the certificates of several runs."""

from meta_tests.faults import certificates


def test_a_refused_run_has_its_refusal_as_the_reason(tmp_path, monkeypatch):
    def refuse(_command, *, stdout, **_options):
        stdout.write("\nERROR: this machine: expected one run that measures at a time\n\n")

    monkeypatch.setattr(certificates.subprocess, "run", refuse)
    (verdict,) = certificates.runs(1, tmp_path, [])
    assert not verdict.get("certified")
    assert verdict["reason"] == "ERROR: this machine: expected one run that measures at a time"
