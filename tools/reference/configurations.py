"""Compute the bytes per token of each configuration of the GB10 profile, and its highest possible
rate."""

from collections.abc import Iterable, Iterator

from sm121.core import builds, profile
from sm121.core.profile import Profile
from sm121.machine import roofline
from sm121.machine.roofline import Ceiling, Traffic
from sm121.report import references
from tools.choices import data
from tools.reference.markdown import MADE_BY, cell, table

PROFILE = "sm121-gpt-oss-120b"
#: Configurations for two machines: only those that somebody has served on two machines.
TWO = "sm121x2-gpt-oss-120b"
ON_TWO = ("mxfp4", "stock")
#: The bandwidth according to the data sheet, in GB/s.
DATA_SHEET = 273.0


def judged(own: Profile) -> Iterator[tuple[str, Profile]]:
    """Yield each configuration's name, with the profile for the newest engine that supports it.

    Args:
        own: The profile.
    """
    newest = data.load()[-1].version
    rows = []
    for row in builds.shipped():
        if row.engine == own.engine.name:
            rows.append(row)
    engines = [newest, *(f"{row.release}+{row.name}" for row in rows), None]
    for name, configuration in own.configurations.items():
        baseline = own.configurations[own.baseline]
        fits = (e for e in engines if configuration.at(e) and baseline.at(e))
        yield name, own.judging(name, next(fits))


def bytes_per_token(own: Profile, depth: int) -> Traffic | None:
    """Return the bytes that the configuration under test reads for each token.

    Args:
        own: The profile for this configuration.
        depth: The number of tokens in the KV cache.

    Returns:
        The bytes; None if the model's config.json or the formats are unknown.
    """
    config = roofline.read_config(own.model.id)
    if config is not None:
        return roofline.cost(own, own.under_test, depth, config)
    return None


def _rows(own: Profile, names: Iterable[str], suffix: str = "") -> Iterator[list[str]]:
    assert own.box is not None and own.box.healthy_gb_s is not None
    rates = (own.box.healthy_gb_s.low, own.box.healthy_gb_s.high, DATA_SHEET)
    for name, each in judged(own):
        for depth in (min(own.performance.depths), max(own.performance.depths)):
            if name not in names:
                continue
            metric = f"tg32@d{depth}"
            known = next((r for r in references.load().reference if not suffix
                          and name in r.configurations and metric in r.values), None)  # fmt: skip
            cost = bytes_per_token(each, depth)
            gate = each.gate(metric)
            gates = [g.metric for g in own.configurations[name].gates]
            asked = "" if metric in gates else ", of every build"
            bounds = []
            for g in rates:
                bounds.append(Ceiling(cost, g, 1.0) if cost else None)
            yield [
                f"`{name}`{suffix}",
                str(depth),
                f"{cost.total / 1e9:.2f}" if cost else "not known",
                *(f"{bound.tok_s:.1f}" if bound else "" for bound in bounds),
                f"{known.values[metric]:g}" if known else "",
                f"{bounds[1].share(known.values[metric]):.0%}" if known and bounds[1] else "",
                f"{gate.minimum:g}{asked}" if gate else "",
                cell(known.source) if known else "",
            ]  # fmt: skip


def page() -> str:
    """Return docs/tables/configurations.md."""
    own = profile.load(PROFILE)
    two = profile.load(TWO)
    assert own.box is not None and own.box.healthy_gb_s is not None
    least = own.box.healthy_gb_s.low
    most = own.box.healthy_gb_s.high
    rows = [*_rows(own, own.configurations), *_rows(two, ON_TWO, " on two Sparks")]
    shown = []
    for gb_s in (least, most, DATA_SHEET):
        shown.append(f"{gb_s:g} GB/s")
    header = ["configuration", "depth", "GB a token", *shown, "published", f"of {shown[1]}", "gate"]
    lines = [
        "# What a configuration reads, and how fast it can be at most",
        "",
        MADE_BY.format(source=f"`fixtures/profiles/{PROFILE}.toml` and `fixtures/references.toml`"),
        "Rates of one stream in tok/s. To decode a token, the engine reads the active weights "
        "once, in the configuration's formats and with the padding of its kernels, and the KV "
        "cache of the context; a prompt of 2,048 tokens adds 0.08 GB in BF16. Healthy machines "
        f"read {least:g} to {most:g} GB/s; the data sheet says {DATA_SHEET:g}. A run reports "
        "[gates](../gates.md) above the bound before it starts; `make test` refuses such a gate "
        "of a configuration that is selected by name. On two Sparks each machine reads half of "
        f"the bytes, and the link adds the time in `[nodes.link]` of `{TWO}` "
        "([two Sparks](../two-sparks.md)).",
        "",
        *table([*header, "source"], rows),
    ]
    return "\n".join(lines) + "\n"
