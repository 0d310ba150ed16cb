"""Checks what goes along to a cluster's executors: the user's own modules and, with --env-pack, the packages."""

from __future__ import annotations

from sparkring.capture import environment, own_modules
from sparkring.capture.versions import installed
from sparkring.errors import LaunchError
from sparkring.history.describe import counted, named, size
from sparkring.history.findings import Finding, note, ok

_NAMED = 5


def imported_packages() -> list[str]:
    """Return the modules of installed packages that the notebook's cells and the user's own modules import."""
    return sorted(own_modules.imports(own_modules.own_modules(), own_modules.cells()) & installed().keys())


def check() -> list[Finding]:
    """Return findings about what can be sent to executors."""
    modules = own_modules.own_modules()
    sent = [module for module in modules if not module.problem]
    findings = []
    if sent:
        total_bytes = sum(module.size_bytes for module in sent)
        titles = named([module.title for module in sent], _NAMED)
        findings.append(ok("own modules", f"sent with each cell: {titles} ({size(total_bytes)})"))
    for module in modules:
        if module.problem:
            advice = "Install it for the executors' Python, or put it in a folder that they share with the notebook."
            findings.append(note("own modules", f"{module.title} is not sent, because {module.problem}", advice))
    try:
        packed = environment.known()
    except LaunchError as error:
        return [*findings, note("--env-pack", str(error), "Install what cells need for the executors' Python.")]
    editable = f", without the editable {named(packed.left_out, _NAMED)}" if packed.left_out else ""
    what = f"possible: {counted(packed.packages, 'package')}, {size(packed.size_bytes)} before compression{editable}"
    return [*findings, ok("--env-pack", what)]
