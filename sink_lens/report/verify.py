"""The page of ``verify``: published facts about a model, each with what was measured and the verdict."""

from sink_lens.records import Run
from sink_lens.report.page import Listed, Page, PageTable, more, shown_table
from sink_lens.text import plural, visible, words

_MOST = 200
_MOST_EXPLAINED = 3
_ORDER = {"disagree": 0, "agree": 1, "not comparable": 2}
_SIGNS = {"disagree": "✗ disagree", "agree": "✓ agree", "not comparable": "– not comparable"}
_COLUMNS = ["id", "quantity", "verdict", "published", "measured", "condition", "reason", "source"]


def _title(run: Run) -> str:
    """Head the page with how many published facts agree."""
    table = run.optional("summary", columns=["agree", "disagree", "not_comparable"])
    if table is None or table.empty:
        return "Published facts"
    row = table.to_dict("records")[0]
    if not row["agree"] + row["disagree"]:
        return "No published fact can be compared"
    agree, disagree, unknown = (int(row[name]) for name in ("agree", "disagree", "not_comparable"))
    counts = f"{plural(agree, 'published fact')} {'agrees' if agree == 1 else 'agree'}, {disagree} disagree"
    return counts + (f", {unknown} cannot be compared" if unknown else "")


def _headline(run: Run) -> list[str]:
    """The verdict, and the meaning of each quantity that was compared."""
    facts = run.need("facts", columns=["quantity", "verdict"])
    if "meaning" not in facts:  # a run of an earlier version
        facts = facts.assign(meaning="")
    compared = facts.loc[facts["verdict"] != "not comparable"].drop_duplicates("quantity").head(_MOST_EXPLAINED)
    meanings = [
        f"{words(one.quantity)}: {visible(one.meaning, limit=400)}" for one in compared.itertuples() if one.meaning
    ]
    sentences = run.need("summary", columns=["sentence"])["sentence"].tolist()[:1]
    return [*(visible(text, limit=1500) for text in sentences), *meanings]


def _facts(run: Run) -> tuple[str, PageTable]:
    """The table of facts, those that disagree first."""
    table = run.need("facts", columns=_COLUMNS)
    order = [_ORDER[one] for one in table["verdict"]]
    table = table.assign(order=order, verdict=[_SIGNS[one] for one in table["verdict"]]).sort_values(
        "order", kind="stable"
    )
    see = (
        "Facts that disagree come first. A number agrees if the measured interval overlaps the published one "
        "within its tolerance (±), a set if all published members are found." + more(len(table), "facts", most=_MOST)
    )
    table = table.assign(
        published=table["published"].replace("undefined", ""),
        quantity=[words(str(name)) for name in table["quantity"]],
    )
    heads = {"verdict": "verdict", "id": "fact"}
    heads |= {name: name for name in ("quantity", "published", "measured", "condition", "reason", "source")}
    return see, shown_table(table, heads, most=_MOST)


def _known(run: Run) -> bool:
    """Check whether there is a fact about the model, comparable or not."""
    table = run.optional("facts", columns=["id"])
    return table is None or len(table) > 0


VERIFY = Page(
    title=_title,
    headline=_headline,
    figures=(),
    tables=(Listed(key="fact-table", title="Facts", make=_facts, when=_known),),
)
