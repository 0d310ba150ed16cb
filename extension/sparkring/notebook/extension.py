"""`%load_ext sparkring` registers the magics and their completion; `%unload_ext sparkring` removes them.

The modules of this package import the code that runs and shows cells only when a magic is called, so that the
extension loads fast.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher
from IPython.core.magic import no_var_expand

import sparkring
from sparkring import products
from sparkring.notebook import expected, gang
from sparkring.notebook.magic import Magic
from sparkring.notebook.options_table import asks_for_help
from sparkring.runtime.packages import lacking

_FAMILIES = [importlib.import_module(f"sparkring.notebook.{name}") for name in products.MAGICS]
MAGICS: dict[str, Magic] = {magic.name: magic for family in _FAMILIES for magic in family.MAGICS}


def load(shell: Any) -> None:
    """Register the magics and their completion in an IPython shell, and make `import sparkdl` work.

    Define `sparkring` in the user's namespace unless the name is taken.
    """
    from sparkring.compat import petastorm_warnings, sparkdl

    for magic in MAGICS.values():
        shell.register_magic_function(_function(shell, magic), magic.kind, magic.name)
    if "sparkring" not in shell.user_ns:  # so that `sparkring.log` in a cell needs no import
        shell.push({"sparkring": sparkring}, interactive=False)
    shell.events.register("post_run_cell", expected.note_imports)
    sparkdl.install()
    petastorm_warnings.silence_when_imported()
    if _complete not in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.append(_complete)


def unload(shell: Any) -> None:
    """Remove the magics, and end all background runs and warm gangs."""
    from sparkring.engine.run import background, warm_gang

    background.stop_all()
    warm_gang.stop()
    for after_cell in (expected.note_imports, gang.stop_after_reset):
        with contextlib.suppress(ValueError):
            shell.events.unregister("post_run_cell", after_cell)
    if _complete in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.remove(_complete)
    for magic in MAGICS.values():
        shell.magics_manager.magics[magic.kind].pop(magic.name, None)


def _function(shell: Any, magic: Magic) -> Callable[..., Any]:
    """Return the function that IPython calls with the magic's line and, for a cell magic, with the cell.

    The function's docstring is the magic's help, so that IPython's `?` shows the help.
    """

    def run_or_help(line: str, *cell: str) -> Any:
        if asks_for_help(line):
            print(magic.help.rstrip())
            return None
        try:
            return magic.run(shell, line, *cell)
        except ModuleNotFoundError as problem:
            raise (lacking(problem, magic.title) or problem) from None

    if magic.raw:
        no_var_expand(run_or_help)
    run_or_help.__name__ = magic.name
    run_or_help.__doc__ = magic.help
    return run_or_help


def _completions(context: CompletionContext) -> dict[str, Any]:
    """Return what Tab offers on the line of one of sparkring's magics."""
    line = re.match(r"%%?(\w+)(\s.*)", context.text_until_cursor)
    magic = MAGICS.get(line[1]) if line else None
    words = magic.complete(line[2]) if line and magic else []
    return {"completions": [SimpleCompletion(word, type="option") for word in words], "suppress": True}


# Completion uses one of IPython's matchers and not one of its hooks. With a hook, Jedi would add Python's keywords and
# names to the options that Tab offers.
_complete: Any = context_matcher(identifier="sparkring", priority=100)(_completions)
