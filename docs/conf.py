"""Sphinx configuration."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import stablenum

HERE = Path(__file__).parent
LOGGER = logging.getLogger(__name__)

project = "stablenum"
copyright = "the stablenum authors"
release = version = stablenum.__version__

sys.path[:0] = [str(HERE), str(HERE.parent)]  # the generators, and the recorded streams
import inventories  # noqa: E402 - found there

extensions = [
    "myst_nb",  # the parser of all pages, and that of the notebooks in stories/
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
intersphinx_mapping = inventories.mapping()
exclude_patterns = ["_build", "failures", "stories/*.md", "templates"]  # of a story, its notebook is the page
nb_execution_mode = "off"  # `make stories` runs them; their outputs are committed
html_theme = "furo"
html_title = f"stablenum {release}"
# Lines of up to 84 characters fit.
html_theme_options = {
    name: {"code-font-size": "76%"} for name in ("light_css_variables", "dark_css_variables")
}
html_static_path = ["static"]
html_copy_source = False
html_search_scorer = str(HERE / "scorer.js")
# Pages with a little of everything, which would stand before the page that a search is for.
NOT_SEARCHED = ["changelog", "contributing", "releasing"]
html_css_files = ["figures.css", "versions.css"]
html_js_files = ["versions.js"]
templates_path = ["templates"]
# Where the pages are hosted is a matter of settings: the address of this version's pages (for canonical
# links), and that of the list of versions, from there. Without it the pages ask for no list; versions.py,
# which writes one, then puts its address into the pages that it publishes.
html_baseurl = os.environ.get("DOCS_BASE_URL", "")
html_context = {"versions_list": os.environ.get("DOCS_VERSIONS", "")}
html_sidebars = {
    "**": [
        "sidebar/brand.html", "sidebar/versions.html", "sidebar/search.html", "sidebar/scroll-start.html",
        "sidebar/navigation.html", "sidebar/scroll-end.html",
    ]
}  # fmt: skip

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def shorten_defaults(
    _app: object,
    _what: str,
    _name: str,
    _of: object,
    _options: object,
    signature: str | None,
    returns: object,
) -> tuple[str | None, object]:
    """Replace defaults that are not Python, ``<factory>`` and ``<function f>``: with them, Sphinx would show
    a signature as plain text with the full name of every type."""
    if signature is not None:
        signature = re.sub(r"<function (\w+)>", r"\1", signature.replace("<factory>", "..."))
    return signature, returns


def check_docstring(
    _app: object, what: str, name: str, _of: object, _options: object, lines: list[str]
) -> None:
    """Warn where Napoleon takes text for a type."""
    if any(re.match(r":ivar \w+, ", line) for line in lines):
        LOGGER.warning("%s: two attributes share a line, and the first would be shown as a type", name)
    if what == "property" and any(line.startswith(":type:") for line in lines):
        LOGGER.warning("%s: what comes before a colon in its first line would be shown as its type", name)


def leave_out_of_the_search(_app: object, environment: BuildEnvironment) -> None:
    """Mark the pages whose words are not searched, as ``:nosearch:`` on them would."""
    for page in NOT_SEARCHED:
        environment.metadata[page]["nosearch"] = True


def setup(app: Sphinx) -> None:
    """Generate what the pages include. Sphinx calls this before it reads them."""
    app.connect("env-updated", leave_out_of_the_search)
    app.connect("autodoc-process-signature", shorten_defaults)
    app.connect("autodoc-process-docstring", check_docstring, priority=900)  # after Napoleon
    import bounds
    import commands
    import costs
    import cures
    import diffs
    import figures
    import gallery
    import leaderboard
    import partners
    import poison
    import programs
    import ranks
    import recoveries
    import root_files
    import runs
    import savings
    import short_costs
    import tables
    import updates

    from benchmarks.partners import torchvision_on_cpu

    torchvision_on_cpu.allow()  # transformers imports it, and autodoc imports transformers
    results, generated = HERE.parent / "benchmarks" / "results", HERE / "_build" / "generated"
    generated.mkdir(parents=True, exist_ok=True)
    inventories.write_inventories(HERE)
    commands.write_commands(generated)
    root_files.write_root_files(HERE.parent, generated)
    tables.write_reasons(generated)
    tables.write_rule_tables(results / "rules.json", generated)
    tables.write_ulp(results / "ulp.json", generated)
    tables.write_losses(results / "losses.json", generated)
    tables.write_diagnosis(results / "diagnosis.json", generated)
    tables.write_small_steps(results / "small-steps.json", generated)
    bounds.write_bounds(results / "bounds.json", generated)
    leaderboard.write_leaderboard(HERE.parent / "corpus" / "results", generated)
    partners.write_partners(results / "partners.json", generated)
    costs.write_costs(results / "cpu.json", generated)
    short_costs.write_short_costs(results, generated)
    costs.write_ranks(results / "ranks.json", generated)
    ranks.write_distributed(results / "distributed.json", generated)
    ranks.write_ranks_model(generated)
    diffs.write_diff_causes(generated)
    diffs.write_diff_peers(results / "diff-peers.json", generated)
    diffs.write_diff_cost(results / "diff.json", generated)
    recoveries.write_recoveries(results / "recovery.json", generated)
    recoveries.write_false_alarms(results / "false-alarms.json", generated)
    savings.write_checkpoint_cost(results / "checkpoints.json", generated)
    savings.write_recovery_cost(results / "recovery-cost.json", generated)
    savings.write_recovery_cost(results / "recovery-cost-gpu.json", generated)
    runs.write_report_page(results / "report.json", generated)
    cures.write_cures(generated)
    poison.write_poison(generated)
    gallery.write_gallery(generated)
    programs.write_programs(generated)
    updates.write_updates(generated)
    figures.make_all(generated / "figures")
