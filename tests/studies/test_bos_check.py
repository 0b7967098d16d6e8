"""BOS in front of texts and chats is counted by using the tokenizer."""

import pytest
from tokenizers import processors

from sink_lens.models.tiny import BOS_ID, tiny_tokenizer
from sink_lens.studies.bos_check import bos_counts_text, count_bos_in_front

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


def tokenizer(*, adds_bos: bool = True, template: str | None = TEMPLATE):
    made = tiny_tokenizer(adds_bos=adds_bos)
    made.chat_template = template
    return made


def doubled():
    made, special = tokenizer(), [("<s>", BOS_ID)]
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> <s> $A", special_tokens=special
    )
    return made


@pytest.mark.parametrize(
    ("make", "counts", "said"),
    [
        (
            tokenizer,
            (1, 1, 2),
            "puts 1 in front of a text, a chat begins with 1 (2 if its text is tokenised again)",
        ),
        (doubled, (2, 1, 3), "puts 2 in front of a text, a chat begins with 1 (3 if"),
        (
            lambda: tokenizer(adds_bos=False),
            (0, 1, 1),
            "puts none in front of a text, a chat begins with 1",
        ),
        (
            lambda: tokenizer(template=None),
            (1, None, None),
            "the tokenizer puts 1 in front of a text",
        ),
        (
            lambda: tokenizer(template="{{ messages[9].content }}"),
            (1, None, None),
            "puts 1 in front of a text",
        ),
    ],
)
def test_bos_is_counted_in_front_of_a_text_and_of_a_chat(make, counts, said):
    found = count_bos_in_front(make())
    assert tuple(found.values()) == counts
    assert said in bos_counts_text(found)


MESSAGES = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in messages %}{% for j in messages %}x{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}x{% endfor %}" + MESSAGES,
        "{% macro f(n) %}{{ g(n) }}{% endmacro %}{% macro g(n) %}{% for i in n %}x{% endfor %}{% endmacro %}"
        + MESSAGES,
        "{{ 'x' * 999999999 }}" + MESSAGES,
        "{% set a = 'x' %}" + "{% set a = a ~ a %}" * 50 + MESSAGES,
        MESSAGES + "x" * 20_000,
        "{% for",
    ],
)
def test_a_template_that_may_never_end_is_not_rendered_and_that_is_said(template):
    found = count_bos_in_front(tokenizer(template=template))
    assert found["chat"] is None
    assert "not rendered" in bos_counts_text(found)
